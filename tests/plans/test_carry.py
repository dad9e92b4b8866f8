"""Which weights launches decode for each other: no way to do it takes less time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebits.plans import carry
from samebits.plans.carry import Coming, best_carried

SAVED = 1.0  # for each weight, in these tests


@pytest.fixture(autouse=True)
def _saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carry, "_SAVED_US", SAVED)


def coming(weights: int, gained: float = 0.0, room: int = 0, places: int = 1) -> Coming:
    return Coming(weights, places, gained, room)


def gained(room: int, places: int, every: Sequence[Coming]) -> float:
    """By what ``best_carried`` says, and then each launch that is reached."""
    carried = best_carried(room, places, every)
    assert sum(every[i].weights for i in carried) <= room
    assert sum(every[i].places for i in carried) <= places
    total, last = 0.0, carried[-1] if carried else -1
    for number, each in enumerate(every):
        if number in carried:
            total += SAVED * each.weights
            continue
        total += each.gained_us
        if each.room and number > last:
            return total + gained(each.room, places, every[number + 1 :])
    return total


def ways(room: int, places: int, every: Sequence[Coming]) -> Iterator[float]:
    """What every way gains in which a launch decodes all that fits up to another one, which goes on."""
    for is_left in product((False, True), repeat=len(every)):
        if any(left and not each.room for left, each in zip(is_left, every, strict=True)):
            continue
        total, left_room, left_places = 0.0, room, places
        for left, each in zip(is_left, every, strict=True):
            saved = SAVED * each.weights
            if left:
                total, left_room, left_places = total + each.gained_us, each.room, places
            elif each.weights <= left_room and each.places <= left_places and saved > each.gained_us:
                total, left_room, left_places = total + saved, left_room - each.weights, left_places - each.places
            else:
                total += each.gained_us
        yield total


launches = st.builds(
    Coming,
    weights=st.integers(1, 9),
    places=st.integers(1, 3),
    gained_us=st.integers(0, 9).map(float),
    room=st.sampled_from([0, 0, 4, 9, 20]),
)


@given(st.integers(0, 20), st.integers(1, 5), st.lists(launches, max_size=7))
def test_no_other_way_gains_more(room: int, places: int, every: list[Coming]) -> None:
    carry._SAVED_US = SAVED  # hypothesis runs this often, the fixture once
    assert gained(room, places, every) >= max(ways(room, places, every))


def test_as_many_as_fit() -> None:
    assert best_carried(10, 8, [coming(4), coming(5), coming(3), coming(1)]) == (0, 1, 3)
    assert best_carried(100, 3, [coming(4), coming(5, places=2), coming(3)]) == (0, 1)
    assert best_carried(0, 8, [coming(4)]) == ()


def test_nothing_to_come() -> None:
    assert best_carried(10, 8, []) == ()


def test_launches_that_gain_as_much_themselves() -> None:
    assert best_carried(10, 8, [coming(4, gained=4.0), coming(4, gained=3.0)]) == (1,)


def test_the_launch_that_loses_least_goes_on() -> None:
    """One launch cannot decode all of them; the second or the third is to go on."""
    layers = [coming(4), coming(4, gained=1.0, room=12), coming(4, gained=3.0, room=12), coming(4), coming(4)]
    assert best_carried(12, 8, layers) == (0, 1)
    layers[1], layers[2] = layers[2], layers[1]
    assert best_carried(12, 8, layers) == (0,)


def test_real_layers() -> None:
    """Wan 2.1 with 4,096 tokens: the first matrix of a block's MLP, little slower than cuBLAS, decodes all others."""
    carry._SAVED_US = 0.8e-6
    square = coming(5120 * 5120, gained=7.0, room=112_000_000)
    of_text = coming(5120 * 5120, gained=7.0)
    up = coming(13824 * 5120, gained=63.0, room=281_000_000)
    down = coming(13824 * 5120, gained=10.0, room=260_000_000)
    block = [*[square] * 4, square, of_text, of_text, square, up, down]
    assert best_carried(up.room, 9, [down, *block, *block]) == tuple(range(9))
