"""Finding plans: on a fake GPU whose kernels really sum in the order that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from samebits.bf16 import same_words
from samebits.kernels.linear.products import LinearPlan, Operands
from samebits.plans import calibrate
from samebits.plans.calibrate import UNSUPPORTED, ProbeWeights, Trial, candidate_splits, confirm
from samebits.plans.key import PlanKey
from samebits.plans.probe import Probe
from samebits.plans.store import Outcome
from tests.plans.conftest import FakeGpu
from tests.plans.sums import split_linear

CPU = torch.device("cpu")
COLUMNS = 1024  # splits 5 and 6 of its 16 stages are 4 and 6


def key(columns: int = COLUMNS, *, tokens: int = 2, has_bias: bool = False) -> PlanKey:
    return PlanKey(64, columns, tokens, has_bias, "state")


def found(key: PlanKey) -> Outcome:
    return calibrate.calibrate(key, ProbeWeights(CPU))


@pytest.mark.parametrize(
    ("columns", "splits"),
    [
        (64, [1]),
        (128, [1, 2]),
        (256, [1, 2, 4]),
        (1024, [1, 2, 3, 4, 6, 8, 16]),
        (4096, [1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 13, 16]),
        (9728, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 16]),
    ],
)
def test_candidates_are_distinct(columns: int, splits: list[int]) -> None:
    assert candidate_splits(columns) == splits


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("split", candidate_splits(COLUMNS))
def test_finds_the_split(gpu: FakeGpu, split: int, has_bias: bool) -> None:
    gpu.split = split
    assert found(key(has_bias=has_bias)) == Outcome(LinearPlan(split, 1), "", 3.0, 9.0)


def test_finds_a_split_under_its_smallest_number(gpu: FakeGpu) -> None:
    gpu.split = 5
    assert found(key()).plan == LinearPlan(4, 1)


@pytest.mark.parametrize("tokens", [1, 8, 128])
def test_finds_it_for_many_tokens(gpu: FakeGpu, tokens: int) -> None:
    assert found(key(tokens=tokens)).plan == LinearPlan(gpu.split, 1)
    first, others = gpu.compiled
    assert first == {LinearPlan(split) for split in candidate_splits(key().columns)} | {LinearPlan(1, 1)}
    assert others == {LinearPlan(gpu.split), LinearPlan(gpu.split, 1)}


def test_no_split_is_right(gpu: FakeGpu) -> None:
    """cuBLAS may sum in any order: here from the end."""
    gpu.linear = lambda x, w, b=None: split_linear(x.flip(-1), w.flip(-1), b, 2)
    assert found(key()) == Outcome(None, "no split gives cuBLAS's bits")


def test_a_bias_added_after_rounding_is_noticed(gpu: FakeGpu) -> None:
    gpu.linear = lambda x, w, b=None: split_linear(x, w, None, 3) + (0 if b is None else b)
    assert found(key(has_bias=False)).plan == LinearPlan(3, 1)
    assert found(key(has_bias=True)).plan is None


def test_a_bias_that_starts_the_sum_is_noticed(gpu: FakeGpu) -> None:
    def bias_first(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        if b is None:
            return split_linear(x, w, None, 1)
        ones, column = torch.ones(*x.shape[:-1], 64), torch.zeros(len(w), 64)
        column[:, 0] = b.float()
        return split_linear(torch.cat([ones, x.float()], -1), torch.cat([column, w.float()], -1), None, 1)

    gpu.linear = bias_first
    assert found(key(has_bias=True)).plan is None


def test_three_dimensions_that_differ_are_noticed(gpu: FakeGpu) -> None:
    gpu.linear = lambda x, w, b=None: split_linear(x, w, b, x.dim())
    assert found(key()).plan is None


def test_one_wrong_word_is_enough(gpu: FakeGpu) -> None:
    calls = []

    def wrong_at_last(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
        y = split_linear(x, w, b, 3)
        calls.append(1)
        if len(calls) >= 5:  # each probe asks twice: of the second cancelling one
            y.view(torch.int16)[..., -1] ^= 1
        return y

    gpu.linear = wrong_at_last
    assert found(key()).plan is None


def test_the_last_split_is_probed_as_often(gpu: FakeGpu) -> None:
    """The only one that agrees so far may be wrong in a cancelling probe."""
    calls: list[int] = []

    def wrong_once(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, split: int) -> torch.Tensor:
        calls.append(split)
        return split_linear(x, w, b, split) * (2 if calls.count(3) == 1 + calibrate.CANCELLING_PROBES else 1)

    gpu.fused = wrong_once
    assert found(key()).plan is None


def test_splits_that_stay_alike_are_refused(gpu: FakeGpu) -> None:
    gpu.fused = lambda x, w, b, split: split_linear(x, w, b, 3)
    assert found(key()) == Outcome(
        None, f"splits {', '.join(map(str, candidate_splits(COLUMNS)))} cannot be told apart"
    )


def test_more_probes_tell_splits_apart(gpu: FakeGpu) -> None:
    """Two that are alike for so long."""
    probes = calibrate.CANCELLING_PROBES + 3
    calls = {2: 0, 3: 0}

    def slowly_different(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None, split: int) -> torch.Tensor:
        if split == 2:
            calls[2] += 1
            split = 3 if calls[2] <= probes else 2
        return split_linear(x, w, b, split)

    gpu.fused = slowly_different
    assert found(key()).plan == LinearPlan(3, 1)
    assert calls[2] == probes + 1


def test_splits_that_the_kernel_cannot_do(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "variants", lambda header, m, split: [0, 1] if split > 2 else [])
    monkeypatch.setattr(calibrate, "first_variant", lambda header, m, split: 0 if split > 2 else None)
    assert found(key()).plan == LinearPlan(3, 1)
    gpu.split = 2
    assert found(key()).plan is None


def test_a_wrong_variant_is_not_timed(gpu: FakeGpu) -> None:
    original = gpu.fused_linear

    def fused_linear(x: torch.Tensor, packed: object, bias: torch.Tensor | None, plan: LinearPlan) -> torch.Tensor:
        return original(x, packed, bias, plan) * (1 if plan.variant == 0 else 2)

    gpu.times = [5.0, 9.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibrate, "fused_linear", fused_linear)
        assert found(key()) == Outcome(LinearPlan(3, 0), "", 5.0, 9.0)


@pytest.mark.parametrize("times", [[9.0, 10.0, 9.0], [20.0, 10.0, 9.5]])
def test_never_slower_than_decoding_first(gpu: FakeGpu, times: list[float]) -> None:
    gpu.times = times
    plan = LinearPlan(3, times.index(min(times[:2])))
    assert found(key()) == Outcome(plan, "decoding first is faster", min(times[:2]), times[2])


@pytest.mark.parametrize(
    ("alone", "loaded", "best"),
    [
        ((5.0, 4.9), {0: 6.0, 1: 7.0}, 0),  # as fast, and faster while it decodes another weight
        ((5.0, 4.9), {0: 8.0, 1: 7.0}, 1),
        ((5.2, 4.9), {0: 6.0, 1: 7.0}, 1),  # not as fast
        ((5.0, 4.9), {0: 6.0}, 1),  # the fastest cannot decode another weight
        ((4.9, 5.0), {0: 6.0}, 0),
    ],
)
def test_launches_that_may_decode_other_weights(
    alone: tuple[float, float], loaded: dict[int, float], best: int, gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fastest is the one that is while it does, and counts as it is alone."""
    calls: list[tuple[int, object]] = []
    leading = [launch for launch in (0, 1) if alone[launch] < 1.05 * min(alone)]
    times: list[list[float]] = []

    def loaded_products(operands: Sequence[Operands], launch: object, device: int) -> Callable[..., object] | None:
        def products(x: torch.Tensor, bias: object, again: Callable[[], Sequence[Operands]]) -> None:
            calls.append((launch, bias))
            assert again() == tuple(operands)

        return products if launch in loaded else None

    def microseconds(candidates: Sequence[Sequence[Callable[[], object]]], **named: float) -> list[float]:
        for each in candidates:
            assert len(each) >= 3
            each[0]()
        times.append([*alone, 9.0] if not times else [loaded[each] for each in leading if each in loaded])
        assert len(candidates) == len(times[-1])
        return times[-1]

    monkeypatch.setattr(calibrate, "launch_of", lambda header, m, split, variant, device: variant)
    monkeypatch.setattr(calibrate, "loaded", loaded_products)
    monkeypatch.setattr(calibrate, "microseconds", microseconds)
    outcome = found(key())
    assert outcome == Outcome(LinearPlan(3, best), "", alone[best], 9.0, outcome.carried_us)
    if best in loaded:
        assert outcome.carried_us == (loaded[best] - alone[best]) / (key().rows * key().columns)
    else:
        assert outcome.carried_us is None
    assert [launch for launch, _ in calls] == [launch for launch in leading if launch in loaded and best in loaded]


@pytest.mark.parametrize("times", [[800.0, 700.0, 650.0], [800.0, 700.0, 750.0]])
def test_long_products_of_many_tokens(gpu: FakeGpu, times: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """The fastest launch, and decoding first, count as they are at their own clocks."""
    asked: list[int] = []

    def own_microseconds(candidates: Sequence[Sequence[Callable[[], object]]]) -> list[float]:
        asked.append(len(candidates))
        candidates[0][0](), candidates[1][0]()
        return [710.0, 705.0]

    monkeypatch.setattr(calibrate, "own_microseconds", own_microseconds)
    gpu.times = times
    reason = "decoding first is faster" if times[2] < times[1] else ""
    assert found(key()) == Outcome(LinearPlan(3, 1), reason, *times[1:])
    assert not asked
    monkeypatch.setattr(calibrate, "_COOL_TOKENS", 1)
    calls = len(gpu.fused_calls)
    assert found(key(tokens=3)) == Outcome(LinearPlan(3, 1), "decoding first is faster", 710.0, 705.0)
    assert asked == [2]
    assert gpu.fused_calls[-1] == LinearPlan(3, 1)
    assert len(gpu.fused_calls) > calls
    gpu.times = [80.0, 70.0, 99.0]
    assert found(key(tokens=3)) == Outcome(LinearPlan(3, 1), "", 70.0, 99.0)
    assert asked == [2]


def test_what_the_kernel_does_not_take(gpu: FakeGpu) -> None:
    assert found(key(tokens=129)) == Outcome(None, UNSUPPORTED)
    assert not gpu.fused_calls


def test_searches_share_a_weight(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the shape that was asked for last: it is the same as one made anew, down to the pairs."""
    made: list[tuple[int, int]] = []
    original = Probe.make

    def make(rows: int, columns: int, *arguments: Any, **named: Any) -> Probe:
        made.append((rows, columns))
        return original(rows, columns, *arguments, **named)

    monkeypatch.setattr(Probe, "make", make)
    shared = ProbeWeights(CPU, keeps=True)
    for tokens in (1, 2):
        assert calibrate.calibrate(key(tokens=tokens), shared).plan == LinearPlan(3, 1)
    again, anew = (Trial(key(), weights).probe for weights in (shared, ProbeWeights(CPU)))
    assert same_words(again.weight, anew.weight)
    assert same_words(again.cancelling(2, 5), anew.cancelling(2, 5))
    assert confirm(key(512), LinearPlan(3, 1), shared)
    assert confirm(key(), LinearPlan(3, 1), shared)
    assert made == [(64, COLUMNS), (64, COLUMNS), (64, 512), (64, COLUMNS)]


def test_confirms_right_plans_only(gpu: FakeGpu) -> None:
    plans = [LinearPlan(split, 0) for split in range(1, 9)]
    right = [plan for plan in plans if confirm(key(), plan, ProbeWeights(CPU))]
    assert right == [LinearPlan(3, 0)]
    assert confirm(key(), LinearPlan(3, 1), ProbeWeights(CPU))
    calls = len(gpu.fused_calls)
    assert not confirm(key(), LinearPlan(3, 2), ProbeWeights(CPU))  # no such variant
    assert not confirm(key(), LinearPlan(1 << 30, 0), ProbeWeights(CPU))
    assert not confirm(key(tokens=129), LinearPlan(3, 0), ProbeWeights(CPU))
    assert len(gpu.fused_calls) == calls
