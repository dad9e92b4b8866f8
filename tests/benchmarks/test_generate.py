"""benchmarks/generate.py in small, on the CPU."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
from torch._inductor.exc import InductorError
from torch.nn import functional as F
from transformers import StaticCache

import common
import generate
import models
import tables
from samebits.kernels.ops import decode_packed
from samebits.nn.packed_module import packed_parameters
from samebits.plans import dispatch


def test_both_models_have_the_same_weights() -> None:
    plain, packed = (models.build("tiny", "cpu", which) for which in (False, True))
    names = {name for name, _, _ in packed_parameters(packed)}
    assert names == {name for name, parameter in plain.named_parameters() if parameter.dim() == 2}
    for name, module, leaf in packed_parameters(packed):
        assert torch.equal(module.sb_decode(leaf).view(torch.int16), plain.get_parameter(name).view(torch.int16))
    assert not any(tensor.is_meta for tensor in (*packed.parameters(), *packed.buffers()))


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "LONG", float("inf"))
    settings = [generate.Setting(way, 2, 5, 4) for way in generate.WAYS]
    found = list(generate.rows("tiny", settings, "cpu", 1e9))
    assert [row["table"] for row in found] == list(generate.WAYS)
    assert all(row["same_tokens"] for row in found)
    assert all(row["bf16_repeats"] and row["samebits_repeats"] for row in found)
    assert len({row[f"{kind}_tokens_digest"] for row in found for kind in ("bf16", "samebits")}) == 1
    assert all(row["speed"] > 0 and row["samebits_first_token_seconds"] > 0 for row in found)
    assert all(row["samebits_peak_bytes"] is None for row in found)


def test_compiled_steps_round_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor is told so for every step that it compiles, not for the first one alone."""
    inductor, seen = torch._inductor.config, []

    def noted(*arguments: Any, **options: Any) -> None:
        seen.append((inductor.deterministic, inductor.emulate_precision_casts))
        raise RuntimeError("no kernels are needed")  # whose compilation takes ten seconds

    monkeypatch.setattr(torch._inductor.compile_fx, "post_grad_passes", noted)
    options = generate.Setting("compile", 1, 5, 3).options(models.build("tiny", "cpu", False), "cpu")
    with inductor.patch(force_disable_caches=True):
        for step in (torch.sin, torch.cos):
            compiled = torch.compile(lambda x, step=step: step(x) + 1, **options["compile_config"].to_dict())
            with pytest.raises(InductorError, match="no kernels are needed"):
                compiled(torch.ones(3))
    assert seen == [(True, True), (True, True)]


def test_differences() -> None:
    bf16 = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    same = {"same_tokens": True, "different_sequences": 0, "first_difference": None}
    assert generate.differences(bf16, bf16) == same
    found = generate.differences(bf16, [[1, 2, 0], [4, 5, 6], [7, 0, 0]])
    assert found == {"same_tokens": False, "different_sequences": 2, "first_difference": 1}


@pytest.mark.parametrize("way", generate.IN_TURNS)
def test_forms_take_turns(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the host decides: BF16 and compressed one after the other, all turns in one row."""
    turns: list[bool] = []

    def measured(name: str, model: Any, setting: generate.Setting, device: str, packed: bool) -> generate.Figures:
        turns.append(packed)
        seconds = float(len(turns))
        return generate.Figures([seconds], [seconds, 2 * seconds], 1, int(seconds), [[len(turns) // 8]], True)

    monkeypatch.setattr(generate, "measure_said", measured)
    [row] = generate.rows("tiny", [generate.Setting(way, 1, 5, 4)], "cpu", 1e9)
    assert turns == generate.TURNS * [False, True]
    assert row["bf16_first_token_seconds"] == 4
    assert (row["samebits_first_token_seconds_fastest"], row["samebits_first_token_seconds_slowest"]) == (2, 8)
    assert row["bf16_tokens_per_s_slowest"] == pytest.approx(1 / 14, rel=1e-3)
    assert (row["bf16_peak_bytes"], row["samebits_peak_bytes"]) == (7, 8)
    assert (row["speed"], row["speed_slowest"], row["speed_fastest"]) == (0.7917, 0.5, 0.875)  # 1/2, 3/4, 5/6, 7/8
    assert (row["bf16_repeats"], row["samebits_repeats"]) == (True, False)
    assert not generate._held


def test_only_one_way_has_the_attention_that_torch_prefers(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, bool] = {}
    timed = generate._timed

    def noted(run: Any, device: str) -> Any:
        seen[way] = torch.backends.cuda.cudnn_sdp_enabled()
        return timed(run, device)

    monkeypatch.setattr(generate, "_timed", noted)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    for way in generate.WAYS:
        list(generate.measure_each("tiny", [generate.Setting(way, 1, 3, 2)], "cpu", False, float("inf"), False))
    assert [way for way, has_cudnn in seen.items() if has_cudnn] == ["preferred"]
    assert seen.keys() == set(generate.WAYS)
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_all_ways_give_the_same_tokens(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph's step, here called again instead of replayed, sees each token and the cache as the model would.

    Models with kinds of attention, Qwen3 among them, take a dict of masks that is another one at each step.
    """
    monkeypatch.setitem(models.MODELS, kind, (kind, models.MODELS["tiny"][1] | {"head_dim": 32}))
    model = models.build(kind, "cpu", False)
    eager, graphs = (generate.measure(model, generate.Setting(way, 2, 5, 9), "cpu") for way in ("eager", "graphs"))
    assert eager.tokens == graphs.tokens
    assert "get_compiled_call" not in vars(model)


def test_what_does_not_repeat_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Is told from what differs, and what ran once from both."""
    model, setting = models.build("tiny", "cpu", False), generate.Setting("eager", 2, 5, 4)
    numbers = itertools.count()
    monkeypatch.setattr(model, "generate", lambda prompt, **options: _timed_tokens(options, next(numbers)))
    monkeypatch.setattr(generate, "LONG", float("inf"))
    assert generate.measure(model, setting, "cpu").repeats is False
    monkeypatch.setattr(generate, "LONG", 0.0)
    assert generate.measure(model, setting, "cpu").repeats is None
    row = {"same_tokens": False}
    assert tables.same_tokens(row | {"bf16_repeats": False}) == "BF16 differs from itself"
    assert {tables.same_tokens(row | {"bf16_repeats": repeats}) for repeats in (True, None)} == {"**no**"}


def _timed_tokens(options: dict[str, Any], number: int) -> torch.Tensor:
    """Two tokens, the clock read at each of them."""
    tokens = torch.full((2, 2), number)
    for _ in range(2):
        options["stopping_criteria"](tokens, None)
    return tokens


def test_no_case_is_taken_after_the_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    settings = [generate.Setting("eager", 1, 3, 2)]
    assert list(generate.measure_each("tiny", settings, "cpu", False, time.monotonic(), False)) == []
    assert f"no time left for\n  {settings[0]}" in capsys.readouterr().out
    assert list(generate.rows("tiny", settings, "cpu", 0)) == []


def test_rows_stay_if_a_later_case_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(name: str, model: Any, setting: generate.Setting, device: str, packed: bool) -> generate.Figures:
        if packed and setting.batch > 1:
            raise torch.OutOfMemoryError
        return generate.Figures([1.0], [1.0], 1, None, [[1]])

    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(generate, "measure_said", measured)
    options = "--models tiny --device cpu --ways graphs --batches 1,2 --prompts 3 --tokens 4 --name trial"
    monkeypatch.setattr("sys.argv", ["generate.py", *options.split()])
    with pytest.raises(torch.OutOfMemoryError):
        generate.main()
    assert [row["batch"] for row in common.read_results("trial")["rows"]] == [1]
    assert not generate._held


def test_a_prompt_is_the_same_each_time() -> None:
    model = models.build("tiny", "cpu", False)
    assert torch.equal(models.random_prompt(model, 3, 7, "cpu"), models.random_prompt(model, 3, 7, "cpu"))


def test_results_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    for rows in ([{"table": "t", "a": 1, "x": 1}, {"table": "t", "a": 2, "x": 2}], [{"table": "t", "a": 1, "x": 3}]):
        common.add_results("merged", "a device", rows, ("a",))
    assert [row["x"] for row in common.read_results("merged")["rows"]] == [3, 2]
    for x in (4, 5):  # of another table, with other keys
        common.add_results("merged", "a device", [{"table": "u", "b": 1, "x": x}], ("b",))
    assert [row["x"] for row in common.read_results("merged")["rows"]] == [3, 2, 5]
    common.add_results("merged", "another device", [{"table": "t", "a": 5}], ("a",))
    assert [row["a"] for row in common.read_results("merged")["rows"]] == [5]


def test_a_compiled_step_has_the_packed_bytes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph with the operator for each layer; CUDA graphs copy nothing at each step but the step's own inputs."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._guards import TracingContext

    monkeypatch.setattr("samebits.nn.product._is_plain", lambda tensor: True)
    monkeypatch.setattr(dispatch, "linear_of_module", lambda x, packed, bias: F.linear(x, decode_packed(packed), bias))
    graphs: list[tuple[str, list[torch.Tensor]]] = []

    def compiler(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        static = TracingContext.get().fw_metadata.static_input_indices
        graphs.append((graph.code, [tensor for i, tensor in enumerate(inputs) if i not in static]))
        return graph.forward

    model = models.build("tiny", "cpu", True)
    torch.compiler.reset()
    with torch.no_grad():
        cache = StaticCache(config=model.config, max_cache_len=16)
        ids, mask = torch.zeros(1, 4, dtype=torch.int64), torch.ones(1, 1, 1, 16, dtype=torch.bool)
        model(input_ids=ids, past_key_values=cache)
        step = torch.compile(model, backend=aot_autograd(fw_compiler=compiler), fullgraph=True)
        step(input_ids=ids[:, :1], attention_mask=mask, position_ids=ids[:, :1], past_key_values=cache)
    [(code, moving)] = graphs
    assert code.count("samebits.linear") == 7 * model.config.num_hidden_layers + 1
    assert sorted(tensor.numel() for tensor in moving) == [1, 1, 16]
