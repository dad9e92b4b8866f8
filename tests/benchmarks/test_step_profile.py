"""benchmarks/step_profile.py: what it says of kernels, and which models it makes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")


import diffusion
import step_profile
import token_profile
from common import Timing

ATTENTION, DENSE, DECODE, FUSED, OTHER = "fmha_sdpa", "nvjet_tst", "decode_quad_whole", "linear_relay_256", "copy"


def in_a_row(*names: str) -> list[tuple[str, float, float]]:
    """Each of 10 us, but decoding, which starts 4 us before the kernel in front has ended."""
    return [(name, 10.0 * i - 4 * (name == DECODE), 10.0 * (i + 1)) for i, name in enumerate(names)]


@pytest.mark.parametrize("name", diffusion.DEFAULT_MODELS)
def test_shortened(name: str) -> None:
    """Every class takes the options, and its inputs are those of as many layers."""
    whole, model = diffusion.MODELS[name], step_profile.shortened(diffusion.MODELS[name], 1)
    with torch.device("meta"):
        made = getattr(diffusion.diffusers, model.kind)(**model.config)
    blocks = {leaf: len(each) for leaf, each in made.named_children() if leaf.endswith("blocks")}
    if name.startswith("Stable Diffusion XL"):
        assert model == whole
        return
    assert set(blocks.values()) <= {1, 2}
    assert 1 in blocks.values()
    if name == "HiDream-I1":
        inputs = diffusion.inputs_of(model, made.config, "cpu")
        assert len(inputs["encoder_hidden_states_llama3"]) == sum(blocks.values()) == len(made.caption_projection) - 1


def test_the_middle_of_a_step() -> None:
    layer = (OTHER, DECODE, DENSE, FUSED, ATTENTION)
    found = step_profile.middle(list(token_profile.one_by_one(in_a_row(*layer * 5))))
    assert [name for name, _, _ in found] == [ATTENTION, DECODE, DENSE, FUSED] * 2
    assert {end - start for _, start, end in found} == {10.0}
    assert len(step_profile.middle(in_a_row(*layer * 2))) == 8
    assert step_profile.middle([]) == []


def test_lines() -> None:
    kernels = {"BF16": in_a_row(*(DENSE, ATTENTION, OTHER) * 4), "samebits": in_a_row(*(FUSED, ATTENTION) * 4)}
    text = "\n".join(step_profile.lines(kernels))
    assert "milliseconds of       BF16  samebits\n" in text
    assert "fused                0.000     0.040\n" in text
    assert "other                0.040     0.000\n" in text
    assert f"BF16, by kernel:\n      4 x     10.0 us  {DENSE}\n" in text
    both = [f"      10.0 us  {ATTENTION}", f"      10.0 us  {FUSED}"]
    assert text.endswith("\n".join(["samebits, in the middle:", *both, *both]))


@pytest.mark.parametrize("damaged", [False, True])
def test_measured_on_a_cpu(damaged: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Taken for a GPU whose graphs are not made, and whose kernels are known."""
    build, inputs_of = diffusion.build, diffusion.inputs_of
    replayed: list[str] = []

    def built(model: diffusion.Model, device: str, packed: bool) -> Any:
        made = build(model, "cpu", packed)
        if damaged and not packed:
            made.proj_out.weight.neg_()
        return made

    class Graph:
        def replay(self) -> None:
            replayed.append("replay")

    monkeypatch.setattr(step_profile, "build", built)
    monkeypatch.setattr(step_profile, "inputs_of", lambda model, config, device: inputs_of(model, config, "cpu"))
    monkeypatch.setattr(step_profile, "time_graphs", lambda steps, *_: [Timing.of([0.1]), Timing.of([0.103])])
    monkeypatch.setattr(step_profile, "captured", lambda calls: Graph())
    monkeypatch.setattr(step_profile, "kernels_of", lambda run, device: [run()] and in_a_row(FUSED, ATTENTION))
    model = diffusion.MODELS["tiny"]
    if damaged:
        with pytest.raises(SystemExit, match="tiny: the outputs differ"):
            step_profile.measure("tiny", model)
        return
    step_profile.measure("tiny", model)
    text = capsys.readouterr().out
    assert text.startswith(f"tiny, {model.config_text}: BF16 100.00 ms, samebits 103.00 ms (+3.0 %)\n")
    assert "  fused                0.010     0.010\n" in text
    assert replayed == ["replay"] * 2
