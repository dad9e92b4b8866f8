"""samebits.prepare: each kind of product once, whatever the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import samebits
from samebits.errors import InputError
from samebits.format.header import Header
from samebits.format.packed import PackedTensor
from samebits.kernels.linear.experts import VARIANTS as EXPERTS_VARIANTS
from samebits.kernels.linear.launch import VARIANTS
from samebits.kernels.linear.products import LinearPlan
from samebits.nn import prepare as module
from samebits.nn.packed_module import PackedModule
from samebits.plans import experts
from samebits.plans.calibrate import UNSUPPORTED
from samebits.plans.key import ExpertsKey, Operation, PlanKey
from samebits.plans.planner import Planner
from samebits.plans.store import ExpertsOutcome, Outcome


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=True)
        self.odd = nn.Linear(72, 96)
        self.convolution = nn.Conv1d(64, 64, 3)


class FakePlanner:
    """Fuses one token at a time."""

    def __init__(self) -> None:
        self.keys: list[PlanKey] = []
        self.routed: list[ExpertsKey] = []

    def outcomes(self, wanted: Sequence[tuple[PlanKey, Header]]) -> Iterator[Outcome]:
        for key, header in wanted:
            assert header.shape == (key.rows, key.columns)
            self.keys.append(key)
            reason = "" if key.tokens == 1 else "decoding first is faster"
            yield Outcome(None if reason else LinearPlan(2, 0), reason, 1.0, 2.0)

    def experts(self, key: ExpertsKey, packed: PackedTensor) -> ExpertsOutcome:
        assert packed.shape == (key.experts, key.rows, key.columns)
        self.routed.append(key)
        return ExpertsOutcome(1, "" if key.pairs == 2 else "decoding first is faster")


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> FakePlanner:
    fake = FakePlanner()
    monkeypatch.setattr(Planner, "of", lambda device: fake)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(module, "is_supported", lambda header, m, device: header.shape[1] % 64 == 0 and m <= 128)
    return fake


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.ModuleList(Layer().to(torch.bfloat16) for _ in range(3))
    samebits.compress(layers)
    return layers


def test_every_kind_once(planner: FakePlanner) -> None:
    steps: list[tuple[int, int]] = []
    report = samebits.prepare(model(), batch_sizes=(1, 8), progress=lambda done, total: steps.append((done, total)))
    shapes = [(key.rows, key.columns, key.tokens, key.has_bias) for key in planner.keys]
    assert shapes == [(128, 64, 1, False), (128, 64, 8, False), (64, 128, 1, True), (64, 128, 8, True)]
    assert (report.fused, report.fallback) == (2, 4)
    assert {product.modules for product in report.products} == {3}
    assert [product.outcome.reason for product in report.products if product.columns == 72] == [UNSUPPORTED] * 2
    assert steps == [(done, 6) for done in range(1, 7)]
    text = str(report)
    assert text.startswith("2 kinds of products fused, 4 decoded first\n")
    assert f"64 x 128, 1 tokens, bias, 3 modules: split 2, {VARIANTS[0]}" in text
    assert "128 x 64, 8 tokens, 3 modules: decoding first is faster" in text


def test_numbers_of_tokens_from_a_call(planner: FakePlanner, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, seen = model(), list[int]()

    def call() -> None:
        with monkeypatch.context() as on_cpu:
            on_cpu.setattr(torch.Tensor, "is_cuda", False)
            first, second, _ = layers
            seen.append(len(first.down(first.up(torch.zeros(2, 3, 64, dtype=torch.bfloat16)))))
            second.up(input=torch.zeros(9, 64, dtype=torch.bfloat16))
            second.up(torch.zeros(0, 64, dtype=torch.bfloat16))

    report = samebits.prepare(layers, call=call)
    assert seen == [2] * (1 + module.LEARNING_CALLS)
    found = [(each.rows, each.tokens, each.modules) for each in report.products]
    assert found == [(128, 6, 1), (128, 9, 1), (64, 6, 1)]
    report = samebits.prepare(layers, (1, 6), call=call)
    found = [(each.rows, each.tokens, each.modules) for each in report.products if each.columns != 72]
    assert found == [(128, 1, 3), (128, 6, 3), (128, 9, 1), (64, 1, 3), (64, 6, 3)]
    assert not layers[0].up._forward_pre_hooks
    assert samebits.prepare(layers, call=lambda: None).products == ()
    assert samebits.prepare(nn.Linear(64, 64), call=call).products == ()
    assert len(seen) == 2 * (1 + module.LEARNING_CALLS)


def test_routed_experts_with_many_tokens(planner: FakePlanner, monkeypatch: pytest.MonkeyPatch) -> None:
    """No plans for numbers of tokens that no other call has, but those asked for, and those of other layers."""
    layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(20)).to(torch.bfloat16)
    samebits.compress(layers)
    many = range(module.FEW_TOKENS + 1, module.FEW_TOKENS + 11)

    def call() -> None:
        with monkeypatch.context() as on_cpu:
            on_cpu.setattr(torch.Tensor, "is_cuda", False)
            for layer, tokens in zip(layers, (*many, *[4096] * 5, *range(1, 6)), strict=True):
                layer(torch.zeros(tokens, 64, dtype=torch.bfloat16))

    monkeypatch.setattr(module, "is_supported", lambda header, m, device: True)
    report = samebits.prepare(layers, (many[0],), call=call)
    planned = [*range(1, 6), many[0], 4096]
    assert [key.tokens for key in planner.keys] == planned
    assert [each.tokens for each in report.products if each.outcome.reason == module.CHANGING] == list(many[1:])
    assert {each.tokens for each in report.products} == {*planned, *many}


def test_what_a_call_leaves_to_torch(planner: FakePlanner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its inputs lie otherwise in memory than those that plans are made for."""
    layers = model()

    def call() -> None:
        with monkeypatch.context() as on_cpu:
            on_cpu.setattr(torch.Tensor, "is_cuda", False)
            sequence = torch.zeros(2, 6, 64, dtype=torch.bfloat16)
            for layer in layers[:2]:
                layer.up(sequence[:, -1:])
            layers[0].up(sequence[:1, 2:])
            layers[0].up(sequence[None])
            layers[0].down(torch.zeros(128, 3, dtype=torch.bfloat16).T)
            layers[0].down(torch.zeros(1, 9, 128, dtype=torch.bfloat16)[:, 4:])
            layers[0].down(torch.zeros(2, 128, dtype=torch.bfloat16)[::2])

    report = samebits.prepare(layers, call=call)
    found = [
        (each.rows, each.tokens, each.modules, each.outcome.reason == module.OTHER_LAYOUT) for each in report.products
    ]
    planned, left = [(128, 4, 1), (64, 1, 1), (64, 5, 1)], [(128, 2, 2), (128, 12, 1), (64, 3, 1)]
    assert found == [(*each, False) for each in planned] + [(*each, True) for each in left]
    assert [(key.rows, key.tokens) for key in planner.keys] == [each[:2] for each in planned]
    assert (report.fused, report.fallback) == (1, 5)
    assert f"128 x 64, 2 tokens, 2 modules: {module.OTHER_LAYOUT}" in str(report)


def test_streamed_weights_multiply_on_their_gpu(planner: FakePlanner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_cuda", False)
    assert not samebits.prepare(model()).products
    devices: list[int] = []
    monkeypatch.setattr(Planner, "of", lambda device: devices.append(device) or planner)
    monkeypatch.setattr(module, "streaming_device", lambda model: torch.device("cuda", 3))
    assert len(samebits.prepare(model()).products) == 3
    assert devices == [3]


def test_settings_without_plans(planner: FakePlanner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "blas_state", lambda: None)
    report = samebits.prepare(model())
    assert (report.fused, planner.keys) == (0, [])
    assert "TunableOp" in str(report)


class Experts(nn.Module):
    """Two stacks that kernels take, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        for name, shape in (("up", (2, 128, 1024)), ("down", (2, 256, 1024)), ("odd", (2, 60, 1024))):
            self.register_parameter(name, nn.Parameter(torch.randn(shape).mul(0.02).to(torch.bfloat16)))


def test_routed_experts_of_steps(planner: FakePlanner, monkeypatch: pytest.MonkeyPatch) -> None:
    """For those modules that know how many experts a token has."""
    layers, steps = nn.ModuleList(Experts() for _ in range(3)), list[tuple[int, int]]()
    samebits.compress(layers)
    monkeypatch.setattr(experts.nvrtc, "on_device", lambda device: nullcontext())
    known = dict.fromkeys(map(id, layers[:2]), 2)
    each = lambda self, tokens: known[id(self)] * tokens if id(self) in known else None  # noqa: E731
    monkeypatch.setattr(PackedModule, "sb_routed_rows", each)
    sizes = (experts.MAX_PAIRS, 1, 4)
    report = samebits.prepare(layers, sizes, progress=lambda done, total: steps.append((done, total)))
    assert [(key.operation, key.rows, key.pairs) for key in planner.routed] == [
        (Operation.BATCHED, rows, pairs) for rows in (128, 256) for pairs in (2, 8)
    ]
    assert {(each.experts, each.columns, each.modules) for each in report.experts} == {(2, 1024, 2)}
    assert (report.products, report.fused, report.fallback) == ((), 2, 7)
    assert steps == [(done, 9) for done in range(1, 10)]
    text = str(report)
    assert f"2 experts of 128 x 1024, 2 pairs, 2 modules: {EXPERTS_VARIANTS[1]}" in text
    assert "2 experts of 256 x 1024, 8 pairs, 2 modules: decoding first is faster" in text
    assert text.count(UNSUPPORTED) == 5  # too many pairs, or rows


def test_routed_experts_without_plans(planner: FakePlanner, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Experts()
    samebits.compress(layer)
    monkeypatch.setattr(PackedModule, "sb_routed_rows", lambda self, tokens: tokens)
    monkeypatch.setattr(experts, "blas_state", lambda: None)
    report = samebits.prepare(layer)
    assert [each.outcome.reason for each in report.experts] == [module.UNKEYED] * 3
    assert not planner.routed


def test_nothing_to_prepare_on_the_cpu() -> None:
    assert samebits.prepare(model()).products == ()
    assert samebits.prepare(nn.Linear(64, 64)).products == ()


@pytest.mark.parametrize("sizes", [(0,), (1, -3), 8, (1.5,), ("1",)])
def test_impossible_batch_sizes(sizes: Any) -> None:
    with pytest.raises(InputError, match="give a list of whole numbers from 1 on"):
        samebits.prepare(model(), sizes)
