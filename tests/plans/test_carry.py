"""Which weights launches decode for each other: no way to do it takes less time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.plans import carry
from samebits.plans.carry import Carrying, Coming, Way, beside, best_way, led, together

LAUNCH, FIRST = 2.0, 1.0  # of a launch that decodes, and of each of its weights, in these tests
ROOM = 10  # of launches that decode a weight first


@pytest.fixture(autouse=True)
def _saved(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch)


def use(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_LAUNCH_US", LAUNCH), ("_FIRST_US", FIRST), ("_TOGETHER_WEIGHTS", ROOM)):
        monkeypatch.setattr(carry, name, value)


def coming(weights: int, gained: float = 0.0, room: int = 0, places: int = 1, carried: float | None = 0.0) -> Coming:
    return Coming(weights, places, True, True, False, gained, room, carried)


def best(room: int, places: int, every: Sequence[Coming], carried: float | None = 0.0) -> Way:
    return best_way(beside(room, places, carried), every)


def ways(carrying: Carrying, every: Sequence[Coming]) -> Iterator[float]:
    """What every way gains in which a launch decodes all that fits up to another one, which goes on."""
    for goes_on in product((None, False, True), repeat=len(every)):  # in no way, or in these
        total, left = 0.0, carrying
        for is_beside, each in zip(goes_on, every, strict=True):
            if is_beside and not each.room:
                break
            if is_beside is not None:
                left = beside(each.room, carrying.places, each.carried_us) if is_beside else together(carrying.places)
                left = left if is_beside or each.suits_together else left._replace(room=0)
                total += each.gained_us if is_beside else 0.0 if each.suits_together else max(each.gained_us, 0.0)
                continue
            saved = LAUNCH * each.places + left.saved_us * each.weights
            suits = each.suits_beside if left.is_beside else each.suits_together
            if suits and each.weights <= left.room and each.places <= left.places and saved > each.gained_us:
                total += saved
                left = left._replace(room=left.room - each.weights, places=left.places - each.places)
            elif suits and not left.is_beside and each.gained_us <= 0.0:
                break
            else:
                total += max(each.gained_us, 0.0)
        else:
            yield total


launches = st.builds(
    Coming,
    weights=st.integers(1, 9),
    places=st.integers(1, 3),
    suits_beside=st.booleans(),
    suits_together=st.booleans(),
    is_led=st.just(False),
    gained_us=st.integers(-4, 9).map(float),
    room=st.sampled_from([0, 0, 4, 9, 20]),
    carried_us=st.sampled_from([0.0, 0.5, 2.0]),
)
carriers = st.builds(
    Carrying,
    room=st.integers(0, 20),
    places=st.integers(1, 5),
    is_beside=st.booleans(),
    saved_us=st.sampled_from([0.0, 1.0, -1.0]),
)


@settings(deadline=None)
@given(carriers, st.lists(launches, max_size=5))
def test_no_other_way_gains_more(carrying: Carrying, every: list[Coming]) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:  # hypothesis runs this often, the fixture once
        use(monkeypatch)
        way = best_way(carrying, every)
        nothing = carrying._replace(room=0)
        assert way.gained_us == max(ways(carrying, every)) - max(ways(nothing, every))
    assert sum(every[i].weights for i in way.carried) <= carrying.room
    assert sum(every[i].places for i in way.carried) <= carrying.places
    assert all(every[i].suits_beside if carrying.is_beside else every[i].suits_together for i in way.carried)


def test_as_many_as_fit() -> None:
    every = [coming(4, 1.0), coming(5, 1.0), coming(3, 1.0), coming(1)]
    assert best(10, 8, every).carried == (0, 1, 3)
    assert best(100, 3, [coming(4), coming(5, places=2), coming(3)]).carried == (0, 1)
    assert best(0, 8, [coming(4)]).carried == best(9, 8, []).carried == ()


def test_launches_that_gain_as_much_themselves() -> None:
    assert best(10, 8, [coming(4, gained=6.0), coming(4, gained=5.0)]).carried == (1,)


def test_launches_that_take_longer_for_others_than_to_decode_them_first() -> None:
    """They may spare a launch that is short, but no more."""
    every = [coming(weights)._replace(suits_together=False) for weights in (3, 1)]
    assert best(10, 8, every, carried=2.5).carried == (1,)
    assert best(10, 8, every, carried=1.5).carried == (0, 1)
    assert carry.beside(10, 8, -0.5) == carry.beside(10, 8, 0.0)


def test_launches_of_which_that_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert beside(10, 8, None).saved_us == together(8).saved_us == 0.0


def test_the_launch_that_loses_least_goes_on() -> None:
    """One launch cannot decode all of them; the second or the third is to go on."""
    layers = [coming(4), coming(4, gained=1.0, room=12), coming(4, gained=3.0, room=12), coming(4), coming(4)]
    assert best(12, 8, layers).carried == (0, 1)
    layers[1], layers[2] = layers[2], layers[1]
    assert best(12, 8, layers).carried == (0,)


def test_small_weights_are_decoded_together() -> None:
    """One launch less; as many of them as fit, where fewer would leave as many launches."""
    every = [coming(3), coming(3), coming(3, gained=3.0), coming(4), coming(5)]
    assert best_way(together(8), every) == Way(LAUNCH, (0, 1, 3))
    assert best_way(together(8), every[3:]) == Way(LAUNCH, (0, 1))
    assert best_way(together(8), every[2:3]).carried == ()


def test_small_weights_behind_a_large_one_are_left_to_that_ones_launch() -> None:
    """So that what is decoded is asked for soon. Not behind one that is fused."""
    assert best_way(together(8), [coming(3), coming(11), coming(3)]).carried == (0,)
    assert best_way(together(8), [coming(3), coming(11, gained=1.0), coming(3)]).carried == (0, 2)
    assert best(10, 8, [coming(3), coming(11), coming(3)]).carried == (0, 2)


def test_what_one_launch_decodes_stays_together() -> None:
    """Another one takes all of it, which spares a launch, or nothing, nor of what comes behind."""
    one = led([coming(2), coming(3), coming(1)])
    assert (one.weights, one.places, one.is_led, one.gained_us) == (6, 3, True, 2 * LAUNCH)
    assert best_way(together(8), [coming(2), one, coming(2)]) == Way(LAUNCH, (0, 1, 2))
    assert best(10, 8, [coming(5), one, coming(2)]).carried == (0,)
    assert best_way(together(8), [led([coming(2), coming(3)._replace(suits_together=False)])]).carried == ()


def test_real_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wan 2.1 with 4,096 tokens: the first matrix of a block's MLP, little slower than cuBLAS, and a square go on."""
    monkeypatch.undo()
    square = coming(5120 * 5120, gained=-7.0, room=80_000_000, carried=0.35e-6)
    of_text = coming(5120 * 5120, gained=6.0)
    up = coming(13824 * 5120, gained=18.0, room=211_000_000, carried=0.35e-6)
    down = coming(13824 * 5120, gained=-33.0, room=210_000_000, carried=0.35e-6)
    block = [*[square] * 4, square, of_text, of_text, square, up, down]
    assert best(up.room, 8, [down, *block, *block], up.carried_us).carried == (0, 1, 2, 3, 4)
    assert best(square.room, 8, [*block[5:], *block], square.carried_us).carried == (0, 1, 2)
    assert best_way(together(8), [down, *block]).carried == ()


def test_real_layers_of_small_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stable Diffusion XL with 2,048: the large one goes on."""
    monkeypatch.undo()
    square = coming(1280 * 1280)
    block = [square] * 6
    ff = [
        coming(10240 * 1280, gained=2.6, room=11_000_000, carried=0.52e-6),
        coming(1280 * 5120, gained=0.2, room=8_000_000, carried=1.52e-6),
    ]
    assert best_way(together(8), [*block[1:], *ff, *block]).carried == (0, 1, 2, 3, 4)
