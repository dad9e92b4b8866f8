"""benchmarks/diffusion.py in small, on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import diffusion  # noqa: E402
from samebits.nn.packed_module import packed_parameters  # noqa: E402

TINY = ["tiny", "tiny FLUX.2", "tiny Qwen-Image", "tiny Wan"]


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


@pytest.mark.parametrize("fits", [True, False])
def test_graphs_in_turns(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both models, which stay in memory until then."""
    outputs: list[torch.Tensor] = []

    def time_graphs(steps: list[list[Callable[[], Any]]], repeats: int, warm_seconds: float) -> list[str]:
        if not fits:
            raise torch.OutOfMemoryError
        outputs.extend(step()[0] for [step] in steps)
        return ["BF16", "samebits"]

    build, model = diffusion.build, diffusion.MODELS["tiny"]
    monkeypatch.setattr(diffusion, "build", lambda model, device, packed: build(model, "cpu", packed))
    monkeypatch.setattr(diffusion, "time_graphs", time_graphs)
    packed = build(model, "cpu", packed=True)
    found = diffusion.graphs_in_turns(model, packed, diffusion.inputs_of(model, packed.config, "cpu"))
    assert found == (["BF16", "samebits"] if fits else None)
    assert not fits or diffusion.same_bytes(*outputs)


@pytest.mark.parametrize("fits", [True, False])
def test_rows_of_graphs(fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With times in turns where there are some."""
    figures = [diffusion.Figures(diffusion.Timing.of([seconds]), 100, torch.randn(200)) for seconds in (1.0, 2.0)]
    timings = [diffusion.Timing.of([seconds]) for seconds in (4.0, 5.0)] if fits else None

    def run(function: object, *arguments: object, packed: bool) -> object:
        assert function is diffusion.measure_all
        return lambda: diffusion.Measured([figures[packed]], 10.7, timings if packed else None)

    [row] = diffusion.rows("tiny", ["graphs"], "cuda", run)
    assert row["in_turns"] == fits
    assert row["more_time"] == (0.25 if fits else 1.0)


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
    billions = {"FLUX.1-dev": 11.9, "FLUX.2-dev": 32.22, "Qwen-Image": 20.43, "Stable Diffusion 3.5 large": 8.06}
    count = sum(parameter.numel() for parameter in made.parameters())
    assert count / 1e9 == pytest.approx(billions.get(name, 14.29), abs=0.05)
