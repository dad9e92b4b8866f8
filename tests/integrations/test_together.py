"""Whole models whose products of one input are made together, on a CPU that stands for a GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import families
import samebits
from samebits.format.packed import PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.linear.job import Spare
from samebits.kernels.linear.products import LinearPlan, Operands
from samebits.kernels.structures import MAX_PREFETCHED
from samebits.plans import call, carry, dispatch, group, planner, prefetch, recall, together
from samebits.plans.planner import Planner
from samebits.plans.store import GroupOutcome, Outcome
from samebits.plans.together import Together
from tests.plans.conftest import DecodeOnCpu, FakeProducts, decoding, new_planner

PLAN = LinearPlan(1)
SPARE = Spare(1 << 40, 0, 0)


@pytest.fixture
def ahead() -> list[int]:
    """Weights that launches have decoded ahead."""
    return []


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ahead: list[int]) -> list[int]:
    """Products of each launch; every product has a plan, and one launch is faster wherever there can be one."""
    seen: list[int] = []

    def fused_linear(
        x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None, plan: LinearPlan
    ) -> torch.Tensor:
        seen.append(1)
        return F.linear(x, samebits.decode(packed), bias)

    def products(
        x: torch.Tensor, bias: torch.Tensor | None, operands: Callable[[], Sequence[Operands]]
    ) -> list[torch.Tensor]:
        first, *others = operands()
        seen.append(1 + len(others))
        return [F.linear(x, samebits.decode(packed), b) for packed, b, _ in (first._replace(bias=bias), *others)]

    monkeypatch.setattr(together, "fused_linear", fused_linear)

    def plain(*launch: object) -> FakeProducts:
        return FakeProducts(products, SPARE)

    def prefetching(launch: object, weights: Sequence[PackedTensor]) -> Callable[..., list[torch.Tensor]]:
        decoded = decoding(weights)

        def all_of_it(*arguments: Any) -> list[torch.Tensor]:
            found = decoded()
            ahead.append(len(found))
            return products(*arguments) + found

        return all_of_it

    monkeypatch.setattr(group, "Products", plain)
    monkeypatch.setattr(prefetch, "Products", prefetching)
    monkeypatch.setattr(prefetch, "is_prefetchable", lambda packed, launch, device: True)
    monkeypatch.setattr(prefetch, "load", lambda device: None)
    for name, result in (("is_supported", True), ("is_launchable", True), ("launch_together", "a launch")):
        monkeypatch.setattr(group, name, lambda *arguments, result=result: result)
    monkeypatch.setattr(call, "_outcome", lambda key, packed, device: Outcome(PLAN, ""))
    monkeypatch.setattr(call, "products_of", plain)
    for module in (prefetch, recall.decode):
        monkeypatch.setattr(module, "decode_cuda", samebits.decode)
    monkeypatch.setattr(dispatch, "together", Together())
    monkeypatch.setattr(planner, "fastest_together", lambda x, operands, are_fused: GroupOutcome(1))
    monkeypatch.setenv("SAMEBITS_CACHE", str(tmp_path))
    monkeypatch.setattr(Planner, "of", new_planner())
    monkeypatch.setattr(Planner, "outcome", lambda self, key: Outcome(PLAN, ""))
    monkeypatch.setattr(nvrtc, "where", lambda device: nvrtc.Where(7, 0))
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # as tensors in main memory say
    monkeypatch.setattr("samebits.nn.product._is_plain", lambda tensor: not tensor.requires_grad)
    return seen


def check(name: str, times: int) -> Callable[[], object]:
    """Prompts, greedy and sampled tokens of a model, so many times; returns what makes them once more."""
    outputs = torch.no_grad()(families.outputs.__wrapped__)
    model = families.build(name).requires_grad_(False)
    expected = outputs(model)
    samebits.compress(model, min_weights=families.MIN_WEIGHTS)
    for _ in range(times):
        found = outputs(model)
        assert all(families.same(found[what], expected[what]) for what in expected)
    return partial(outputs, model)


@pytest.mark.parametrize(
    ("name", "of_attention"),
    [("qwen2", 3), ("gemma3_text", 3), ("opt", 3), ("t5", 3), ("bart", 3), ("qwen2_moe", 3), ("deepseek_v2", 2)],
)
def test_the_same_bits(name: str, of_attention: int, launches: list[int]) -> None:
    """With the learning among them; cross attention, experts, norms in between."""
    once_more = check(name, 2)
    assert max(launches) == of_attention
    launches.clear()
    once_more()
    assert of_attention in launches


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text", "t5", "bart", "qwen2_moe", "deepseek_v2"])
@pytest.mark.parametrize("room", [1 << 12, 1 << 14, 1 << 40])
def test_the_same_bits_with_weights_decoded_ahead(
    name: str, room: int, launches: list[int], ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever launches have room for; with prompts and tokens in turns, experts that others do not ask for."""
    monkeypatch.setattr(prefetch, "FEW_TOKENS", 0)
    monkeypatch.setattr(sys.modules[__name__], "SPARE", Spare(room, 0, 0))
    check(name, 3)
    assert ahead
    assert max(ahead) > 1 or room == 1 << 12


@pytest.mark.parametrize("name", ["qwen2", "gemma3_text", "t5", "bart", "qwen2_moe", "deepseek_v2"])
@pytest.mark.parametrize("room", [1 << 12, 1 << 14, 1 << 40])
def test_the_same_bits_with_weights_decoded_together(
    name: str, room: int, launches: list[int], ahead: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no product has a plan."""

    class Played(DecodeOnCpu):
        def __call__(self, *every: torch.Tensor) -> list[torch.Tensor]:
            ahead.append(len(every) - 1)
            return super().__call__(*every)

    monkeypatch.setattr(call, "_outcome", lambda key, packed, device: Outcome(None, "none"))
    monkeypatch.setattr(prefetch, "FEW_TOKENS", 0)
    monkeypatch.setattr(prefetch, "DecodeTogether", Played)
    monkeypatch.setattr(prefetch, "suits", lambda packed: True)
    monkeypatch.setattr(carry, "_TOGETHER_WEIGHTS", room)
    check(name, 3)
    assert not launches
    assert max(ahead) == MAX_PREFETCHED or room < 1 << 40
