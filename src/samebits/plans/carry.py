"""Which weights of products to come a launch decodes (prefetch.py), and which it leaves to later launches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_LAUNCH_US = 4.0  # of a launch that decodes, and
_FIRST_US = 1.0e-6  # of each of its weights, where these are many: decoded first
_AS_GOOD_US = 1e-3  # ways that differ by less: the one that leaves less to later launches, which might think so, too
_UNMEASURED_US = 1.0e-6  # of each, decoded beside a product of which that is not known
_TOGETHER_WEIGHTS = 1 << 24  # that a launch which decodes a weight first decodes for others: with more there is nothing
# left of its beginning and end to be shared, and they would take memory


class Carrying(NamedTuple):
    """What a launch can decode for others.

    Attributes:
        room: weights.
        places: one for each packed tensor.
        is_beside: it multiplies, and decodes them beside that; else it decodes a weight first, and these with it.
        saved_us: microseconds that each weight takes less so than where many are decoded first.
    """

    room: int
    places: int
    is_beside: bool
    saved_us: float


class Coming(NamedTuple):
    """A product to come, or some that are made together.

    Attributes:
        weights: that are decoded for it.
        places: in a launch that decodes them.
        suits_beside, suits_together: launches of either kind can decode them.
        is_led: where its weight is decoded first, that launch decodes others' already.
        gained_us: microseconds that it takes less if its own launch decodes them than if each is decoded first, which
            they are otherwise.
        room: weights that this launch can decode for others; 0 where it cannot.
        carried_us: microseconds that each of these takes it, see store.Outcome.
    """

    weights: int
    places: int
    suits_beside: bool
    suits_together: bool
    is_led: bool
    gained_us: float
    room: int
    carried_us: float | None


class Way(NamedTuple):
    """What is gained by all that comes if a launch decodes some of it, by its numbers: more than if it decodes none."""

    gained_us: float
    carried: tuple[int, ...]


def beside(room: int, places: int, carried_us: float | None) -> Carrying:
    """Of a launch of products; ``carried_us`` as Outcome's."""
    return Carrying(room, places, True, _FIRST_US - max(_UNMEASURED_US if carried_us is None else carried_us, 0.0))


def together(places: int) -> Carrying:
    """Of a launch that decodes a weight first."""
    return Carrying(_TOGETHER_WEIGHTS, places, False, 0.0)


def led(every: Sequence[Coming]) -> Coming:
    """Products whose weights one launch decodes, with the first one's. All of them stay together.

    A launch in front takes all of it, or nothing of that nor of what comes behind: else launches would take from each
    other what they decode, in a loop in another way round by round.
    """
    places = sum(each.places for each in every)
    return Coming(
        sum(each.weights for each in every),
        places,
        all(each.suits_beside for each in every),
        all(each.suits_together for each in every),
        is_led=True,
        gained_us=_LAUNCH_US * (places - 1),
        room=0,
        carried_us=None,
    )


def best_way(carrying: Carrying, coming: Sequence[Coming]) -> Way:
    """What of ``coming`` a launch decodes, such that all that comes takes the least time.

    Launches relieve each other: one decodes what fits of the products up to the next one that does so, whose own
    weights it leaves alone. What is decoded for others saves a launch each; beside a product it also takes more or less
    time than where it is decoded first. Some launches of products are little slower than cuBLAS's, and some have more
    room than others. So from the last launch to the first, each takes the best one to be relieved by: as many steps as
    there are pairs of products.
    """
    behind, places, nothing = [0.0] * (len(coming) + 1), carrying.places, carrying._replace(room=0)
    for number in reversed(range(len(coming))):
        each = coming[number]
        if each.suits_together and not each.is_led:  # its launch can decode others with it
            behind[number] = _best(together(places), coming, number + 1, behind).gained_us
        else:
            behind[number] = max(each.gained_us, 0.0) + _best(nothing, coming, number + 1, behind).gained_us
        if each.room:
            by_products = _best(beside(each.room, places, each.carried_us), coming, number + 1, behind)
            behind[number] = max(behind[number], each.gained_us + by_products.gained_us)
    best, without = _best(carrying, coming, 0, behind), _best(nothing, coming, 0, behind)
    return best._replace(gained_us=max(best.gained_us - without.gained_us, 0.0))


def _best(carrying: Carrying, coming: Sequence[Coming], first: int, behind: Sequence[float]) -> Way:
    """Of a launch in front of ``first``, whoever relieves it; ``behind``: what is gained from each launch on."""
    room, places, is_beside, saved_of_each_us = carrying
    gained_us, carried, best_us, best_carried = 0.0, list[int](), -1.0, 0
    for number in range(first, len(coming)):
        if gained_us + behind[number] > best_us - _AS_GOOD_US:
            best_us, best_carried = gained_us + behind[number], len(carried)
        weights, needed, suits_beside, suits_together, is_led, own_us, *_ = coming[number]
        saved_us = _LAUNCH_US * needed + saved_of_each_us * weights
        suits = suits_beside if is_beside else suits_together
        if suits and weights <= room and needed <= places and saved_us > own_us:
            room, places = room - weights, places - needed
            carried.append(number)
            gained_us += saved_us
        elif is_led or (suits and not is_beside and own_us <= 0.0):  # its own launch goes on, with all its room
            break
        else:
            gained_us += max(own_us, 0.0)
    else:
        if gained_us > best_us - _AS_GOOD_US:
            best_us, best_carried = gained_us, len(carried)
    return Way(best_us, tuple(carried[:best_carried]))
