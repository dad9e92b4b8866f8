"""Time of short calls on the device alone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

ROUNDS = 5
_OWN_ROUNDS = 3
_OWN_SECONDS = 0.08
_CYCLES_PER_CALL = 50_000  # of the device, about 25 us: longer than a fast host takes to launch a call
_MAX_CYCLES_PER_CALL = 64 * _CYCLES_PER_CALL
_DECAY = 0.9  # of the start, from one measurement to the next: a host may have been slow once
_SURE_US = 20.0  # more than it takes the host to see that the device is done
_HEATS = 2  # rounds with every candidate
_BEATEN = 1.25  # one that takes so many times as long as the fastest is timed no more then

Calls = Sequence[Callable[[], object]]


@dataclass
class _Host:
    """
    Attributes:
        cycles: of the device, for each call that the host is to launch: its start.
    """

    cycles: int = _CYCLES_PER_CALL


_host = _Host()


class _Round(NamedTuple):
    microseconds: float  # of one call
    is_late: bool  # the device may have waited for the host


def microseconds(candidates: Sequence[Calls], *, warm_seconds: float = 0.0) -> list[float]:
    """Of one call of each candidate, on the current stream: medians over rounds, in which the candidates alternate.

    Those that are beaten clearly are timed in the first rounds alone. The host gets as long a start as it needs, and at
    first as long a one as it needed before; on the slowest of hosts the longest counts.

    Args:
        warm_seconds: for so long they run before they are timed, and longer than it takes to run each once: a device
            that works hard lowers its clock after a while, and then another candidate may be the fastest.
    """
    start = time.monotonic()
    while True:
        for calls in candidates:
            for call in calls:
                call()
        if not warm_seconds or time.monotonic() - start >= warm_seconds:
            break
        torch.cuda.synchronize()
    racing, times = list(range(len(candidates))), list[list[float]]([] for _ in candidates)
    while len(times[racing[0]]) < ROUNDS:
        found = {number: _round(candidates[number], _host.cycles) for number in racing}
        if any(each.is_late for each in found.values()) and _host.cycles < _MAX_CYCLES_PER_CALL:
            _host.cycles = min(2 * _host.cycles, _MAX_CYCLES_PER_CALL)
            continue
        for number, each in found.items():
            times[number].append(each.microseconds)
        if len(times[racing[0]]) == _HEATS:
            limit = _BEATEN * min(map(min, times))
            racing = [number for number in racing if min(times[number]) <= limit]
    _host.cycles = max(_CYCLES_PER_CALL, int(_DECAY * _host.cycles))
    return [statistics.median(each) for each in times]


def own_microseconds(candidates: Sequence[Calls]) -> list[float] | None:
    """The same of long calls, each candidate at the clock that its own power leaves it, not at one that all share.

    A device at its limit of power takes some ten milliseconds to find that clock, so each candidate has it to itself
    for ``_OWN_SECONDS`` before it is timed for about as long. None where the host cannot keep the device at work.
    """
    rounds: list[list[float]] = []
    for _ in range(_OWN_ROUNDS):
        found = [_own_round(calls) for calls in candidates]
        if any(each.is_late for each in found):
            return None
        rounds.append([each.microseconds for each in found])
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _own_round(calls: Calls) -> _Round:
    start, passes, deadline = _pass(calls), 0, time.monotonic() + _OWN_SECONDS
    while not passes or time.monotonic() < deadline:
        front, start, passes = start, _pass(calls), passes + 1
        front.synchronize()
    end, is_late = start, False
    for _ in range(passes):
        front, end = end, _pass(calls)
        is_late |= front.query()
    end.synchronize()
    return _Round(1e3 * float(start.elapsed_time(end)) / (passes * len(calls)), is_late)


def _pass(calls: Calls) -> torch.cuda.Event:
    """An event behind all of them."""
    for call in calls:
        call()
    end = torch.cuda.Event(enable_timing=True)
    end.record()
    return end


def _round(calls: Calls, cycles: int) -> _Round:
    """The device waits while the host begins to launch calls, then runs them back to back.

    What it has left to do shrinks or grows from call to call, so it had enough throughout if it still has a whole call
    when all are launched.
    """
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles * len(calls))
    start.record()
    for call in calls:
        call()
    end.record()
    launched = time.perf_counter()
    end.synchronize()
    left_us = 1e6 * (time.perf_counter() - launched)
    each_us = 1e3 * float(start.elapsed_time(end)) / len(calls)
    return _Round(each_us, left_us < each_us + _SURE_US)
