"""Time of short calls on the device alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

ROUNDS = 5
_CYCLES_PER_CALL = 200_000  # of the device, about 100 us: longer than the host usually takes to launch a call
_MAX_CYCLES_PER_CALL = 16 * _CYCLES_PER_CALL

Calls = Sequence[Callable[[], object]]


class _Round(NamedTuple):
    microseconds: float  # of one call
    is_late: bool  # the device went on before all calls were launched, and may have waited for the host


def microseconds(candidates: Sequence[Calls]) -> list[float]:
    """Of one call of each candidate, on the current stream: medians over rounds, in which the candidates alternate."""
    for calls in candidates:
        for call in calls:
            call()
    rounds = [[_time(calls) for calls in candidates] for _ in range(ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _time(calls: Calls) -> float:
    """With as long a start for the host as it needs; on the slowest of hosts the last try counts."""
    cycles = _CYCLES_PER_CALL
    while True:
        found = _round(calls, cycles)
        if not found.is_late or cycles >= _MAX_CYCLES_PER_CALL:
            return found.microseconds
        cycles *= 2


def _round(calls: Calls, cycles: int) -> _Round:
    """The device waits until all calls are launched, then runs them back to back."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(cycles * len(calls))
    start.record()
    for call in calls:
        call()
    end.record()
    is_late = start.query()
    end.synchronize()
    return _Round(1e3 * float(start.elapsed_time(end)) / len(calls), is_late)
