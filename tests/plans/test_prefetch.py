"""Weights of products to come: learned, decoded by launches that have the time, and never another result."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence

import pytest
import torch

import samebits
from samebits.errors import DeviceError
from samebits.format.header import Header
from samebits.format.packed import PackedTensor
from samebits.kernels import residents
from samebits.kernels.decode_together import DecodeTogether
from samebits.kernels.linear.job import Spare
from samebits.kernels.linear.products import LinearPlan, Operands
from samebits.kernels.residents import resident
from samebits.kernels.structures import MAX_PREFETCHED
from samebits.plans import call, carry, dispatch, group, planner, prefetch, together
from samebits.plans.store import GroupOutcome
from samebits.plans.together import Together
from tests.plans.conftest import (
    DecodeOnCpu,
    FakeGpu,
    FakeProducts,
    decode_beside_products_alone,
    decoding,
    is_supported,
)
from tests.plans.sums import normal, split_linear

K = 512
SPLIT = 3
LAYERS = 12
UNSUITED = 11  # cannot be decoded with others
MANY, FEW = 4, 1  # tokens
EVERYTHING = 1 << 40  # weights


def rows_of(number: int) -> int:
    """By which layers are told apart."""
    return 64 + 8 * number


def size_of(*numbers: int) -> int:
    return sum(K * rows_of(number) for number in numbers)


def number_of(header: Header) -> int:
    return (header.shape[0] - rows_of(0)) // 8


class Launches:
    """In place of Products; holds no weights, as these do not.

    Attributes:
        room: of a layer's launch for others' weights, by its number.
        ahead: launches that decoded others' weights beside products: whose, and which.
        first: launches that decoded weights first: which.
        memory: how many launches there is memory for that decode others' weights; then comes ``error``.
    """

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.room, self.memory = gpu, dict[int, int](), 1000
        self.error: Exception = torch.OutOfMemoryError()
        self.ahead: list[tuple[int, list[int]]] = []
        self.first: list[list[int]] = []

    def plain(self, header: Header, m: int, plan: LinearPlan, device: int) -> FakeProducts:
        room = self.room.get(number_of(header))
        return FakeProducts(self.gpu.products, None if room is None else Spare(room, 0, 0))

    def prefetching(self, launch: object, weights: Sequence[PackedTensor]) -> Callable[..., list[torch.Tensor]]:
        numbers, decoded = [number_of(packed.header) for packed in weights], decoding(weights)

        def products(
            x: torch.Tensor, bias: torch.Tensor | None, operands: Callable[[], Sequence[Operands]]
        ) -> list[torch.Tensor]:
            every = operands()
            self.ahead.append((number_of(every[0].packed.header), numbers))
            if len(self.ahead) > self.memory:
                raise torch.OutOfMemoryError
            return [self.gpu.fused_linear(x, *each) for each in every] + decoded()

        return products

    def together(self) -> type[DecodeTogether]:
        launches = self

        class Played(DecodeOnCpu):
            def __call__(self, *every: torch.Tensor) -> list[torch.Tensor]:
                launches.first.append([number_of(header) for header in self._headers])
                if len(launches.first) > launches.memory:
                    raise launches.error
                return super().__call__(*every)

        return Played


class Model:
    """Layers one behind the other."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu, self.launches = gpu, Launches(gpu)
        self.room, self.ahead, self.first = self.launches.room, self.launches.ahead, self.launches.first
        self.weights = [(normal(rows_of(number), K, seed=number) / 8).clone() for number in range(LAYERS)]
        self.packed = [samebits.encode(weight) for weight in self.weights]
        self.seed = 0

    def ask(self, *numbers: int, tokens: int = MANY) -> None:
        """For these products, each of another input, and check them."""
        for number in numbers:
            self.seed += 1
            self.check(normal(tokens, K, seed=1000 + self.seed), number)

    def ask_together(self, *numbers: int) -> None:
        """Of one input."""
        self.seed += 1
        x = normal(MANY, K, seed=1000 + self.seed)
        for number in numbers:
            self.check(x, number)

    def check(self, x: torch.Tensor, number: int) -> None:
        y = dispatch.linear_of_module(x, self.packed[number], None)
        right = split_linear(x, self.weights[number], None, SPLIT)
        assert torch.equal(y.view(torch.int16), right.view(torch.int16))

    def step(self, *numbers: int) -> list[tuple[int, list[int]]]:
        """As ``ask``; what launches decoded ahead."""
        self.ahead.clear()
        self.ask(*numbers)
        return list(self.ahead)


@pytest.fixture
def model(gpu: FakeGpu, where: list[int], monkeypatch: pytest.MonkeyPatch) -> Model:
    """The first layer's launch has room for two others' weights."""
    made = Model(gpu)
    made.room[0] = size_of(1, 2)
    monkeypatch.setattr(call, "products_of", made.launches.plain)
    monkeypatch.setattr(together, "fused_linear", gpu.fused_linear)
    monkeypatch.setattr(group, "is_supported", is_supported)
    monkeypatch.setattr(prefetch, "Products", made.launches.prefetching)
    monkeypatch.setattr(prefetch, "DecodeTogether", made.launches.together())
    monkeypatch.setattr(prefetch, "is_prefetchable", lambda packed, launch, device: True)
    monkeypatch.setattr(prefetch, "FEW_TOKENS", FEW)
    decode_beside_products_alone(monkeypatch)
    monkeypatch.setattr(dispatch, "together", Together())
    return made


def in_one_launch(
    model: Model, monkeypatch: pytest.MonkeyPatch, variant: int | None, gained_us: float = 0.0,
    carried_us: float | None = None,
) -> None:  # fmt: skip
    """Products of one input are made so, in this variant, or one by one."""
    found, gpu = GroupOutcome(variant, gained_us, carried_us), model.gpu  # the model would be kept alive

    def joint(launch: object) -> FakeProducts:
        def products(
            x: torch.Tensor, bias: torch.Tensor | None, operands: Callable[[], Sequence[Operands]]
        ) -> list[torch.Tensor]:
            return [gpu.fused_linear(x, *each) for each in operands()]

        return FakeProducts(products, Spare(EVERYTHING, 0, 0))

    monkeypatch.setattr(group, "Products", joint)
    monkeypatch.setattr(group, "is_launchable", lambda header, m, plan, device: True)
    monkeypatch.setattr(group, "launch_together", lambda operands, m, variant, device: "a launch")
    monkeypatch.setattr(planner, "fastest_together", lambda x, operands, are_fused: found)


def test_learned_and_decoded_ahead(model: Model) -> None:
    assert model.step(0, 1, 2, 3) == []
    model.gpu.fused_calls.clear()
    assert model.step(0, 1, 2, 3) == [(0, [1, 2])]
    assert len(model.gpu.fused_calls) == 2  # the others are cuBLAS's
    assert model.step(0, 1, 2, 3) == [(0, [1, 2])]


def test_as_many_as_there_is_room_for(model: Model) -> None:
    model.room[0] = size_of(1, 2, 3) - 1
    model.step(0, 1, 2, 3)
    assert model.step(0, 1, 2, 3) == [(0, [1, 2])]


def test_no_more_than_the_kernel_takes(model: Model) -> None:
    model.room[0] = EVERYTHING
    model.step(*range(LAYERS))
    assert model.step(*range(LAYERS)) == [(0, list(range(1, 1 + MAX_PREFETCHED)))]


def test_launches_that_were_decoded_ahead_themselves(model: Model) -> None:
    """The next one that was not goes on behind them."""
    model.room |= {2: size_of(3) - 1, 3: size_of(4)}
    model.step(*range(6))
    assert model.step(*range(6)) == [(0, [1, 2]), (3, [4])]


def test_a_launch_with_more_room_is_left_to_decode_its_own(model: Model) -> None:
    model.room |= {2: size_of(3, 4, 5), 3: size_of(4)}
    model.step(*range(6))
    assert model.step(*range(6)) == [(0, [1]), (2, [3, 4, 5])]


def test_a_launch_that_gains_more_itself_is_left_to_decode_its_own(model: Model) -> None:
    """Than others gain that are decoded ahead."""
    model.room |= {1: size_of(0) - 1}
    model.step(*range(3))
    kept = resident(model.packed[1].data)
    assert kept is not None
    ((shape, known),) = kept.calls.items()
    kept.calls[shape] = known._replace(gained_us=2.0 * size_of(1))
    assert model.step(*range(3)) == [(0, [2])]


@pytest.mark.parametrize(("carried_us", "is_worth_it"), [(0.5, True), (2.0, False)])
def test_a_launch_that_takes_long_to_decode_others(model: Model, carried_us: float, is_worth_it: bool) -> None:
    """Longer than they take if they are decoded first: nothing is."""
    model.step(0, 1, 2)
    kept = resident(model.packed[0].data)
    assert kept is not None
    ((shape, known),) = kept.calls.items()
    kept.calls[shape] = known._replace(carried_us=carried_us)
    assert model.step(0, 1, 2) == ([(0, [1, 2])] if is_worth_it else [])


def test_what_was_chosen_thrice_is_not_chosen_again(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a weight changes, or is decoded already."""
    for _ in range(4):
        model.step(0, 1, 2)
    chosen = []

    def best_way(*arguments: object) -> carry.Way:
        chosen.append(arguments)
        return carry.best_way(*arguments)

    monkeypatch.setattr(prefetch, "best_way", best_way)
    for _ in range(3):
        assert model.step(0, 1, 2) == [(0, [1, 2])]
    assert not chosen
    model.packed[1].data.copy_(model.packed[1].data.clone())
    assert model.step(0, 1, 2) == [(0, [2])]
    assert chosen


@pytest.mark.parametrize("steps", [2, 6], ids=["at first", "settled"])
def test_a_product_that_has_another_plan_now(model: Model, steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under other settings of torch: what the launch of the old one made would have other bits."""
    for _ in range(steps):
        model.step(0, 1, 2)
    made, prefetching = list[object](), model.launches.prefetching
    monkeypatch.setattr(
        prefetch, "Products", lambda launch, weights: made.append(launch) or prefetching(launch, weights)
    )
    kept = resident(model.packed[0].data)
    assert kept is not None
    ((shape, known),) = kept.calls.items()
    others = FakeProducts(model.gpu.products, Spare(size_of(1, 2), 0, 0)), FakeProducts(model.gpu.products)
    for products, expected in zip(others, ([(0, [1, 2])], []), strict=True):
        kept.calls[shape] = known._replace(products=products)
        assert model.step(0, 1, 2) == expected
    assert made == [others[0].launch]


def test_what_was_chosen_thrice_is_chosen_anew_once_nobody_asked_for_it(model: Model) -> None:
    for _ in range(5):
        model.step(0, 1, 2)
    assert model.step(0) == [(0, [1, 2])]
    assert model.step(0, 3) == []
    assert model.step(0, 3) == [(0, [3])]


def test_a_product_slower_than_decoding_first_that_decodes_others(model: Model) -> None:
    """It is worth it where these gain more."""
    model.gpu.times = [12.0, 11.0, 9.0]
    model.step(0, 1, 2)
    model.gpu.fused_calls.clear()
    assert model.step(0, 1, 2) == [(0, [1, 2])]
    assert len(model.gpu.fused_calls) == 1
    model.room[0] = 0
    model.packed = [samebits.encode(weight) for weight in model.weights]
    model.gpu.fused_calls.clear()
    assert model.step(0, 1, 2) == model.step(0, 1, 2) == []
    assert not model.gpu.fused_calls


@pytest.mark.parametrize(("longer_us", "is_worth_it"), [(1.0, True), (3.0, False)])
def test_a_slower_product_that_decodes_little(model: Model, longer_us: float, is_worth_it: bool) -> None:
    """It takes 2 microseconds more than decoding first, and what it decodes saves a launch of 4, but takes longer."""
    model.gpu.times, model.room[0] = [12.0, 11.0, 9.0], size_of(1)
    model.step(0, 1)
    kept = resident(model.packed[0].data)
    assert kept is not None
    ((shape, known),) = kept.calls.items()
    kept.calls[shape] = known._replace(carried_us=carry._FIRST_US + longer_us / size_of(1))
    assert model.step(0, 1) == ([(0, [1])] if is_worth_it else [])


def test_what_another_launch_has_decoded(model: Model) -> None:
    model.room |= {0: size_of(2), 1: size_of(3)}
    for _ in range(2):
        model.ahead.clear()
        model.ask(0)
        model.ask(1, tokens=FEW)
        model.ask(2, 3, 4)
    assert model.ahead == [(0, [2]), (1, [3])]


def test_a_weight_that_is_asked_for_twice(model: Model) -> None:
    """As layers share one: it is decoded ahead once."""
    model.room[0] = EVERYTHING
    model.step(0, 1, 1, 2)
    assert [model.step(0, 1, 1, 2) for _ in range(3)] == [[(0, [1, 2])]] * 3


def test_few_tokens_are_not_noted(model: Model) -> None:
    for _ in range(2):
        model.ahead.clear()
        model.ask(0)
        model.ask(1, tokens=FEW)
        model.ask(2, 3)
    assert model.ahead == [(0, [2])]


def test_weights_that_do_not_tell_when_they_change(model: Model) -> None:
    """They are not noted."""
    with torch.inference_mode():
        model.packed[1] = samebits.encode(model.weights[1])
    model.step(0, 1, 2)
    assert model.step(0, 1, 2) == [(0, [2])]


@pytest.mark.parametrize("numbers", [(0, 1, 2), (1,), (0,)], ids=["all", "one behind", "the first"])
def test_weights_that_are_gathered(model: Model, numbers: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """As fully_shard does it: nothing is known of their bytes, and they are not decoded ahead."""
    model.step(0, 1, 2)
    for number in numbers:
        model.packed[number] = samebits.encode(model.weights[number])
    monkeypatch.setattr(residents, "_is_gathered", lambda: True)
    expected = [] if 0 in numbers else [(0, [2])]
    assert [model.step(0, 1, 2) for _ in range(3)] == [expected] * 3


def test_weights_on_another_gpu(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not decoded ahead, though the default streams of all GPUs have the same number."""
    data, get_device = model.packed[1].data, torch.Tensor.get_device
    monkeypatch.setattr(torch.Tensor, "get_device", lambda own: 1 if own is data else get_device(own))
    model.step(0, 1, 2)
    assert [model.step(0, 1, 2) for _ in range(3)] == [[(0, [2])]] * 3


def test_not_beyond_the_next_round(model: Model) -> None:
    model.room[0] = EVERYTHING
    model.step(0, 1)
    assert model.step(0, 1) == [(0, [1])]
    assert model.step(0, 1) == [(0, [1])]


@pytest.mark.parametrize("place", [0, 1])
def test_another_stream_or_graph(place: int, model: Model, where: list[int]) -> None:
    """What was decoded on another one may not be there yet."""
    model.step(0, 1, 2)
    model.ask(0)
    where[place] += 1
    model.gpu.fused_calls.clear()
    model.ask(1)
    assert len(model.gpu.fused_calls) == 1
    where[place] -= 1
    model.ask(1)
    assert len(model.gpu.fused_calls) == 2  # it is not kept for later


def test_what_always_comes_on_another_stream(model: Model, where: list[int]) -> None:
    """Is not decoded ahead."""
    for _ in range(3):
        model.ahead.clear()
        model.ask(0)
        where[0] += 1
        model.ask(1)
        where[0] -= 1
        model.ask(2)
    assert model.ahead == [(0, [2])]


def test_a_weight_that_changes(model: Model) -> None:
    """Its bytes are written again after they were decoded ahead, if only to be the same."""
    model.step(0, 1, 2)
    assert model.step(0) == [(0, [1, 2])]
    model.packed[1].data.copy_(model.packed[1].data.clone())
    model.gpu.fused_calls.clear()
    model.ask(1, 2)
    assert len(model.gpu.fused_calls) == 1


def test_a_weight_that_has_changed_is_decoded_ahead_no_more(model: Model) -> None:
    """It may change again, as those do that are copied from main memory for each call."""
    model.step(0, 1, 2)
    assert model.step(0, 1, 2) == [(0, [1, 2])]
    model.packed[1].data.copy_(model.packed[1].data.clone())
    assert [model.step(0, 1, 2) for _ in range(3)] == [[(0, [2])]] * 3
    for _ in range(3):
        model.ahead.clear()
        model.ask(0, 1, 2, tokens=2 * MANY)  # of which it is noted anew what comes behind
    assert model.ahead == [(0, [2])]


def test_a_product_that_nobody_asks_for(model: Model) -> None:
    """The launch forgets what it had noted, and learns anew."""
    model.step(0, 1, 2)
    assert model.step(0, 3, 4) == [(0, [1, 2])]
    kept = resident(model.packed[1].data)
    assert kept is not None
    assert kept.prefetched is not None
    assert model.step(0, 3, 4) == []
    assert kept.prefetched is None
    assert model.step(0, 3, 4)[0] == (0, [3])
    assert model.step(0, 5, 6) == [(0, [3])]  # for the second time
    model.step(0, 5, 6)
    assert model.step(0, 5, 6) == [(0, [5])]
    model.step(0, 7, 8)
    for _ in range(3):
        assert model.step(0, 7, 8) == []  # given up


@pytest.mark.parametrize("steps", [2, 6], ids=["at first", "settled"])
def test_not_beyond_the_end_of_a_graph(model: Model, where: list[int], steps: int) -> None:
    """Its first products are captured already."""
    for _ in range(steps):
        model.step(1, 2, 0)
    for graph in (3, 4):
        where[1] = graph
        assert model.step(1, 2, 0) == []
        where[1] = 0
        assert model.step(1, 2, 0) == [(0, [1, 2])]


def test_the_end_of_a_graph_of_a_part_of_a_model(model: Model, where: list[int]) -> None:
    """What it decodes for others is not counted, however often."""
    model.step(0, 1, 2)
    for graph in (3, 4, 5, 6):
        where[1] = graph
        assert model.step(0) == [(0, [1, 2])]
        where[1] = 0
        assert model.step(0, 1, 2) == [(0, [1, 2])]


def test_too_little_memory(model: Model) -> None:
    model.launches.memory = 0
    model.step(0, 1, 2)
    assert model.step(0, 1, 2) == [(0, [1, 2])]
    assert model.step(0, 1, 2) == []


def test_products_of_one_input_are_decoded_ahead_all_or_none(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    in_one_launch(model, monkeypatch, None)
    model.ask_together(0), model.ask_together(1), model.ask_together(2, 3)
    assert model.room[0] == size_of(1, 2)
    model.ahead.clear()
    model.ask_together(0), model.ask_together(1), model.ask_together(2, 3)
    assert model.ahead == [(0, [1])]


def test_products_of_one_input_are_decoded_ahead_each_once_they_are_made_one_by_one(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_one_launch(model, monkeypatch, None)
    for _ in range(4):
        model.ahead.clear()
        model.ask_together(0), model.ask_together(1), model.ask_together(2, 3)
    assert model.ahead == [(0, [1, 2])]


@pytest.mark.parametrize("is_joint", [False, True])
def test_launches_of_products_of_one_input(model: Model, is_joint: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """They decode ahead once it is proved that they are right; none of their own."""
    in_one_launch(model, monkeypatch, 7 if is_joint else None)
    model.room |= {0: size_of(1, 2, 3)}
    for _ in range(5):
        model.ahead.clear()
        model.ask_together(0, 1)
        model.ask_together(2)
        model.ask_together(3)
    assert model.ahead == [(0, [2, 3] if is_joint else [1, 2, 3])]


@pytest.mark.parametrize(("carried_us", "is_worth_it"), [(None, True), (0.5, True), (2.0, False)])
def test_launches_of_products_of_one_input_that_are_not_proved(
    model: Model, carried_us: float | None, is_worth_it: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They decode nothing for others; nor do they where that takes longer than to decode it first, once they are."""
    in_one_launch(model, monkeypatch, 7, carried_us=carried_us)
    found = []
    for _ in range(4):
        model.ahead.clear()
        model.ask_together(0, 1)
        model.ask_together(2)
        found.append(list(model.ahead))
    assert found == [[], [], *[[(0, [2])] if is_worth_it else []] * 2]


@pytest.mark.parametrize("times", [[12.0, 11.0, 9.0], [5.0, 3.0, 9.0]], ids=["decoded first", "each alone"])
def test_one_launch_that_is_slower_than_one_by_one(
    model: Model, times: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is proved at first; then it is made where it decodes others' weights."""
    in_one_launch(model, monkeypatch, 7, gained_us=-1.0)
    model.gpu.times = times
    del model.room[0]
    for _ in range(5):
        model.ahead.clear()
        model.gpu.fused_calls.clear()
        model.ask_together(0, 1)
    assert not model.ahead
    is_fused = min(times[:2]) < times[2]
    assert len(model.gpu.fused_calls) == (2 if is_fused else 0)
    model.packed = [samebits.encode(weight) for weight in model.weights]
    for _ in range(5):
        model.ahead.clear()
        model.ask_together(0, 1)
        model.ask_together(2)
    assert model.ahead == [(0, [2])]


def test_weights_that_are_gone(model: Model) -> None:
    model.step(0, 1, 2)
    dead = weakref.ref(model.packed[1].data)
    model.packed[1] = samebits.encode(model.weights[1])
    gc.collect()
    assert dead() is None
    assert model.step(0, 1, 2) == [(0, [2])]


def test_what_was_decoded_goes_with_the_weight(model: Model) -> None:
    model.step(0, 1, 2)
    model.ask(0)
    kept = resident(model.packed[1].data)
    assert kept is not None
    assert kept.prefetched is not None
    dead = weakref.ref(kept.prefetched[1])
    del kept
    model.packed[1] = samebits.encode(model.weights[1])
    gc.collect()
    assert dead() is None


def test_threads(model: Model) -> None:
    """Of the same layers: each may take what another one's launch decoded, and all products are right."""
    model.room |= {2: EVERYTHING, 3: size_of(4)}
    model.step(*range(6))
    failed: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(20):
                model.ask(*range(6))
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert model.ahead


@pytest.fixture
def small(model: Model, monkeypatch: pytest.MonkeyPatch) -> Model:
    """Layers whose weights are decoded first, as that is faster; four others' fit into a launch."""
    model.room.clear()
    model.gpu.times = [12.0, 11.0, 9.0]
    monkeypatch.setattr(prefetch, "suits", lambda packed: packed.header.shape[0] != rows_of(UNSUITED))
    monkeypatch.setattr(carry, "_FIRST_US", 0.0)
    monkeypatch.setattr(carry, "_TOGETHER_WEIGHTS", size_of(1, 2, 3, 4))
    return model


def first_of(model: Model, *numbers: int, steps: int = 3) -> list[list[int]]:
    """What launches decoded, with others' weights, in the last of some steps."""
    for _ in range(steps):
        model.first.clear()
        model.ask(*numbers)
    assert not model.ahead
    return list(model.first)


def test_small_weights_are_decoded_with_the_first_one(small: Model) -> None:
    assert first_of(small, 0, 1, 2, 3, steps=1) == []
    assert not dispatch.together.turns.windows  # not for what comes once
    assert first_of(small, 0, 1, 2, 3, steps=1) == []
    assert first_of(small, 0, 1, 2, 3, steps=1) == [[0, 1, 2, 3]]
    small.gpu.fused_calls.clear()
    assert first_of(small, 0, 1, 2, 3, steps=6) == [[0, 1, 2, 3]]
    assert not small.gpu.fused_calls


def test_nothing_is_noted_where_numbers_of_tokens_change(small: Model) -> None:
    """No two rounds would be alike, and while something is noted native code makes no product."""
    small.ask(0)
    kept = resident(small.packed[0].data)
    assert kept is not None
    kept.is_changing = True
    small.ask(0)
    assert not dispatch.together.turns.windows
    kept.is_changing = False
    small.ask(0)
    assert dispatch.together.turns.windows


def test_the_kernel_is_there_before_a_graph_is_captured(
    small: Model, where: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is compiled while it is noted what comes, and not in a graph."""
    loaded: list[int] = []
    monkeypatch.setattr(prefetch, "load", loaded.append)
    small.ask(0)
    assert not loaded
    small.ask(0)
    assert loaded == [-1]
    where[1] = 3
    small.ask(1, 1)
    assert loaded == [-1]


def test_as_many_together_as_there_is_room_for(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next launch decodes what comes behind. The same ones do in each round, or others would have to settle too."""
    monkeypatch.setattr(carry, "_TOGETHER_WEIGHTS", size_of(4, 5))
    for _ in range(6):
        assert first_of(small, *range(8)) == [[0, 1, 2], [3, 4, 5], [6, 7]]


def test_the_last_launch_decodes_what_comes_first_in_the_next_round(
    small: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that the first one does, or nothing of it."""
    monkeypatch.setattr(carry, "_TOGETHER_WEIGHTS", size_of(5, 6))
    assert first_of(small, *range(7)) == [[0, 1, 2], [3, 4, 5], [6, 0, 1, 2]]
    for _ in range(6):
        assert first_of(small, *range(7), steps=1) == [[3, 4, 5], [6, 0, 1, 2]]


def test_what_one_launch_decodes_with_its_weight_another_may_take(small: Model) -> None:
    assert first_of(small, 1, 2, 3) == [[1, 2, 3]]
    assert first_of(small, 0, 1, 2, 3) == [[0, 1, 2, 3]]


def test_no_more_together_than_the_kernel_takes(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(carry, "_TOGETHER_WEIGHTS", EVERYTHING)
    found = first_of(small, *range(UNSUITED))
    assert max(map(len, found)) == 1 + MAX_PREFETCHED
    assert set().union(*found) == set(range(UNSUITED))


@pytest.mark.parametrize(("times", "together"), [((8.5, 8.0, 9.0), True), ((8.0, 4.5, 9.0), False)])
def test_products_that_gain_less_than_a_launch(times: tuple[float, ...], together: bool, small: Model) -> None:
    """Are made by cuBLAS, once the weight is there."""
    small.gpu.times = list(times)
    found = first_of(small, 0, 1, 2)
    assert found == ([[0, 1, 2]] if together else [])


def test_products_without_a_plan(small: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "is_supported", lambda header, m, device: False)
    assert first_of(small, 0, 1, 2) == [[0, 1, 2]]


@pytest.mark.parametrize(("gained_us", "together"), [(3.0, True), (9.0, False)])
def test_products_of_one_input_are_decoded_together(
    gained_us: float, together: bool, small: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that takes less time than one launch that makes them."""
    in_one_launch(small, monkeypatch, 7, gained_us=gained_us)
    for _ in range(6):
        small.first.clear()
        small.ask_together(0, 1, 2)
    assert small.first == ([[0, 1, 2]] if together else [])


@pytest.mark.parametrize(
    ("times", "gained_us", "together"),
    [((8.5, 8.0, 9.0), 2.5, True), ((8.5, 8.0, 9.0), 3.5, False), ((12.0, 11.0, 9.0), 5.0, False)],
)
def test_what_the_first_of_one_input_gains_alone(
    times: tuple[float, ...], gained_us: float, together: bool, small: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is lost, too, where its weight is decoded with the others'; it is not won where it gains nothing."""
    small.gpu.times = list(times)
    in_one_launch(small, monkeypatch, 7, gained_us=gained_us)
    for _ in range(6):
        small.first.clear()
        small.ask_together(0, 1, 2)
    assert small.first == ([[0, 1, 2]] if together else [])


def test_a_weight_that_cannot_be_decoded_with_others(small: Model) -> None:
    found = first_of(small, 0, UNSUITED, 1, 2)
    assert found == [[0, 1, 2]]


def test_a_weight_that_cannot_be_decoded_with_others_comes_first(small: Model) -> None:
    assert first_of(small, UNSUITED, 2, 3) == [[2, 3]]


def test_few_tokens_are_decoded_one_by_one(small: Model) -> None:
    for _ in range(4):
        small.ask(0, 1, 2, tokens=FEW)
    assert not small.first


def test_gradients(small: Model) -> None:
    """Weights would be kept for the backward pass."""
    for _ in range(4):
        for number in range(3):
            x = normal(MANY, K, seed=number).requires_grad_()
            dispatch.linear_of_module(x, small.packed[number], None)
    assert not small.first


@pytest.mark.parametrize("error", [torch.OutOfMemoryError(), DeviceError("too little shared memory", mend="none")])
def test_too_little_memory_for_several(small: Model, error: Exception) -> None:
    """From then on one by one."""
    small.launches.memory, small.launches.error = 0, error
    tried = first_of(small, 0, 1, 2)
    assert [each[0] for each in tried] == [0, 1, 2]
    assert first_of(small, 0, 1, 2) == []


def test_a_weight_decoded_with_others_that_changes(small: Model) -> None:
    first_of(small, 0, 1, 2)
    small.ask(0)
    small.packed[1].data.copy_(samebits.encode(-small.weights[1]).data)
    small.weights[1] = -small.weights[1]
    small.ask(1, 2)


def test_weights_decoded_together_that_nobody_asks_for(small: Model) -> None:
    """Are forgotten, and decoded by this launch no more once that has happened thrice."""
    assert first_of(small, 0, 1, 2) == [[0, 1, 2]]
    for _ in range(3):
        small.ask(0)
        for _ in range(4):
            small.ask(0, 1, 2)
    assert 0 not in [each[0] for each in first_of(small, 0, 1, 2)]
