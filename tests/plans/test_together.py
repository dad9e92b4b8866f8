"""Products of one input in one launch: learned, proved, and never another result than products one by one."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import samebits
from samebits.errors import DeviceError
from samebits.format.header import Header
from samebits.format.packed import PackedTensor
from samebits.kernels import residents
from samebits.kernels.linear.job import Launch, Spare
from samebits.kernels.linear.products import Operands
from samebits.plans import at_once as together_at_once
from samebits.plans import calibrate, call, dispatch, group, key, planner, together
from samebits.plans.store import GroupOutcome, Outcome
from samebits.plans.together import Together
from tests.plans.conftest import FakeGpu, FakeProducts, is_supported
from tests.plans.sums import normal, split_linear

K = 512
SPLIT = 3


class Layers:
    """Weights of one input, and how often which products were launched."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.gpu = gpu
        self.weights = [(normal(rows, K, seed=rows) / 8).clone() for rows in (64, 8, 16)]
        self.packed = [samebits.encode(weight) for weight in self.weights]
        self.biases: list[torch.Tensor | None] = [None, normal(8), None]
        self.joint: list[int] = []  # products of each launch of several

    def joint_products(self, launch: object) -> FakeProducts:
        """In place of Products; holds none of the weights, as that does not."""
        gpu, joint = self.gpu, self.joint

        def products(
            x: torch.Tensor, bias: torch.Tensor | None, operands: Callable[[], Sequence[Operands]]
        ) -> list[torch.Tensor]:
            first, *others = operands()
            joint.append(1 + len(others))
            calls = len(gpu.fused_calls)
            made = [gpu.fused_linear(x, *each) for each in (first._replace(bias=bias), *others)]
            del gpu.fused_calls[calls:]
            return made

        return FakeProducts(products)

    def ask(self, x: torch.Tensor, *numbers: int) -> tuple[int, int]:
        """Check these products, of all weights if there are none; returns how many launches of one, and of several."""
        self.gpu.fused_calls.clear()
        self.joint.clear()
        for number in numbers or range(len(self.packed)):
            self.check(x, number)
        return len(self.gpu.fused_calls), len(self.joint)

    def check(self, x: torch.Tensor, number: int) -> None:
        bias = self.biases[number]
        y = dispatch.linear_of_module(x, self.packed[number], bias)
        right = split_linear(x.view(-1, K), self.weights[number], bias, SPLIT)
        assert torch.equal(y.view(-1, y.shape[-1]).view(torch.int16), right.view(torch.int16))


@pytest.fixture
def layers(gpu: FakeGpu, where: list[int], monkeypatch: pytest.MonkeyPatch) -> Layers:
    made = Layers(gpu)
    monkeypatch.setattr(together, "fused_linear", gpu.fused_linear)
    monkeypatch.setattr(group, "Products", made.joint_products)
    monkeypatch.setattr(group, "is_supported", is_supported)
    monkeypatch.setattr(group, "is_launchable", lambda header, m, plan, device: is_supported(header, m, device))
    monkeypatch.setattr(group, "launch_together", lambda operands, m, variant, device: "a launch")
    monkeypatch.setattr(planner, "fastest_together", lambda x, operands, are_fused: GroupOutcome(1))
    monkeypatch.setattr(dispatch, "together", Together())
    for number in range(3):  # plans
        dispatch.linear(normal(1, K), made.packed[number], made.biases[number])
    return made


def test_learned_proved_and_together(layers: Layers) -> None:
    x = [normal(1, K, seed=seed) for seed in range(5)]
    assert layers.ask(x[0]) == (3, 0)
    assert layers.ask(x[1]) == (3, 1)
    assert layers.ask(x[2]) == (0, 1)
    assert layers.joint == [3]
    assert layers.ask(x[3].view(1, 1, K)) == (0, 1)


def together_already(layers: Layers) -> None:
    for seed in range(3):
        layers.ask(normal(1, K, seed=seed))
    assert layers.ask(normal(1, K, seed=9)) == (0, 1)


def test_other_numbers_of_tokens(layers: Layers) -> None:
    together_already(layers)
    layers.ask(normal(2, K))  # looks for plans
    assert layers.ask(normal(2, K, seed=1)) == (0, 1)


def test_weights_that_are_decoded_first_alone(layers: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    found = GroupOutcome(1)
    monkeypatch.setattr(planner, "fastest_together", lambda x, operands, are_fused: asked.append(are_fused) or found)
    layers.gpu.times = [5.0, 3.0, 1.0]
    layers.ask(normal(2, K))  # looks for plans
    assert layers.ask(normal(2, K, seed=1)) == (2, 1)  # the others once more, to compare
    assert layers.ask(normal(2, K, seed=2)) == (0, 1)
    assert asked == [[False] * 3]


def test_decoded_first_one_by_one(layers: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "fastest_together", lambda x, operands, are_fused: GroupOutcome(None))
    layers.gpu.times = [5.0, 3.0, 1.0]
    layers.ask(normal(2, K))  # looks for plans
    assert [layers.ask(normal(2, K, seed=seed)) for seed in range(1, 4)] == [(0, 0)] * 3


def failing(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """Arguments of launches of several, all of which fail."""
    attempts: list[tuple[object, ...]] = []

    def products(*arguments: object) -> list[torch.Tensor]:
        attempts.append(arguments)
        raise error("failed")

    monkeypatch.setattr(group, "Products", lambda launch: FakeProducts(products))
    return attempts


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, DeviceError])
def test_one_launch_that_fails(layers: Layers, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """For want of memory, say; it is tried once."""
    attempts = failing(error, monkeypatch)
    assert [layers.ask(normal(1, K, seed=seed)) for seed in range(4)] == [(3, 0)] * 4
    assert len(attempts) == 1


def test_changed_input(layers: Layers) -> None:
    together_already(layers)
    x = normal(1, K)
    layers.ask(x, 0)
    x.mul_(2)
    assert layers.ask(x, 1, 2) == (2, 0)
    layers.ask(x, 0)
    assert layers.ask(x.clone(), 2) == (1, 0)


def test_changed_weight(layers: Layers) -> None:
    together_already(layers)
    x, other = normal(1, K), (normal(8, K, seed=70) / 8).clone()
    packed = samebits.encode(other)
    if packed.nbytes != layers.packed[1].nbytes or packed.header != layers.packed[1].header:
        packed = samebits.encode(layers.weights[1].neg())  # as long, and other signs
        other = layers.weights[1].neg()
    layers.ask(x, 0)
    layers.packed[1].data.copy_(packed.data)
    layers.weights[1] = other
    assert layers.ask(x, 1, 2) == (1, 0)
    for seed in range(3):
        layers.ask(normal(1, K, seed=seed))
    assert layers.ask(normal(1, K, seed=4)) == (0, 1)


def test_changed_bias(layers: Layers) -> None:
    together_already(layers)
    bias = layers.biases[1]
    assert bias is not None
    x = normal(1, K)
    layers.ask(x, 0)
    bias.mul_(3)
    assert layers.ask(x, 1) == (1, 0)
    layers.ask(x, 0)
    layers.biases[1] = bias.clone()
    assert layers.ask(x, 1) == (1, 0)


def test_a_bias_where_there_was_none(layers: Layers) -> None:
    """It is not in the product that was made."""
    together_already(layers)
    x = normal(1, K)
    layers.ask(x, 0)
    layers.biases[2] = normal(16)
    layers.ask(x, 2)  # looks for plans
    assert layers.ask(x, 2) == (1, 0)


@pytest.mark.parametrize(("more_us", "is_faster"), [(2.0, True), (0.0, True), (-1.0, False)])
def test_for_how_many_tokens_one_launch_is_chosen(
    layers: Layers, more_us: float, is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = GroupOutcome(1, more_us)
    monkeypatch.setattr(planner, "fastest_together", lambda x, operands, are_fused: found)
    for seed in range(2):
        layers.ask(normal(1, K, seed=seed))
    kept = residents.resident(layers.packed[0].data)
    assert kept is not None
    assert [kept.followers.chosen_for(tokens) for tokens in (1, 2)] == [is_faster, False]


@pytest.mark.parametrize("change", [lambda bias: bias.mul_(3), torch.clone], ids=["written to", "another"])
def test_a_changed_bias_is_learned_anew(layers: Layers, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The launch that adds the old one is not made again."""
    together_already(layers)
    bias = layers.biases[1]
    assert bias is not None
    layers.biases[1] = change(bias)
    del bias
    assert layers.ask(normal(1, K, seed=20), 0) == (1, 0)
    for seed in range(3):
        layers.ask(normal(1, K, seed=seed))
    assert layers.ask(normal(1, K, seed=21)) == (0, 1)
    assert layers.joint == [3]


def test_input_written_behind_torchs_back(layers: Layers) -> None:
    """As a kernel of somebody else's may: the trial finds out."""
    x, raw = normal(1, K), None
    raw = x.view(torch.int16).numpy()
    layers.ask(x)
    for _ in range(4):
        layers.ask(normal(1, K, seed=5), 2)  # another input in between
        layers.ask(x, 0)
        raw[:] = raw[:, ::-1].copy()
        launches = layers.ask(x, 1, 2)
    assert launches == (2, 0)


def test_zeros_prove_nothing(layers: Layers) -> None:
    layers.biases[1] = None
    for _ in range(4):
        layers.ask(torch.zeros(1, K, dtype=torch.bfloat16))
    assert layers.ask(normal(1, K)) == (3, 1)
    assert layers.ask(normal(1, K, seed=1)) == (0, 1)


def test_given_up_when_nobody_asks(layers: Layers) -> None:
    together_already(layers)
    launches = [layers.ask(normal(1, K, seed=seed), 0, 1)[1] for seed in range(8)]
    assert sum(launches) == group._MAX_UNWANTED
    assert launches[-1] == 0
    assert layers.ask(normal(1, K, seed=20)) == (3, 0)


def test_not_given_up_when_nobody_asks_now_and_then(layers: Layers) -> None:
    together_already(layers)
    for seed in range(2 * group._MAX_UNWANTED):
        layers.ask(normal(1, K, seed=seed), 0, 1)
        assert layers.ask(normal(1, K, seed=10 + seed)) == (0, 1)


def test_given_up_when_the_input_always_changes(layers: Layers) -> None:
    for seed in range(3):
        layers.ask(normal(1, K, seed=seed), 0, 1)
    launches = []
    for seed in range(6):
        x = normal(1, K, seed=seed)
        launches.append(layers.ask(x, 0)[1])
        x.mul_(2)
        layers.ask(x, 1)
    assert launches == [1, 1, 1, 0, 0, 0]


def test_capture(layers: Layers, where: list[int]) -> None:
    layers.ask(normal(1, K))
    where[1] = 5
    assert layers.ask(normal(1, K, seed=1)) == (3, 0)
    where[1] = 0
    layers.ask(normal(1, K, seed=2))
    where[1] = 6
    assert layers.ask(normal(1, K, seed=3)) == (0, 1)
    x = normal(1, K, seed=4)
    layers.ask(x, 0)
    where[1] = 7
    assert layers.ask(x, 1) == (1, 0)
    where[1] = 0
    assert layers.ask(x, 2) == (1, 0)


def test_nothing_is_compared_while_a_graph_is_captured(layers: Layers, where: list[int]) -> None:
    """What is not proved yet is made one by one there."""
    layers.biases[1] = None
    for _ in range(3):
        layers.ask(torch.zeros(1, K, dtype=torch.bfloat16))
    assert layers.joint == [3]
    where[1] = 5
    assert layers.ask(normal(1, K)) == (3, 0)
    factors = list(zip(layers.packed, layers.biases, strict=True))
    where[1] = 0
    dispatch.linears(torch.zeros(1, K, dtype=torch.bfloat16), factors)
    layers.joint.clear()
    where[1] = 6
    dispatch.linears(normal(1, K), factors)
    assert layers.joint == []


def test_headers(layers: Layers) -> None:
    """An equal one may be read anew in each call; under another one these bytes are another weight."""
    together_already(layers)
    layers.packed = [replace(packed, header=replace(packed.header)) for packed in layers.packed]
    assert layers.ask(normal(1, K)) == (0, 1)
    first, other = layers.packed[:2]
    kept = residents.resident(first.data)
    assert kept is not None
    [asked], plan = kept.followers.chosen, calibrate.LinearPlan(SPLIT)
    for header, is_there in ((first.header, True), (other.header, False)):
        operands = Operands(PackedTensor(header, first.data), None, plan)
        choice = kept.followers.choice(normal(1, K), operands, asked, is_captured=False)
        assert (choice is not None) is is_there


@pytest.mark.parametrize(("times", "one_by_one_us"), [([5.0, 3.0, 9.0], 6.0), ([12.0, 11.0, 9.0], 0.0)])
def test_what_one_launch_gains(
    layers: Layers, times: list[float], one_by_one_us: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over products one by one, and over weights that are all decoded first."""
    found = GroupOutcome(1, 2.0, 0.5)
    monkeypatch.setattr(planner, "fastest_together", lambda x, operands, are_fused: found)
    layers.gpu.times = times
    for seed in range(3):
        layers.ask(normal(2, K, seed=seed))
    kept = residents.resident(layers.packed[0].data)
    assert kept is not None
    [choice] = kept.followers.chosen.values()
    assert (choice.gained_us, choice.more_us, choice.carried_us) == (2.0 + 3 * one_by_one_us, 2.0, 0.5)


@pytest.mark.parametrize("why", ["no plan", "not supported", "not launchable"])
def test_a_number_of_tokens_for_which_one_of_them_cannot_be_fused(
    layers: Layers, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then all are made one by one."""
    outcome = planner.Planner.outcome

    def none_for_one(own: planner.Planner, asked: key.PlanKey) -> Outcome:
        assert why != "not supported" or (asked.rows, asked.tokens) != (8, 2)
        return Outcome(None, "none") if (asked.rows, asked.tokens) == (8, 2) else outcome(own, asked)

    def but_one(header: Header, tokens: int, *others: object) -> bool:
        return (header.shape[0], tokens) != (8, 2)

    together_already(layers)
    if why == "not launchable":
        monkeypatch.setattr(group, "is_launchable", but_one)
    else:
        monkeypatch.setattr(planner.Planner, "outcome", none_for_one)
    for module in (call, group) if why == "not supported" else ():
        monkeypatch.setattr(module, "is_supported", but_one)
    fused = 3 if why == "not launchable" else 2
    layers.ask(normal(2, K))  # looks for plans
    assert [layers.ask(normal(2, K, seed=seed)) for seed in range(3)] == [(fused, 0)] * 3
    assert layers.ask(normal(1, K, seed=20)) == (0, 1)


def test_a_weight_that_is_gone_before_the_next_one_is_asked_for(layers: Layers) -> None:
    """Of the same input: there is nothing that the next one could be behind."""
    x = normal(1, K)
    layers.ask(x, 0)
    layers.packed[0] = samebits.encode(layers.weights[0])
    gc.collect()
    assert layers.ask(x, 1, 2) == (2, 0)


def test_a_weight_that_is_gone_before_one_launch_was_chosen(layers: Layers) -> None:
    """The others are made by one without it."""
    layers.ask(normal(1, K))
    layers.packed[2] = samebits.encode(layers.weights[2])
    gc.collect()
    for seed in range(1, 4):
        layers.ask(normal(1, K, seed=seed), 0, 1)
    assert layers.ask(normal(1, K, seed=4), 0, 1) == (0, 1)
    assert layers.joint[-1] == 2


def test_a_bias_that_does_not_tell_when_it_changes(layers: Layers) -> None:
    with torch.inference_mode():
        layers.biases[1] = normal(8, seed=4).clone()
    assert [layers.ask(normal(1, K, seed=seed)) for seed in range(2)] == [(3, 0), (3, 1)]
    assert layers.ask(normal(1, K, seed=3)) == (1, 1)
    assert layers.joint == [2]


def test_nothing_is_measured_while_a_graph_is_captured(
    layers: Layers, where: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was measured would be a part of the graph, and waiting for it would end the capture."""
    found, asked = GroupOutcome(1), list[int]()

    def fastest(x: torch.Tensor, operands: Sequence[Operands], are_fused: Sequence[bool]) -> GroupOutcome:
        asked.append(len(operands))
        return found

    monkeypatch.setattr(planner, "fastest_together", fastest)
    layers.ask(normal(1, K))
    where[1] = 5
    assert layers.ask(normal(1, K, seed=1)) == (3, 0)
    dispatch.linears(normal(1, K), list(zip(layers.packed, layers.biases, strict=True)))
    assert asked == []
    where[1] = 0
    assert layers.ask(normal(1, K, seed=2)) == (3, 1)
    assert asked == [3]


def test_other_settings(layers: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under which cuBLAS may add in another order."""
    together_already(layers)
    x = normal(1, K)
    layers.ask(x, 0)
    for module in (call, key, together):
        monkeypatch.setattr(module, "blas_state", lambda: "other settings")
    layers.ask(x, 1, 2)  # looks for plans, and takes nothing of what was made
    assert layers.ask(x, 1, 2) == (2, 0)
    assert "other settings" in {known.state for known in planner.Planner.of(0).known}


def test_other_stream(layers: Layers, where: list[int]) -> None:
    together_already(layers)
    x = normal(1, K)
    layers.ask(x, 0)
    where[0] = 8
    assert layers.ask(x, 1, 2) == (2, 0)


def test_other_thread(layers: Layers) -> None:
    together_already(layers)
    x, seen = normal(1, K), []
    layers.ask(x, 0)
    thread = threading.Thread(target=lambda: seen.append(layers.ask(x, 1, 2)))
    thread.start()
    thread.join()
    assert seen == [(2, 0)]


def test_others_that_another_thread_replaces_meanwhile(layers: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one launch makes is not proved for these."""
    together_already(layers)
    monkeypatch.setattr(group.Group, "is_proved", True)
    asked: list[group.Group] = []

    def chosen(own: group.Group) -> dict[key.PlanKey, Any]:
        found: dict[key.PlanKey, Any] = vars(own)["chosen"]
        if found and not asked:
            asked.append(own)
            own.replace_others(*own.others[:1])
        return found

    monkeypatch.setattr(
        group.Group, "chosen", property(chosen, lambda own, new: vars(own).update(chosen=new)), raising=False
    )
    assert layers.ask(normal(1, K, seed=20), 0) == (1, 0)
    assert asked


def test_no_more_than_a_launch_takes(layers: Layers) -> None:
    layers.weights = [(normal(8, K, seed=seed) / 8).clone() for seed in range(6)]
    layers.packed = [samebits.encode(weight) for weight in layers.weights]
    layers.biases = [None] * 6
    for seed in range(3):
        layers.ask(normal(1, K, seed=seed))
    assert layers.ask(normal(1, K, seed=5)) == (2, 1)
    assert layers.joint == [4]


def test_one_by_one_where_that_is_faster(layers: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "fastest_together", lambda x, operands, are_fused: GroupOutcome(None))
    assert [layers.ask(normal(1, K, seed=seed)) for seed in range(4)] == [(3, 0)] * 4


def test_one_by_one_under_cached_plans(layers: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(planner.MODE_VARIABLE, "cached")
    planner.mode.cache_clear()
    assert [layers.ask(normal(1, K, seed=seed)) for seed in range(4)] == [(3, 0)] * 4


def test_inference_tensors(layers: Layers) -> None:
    """They do not tell when they change."""
    with torch.inference_mode():
        assert [layers.ask(normal(1, K, seed=seed)) for seed in range(4)] == [(3, 0)] * 4


@pytest.mark.parametrize("gathered", [(0, 1, 2), (0,)], ids=["all", "the first"])
def test_weights_that_are_gathered(layers: Layers, gathered: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """As fully_shard does it: nothing is known of their bytes, so nothing is made together."""
    for number in gathered:
        layers.packed[number] = samebits.encode(layers.weights[number])
    monkeypatch.setattr(residents, "_is_gathered", lambda: True)
    assert [layers.ask(normal(1, K, seed=seed)) for seed in range(4)] == [(3, 0)] * 4
    factors = list(zip(layers.packed, layers.biases, strict=True))
    for y, number in zip(dispatch.linears(normal(1, K), factors), range(3), strict=True):
        right = split_linear(normal(1, K), layers.weights[number], layers.biases[number], SPLIT)
        assert torch.equal(y.view(torch.int16), right.view(torch.int16))
    assert not layers.joint


def test_nothing_is_kept_alive(layers: Layers) -> None:
    together_already(layers)
    layers.packed, layers.biases = [], []
    gc.collect()
    assert not any(kept.followers for kept in residents.residents.values())


def test_fastest_variant(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = (normal(64, K) / 8).clone()
    packed: PackedTensor = samebits.encode(weight)
    plan = calibrate.LinearPlan(SPLIT)
    operands = [Operands(packed, None, plan), Operands(packed, normal(64), plan)]
    launches = {1: Launch("a", "launch", 1, 1, 0, ()), 3: Launch("an", "other", 1, 1, 0, ())}
    monkeypatch.setattr(calibrate, "launch_together", lambda operands, m, variant, device: launches.get(variant))
    monkeypatch.setattr(
        calibrate, "fused_linears", lambda x, each, launch: torch.cat([gpu.fused_linear(x, *one) for one in each])
    )
    one_by_one = calibrate._one_by_one
    monkeypatch.setattr(calibrate, "_one_by_one", lambda *arguments: torch.cat(one_by_one(*arguments)))
    for times, best in (
        ([5.0, 3.0, 9.0], GroupOutcome(3, 6.0)),
        ([2.0, 3.0, 9.0], GroupOutcome(1, 7.0)),
        ([5.0, 3.0, 2.0], GroupOutcome(None)),
    ):
        gpu.times = times
        gpu.fused_calls.clear()
        assert calibrate.fastest_together(normal(1, K), operands, [True, False]) == best
        assert len(gpu.fused_calls) == 5  # of six, for one is decoded first
    assert gpu.compiled == [{("a", "launch"), ("an", "other")}] * 3
    launches[3] = replace(launches[3], spare=Spare(1, 0, 0))  # which may decode other weights
    assert calibrate.fastest_together(normal(1, K), operands, [True, False]) == GroupOutcome(3, -1.0)
    gpu.times = [2.5, 3.0, 2.0]
    assert calibrate.fastest_together(normal(1, K), operands, [True, False]) == GroupOutcome(None)
    launches.clear()
    assert calibrate.fastest_together(normal(1, K), operands, [True, False]) == GroupOutcome(None)


class AtOnce:
    """The same weights, all asked for by one operator."""

    def __init__(self, layers: Layers) -> None:
        self.layers = layers

    def ask(self, x: torch.Tensor) -> tuple[int, int]:
        """As Layers.ask."""
        layers = self.layers
        layers.gpu.fused_calls.clear()
        layers.joint.clear()
        made = dispatch.linears(x, list(zip(layers.packed, layers.biases, strict=True)))
        for y, weight, bias in zip(made, layers.weights, layers.biases, strict=True):
            right = split_linear(x.view(-1, K), weight, bias, SPLIT)
            assert torch.equal(y.view(-1, y.shape[-1]).view(torch.int16), right.view(torch.int16))
        return len(layers.gpu.fused_calls), len(layers.joint)


@pytest.fixture
def at_once(layers: Layers) -> AtOnce:
    return AtOnce(layers)


def test_at_once_proved_and_together(at_once: AtOnce) -> None:
    assert at_once.ask(normal(1, K)) == (3, 1)
    assert at_once.ask(normal(1, K, seed=1)) == (0, 1)
    assert at_once.ask(normal(1, K, seed=2).view(1, 1, K)) == (0, 1)


def test_at_once_as_the_first_product_has_it(at_once: AtOnce) -> None:
    """By its key a launch is chosen; the others have other numbers of rows, and biases."""
    at_once.ask(normal(1, K))
    kept = residents.resident(at_once.layers.packed[0].data)
    assert kept is not None
    [made] = kept.at_once._groups.values()
    [(asked, choice)] = made.chosen.items()
    assert (asked.rows, asked.has_bias, choice.header) == (64, False, at_once.layers.packed[0].header)


def test_at_once_while_captured(at_once: AtOnce, where: list[int]) -> None:
    where[1] = 5
    assert at_once.ask(normal(1, K)) == (3, 0)
    where[1] = 0
    assert at_once.ask(normal(1, K)) == (3, 1)
    where[1] = 5
    assert at_once.ask(normal(1, K)) == (0, 1)


def test_at_once_with_changed_weights(at_once: AtOnce) -> None:
    layers = at_once.layers
    assert at_once.ask(normal(1, K)) == (3, 1)
    layers.weights[1] = normal(8, K, seed=50).clone()
    layers.packed[1] = samebits.encode(layers.weights[1])
    assert at_once.ask(normal(1, K)) == (3, 1)
    assert at_once.ask(normal(1, K)) == (0, 1)
    bias = layers.biases[1]
    assert bias is not None
    bias.mul_(2)
    assert at_once.ask(normal(1, K)) == (3, 1)
    assert at_once.ask(normal(1, K)) == (0, 1)
    layers.weights[0] = normal(64, K, seed=51).clone()
    layers.packed[0] = samebits.encode(layers.weights[0])
    dispatch.linear(normal(1, K), layers.packed[0], None)
    assert at_once.ask(normal(1, K)) == (3, 1)


def test_at_once_with_other_bits(at_once: AtOnce, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, right = at_once.layers, at_once.layers.joint_products

    def wrong(launch: object) -> FakeProducts:
        products = right(launch)
        return FakeProducts(lambda *arguments: [-y for y in products(*arguments)])

    monkeypatch.setattr(group, "Products", wrong)
    assert at_once.ask(normal(1, K)) == (3, 1)
    assert [at_once.ask(normal(1, K, seed=seed)) for seed in range(3)] == [(3, 0)] * 3
    assert layers.ask(normal(1, K, seed=9)) == (3, 0)


def test_at_once_of_an_input_of_zeros(at_once: AtOnce) -> None:
    """These prove nothing, but of what has a bias."""
    assert [at_once.ask(torch.zeros(1, K, dtype=torch.bfloat16)) for _ in range(2)] == [(3, 1)] * 2
    assert at_once.ask(normal(1, K)) == (3, 1)
    assert at_once.ask(normal(1, K)) == (0, 1)


def test_at_once_of_a_first_product_of_zeros(at_once: AtOnce) -> None:
    """It proves nothing of the first one, whatever the others are."""
    layers, x = at_once.layers, torch.zeros(1, K, dtype=torch.bfloat16)
    for _ in range(3):
        layers.gpu.fused_calls.clear()
        first, second = dispatch.linears(x, list(zip(layers.packed[:2], layers.biases[:2], strict=True)))
        assert not first.any()
        assert second.any()
        assert len(layers.gpu.fused_calls) == 2


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, DeviceError])
def test_at_once_with_a_launch_that_fails(
    at_once: AtOnce, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    attempts = failing(error, monkeypatch)
    assert [at_once.ask(normal(1, K, seed=seed)) for seed in range(4)] == [(3, 0)] * 4
    assert len(attempts) == 1


def test_at_once_one_by_one_where_that_is_faster(at_once: AtOnce, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a launch would only be of use as it can decode other weights, which no graph asks for."""
    monkeypatch.setattr(planner, "fastest_together", lambda x, operands, are_fused: GroupOutcome(1, -1.0))
    assert [at_once.ask(normal(1, K, seed=seed)) for seed in range(3)] == [(3, 0)] * 3


def test_at_once_without_a_plan(at_once: AtOnce) -> None:
    at_once.layers.gpu.fused = at_once.layers.gpu.linear
    assert [at_once.ask(normal(200, K, seed=seed)) for seed in range(2)] == [(0, 0)] * 2


def test_at_once_with_inference_tensors(at_once: AtOnce) -> None:
    with torch.inference_mode():
        at_once.layers.packed[2] = samebits.encode(at_once.layers.weights[2])
    assert [at_once.ask(normal(1, K, seed=seed)) for seed in range(3)] == [(3, 0)] * 3


def test_at_once_with_other_companions(at_once: AtOnce) -> None:
    """Each set of them by itself, in whatever order graphs ask for them."""
    layers = at_once.layers

    def ask(seed: int, *numbers: int) -> tuple[int, int]:
        layers.gpu.fused_calls.clear()
        layers.joint.clear()
        x = normal(1, K, seed=seed)
        made = dispatch.linears(x, [(layers.packed[i], layers.biases[i]) for i in numbers])
        for y, number in zip(made, numbers, strict=True):
            right = split_linear(x, layers.weights[number], layers.biases[number], SPLIT)
            assert torch.equal(y.view(torch.int16), right.view(torch.int16))
        return len(layers.gpu.fused_calls), len(layers.joint)

    assert [ask(0, 0, 1), ask(1, 0, 2)] == [(2, 1)] * 2
    assert [ask(2, 0, 1), ask(3, 0, 2), ask(4, 0, 1, 2), ask(5, 0, 1)] == [(0, 1), (0, 1), (3, 1), (0, 1)]


def test_at_once_with_biases_that_are_made_anew(at_once: AtOnce) -> None:
    """As by a graph: there is nothing that a later call could rest on."""
    found = []
    for seed in range(20):
        at_once.layers.biases[1] = normal(8, seed=seed).clone()
        found.append(at_once.ask(normal(1, K, seed=seed)))
    many = together_at_once._MAX_GROUPS
    assert found == [(3, 1)] * many + [(3, 0)] * (20 - many)
    kept = residents.resident(at_once.layers.packed[0].data)
    assert kept is not None
    assert not kept.at_once._groups  # nor is what is gone kept


def test_at_once_with_a_wrong_first_product(at_once: AtOnce, monkeypatch: pytest.MonkeyPatch) -> None:
    right = at_once.layers.joint_products

    def wrong(launch: object) -> FakeProducts:
        products = right(launch)

        def negated(*arguments: Any) -> list[torch.Tensor]:
            first, *others = products(*arguments)
            return [-first, *others]

        return FakeProducts(negated)

    monkeypatch.setattr(group, "Products", wrong)
    assert at_once.ask(normal(1, K)) == (3, 1)
    assert at_once.ask(normal(1, K)) == (3, 0)


def test_at_once_with_an_operand_that_no_plan_is_for(at_once: AtOnce) -> None:
    """A bias with gaps, which is not asked for by its plan but by torch."""
    layers = at_once.layers
    bias = layers.biases[1]
    assert bias is not None
    layers.biases[1] = torch.stack([bias, bias], 1)[:, 0]
    assert [at_once.ask(normal(1, K, seed=seed)) for seed in range(3)] == [(2, 0)] * 3


def test_disproved_weights_are_not_proved(at_once: AtOnce) -> None:
    packed = at_once.layers.packed[1]
    weight, y = group.Weight(packed, None), normal(1, 8)
    made = group.Group((weight,))
    made.prove(weight, -y, y)
    assert made.is_given_up
    assert not weight.is_proved
    assert not made.is_proved
    assert not group.Group().is_proved
