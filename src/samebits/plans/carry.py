"""Which weights of products to come a launch decodes ahead (prefetch.py), and which it leaves to later launches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

_SAVED_US = 0.65e-6  # for each weight: decoded beside a product instead of first


class Coming(NamedTuple):
    """A product to come, or some that are made together.

    Attributes:
        weights: that are decoded for it.
        places: in a launch that decodes them, one for each packed tensor.
        gained_us: microseconds that it takes less if its own launch decodes them than if they are decoded first, which
            they are otherwise.
        room: weights that this launch can decode for others; 0 where it cannot.
    """

    weights: int
    places: int
    gained_us: float
    room: int


class Way(NamedTuple):
    """What is gained by all that comes if a launch decodes some of it, by its numbers: more than if it decodes none."""

    gained_us: float
    carried: tuple[int, ...]


def best_way(room: int, places: int, coming: Sequence[Coming]) -> Way:
    """What of ``coming`` a launch decodes ahead, such that all that comes takes the least time.

    Launches relieve each other: one decodes what fits of the products up to the next one that does so, whose own
    weights it leaves alone. What is decoded ahead saves time in proportion; some launches are little slower than
    cuBLAS's, and some have more room than others. So from the last launch to the first, each takes the best one to be
    relieved by: as many steps as there are pairs of products.

    Args:
        room, places: that it has for weights.
    """
    behind = [Way(0.0, ())] * len(coming)
    for number in reversed(range(len(coming))):
        if coming[number].room:
            behind[number] = _best(coming[number].room, places, coming, number + 1, behind)
    best, without = _best(room, places, coming, 0, behind), _best(0, places, coming, 0, behind)
    return best._replace(gained_us=best.gained_us - without.gained_us)


def _best(room: int, places: int, coming: Sequence[Coming], first: int, behind: Sequence[Way]) -> Way:
    return max(_ways(room, places, coming, first, behind), key=lambda way: way.gained_us)


def _ways(room: int, places: int, coming: Sequence[Coming], first: int, behind: Sequence[Way]) -> Iterator[Way]:
    """Of a launch in front of ``first``: for each that may relieve it, and for none."""
    gained_us, carried = 0.0, tuple[int, ...]()
    for number, each in enumerate(coming[first:], first):
        if each.room:
            yield Way(gained_us + each.gained_us + behind[number].gained_us, carried)
        saved_us, alone_us = _SAVED_US * each.weights, max(each.gained_us, 0.0)
        if each.weights <= room and each.places <= places and saved_us > alone_us:
            room, places, carried = room - each.weights, places - each.places, (*carried, number)
            gained_us += saved_us
        else:
            gained_us += alone_us
    yield Way(gained_us, carried)
