"""A CPU that stands for the GPU: its F.linear sums as cuBLAS does, and its fused kernel really computes split sums."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import samebits
from samebits.format.header import Header
from samebits.format.packed import PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.decode_together import DecodeTogether
from samebits.kernels.linear.products import LinearPlan, Operands
from samebits.plans import calibrate, call, carry, dispatch, planner, prefetch, recall, together
from samebits.plans.environment import Environment
from samebits.plans.planner import Planner
from tests.plans.sums import split_linear

ENVIRONMENT = Environment("a device", 132, "13.0", "2.11.0", "13.1.0", "digest", {})


class FakeProducts:
    """In place of Products; ``spare`` is that of its launch."""

    def __init__(self, make: Callable[..., list[torch.Tensor]], spare: object = None) -> None:
        self.make, self.launch = make, SimpleNamespace(spare=spare)

    def __call__(self, *arguments: Any) -> list[torch.Tensor]:
        return self.make(*arguments)


def decoding(weights: Sequence[PackedTensor]) -> Callable[[], list[torch.Tensor]]:
    """A function that decodes those of them that there are then; holds none."""
    every = [(packed.header, weakref.ref(packed.data)) for packed in weights]

    def decoded() -> list[torch.Tensor]:
        there = [(header, data) for header, ref in every if (data := ref()) is not None]
        return [samebits.decode(PackedTensor(*each)) for each in there]

    return decoded


class FakeGpu:
    """What the code under test finds in place of torch's and samebits' kernels; a test changes what it likes.

    Attributes:
        split: F.linear's split; fused products have that of their plan.
        linear, fused: the two kernels.
        times: microseconds of every variant, then of decoding first.
        fused_calls: plans of the fused products so far, in order.
        compiled: plans whose kernels were compiled side by side.
    """

    def __init__(self) -> None:
        self.split = 3
        self.linear: Callable[..., torch.Tensor] = lambda x, w, b=None: split_linear(x, w, b, self.split)
        self.fused: Callable[..., torch.Tensor] = split_linear
        self.times = [5.0, 3.0, 9.0]
        self.fused_calls: list[LinearPlan] = []
        self.compiled: list[set[object]] = []
        self.is_capturing = False

    def fused_linear(
        self, x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None, plan: LinearPlan
    ) -> torch.Tensor:
        assert x.is_contiguous()
        self.fused_calls.append(plan)
        return self.fused(x.view(-1, x.shape[-1]), samebits.decode(packed), bias, plan.split).view(*x.shape[:-1], -1)

    def products(
        self, x: torch.Tensor, bias: torch.Tensor | None, operands: Callable[[], Sequence[Operands]]
    ) -> list[torch.Tensor]:
        """Products of one weight."""
        [(packed, _, plan)] = operands()
        return [self.fused_linear(x, packed, bias, plan)]

    def microseconds(
        self, candidates: Sequence[Sequence[Callable[[], torch.Tensor]]], *, warm_seconds: float = 0.0
    ) -> list[float]:
        assert len(candidates) == len(self.times)
        first, *others = [calls[0]() for calls in candidates]
        assert all(torch.equal(first.view(torch.int16), other.view(torch.int16)) for other in others)
        return self.times


def is_supported(header: Header, m: int, device: int) -> bool:
    return len(header.shape) == 2 and header.shape[1] % 64 == 0 and header.shape[0] % 8 == 0 and 1 <= m <= 128


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeGpu:
    """The fake, in place; plans are stored in an empty folder."""
    fake = FakeGpu()
    for module in (calibrate, call, dispatch, recall, together):
        monkeypatch.setattr(module, "F", SimpleNamespace(linear=lambda *arguments: fake.linear(*arguments)))
    for module in (calibrate, call):
        monkeypatch.setattr(module, "is_supported", is_supported)
    monkeypatch.setattr(prefetch, "load", lambda device: None)
    monkeypatch.setattr(calibrate, "fused_linear", fake.fused_linear)
    monkeypatch.setattr(call, "products_of", lambda header, m, plan, device: FakeProducts(fake.products))
    monkeypatch.setattr(call, "is_launchable", lambda header, m, plan, device: is_supported(header, m, device))
    monkeypatch.setattr(calibrate, "variants", lambda header, m, split: [0, 1])
    monkeypatch.setattr(calibrate, "first_variant", lambda header, m, split: 0)
    monkeypatch.setattr(calibrate, "sources", lambda header, m, plans, device: plans)
    monkeypatch.setattr(calibrate, "compile_all", lambda sources, device: fake.compiled.append({*sources}))
    monkeypatch.setattr(calibrate, "microseconds", fake.microseconds)
    monkeypatch.setattr(calibrate, "launch_of", lambda header, m, split, variant, device: None)
    for module in (call, dispatch, prefetch, recall.decode):
        monkeypatch.setattr(module, "decode_cuda", samebits.decode)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: -1)  # as tensors in main memory say
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: fake.is_capturing)
    monkeypatch.setenv("SAMEBITS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(planner.MODE_VARIABLE, raising=False)
    planner.mode.cache_clear()
    monkeypatch.setattr(Planner, "of", new_planner())
    yield fake
    planner.mode.cache_clear()


class DecodeOnCpu(DecodeTogether):
    """In place of DecodeTogether."""

    def __call__(self, *every: torch.Tensor) -> list[torch.Tensor]:
        return [samebits.decode(PackedTensor(*each)) for each in zip(self._headers, every, strict=True)]


def decode_beside_products_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever launches gain themselves is less than what they gain by that."""
    for name, value in (("_FIRST_US", 1.0), ("_UNMEASURED_US", 0.0), ("_TOGETHER_WEIGHTS", 0)):
        monkeypatch.setattr(carry, name, value)


@pytest.fixture
def where(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stream and captured graph, as a test wants them."""
    now = [7, 0]
    monkeypatch.setattr(nvrtc, "where", lambda device: nvrtc.Where(*now))
    return now


def new_planner(environment: Environment = ENVIRONMENT) -> Callable[[int], Planner]:
    """``Planner.of`` in a new process: nothing in memory."""
    made = Planner(torch.device("cpu"), environment)
    return lambda device: made


def new_process() -> None:
    """Forget the plans that are in memory."""
    Planner.of.__func__.cache_clear()
    planner.mode.cache_clear()


@pytest.fixture
def own_plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Of a real GPU, in a folder of their own."""
    monkeypatch.setenv("SAMEBITS_CACHE", str(tmp_path))
    monkeypatch.delenv("SAMEBITS_PLANS", raising=False)
    new_process()
    yield
    monkeypatch.undo()
    new_process()
