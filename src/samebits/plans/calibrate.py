"""Find the plan for a key: the one split whose bytes are cuBLAS's on every probe, if it is also faster than decoding.

Nothing here guesses. A key without exactly one such split has no plan, and a plan from disk is tried before it is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch.nn import functional as F

from samebits.api import decode, encode
from samebits.bf16 import same_words
from samebits.format.geometry import STAGE
from samebits.format.header import Header
from samebits.format.packed import PackedTensor
from samebits.kernels.linear.job import Launch
from samebits.kernels.linear.launch import VARIANTS, different, launch_of
from samebits.kernels.linear.products import (
    LinearPlan,
    Operands,
    first_variant,
    fused_linear,
    fused_linears,
    is_supported,
    launch_together,
    loaded,
    sources,
    variants,
)
from samebits.kernels.nvrtc import Source, compile_all
from samebits.plans.key import PlanKey
from samebits.plans.probe import Columns, Probe
from samebits.plans.store import GroupOutcome, Outcome
from samebits.plans.timing import Calls, microseconds, own_microseconds

MAX_SPLIT = 16
CANCELLING_PROBES = 2  # beside a plain one
MORE_PROBES = 6  # at most, while several splits agree with all so far
UNSUPPORTED = "the fused kernel does not take it"
_COLD = 3  # the copies of a weight that are timed in turn are as large as so many second-level caches
_MAX_COPIES = 48
_MIN_CALLS = 12
_LONG_BYTES = 1 << 26  # packed: products with so many take long enough for fewer calls
_MIN_LONG_CALLS = 4
_MIN_HOT_CALLS = 3  # of as many tokens as let the clock fall
_COOL_TOKENS = 512  # with more, tensor cores work so hard that the clock falls
_WARM_SECONDS = 0.3
_LONG_US = 100.0  # calls that take longer are timed at their own clocks, if they have many tokens
_ABOUT_AS_FAST = 1.05


class ProbeWeights:
    """Where searches on a device get their weights from.

    Args:
        keeps: the last one, packed, for the next search if its weight has the same shape.
    """

    def __init__(self, device: torch.device, *, keeps: bool = False) -> None:
        self.device, self._keeps = device, keeps
        self._last: tuple[tuple[int, int, bool], Columns, PackedTensor] | None = None

    def made(self, rows: int, columns: int, *, even: bool) -> tuple[Probe, PackedTensor]:
        """See Probe.make."""
        asked = rows, columns, even
        if self._last and self._last[0] == asked:
            _, paired, packed = self._last
            return Probe(decode(packed), paired), packed
        self._last = None  # before there is memory for another
        probe = Probe.make(rows, columns, self.device, even=even)
        packed = encode(probe.weight)
        if self._keeps:
            self._last = asked, probe.paired, packed
        return probe, packed


class Trial:
    """One weight made for a key, and the products of it that were asked of cuBLAS.

    Every product is made with the settings, on the stream and on the device that are current.
    """

    def __init__(self, key: PlanKey, weights: ProbeWeights) -> None:
        self.key = key
        for even in Probe.kinds(key.rows, key.columns):
            self.probe, self.packed = weights.made(key.rows, key.columns, even=even)
            if self.is_supported:
                break

    @property
    def is_supported(self) -> bool:
        return is_supported(self.packed.header, self.key.tokens, self.packed.data.get_device())

    def plans(self, split: int) -> list[LinearPlan]:
        return _plans(self.packed.header, self.key.tokens, split)

    def compile(self, plans: Sequence[LinearPlan]) -> None:
        device = self.packed.data.get_device()
        compile_all(sources(self.packed.header, self.key.tokens, plans, device), device)

    def agreeing(self, plans: Sequence[LinearPlan], seed: int, *, cancelling: bool = True) -> list[LinearPlan]:
        """Those of ``plans`` that give every byte of F.linear, for one more input of two and of three dimensions."""
        make = self.probe.cancelling if cancelling else self.probe.plain
        x, weight, bias = make(self.key.tokens, seed), self.probe.weight, None
        if self.key.has_bias:
            bias = self.probe.bias(F.linear(x, weight).float().abs().mean(), seed)
        expected = F.linear(x, weight, bias)
        if not same_words(F.linear(x.unsqueeze(1), weight, bias).squeeze(1), expected):
            return []
        return [plan for plan in plans if same_words(fused_linear(x, self.packed, bias, plan), expected)]


def _plans(header: Header, tokens: int, split: int) -> list[LinearPlan]:
    return [LinearPlan(split, variant) for variant in variants(header, tokens, split)]


def _first_plans(header: Header, tokens: int) -> list[LinearPlan]:
    """One for each split that the kernel can do."""
    splits = ((split, first_variant(header, tokens, split)) for split in candidate_splits(header.shape[1]))
    return [LinearPlan(split, variant) for split, variant in splits if variant is not None]


def compile_ahead(products: Iterable[tuple[Header, int]], device: int) -> None:
    """Have most of what searches for these weights and numbers of tokens need compiled, all of it side by side.

    Raises:
        DeviceError: as calibrate.
    """
    found: set[Source] = set()
    for header, tokens in products:
        if is_supported(header, tokens, device):
            plans = [*_first_plans(header, tokens), *_plans(header, tokens, 1)]
            found.update(sources(header, tokens, plans, device))
    compile_all(found, device)


def candidate_splits(columns: int) -> list[int]:
    """Splits of K that are not the same ranges under another number."""
    stages = -(-columns // STAGE)
    by_width = {-(-stages // split): split for split in range(min(stages, MAX_SPLIT), 0, -1)}
    return sorted(by_width.values())


@torch.inference_mode(False)  # whose tensors have no decode tables, and take longer
@torch.no_grad()
def calibrate(key: PlanKey, weights: ProbeWeights) -> Outcome:
    """Try every split, and time the one that is right.

    Raises:
        DeviceError: the kernels cannot be built or launched.
        torch.OutOfMemoryError: the weight, and a packed copy, do not fit.
    """
    trial = Trial(key, weights)
    if not trial.is_supported:
        return Outcome(None, UNSUPPORTED)
    plans = _first_plans(trial.packed.header, key.tokens)
    trial.compile([*plans, *trial.plans(1)])  # most are not split
    plans = _right_ones(trial, plans)
    if len(plans) > 1:
        return Outcome(None, f"splits {', '.join(str(plan.split) for plan in plans)} cannot be told apart")
    plans = [variant for plan in plans for variant in trial.plans(plan.split)]
    trial.compile(plans)
    plans = trial.agreeing(plans, 0)
    if not plans:
        return Outcome(None, "no split gives cuBLAS's bits")
    x, packed = trial.probe.plain(key.tokens, 0), trial.packed
    bias = trial.probe.bias(x.abs().max(), 0) if key.has_bias else None
    del trial  # and with it the weight: timing takes memory of its own
    return _fastest(x, packed, bias, plans)


@torch.inference_mode(False)  # whose tensors have no decode tables, and take longer
@torch.no_grad()
def confirm(key: PlanKey, plan: LinearPlan, weights: ProbeWeights) -> bool:
    """Whether a plan that was found by another process is right here too: one probe."""
    trial = Trial(key, weights)
    known = plan.split in candidate_splits(key.columns) and trial.is_supported
    return known and plan in trial.plans(plan.split) and bool(trial.agreeing([plan], 0))


def _right_ones(trial: Trial, plans: list[LinearPlan]) -> list[LinearPlan]:
    """Those right on all probes; more than one only if as many as MORE_PROBES could not tell them apart."""
    plans = trial.agreeing(plans, 0, cancelling=False)
    for seed in range(1, 1 + CANCELLING_PROBES + MORE_PROBES):
        if not plans or (len(plans) == 1 and seed > CANCELLING_PROBES):
            break
        plans = trial.agreeing(plans, seed)
    return plans


def _fastest(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None, plans: Sequence[LinearPlan]) -> Outcome:
    """The fastest of plans that differ in nothing but speed, and whether decoding first is faster."""
    copies, device = [copy for (copy,) in _cold_copies([packed], x)], x.get_device()
    fused = [[partial(fused_linear, x, copy, bias, plan) for copy in copies] for plan in plans]
    decoded = [partial(_decode_and_multiply, x, copy, bias) for copy in copies]
    launches = [launch_of(packed.header, _tokens(x), plan.split, plan.variant, device) for plan in plans]
    found = _raced(x, fused, launches, [[Operands(copy, bias, plans[0])] for copy in copies], decoded)
    reason = "" if found.us < found.other_us else "decoding first is faster"
    return Outcome(plans[found.number], reason, found.us, found.other_us, found.carried_us)


class _Raced(NamedTuple):
    """Microseconds of the fastest of some launches, by its number, and of another way.

    Attributes:
        carried_us: more for each weight of another product that the launch decodes on the way; None where it was not
            timed so.
    """

    number: int
    us: float
    other_us: float
    carried_us: float | None


def _raced(
    x: torch.Tensor, fused: Sequence[Calls], launches: Sequence[Launch | None], operands: Sequence[Sequence[Operands]],
    other: Calls,
) -> _Raced:  # fmt: skip
    """Of the calls that make these launches, of each of ``operands`` in turn, and the calls of another way.

    Of launches that are about as fast and can decode another weight (prefetch.py), the fastest is the one that is while
    it does. All share a clock while it is found: they differ little in power, but much from the other way, which often
    works less hard and then runs at a higher one.
    """
    many, carried_us = _lets_clock_fall(x), None
    *alone, other_us = microseconds([*fused, other], warm_seconds=_WARM_SECONDS if many else 0.0)
    best = min(range(len(alone)), key=alone.__getitem__)
    leading = [number for number, each in enumerate(alone) if each < _ABOUT_AS_FAST * alone[best]]
    busy = {number: calls for number in leading if (calls := _loaded(x, launches[number], operands))}
    if best in busy:  # else nothing is lost by one that cannot decode another weight
        loaded_us = dict(zip(busy, microseconds(list(busy.values())), strict=True))
        best = min(busy, key=loaded_us.__getitem__)
        rows, columns = operands[0][0].packed.shape
        carried_us = (loaded_us[best] - alone[best]) / (rows * columns)
    is_long = many and min(alone[best], other_us) > _LONG_US
    own = own_microseconds([fused[best], other]) if is_long else None
    us, other_us = own or (alone[best], other_us)
    return _Raced(best, us, other_us, carried_us)


def _loaded(x: torch.Tensor, launch: Launch | None, operands: Sequence[Sequence[Operands]]) -> Calls:
    if launch is None:
        return []
    made = [(loaded(each, launch, x.get_device()), each) for each in operands]
    return [partial(products, x, each[0].bias, partial(tuple, each)) for products, each in made if products]


@torch.inference_mode(False)  # as for calibrate
@torch.no_grad()
def fastest_together(x: torch.Tensor, operands: Sequence[Operands], are_fused: Sequence[bool]) -> GroupOutcome:
    """The variant in which one launch makes these products fastest, if that is faster than one by one.

    Or if it may be, as it can decode other weights on the way.

    Args:
        are_fused: each of them, one by one; else the weight is decoded first.

    Raises:
        DeviceError, torch.OutOfMemoryError: as calibrate.
    """
    device = x.get_device()
    fitting = different(launch_together(operands, _tokens(x), variant, device) for variant in range(len(VARIANTS)))
    if not fitting:
        return GroupOutcome(None)
    compile_all(set().union(*(launch.sources for launch in fitting.values())), device)
    copies = [
        [each._replace(packed=packed) for each, packed in zip(operands, weights, strict=True)]
        for weights in _cold_copies([each.packed for each in operands], x)
    ]
    joint = [[partial(_together, x, copy, launch) for copy in copies] for launch in fitting.values()]
    single = [partial(_one_by_one, x, copy, are_fused) for copy in copies]
    found = _raced(x, joint, list(fitting.values()), copies, single)
    gained_us = found.other_us - found.us
    variant, launch = list(fitting.items())[found.number]
    is_of_use = gained_us > 0 or launch.spare is not None
    return GroupOutcome(variant, gained_us, found.carried_us) if is_of_use else GroupOutcome(None)


def _tokens(x: torch.Tensor) -> int:
    return x.numel() // x.shape[-1]


def _lets_clock_fall(x: torch.Tensor) -> bool:
    return _tokens(x) > _COOL_TOKENS


def _together(x: torch.Tensor, operands: Sequence[Operands], launch: Launch) -> list[torch.Tensor]:
    """Behind a kernel that does not let it start early, as in a model."""
    x.clone()
    return fused_linears(x, operands, launch)


def _one_by_one(x: torch.Tensor, operands: Sequence[Operands], are_fused: Sequence[bool]) -> list[torch.Tensor]:
    x.clone()
    return [
        fused_linear(x, *each) if is_fused else _decode_and_multiply(x, each.packed, each.bias)
        for each, is_fused in zip(operands, are_fused, strict=True)
    ]


def _decode_and_multiply(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, decode(packed), bias)


def _cold_copies(weights: Sequence[PackedTensor], x: torch.Tensor) -> Iterator[Sequence[PackedTensor]]:
    """As many as keep each other out of the cache, and fit into a quarter of the free memory; in turn, then again.

    One for each call that is timed with this input.
    """
    wanted, room, device, size = 1, 1, weights[0].device, sum(packed.nbytes for packed in weights)
    if device.type == "cuda":
        wanted = -(-_COLD * int(torch.cuda.get_device_properties(device).L2_cache_size) // size)
        reserve = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        room = (torch.cuda.mem_get_info(device)[0] + reserve) // 4 // size
    count = max(1, min(wanted, room, _MAX_COPIES))
    copies = [weights, *([replace(packed, data=packed.data.clone()) for packed in weights] for _ in range(count - 1))]
    least = _MIN_LONG_CALLS if size >= _LONG_BYTES else _MIN_CALLS
    for i in range(max(count, _MIN_HOT_CALLS if _lets_clock_fall(x) else least)):
        yield copies[i % count]
