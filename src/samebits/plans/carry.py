"""Which weights of products to come a launch decodes ahead (prefetch.py), and which it leaves to later launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_SAVED_US = 0.8e-6  # for each weight: decoded beside a product instead of first


class Coming(NamedTuple):
    """A product to come, or some that are made together.

    Attributes:
        weights: that are decoded for it.
        places: in a launch that decodes them, one for each packed tensor.
        gained_us: microseconds that it takes less if its own launch decodes them than if they are decoded first.
        room: weights that this launch can decode for others; 0 where it cannot.
    """

    weights: int
    places: int
    gained_us: float
    room: int


class _Choice(NamedTuple):
    gained_us: float
    carried: tuple[int, ...]


def best_carried(room: int, places: int, coming: Sequence[Coming]) -> tuple[int, ...]:
    """Which of ``coming``, by their numbers, a launch decodes ahead, such that all that comes takes the least time.

    Launches relieve each other: one decodes what fits of the products up to the next such launch, whose own weight it
    leaves alone. What is decoded ahead saves time in proportion; some launches are little slower than cuBLAS while they
    decode their own weights, and some have more room than others. So from the last launch to the first, each takes the
    best one to be relieved by: as many steps as there are pairs of products.

    Args:
        room, places: that it has for weights.
    """
    behind = [_Choice(0.0, ())] * len(coming)
    for number in reversed(range(len(coming))):
        if coming[number].room:
            behind[number] = _best(coming[number].room, places, coming, number + 1, behind)
    return _best(room, places, coming, 0, behind).carried


def _best(room: int, places: int, coming: Sequence[Coming], first: int, behind: Sequence[_Choice]) -> _Choice:
    """Of a launch in front of ``first``; ``behind`` has the best of each launch that may relieve it."""
    gained_us, carried = 0.0, list[int]()
    found: _Choice | None = None
    for number, each in enumerate(coming[first:], first):
        if each.room:
            relieved_us = gained_us + each.gained_us + behind[number].gained_us
            if found is None or relieved_us > found.gained_us:
                found = _Choice(relieved_us, tuple(carried))
        saved_us = _SAVED_US * each.weights
        if each.weights <= room and each.places <= places and saved_us > each.gained_us:
            room, places = room - each.weights, places - each.places
            gained_us += saved_us
            carried.append(number)
        else:
            gained_us += each.gained_us
    return found if found and found.gained_us > gained_us else _Choice(gained_us, tuple(carried))
