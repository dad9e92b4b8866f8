"""Timing of candidates, on a device that is played by a clock."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest
import torch

from samebits.plans import timing

CYCLES_PER_US = 2000


class Machine:
    """A host and a device, in microseconds. A call takes the host ``launching``, and the device what it says itself."""

    def __init__(self, launching: float) -> None:
        self.launching, self.host, self.device = launching, 0.0, 0.0
        self.sleeps: list[int] = []

    def sleep(self, cycles: int) -> None:
        self.sleeps.append(cycles)
        self.device = max(self.device, self.host) + cycles / CYCLES_PER_US

    def call(self, lasting: float) -> Callable[[], None]:
        def launch() -> None:
            self.host += self.launching
            self.device = max(self.device, self.host) + lasting

        return launch


@pytest.fixture
def machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine(request.param)

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            self.at = made.device

        def query(self) -> bool:
            return self.at <= made.host

        def synchronize(self) -> None:
            made.host = max(made.host, self.at)

        def elapsed_time(self, other: Event) -> float:
            return (other.at - self.at) / 1e3

    monkeypatch.setattr(timing, "_host", timing._Host())
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: made.host / 1e6)
    monkeypatch.setattr(torch.cuda, "_sleep", made.sleep)
    return made


@pytest.mark.parametrize("machine", [5.0, 90.0, 300.0, 1500.0], indirect=True, ids="host {} us".format)
def test_the_host_does_not_count(machine: Machine) -> None:
    """However long it takes to launch calls, up to a limit, the device is asleep until all of them are there."""
    found = timing.microseconds([[machine.call(20.0)] * 12, [machine.call(7.0)] * 3])
    assert found == pytest.approx([20.0, 7.0])


@pytest.mark.parametrize("machine", [5.0], indirect=True)
def test_only_those_that_may_win_are_timed_again(machine: Machine) -> None:
    made: list[float] = []

    def call(lasting: float) -> Callable[[], None]:
        def launch() -> None:
            made.append(lasting)
            machine.call(lasting)()

        return launch

    every = [20.0, 12.4, 10.0, 12.6]
    assert timing.microseconds([[call(lasting)] * 12 for lasting in every]) == pytest.approx(every)
    assert [made.count(lasting) // 12 - 1 for lasting in every] == [2, timing.ROUNDS, timing.ROUNDS, 2]


@pytest.mark.parametrize("machine", [90.0], indirect=True)
def test_a_slow_host_is_found_out_once(machine: Machine) -> None:
    for _ in range(8):
        assert timing.microseconds([[machine.call(5.0)] * 12]) == pytest.approx([5.0])
    late = len(machine.sleeps) - 8 * timing.ROUNDS
    assert late <= 4  # it takes two doublings, which each measurement would else make
    for _ in range(20):
        timing.microseconds([[machine.call(5000.0)] * 12])  # which no host is too slow for
    assert timing._host.cycles == timing._CYCLES_PER_CALL


@pytest.mark.parametrize("machine", [5000.0], indirect=True)
def test_a_host_that_is_too_slow_ends_the_search(machine: Machine) -> None:
    found = timing.microseconds([[machine.call(20.0)] * 12])
    assert found[0] >= 20.0
    assert len(machine.sleeps) == 6 + timing.ROUNDS  # 25 us doubled to 1,600, which then stay
    assert max(machine.sleeps) == 12 * timing._MAX_CYCLES_PER_CALL


@pytest.mark.parametrize("machine", [5.0], indirect=True)
def test_a_device_that_is_to_work_hard_first(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every candidate runs until the time is over."""
    seconds, calls, waits = count(), [machine.call(20.0), machine.call(7.0)], list[None]()
    made = [0, 0]

    def counted(number: int) -> Callable[[], None]:
        def call() -> None:
            made[number] += 1
            calls[number]()

        return call

    monkeypatch.setattr(timing.time, "monotonic", lambda: float(next(seconds)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(None))
    assert timing.microseconds([[counted(0)], [counted(1)]], warm_seconds=3.0) == pytest.approx([20.0, 7.0])
    assert made == [3 + 2, 3 + timing.ROUNDS]  # the first is beaten
    assert len(waits) == 2


@pytest.mark.parametrize("machine", [5.0], indirect=True)
def test_own_clocks(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that is slower while it works hard, and takes some time to become so; launching is not in the way."""
    behind: list[float] = []

    def call(lasting: float, hard: float) -> Callable[[], None]:
        def launch() -> None:
            behind.append(hard)
            machine.call(lasting * (1.0 + sum(behind[-100:]) / 100))()

        return launch

    monkeypatch.setattr(timing.time, "monotonic", lambda: machine.host / 1e6)
    hard, easy = call(100.0, 0.5), call(140.0, 0.0)
    assert timing.own_microseconds([[hard] * 3, [easy] * 2]) == pytest.approx([150.0, 140.0])
    assert not machine.sleeps


@pytest.mark.parametrize("machine", [5.0], indirect=True)
def test_own_clocks_take_the_device_no_longer(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Than to find them, and once more: the host does not launch as much as it could in that time."""
    monkeypatch.setattr(timing.time, "monotonic", lambda: machine.host / 1e6)
    assert timing.own_microseconds([[machine.call(100.0)] * 3]) == pytest.approx([100.0])
    assert machine.device / 1e6 < 3 * timing._OWN_ROUNDS * timing._OWN_SECONDS


@pytest.mark.parametrize("machine", [130.0], indirect=True)
def test_a_host_that_cannot_keep_the_device_at_work(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing.time, "monotonic", lambda: machine.host / 1e6)
    assert timing.own_microseconds([[machine.call(150.0)] * 3, [machine.call(120.0)] * 3]) is None
    assert timing.own_microseconds([[machine.call(150.0)] * 3] * 2) == pytest.approx([150.0] * 2)
