"""benchmarks/generate.py in small, on the CPU."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import common  # noqa: E402
import generate  # noqa: E402
import models  # noqa: E402
from samebits.nn.packed_module import packed_parameters  # noqa: E402


def test_both_models_have_the_same_weights() -> None:
    plain, packed = (models.build("tiny", "cpu", which) for which in (False, True))
    names = {name for name, _, _ in packed_parameters(packed)}
    assert names == {name for name, parameter in plain.named_parameters() if parameter.dim() == 2}
    for name, module, leaf in packed_parameters(packed):
        assert torch.equal(module.sb_decode(leaf).view(torch.int16), plain.get_parameter(name).view(torch.int16))
    assert not any(tensor.is_meta for tensor in (*packed.parameters(), *packed.buffers()))


def test_rows() -> None:
    settings = [generate.Setting(way, 2, 5, 4) for way in generate.WAYS]
    found = list(generate.rows("tiny", settings, "cpu", 1e9))
    assert [row["table"] for row in found] == list(generate.WAYS)
    assert all(row["same_tokens"] for row in found)
    assert all(row["speed"] > 0 and row["samebits_first_token_seconds"] > 0 for row in found)
    assert all(row["samebits_peak_bytes"] is None for row in found)


def test_all_ways_give_the_same_tokens() -> None:
    """The graph's step, here called again instead of replayed, sees each token and the cache as the model would."""
    model = models.build("tiny", "cpu", False)
    eager, graphs = (generate.measure(model, generate.Setting(way, 2, 5, 9), "cpu") for way in ("eager", "graphs"))
    assert torch.equal(eager.tokens, graphs.tokens)
    assert "get_compiled_call" not in vars(model)


def test_no_case_is_taken_after_the_deadline(capsys: pytest.CaptureFixture[str]) -> None:
    settings = [generate.Setting("eager", 1, 3, 2)]
    assert generate.measure_all("tiny", settings, "cpu", packed=False, deadline=time.monotonic()) == []
    assert f"no time left for\n  {settings[0]}" in capsys.readouterr().out


def test_a_graph_refuses_other_arguments() -> None:
    step = generate.GraphedStep(lambda ids, cache: ids + 1, "cpu")
    cache = object()
    for number in range(4):
        assert step(ids=torch.tensor(number), cache=cache) == number + 1
    with pytest.raises(SystemExit, match="called in another way"):
        step(ids=torch.tensor(0), cache=object())


def test_a_prompt_is_the_same_each_time() -> None:
    model = models.build("tiny", "cpu", False)
    assert torch.equal(models.random_prompt(model, 3, 7, "cpu"), models.random_prompt(model, 3, 7, "cpu"))


def test_results_are_merged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    for rows in ([{"table": "t", "a": 1, "x": 1}, {"table": "t", "a": 2, "x": 2}], [{"table": "t", "a": 1, "x": 3}]):
        common.add_results("merged", "a device", rows, ("a",))
    assert [row["x"] for row in common.read_results("merged")["rows"]] == [3, 2]
    common.add_results("merged", "another device", [{"table": "t", "a": 5}], ("a",))
    assert [row["a"] for row in common.read_results("merged")["rows"]] == [5]
