"""Which weights launches decode for each other: no way to do it takes less time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebits.plans import carry
from samebits.plans.carry import Coming, best_way

SAVED = 1.0  # for each weight, in these tests


@pytest.fixture(autouse=True)
def _saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carry, "_SAVED_US", SAVED)


def coming(weights: int, gained: float = 0.0, room: int = 0) -> Coming:
    return Coming(weights, 1, gained, room)


def ways(room: int, places: int, every: Sequence[Coming]) -> Iterator[float]:
    """What every way gains in which a launch decodes all that fits up to another one, which goes on."""
    for goes_on in product((False, True), repeat=len(every)):
        total, left_room, left_places = 0.0, room, places
        for does, each in zip(goes_on, every, strict=True):
            saved, alone = SAVED * each.weights, max(each.gained_us, 0.0)
            if does and not each.room:
                break
            if does:
                total, left_room, left_places = total + each.gained_us, each.room, places
            elif each.weights <= left_room and each.places <= left_places and saved > alone:
                total, left_room, left_places = total + saved, left_room - each.weights, left_places - each.places
            else:
                total += alone
        else:
            yield total


launches = st.builds(
    Coming,
    weights=st.integers(1, 9),
    places=st.integers(1, 3),
    gained_us=st.integers(-4, 9).map(float),
    room=st.sampled_from([0, 0, 4, 9, 20]),
)


@given(st.integers(0, 20), st.integers(1, 5), st.lists(launches, max_size=6))
def test_no_other_way_gains_more(room: int, places: int, every: list[Coming]) -> None:
    carry._SAVED_US = SAVED  # hypothesis runs this often, the fixture once
    way = best_way(room, places, every)
    assert way.gained_us == max(ways(room, places, every)) - max(ways(0, places, every))
    assert sum(every[i].weights for i in way.carried) <= room
    assert sum(every[i].places for i in way.carried) <= places


def test_as_many_as_fit() -> None:
    every = [coming(4), coming(5), coming(3), coming(1)]
    assert best_way(10, 8, every).carried == (0, 1, 3)
    assert best_way(100, 3, [coming(4), coming(5)._replace(places=2), coming(3)]).carried == (0, 1)
    assert best_way(0, 8, [coming(4)]).carried == best_way(9, 8, []).carried == ()


def test_launches_that_gain_as_much_themselves() -> None:
    assert best_way(10, 8, [coming(4, gained=4.0), coming(4, gained=3.0)]).carried == (1,)


def test_the_launch_that_loses_least_goes_on() -> None:
    """One launch cannot decode all of them; the second or the third is to go on."""
    layers = [coming(4), coming(4, gained=1.0, room=12), coming(4, gained=3.0, room=12), coming(4), coming(4)]
    assert best_way(12, 8, layers).carried == (0, 1)
    layers[1], layers[2] = layers[2], layers[1]
    assert best_way(12, 8, layers).carried == (0,)


def test_real_layers() -> None:
    """Wan 2.1 with 4,096 tokens: the first matrix of a block's MLP, little slower than cuBLAS, and a square go on."""
    carry._SAVED_US = 0.65e-6
    square = coming(5120 * 5120, gained=-7.0, room=80_000_000)
    of_text = coming(5120 * 5120, gained=6.0)
    up = coming(13824 * 5120, gained=18.0, room=211_000_000)
    down = coming(13824 * 5120, gained=-33.0, room=210_000_000)
    block = [*[square] * 4, square, of_text, of_text, square, up, down]
    assert best_way(up.room, 8, [down, *block, *block]).carried == (0, 1, 2, 3, 4)
    assert best_way(square.room, 8, [*block[5:], *block]).carried == (0, 1, 2)
