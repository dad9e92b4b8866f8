"""Time of short calls on the device alone."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

ROUNDS = 5
_CYCLES_PER_CALL = 200_000  # of the device, about 100 us: longer than the host takes to launch a call

Calls = Sequence[Callable[[], object]]


def microseconds(candidates: Sequence[Calls]) -> list[float]:
    """Of one call of each candidate, on the current stream: medians over rounds, in which the candidates alternate."""
    for calls in candidates:
        for call in calls:
            call()
    rounds = [[_round(calls) for calls in candidates] for _ in range(ROUNDS)]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def _round(calls: Calls) -> float:
    """The device waits until all calls are launched, then runs them back to back."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_CYCLES_PER_CALL * len(calls))
    start.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return 1e3 * float(start.elapsed_time(end)) / len(calls)
