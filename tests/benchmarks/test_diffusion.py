"""benchmarks/diffusion.py in small, on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")


import diffusion
import samebits
from samebits.nn.packed_module import packed_parameters

TINY = [name for name in diffusion.MODELS if name.startswith("tiny")]


@pytest.mark.parametrize("name", TINY)
def test_both_models_have_the_same_weights(name: str) -> None:
    plain, packed = (diffusion.build(diffusion.MODELS[name], "cpu", which) for which in (False, True))
    assert len(list(packed_parameters(packed))) > 3
    for full_name, module, leaf in packed_parameters(packed):
        weight = plain.get_parameter(full_name)
        assert torch.equal(module.sb_decode(leaf).view(torch.int16), weight.view(torch.int16))
    kept = [name for name, parameter in plain.named_parameters() if parameter.dtype == torch.float32]
    assert bool(kept) == (name == "tiny Wan")
    assert {packed.get_parameter(name).dtype for name in kept} <= {torch.float32}


@pytest.mark.parametrize("name", TINY)
def test_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diffusion, "REPEATS", 1)
    [row] = diffusion.rows(name, ["eager"], "cpu")
    assert row["same_output"]
    assert (row["way"], row["samebits_peak_bytes"], row["less_memory"]) == ("eager", None, None)
    assert not row["in_turns"]
    assert 10 < row["bits_per_weight"] < 12
    assert row["config"].startswith(diffusion.MODELS[name].kind)


@pytest.mark.parametrize("fitting", [["eager", "replayed", "graphs"], ["eager", "replayed"], ["eager"], []])
def test_both_models_in_turns(fitting: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """In all ways for which there is memory."""
    outputs: list[torch.Tensor] = []
    left = [*fitting]

    def time_turns(steps: list[Callable[[], Any]]) -> list[str]:
        if not left:
            raise torch.OutOfMemoryError
        for step in steps:
            torch.manual_seed(0)  # of latents
            outputs.append(step()[0])
        return [left.pop(0), "samebits"]

    build, model, graphs = diffusion.build, diffusion.MODELS["tiny"], list[Any]()
    monkeypatch.setattr(diffusion, "build", lambda model, device, packed: build(model, "cpu", packed))
    monkeypatch.setattr(diffusion, "captured", lambda steps: graphs.append(steps[0]) or steps[0])
    monkeypatch.setattr(diffusion, "fast_replay", lambda graph: graph)
    monkeypatch.setattr(diffusion, "time_turns", time_turns)
    packed = build(model, "cpu", packed=True)
    inputs = diffusion.inputs_of(model, packed.config, "cpu")
    replayed: list[object] = []
    monkeypatch.setattr(samebits, "cuda_graphs", lambda module: (replayed.append(module), nullcontext())[1])
    found = diffusion.time_in_turns(model, packed, inputs, ["eager", "replayed", "graphs"])
    assert found == {way: [way, "samebits"] for way in fitting}
    assert len(graphs) == (2 if "replayed" in fitting else 0)
    assert len(replayed) == (2 if "eager" in fitting else 0)
    for plain, other in zip(outputs[::2], outputs[1::2], strict=True):
        assert diffusion.same_bytes(plain, other)


def test_each_step_has_latents_of_its_own() -> None:
    model = diffusion.MODELS["tiny HiDream"]
    module = diffusion.build(model, "cpu", packed=False)
    inputs = diffusion.inputs_of(model, module.config, "cpu")
    first, second = (diffusion.step_of_others(module, inputs)[0] for _ in range(2))
    assert not diffusion.same_bytes(first, second)


@pytest.mark.parametrize("in_turns", [[], ["eager"], ["eager", "graphs"]])
def test_rows_in_turns(in_turns: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With those times where there are some; memory is always that of the processes."""
    figures = [
        diffusion.Figures(diffusion.Timing.of([seconds]), 100, torch.randn(200), seconds == 2.0)
        for seconds in (1.0, 2.0)
    ]
    timings = {way: [diffusion.Timing.of([seconds]) for seconds in (4.0, 5.0)] for way in in_turns}

    def run(function: object, *arguments: object, packed: bool) -> object:
        assert function is diffusion.measure_all
        return lambda: diffusion.Measured([figures[packed]] * 2, 10.7, timings if packed else {})

    for row in diffusion.rows("tiny", ["eager", "graphs"], "cuda", run):
        assert row["in_turns"] == (row["way"] in in_turns)
        assert row["more_time"] == (0.25 if row["in_turns"] else 1.0)
        assert row["bf16_peak_bytes"] == row["samebits_peak_bytes"] == 100
        assert (row["bf16_repeats"], row["samebits_repeats"]) == (False, True)


def test_guidance() -> None:
    """The same latents twice, with two texts."""
    model = diffusion.MODELS["tiny Stable Diffusion 3.5, with guidance"]
    module = diffusion.build(model, "cpu", packed=False)
    inputs = diffusion.inputs_of(model, module.config, "cpu")
    assert {name: len(value) for name, value in inputs.items()} == dict.fromkeys(inputs, 2)
    same = {name for name, value in inputs.items() if torch.equal(value[0], value[1])}
    assert same == {"hidden_states", "timestep"}
    [output] = module(**inputs, return_dict=False)
    assert output.shape == inputs["hidden_states"].shape
    assert not torch.equal(output[0], output[1])
    assert model.input_text == "64 x 64, 8 text tokens, a batch of 2"


def test_outputs_that_say_nothing_are_not_compared() -> None:
    for output in (torch.ones(3, 200), torch.full((300,), torch.inf)):
        with pytest.raises(SystemExit, match="degenerate"):
            diffusion.same_bytes(output, output)
    output = torch.randn(200)
    assert not diffusion.same_bytes(output, -output)


@pytest.mark.parametrize("name", diffusion.DEFAULT_MODELS)
def test_real_configurations(name: str) -> None:
    """By their number of weights, and inputs that the classes take."""
    model = diffusion.MODELS[name]
    with torch.device("meta"):
        made = getattr(diffusion.diffusers, model.kind)(**model.config)
    billions = {
        "FLUX.1-dev": 11.9, "FLUX.2-dev": 32.22, "HiDream-I1": 17.11, "Qwen-Image": 20.43,
        "Stable Diffusion 3.5 large": 8.06, "Stable Diffusion XL": 2.57, "Wan 2.1 14B": 14.29,
    }  # fmt: skip
    count = sum(parameter.numel() for parameter in made.parameters())
    assert count / 1e9 == pytest.approx(billions[name.partition(",")[0]], abs=0.05)
