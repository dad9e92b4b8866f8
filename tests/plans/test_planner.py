"""When plans are found, kept and used: memory, disk, switches, graph capture."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import samebits
from samebits.errors import DeviceError, InputError
from samebits.format.packed import PackedTensor
from samebits.kernels.linear.launch import VARIANTS
from samebits.kernels.linear.products import LinearPlan
from samebits.plans import calibrate, planner
from samebits.plans.calibrate import ProbeWeights, candidate_splits
from samebits.plans.environment import Environment
from samebits.plans.key import PlanKey
from samebits.plans.planner import Planner
from samebits.plans.probe import Probe
from samebits.plans.store import GroupOutcome, Outcome, PlanStore
from tests.plans.conftest import ENVIRONMENT, FakeGpu, new_planner

KEY = PlanKey(64, 1024, 2, False, "state")
RIGHT = LinearPlan(3, 1)
CPU = torch.device("cpu")


@pytest.fixture
def calibrations(monkeypatch: pytest.MonkeyPatch) -> list[PlanKey]:
    """The keys that were calibrated."""
    seen: list[PlanKey] = []
    original = planner.calibrate

    def watched(key: PlanKey, weights: ProbeWeights) -> Outcome:
        seen.append(key)
        return original(key, weights)

    monkeypatch.setattr(planner, "calibrate", watched)
    return seen


def new_process(environment: Environment = ENVIRONMENT) -> Planner:
    planner.mode.cache_clear()
    return new_planner(environment)(0)


def test_found_once_in_a_process(gpu: FakeGpu, calibrations: list[PlanKey]) -> None:
    here = new_process()
    assert [here.outcome(KEY).plan for _ in range(3)] == [RIGHT] * 3
    assert here.outcome(KEY._replace(tokens=3)).plan == RIGHT
    assert calibrations == [KEY, KEY._replace(tokens=3)]


def test_found_once_on_a_machine(gpu: FakeGpu, calibrations: list[PlanKey]) -> None:
    new_process().outcome(KEY)
    gpu.fused_calls.clear()
    assert new_process().outcome(KEY) == Outcome(RIGHT, "", 3.0, 9.0)
    assert gpu.fused_calls == [RIGHT]  # tried once, not trusted
    assert calibrations == [KEY]


def test_many_at_once(gpu: FakeGpu, calibrations: list[PlanKey], monkeypatch: pytest.MonkeyPatch) -> None:
    """What they have compiled is compiled first, and a weight is made once."""
    made: list[PackedTensor] = []
    original = calibrate.encode
    monkeypatch.setattr(calibrate, "encode", lambda weight: made.append(original(weight)) or made[-1])
    header = samebits.encode(Probe.make(KEY.rows, KEY.columns, CPU, even=True).weight).header
    keys = [KEY._replace(tokens=tokens) for tokens in (2, 3, 8)]
    wanted = [(key, header) for key in keys]
    outcomes = new_process().outcomes(wanted)
    assert next(outcomes).plan == RIGHT
    assert gpu.compiled[0] == {LinearPlan(split) for split in candidate_splits(KEY.columns)} | {LinearPlan(1, 1)}
    assert [each.plan for each in outcomes] == [RIGHT] * 2
    assert (calibrations, len(made)) == (keys, 1)
    gpu.compiled.clear()
    assert [each.plan for each in new_process().outcomes(wanted)] == [RIGHT] * 3
    assert gpu.compiled == [set()]  # each is known
    assert (calibrations, len(made)) == (keys, 2)


@pytest.mark.parametrize("choice", ["cached", "off"])
def test_nothing_is_compiled_for_searches_that_are_not_made(
    gpu: FakeGpu, choice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(planner.MODE_VARIABLE, choice)
    header = samebits.encode(Probe.make(KEY.rows, KEY.columns, CPU, even=True).weight).header
    [outcome] = new_process().outcomes([(KEY, header)])
    assert outcome.plan is None
    assert not gpu.compiled


def test_a_compiler_that_fails_is_left_to_the_search(
    gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise DeviceError("no such compiler")

    monkeypatch.setattr(calibrate, "compile_all", fail)
    header = samebits.encode(Probe.make(KEY.rows, KEY.columns, CPU, even=True).weight).header
    [outcome] = new_process().outcomes([(KEY, header)])
    assert "no such compiler" in outcome.reason
    assert len(caplog.records) == 1


def test_that_there_is_no_plan_is_remembered_too(gpu: FakeGpu, calibrations: list[PlanKey]) -> None:
    gpu.times = [9.0, 9.0, 1.0]
    outcomes = [new_process().outcome(KEY) for _ in range(2)]
    assert outcomes == [Outcome(LinearPlan(3, 0), "decoding first is faster", 9.0, 1.0)] * 2
    assert calibrations == [KEY]


@pytest.mark.parametrize("change", ["driver", "torch", "cublas", "kernels", "device"])
def test_a_new_version_finds_anew(gpu: FakeGpu, calibrations: list[PlanKey], change: str) -> None:
    new_process().outcome(KEY)
    gpu.split = 2
    newer = Environment(**{**vars(ENVIRONMENT), change: "newer"})
    assert new_process(newer).outcome(KEY).plan == LinearPlan(2, 1)
    assert len(calibrations) == 2


def test_another_state_finds_anew(gpu: FakeGpu, calibrations: list[PlanKey]) -> None:
    here = new_process()
    here.outcome(KEY)
    gpu.split = 2
    assert here.outcome(KEY._replace(state="other")).plan == LinearPlan(2, 1)
    assert here.outcome(KEY).plan == RIGHT


def test_a_plan_on_disk_that_is_wrong_here_is_replaced(
    gpu: FakeGpu, calibrations: list[PlanKey], caplog: pytest.LogCaptureFixture
) -> None:
    """cuBLAS changed, and nothing that the key or the environment knows of."""
    new_process().outcome(KEY)
    gpu.split = 2
    assert new_process().outcome(KEY).plan == LinearPlan(2, 1)
    assert "not right here and is replaced" in caplog.text
    assert PlanStore(ENVIRONMENT).read()[KEY].plan == LinearPlan(2, 1)
    assert len(calibrations) == 2


def test_nothing_is_decided_during_capture(gpu: FakeGpu, calibrations: list[PlanKey]) -> None:
    here = new_process()
    gpu.is_capturing = True
    assert here.outcome(KEY).plan is None
    assert not calibrations
    assert not gpu.fused_calls
    gpu.is_capturing = False
    assert here.outcome(KEY).plan == RIGHT
    gpu.is_capturing = True
    assert here.outcome(KEY).plan == RIGHT


def test_switched_off(gpu: FakeGpu, calibrations: list[PlanKey], monkeypatch: pytest.MonkeyPatch) -> None:
    new_process().outcome(KEY)
    gpu.fused_calls.clear()
    monkeypatch.setenv("SAMEBITS_PLANS", "off")
    assert new_process().outcome(KEY) == Outcome(None, "SAMEBITS_PLANS=off")
    assert not gpu.fused_calls
    assert calibrations == [KEY]


def test_only_what_is_on_disk(gpu: FakeGpu, calibrations: list[PlanKey], monkeypatch: pytest.MonkeyPatch) -> None:
    new_process().outcome(KEY)
    monkeypatch.setenv("SAMEBITS_PLANS", "cached")
    here = new_process()
    assert here.outcome(KEY).plan == RIGHT
    assert here.outcome(KEY._replace(tokens=3)).plan is None
    gpu.split = 2
    assert new_process().outcome(KEY).plan is None  # wrong here, and no other is looked for
    assert calibrations == [KEY]
    assert PlanStore(ENVIRONMENT).read().keys() == {KEY}


def test_an_unknown_switch(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEBITS_PLANS", "of")
    with pytest.raises(InputError, match="SAMEBITS_PLANS='of' is unknown; set it to one of on, cached, off"):
        new_process().outcome(KEY)


FAILURES = {
    "not enough memory": torch.OutOfMemoryError("CUDA out of memory"),
    "no such kernel": DeviceError("no such kernel"),
}


@pytest.mark.parametrize("reason", FAILURES)
@pytest.mark.parametrize("where", ["calibrate", "confirm"])
def test_failing_to_find_a_plan(
    gpu: FakeGpu, where: str, reason: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The product itself may still succeed, and another process in finding a plan."""

    def fail(*_: object) -> None:
        raise FAILURES[reason]

    if where == "confirm":
        new_process().outcome(KEY)
    with monkeypatch.context() as patch:
        patch.setattr(planner, where, fail)
        assert new_process().outcome(KEY).plan is None
    assert reason in caplog.text
    assert new_process().outcome(KEY).plan == RIGHT


def test_without_a_disk(gpu: FakeGpu, calibrations: list[PlanKey], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SAMEBITS_CACHE", "/dev/null")
    here = new_process()
    assert [here.outcome(KEY).plan for _ in range(2)] == [RIGHT] * 2
    assert calibrations == [KEY]


def test_threads_find_it_once(gpu: FakeGpu, calibrations: list[PlanKey]) -> None:
    here = new_process()
    with ThreadPoolExecutor(4) as pool:
        plans = list(pool.map(lambda _: here.outcome(KEY).plan, range(8)))
    assert plans == [RIGHT] * 8
    assert calibrations == [KEY]


def test_settings_of_the_caller_do_no_harm(gpu: FakeGpu) -> None:
    with torch.autocast("cpu", torch.float16), torch.inference_mode():
        assert new_process().outcome(KEY).plan == RIGHT


@pytest.mark.parametrize(("seconds", "level"), [(0.1, logging.INFO), (5.0, logging.WARNING)])
def test_says_what_took_long(
    gpu: FakeGpu, seconds: float, level: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = iter([100.0, 100.0 + seconds])
    monkeypatch.setattr(planner.time, "monotonic", lambda: next(now))
    monkeypatch.setattr(planner, "calibrate", lambda key, weights: Outcome(RIGHT, "", 3.0, 9.0))
    with caplog.at_level(logging.INFO):
        new_process().outcome(KEY)
    (record,) = caplog.records
    assert record.levelno == level
    assert f"2 x 1024 times 64 x 1024: {RIGHT}, found in" in record.getMessage()
    assert ("samebits.prepare" in record.getMessage()) is (level == logging.WARNING)


@pytest.fixture
def timed(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """What was timed of groups; their fastest launch is variant 2."""
    seen: list[object] = []
    found = GroupOutcome(2, 1.0)
    monkeypatch.setattr(planner, "fastest_together", lambda x, operands, are_fused: seen.append(are_fused) or found)
    return seen


KEYS = (KEY, KEY._replace(rows=8))


def group_of(here: Planner) -> int | None:
    for key in KEYS:
        here.outcome(key)
    return here.together(KEYS, torch.empty(0), ()).variant


def test_groups_are_found_once_on_a_machine(timed: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    here = new_process()
    assert [group_of(here), group_of(here), group_of(new_process())] == [2, 2, 2]
    assert timed == [[True, True]]
    monkeypatch.setenv(planner.MODE_VARIABLE, "cached")
    assert group_of(new_process()) == 2
    monkeypatch.setenv(planner.MODE_VARIABLE, "off")
    assert group_of(new_process()) is None


def test_groups_that_are_not_on_disk(timed: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(planner.MODE_VARIABLE, "cached")
    assert group_of(new_process()) is None
    assert not timed


def test_a_group_of_no_kernel(timed: list[object]) -> None:
    PlanStore(ENVIRONMENT).add_group(KEYS, GroupOutcome(99))
    assert group_of(new_process()) == 2
    assert len(timed) == 1
    assert PlanStore(ENVIRONMENT).groups() == {KEYS: GroupOutcome(2, 1.0)}


def test_a_group_that_cannot_be_timed(timed: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr(planner, "fastest_together", fail)
        assert group_of(new_process()) is None
    assert group_of(new_process()) == 2  # was not kept on disk


def test_the_first_and_the_last_variant_that_is_none(timed: list[object]) -> None:
    PlanStore(ENVIRONMENT).add_group(KEYS, GroupOutcome(len(VARIANTS) - 1))
    assert group_of(new_process()) == len(VARIANTS) - 1
    assert not timed
    PlanStore(ENVIRONMENT).add_group(KEYS, GroupOutcome(len(VARIANTS)))
    assert group_of(new_process()) == 2
    assert len(timed) == 1
