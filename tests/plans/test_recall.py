"""Products made again by native code: what the driver is handed, and that anything changed goes the usual way.

On a CPU that is taken for a GPU, whose driver is played by a function that reads what it is handed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import samebits
from samebits.errors import DeviceError, DigestError, SamebitsError
from samebits.format.packed import PackedTensor
from samebits.integrations.comfyui import PatchableModule
from samebits.integrations.transformers.experts import _Gathered, _Route, _Routed
from samebits.kernels import decode, decode_together, nvrtc
from samebits.kernels.linear import experts as linear_experts
from samebits.kernels.linear import job as linear_job
from samebits.kernels.linear import products as linear_products
from samebits.kernels.linear.experts import Input
from samebits.kernels.linear.products import LinearPlan, Products
from samebits.kernels.repeat import Repeat
from samebits.kernels.residents import MAX_SHAPES, gradients, resident, residents
from samebits.kernels.structures import (
    MAX_PREFETCHED,
    MAX_TOGETHER,
    ArrangementStructure,
    DecodedTogetherStructure,
    DivisionStructure,
    GeometryStructure,
    JobStructure,
    PackedStructure,
    PrefetchedStructure,
    ProductStructure,
    RoutingStructure,
    TogetherStructure,
)
from samebits.nn import packed_linear
from samebits.nn import product as eligible
from samebits.plans import call, carrier, carry, dispatch, experts, group, planner, prefetch, recall
from samebits.plans.carrier import Carrier, Window
from samebits.plans.key import key_of
from samebits.plans.store import ExpertsOutcome, GroupOutcome, Outcome
from samebits.plans.together import Together
from tests.plans.conftest import decode_beside_products_alone

DEVICE = -1  # what torch says of tensors in main memory
WAITS = call._waits
K = 1024
CARRIER_ROWS = 72
MOST_TOKENS = 512
MANY_TIMES = 5  # that a product of many tokens is made as usual: it comes again, notes what is behind, and settles
JOB = (*range(1, len(JobStructure._fields_) - 6), tuple(range(JobStructure.division.size // 4)))
LAUNCH = linear_job.Launch("f.cu", "kernel", grid=132, warps=16, shared_bytes=1000, jobs=(JOB,))
ARRANGEMENT = linear_job.Arrangement(5, K, 8, 1 << 14, (6,), (4096,), part_steps=4)
Start = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)


class Driver:
    """What was launched.

    Attributes:
        usual: launches made in the usual way, by what kernels are told.
        again: launches made by the native code: function and addresses of the arguments' copies.
        stream, device, capturing, result: what torch and the driver say.
        empty: by what the native code allocates.
        plans: the planner.
    """

    def __init__(self) -> None:
        self.usual: list[Any] = []
        self.again: list[tuple[int, list[bytes]]] = []
        self.stream, self.device, self.capturing, self.result = 7, DEVICE, False, 0
        self.arguments: dict[int, list[int]] = {}  # sizes, by function
        self.functions: list[str] = []
        self.empty: Callable[..., torch.Tensor] = torch._C._dynamo.guards._empty_strided_cpu
        self.configs: list[tuple[Any, ...]] = []
        self.plans: Any = None

    def exchange_device(self, device: int) -> int:
        before, self.device = self.device, device
        return before

    def start(self, config: int, function: int, arguments: int, extra: int | None) -> int:
        assert extra is None
        assert self.device == DEVICE
        assert self.configs[config - 1][-2:] == (True, DEVICE)  # early
        name = self.functions[function - 1]
        self.again.append((name, read(name, arguments)))
        return self.result

    def launcher(self, function: str, *settings: Any) -> Callable[[int], None]:
        def launch(pointers: int) -> None:
            told = read(function, pointers)
            if function != "arrange":
                self.usual.append(told if function in SIZES else told[0])

        return launch

    def configured(self, function: str, *settings: Any) -> nvrtc.Configured:
        self.configs.append(settings)
        self.functions.append(function)
        number = len(self.configs)
        return nvrtc.Configured(SimpleNamespace(getPtr=lambda: number), number)


ROOM = ctypes.sizeof(ProductStructure)  # what a launch of one weight is told; of several, more than that
DECODE_SIZES = [
    ctypes.sizeof(kind) for kind in (GeometryStructure, PackedStructure, ctypes.c_void_p, DivisionStructure)
]


TOGETHER_SIZES = [ctypes.sizeof(kind) for kind in (DecodedTogetherStructure, DivisionStructure)]
EXPERTS = "linear_experts_8_shared"
EXPERTS_KINDS = (GeometryStructure, PackedStructure, JobStructure, RoutingStructure)
ROUTED = {
    "route_experts": (JobStructure, RoutingStructure),
    "arrange_experts": (GeometryStructure, JobStructure, RoutingStructure),
    "linear_routed_64": EXPERTS_KINDS,
}
SIZES = {
    "arrange": [ctypes.sizeof(ArrangementStructure)], "decode": DECODE_SIZES, "decode_together": TOGETHER_SIZES,
    EXPERTS: [ctypes.sizeof(kind) for kind in EXPERTS_KINDS],
    **{name: [ctypes.sizeof(kind) for kind in kinds] for name, kinds in ROUTED.items()},
}  # fmt: skip


def read(function: str, pointers: int) -> list[bytes]:
    """What a launch's arguments are."""
    every = (ctypes.c_void_p * 4).from_address(pointers)
    return [ctypes.string_at(every[i], size) for i, size in enumerate(SIZES.get(function, [ROOM]))]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    if recall.native is None:
        pytest.fail("the native part was not compiled: pip install -e . needs a C compiler")
    played = Driver()
    start = Start(played.start)
    plan = Outcome(LinearPlan(1), "", 1.0, 2.0)
    plans = SimpleNamespace(
        outcome=lambda key: plan,
        together=lambda *arguments: GroupOutcome(0),
        experts=lambda key, packed: ExpertsOutcome(0, "", 1.0, 2.0),
        known={},
    )
    played.plans = plans
    settings: list[tuple[object, str, Any]] = [
        (torch._C, "_cuda_exchangeDevice", played.exchange_device),
        (torch._C, "_cuda_maybeExchangeDevice", played.exchange_device),
        (torch._C, "_cuda_getCurrentRawStream", lambda device: played.stream),
        (torch._C, "_cuda_isCurrentStreamCapturing", lambda: played.capturing),
        (torch._C._dynamo.guards, "_empty_strided_cuda", lambda *arguments: played.empty(*arguments)),
        (torch.cuda, "current_device", lambda: played.device),
        (torch.cuda, "is_current_stream_capturing", lambda: played.capturing),
        (nvrtc, "where", lambda device: nvrtc.Where(played.stream, int(played.capturing))),
        (nvrtc, "on_device", lambda device: nvrtc._ALREADY),
        (nvrtc, "kernel", lambda file, name, device: "decode" if file == "decode.cu" else name),
        (nvrtc, "launcher", played.launcher),
        (nvrtc, "configured", played.configured),
        (nvrtc, "launch_address", lambda: ctypes.cast(start, ctypes.c_void_p).value),
        (nvrtc, "check_code", _refuse),
        (nvrtc, "multiprocessors", lambda device: 132),
        (nvrtc, "shared_memory", lambda device: 232448),
        (linear_products, "nearest_launch", lambda *arguments: LAUNCH),
        (linear_products, "decode_table", _no_table),
        (decode, "decode_table", _no_table),
        (linear_experts, "decode_table", _no_table),
        (decode_together, "decode_table", _no_table),
        (group, "launch_together", lambda operands, *others: joint(len(operands))),
        (group, "same_words", lambda left, right: True),
        (planner.Planner, "of", lambda device: plans),
        (call, "MAX_HOPPER_TOKENS", MOST_TOKENS),
        (call, "_waits", lambda key, packed: False),
        (eligible, "_is_plain", lambda tensor: type(tensor) in (torch.Tensor, nn.Parameter)),
        (call, "decode_cuda", _decode),
        (prefetch, "decode_cuda", _decode),
        (recall.decode, "decode_cuda", _decode),
        (recall, "decode_weight", _decode),
        (recall, "_can_recall", True),
        (dispatch, "together", Together()),
    ]
    for module in (call, prefetch, group):
        settings += [(module, "is_supported", lambda header, m, device: m <= MOST_TOKENS)]
        settings += [(module, "is_launchable", lambda header, m, plan, device: True)]
    for target, name, value in settings:
        monkeypatch.setattr(target, name, value, raising=False)
    decode_beside_products_alone(monkeypatch)
    monkeypatch.setattr(dispatch, "product_again", recall.recall_of(dispatch.together.turns).product)
    monkeypatch.setattr(dispatch, "experts_again", recall.recall_of(dispatch.together.turns).experts)
    monkeypatch.setattr(dispatch, "gradient_again", recall.recall_of_gradients().product)
    monkeypatch.setattr(dispatch, "weight_again", recall.recall_of(dispatch.together.turns).weight)
    yield played
    assert start is not None  # lived until here


def joint(count: int) -> linear_job.Launch:
    return linear_job.Launch("f.cu", "joint", grid=132, warps=16, shared_bytes=1000, jobs=(JOB,) * count)


def _refuse(code: int) -> None:
    raise DeviceError(f"CUDA driver: {code}")


def _no_table(packed: PackedTensor) -> None:
    kept = resident(packed.data)
    if kept:
        kept.has_table = True


def _decode(packed: PackedTensor) -> torch.Tensor:
    output = torch.empty(packed.shape, dtype=torch.bfloat16)
    decode.launch("decode.cu", "decode", packed, output, None, decode.is_whole(packed.header.geometry))
    return output


def matrix(seed: int, rows: int = 64) -> torch.Tensor:
    return torch.randn(rows, K, generator=torch.Generator().manual_seed(seed)).mul(0.02).to(torch.bfloat16)


def layer(seed: int, rows: int = 64, bias: bool = False) -> nn.Linear:
    made = nn.Linear(K, rows, bias=bias, dtype=torch.bfloat16).requires_grad_(False)
    made.weight.copy_(matrix(seed, rows))
    samebits.compress(made)
    return made


def x_of(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, K, dtype=torch.bfloat16)


def warm(module: nn.Linear, driver: Driver, *shape: int) -> torch.Tensor:
    """Until it is remembered; its input."""
    for _ in range(MANY_TIMES):
        x = x_of(*(shape or (1, 1)))
        module(x)
    driver.usual.clear()
    driver.again.clear()
    return x


def ask(modules: list[nn.Linear], driver: Driver, times: int, x: torch.Tensor | None = None) -> None:
    """Products of one input after another, or of x each time; only the last round's launches are counted."""
    for _ in range(times):
        driver.usual.clear()
        driver.again.clear()
        own = x_of(1, 1) if x is None else x
        for module in modules:
            module(own)


def ways(driver: Driver) -> tuple[int, int]:
    """Launches in the usual way and by the native code since it was asked last."""
    found = len(driver.usual), len(driver.again)
    driver.usual.clear()
    driver.again.clear()
    return found


def product(told: bytes, number: int = 0) -> ProductStructure:
    return ProductStructure.from_buffer_copy(told, number * ctypes.sizeof(ProductStructure))


@pytest.mark.parametrize(("shape", "times"), [((1, 1), 2), ((3,), 2), ((2, 5), 2), ((400,), MANY_TIMES)])
@pytest.mark.parametrize("bias", [False, True])
def test_the_driver_is_handed_the_same(driver: Driver, shape: tuple[int, ...], times: int, bias: bool) -> None:
    module, x = layer(0, bias=bias), x_of(*shape)
    for _ in range(times + 2):
        y = module(x.clone())
    usual = product(driver.usual[-1])
    assert [len(driver.usual), len(driver.again)] == [times, 2]  # what comes once is not remembered
    x = x_of(*shape)
    y = module(x)
    _, (told,) = driver.again[-1]
    again = product(told)
    assert (again.job.x, again.job.y) == (x.data_ptr(), y.data_ptr())
    assert (y.shape, y.dtype) == ((*shape, 64), torch.bfloat16)
    assert again.job.bias == (module.bias.data_ptr() if bias else None)
    again.job.x, again.job.y = usual.job.x, usual.job.y
    assert bytes(again) == bytes(usual)
    assert driver.configs[-1][:4] == (132, 512, 1000, 7)


def test_an_arranged_input(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = linear_job.Launch("f.cu", "kernel", 132, 8, 1000, (JOB,), ARRANGEMENT)
    monkeypatch.setattr(linear_products, "nearest_launch", lambda *arguments: launch)
    module = layer(0)
    warm(module, driver, 5)
    x = x_of(5)
    y = module(x)
    (first, (arranging,)), (second, (told,)) = driver.again
    assert (first, second) == ("arrange", "kernel")
    arranged, job = ArrangementStructure.from_buffer_copy(arranging), product(told).job
    assert (arranged.x, arranged.tokens, arranged.columns, arranged.wide, arranged.part_steps) == (
        x.data_ptr(), 5, K, 8, 4,
    )  # fmt: skip
    assert job.x == arranged.arranged
    assert (job.parts, job.done) == (arranged.arranged + (1 << 14), arranged.arranged + (1 << 14) + 4096)
    assert (arranged.done, arranged.done_count) == (job.done, ARRANGEMENT.done_count)
    assert job.y == y.data_ptr()


def carrying(driver: Driver, monkeypatch: pytest.MonkeyPatch, steps: int = 12) -> list[nn.Linear]:
    """Layers, warmed up, the first of which has its launch decode the others' weights ahead."""
    jobs, spare = (JOB,), linear_job.Spare(1 << 30, 1 << 20, 1 << 20)
    memory = linear_job.Arrangement(0, K, 8, 0, (6 + MAX_PREFETCHED,), (4096,), part_steps=4)
    carrier = linear_job.Launch("f.cu", "kernel", 132, 16, 1000, jobs, memory, None, spare)
    monkeypatch.setattr(
        linear_products,
        "nearest_launch",
        lambda header, *others: carrier if header.shape[0] == CARRIER_ROWS else LAUNCH,
    )
    monkeypatch.setattr(prefetch, "is_prefetchable", lambda packed, launch, device: True)
    monkeypatch.setattr(
        linear_products, "_without_addresses", lambda packed: PrefetchedStructure(row_groups=packed.shape[0] // 8)
    )
    monkeypatch.setattr(prefetch, "FEW_TOKENS", 0)
    modules = [layer(0, rows=CARRIER_ROWS), layer(1), layer(2, bias=True)]
    for _ in range(steps):
        step(modules)
    ways(driver)
    return modules


def carrier_of(module: nn.Linear) -> Carrier:
    kept = resident(module._parameters[packed_linear._DATA])
    assert kept is not None
    [carrier] = kept.carriers.values()
    assert isinstance(carrier, Carrier)
    return carrier


def step(modules: list[nn.Linear]) -> list[torch.Tensor]:
    return [module(x_of(1, 1)) for module in modules]


def prefetched_of(module: nn.Linear) -> tuple[Any, torch.Tensor] | None:
    kept = resident(module._parameters[packed_linear._DATA])
    assert kept is not None
    return kept.prefetched


def test_weights_that_are_decoded_ahead(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launch is told where to; the products that come then are torch's."""
    modules = carrying(driver, monkeypatch)
    modules[0](x_of(1, 1))
    (_, (arranging,)), (_, (told,)) = driver.again
    assert not driver.usual
    job, arranged = product(told).job, ArrangementStructure.from_buffer_copy(arranging)
    every = (PrefetchedStructure * MAX_PREFETCHED).from_buffer_copy(job, JobStructure.division.offset)
    assert [each.row_groups for each in every] == [8, 8] + [0] * (MAX_PREFETCHED - 2)
    for number, module in enumerate(modules[1:]):
        found = prefetched_of(module)
        assert found is not None
        assert every[number].output == found[1].data_ptr()
        assert found[1].shape == module.weight.shape
        assert every[number].claimed == arranged.done + 4 * (6 + number)
        found[1].copy_(matrix(number + 1))
    ways(driver)
    for number, module in enumerate(modules[1:]):
        x = matrix(9, rows=1).view(1, 1, K)
        y = module(x)
        assert torch.equal(y.view(torch.int16), F.linear(x, matrix(number + 1), module.bias).view(torch.int16))
        assert prefetched_of(module) is None
    assert ways(driver) == (0, 0)
    step(modules)
    assert ways(driver) == (0, 2)


def test_a_weight_decoded_ahead_and_an_input_with_gaps(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes another product of a weight that has requires_grad: the usual way says so of it."""
    modules = carrying(driver, monkeypatch)
    seen: list[bool] = []

    def multiply(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        seen.append(weight.requires_grad)
        return real(x, weight, bias)

    real = F.linear
    monkeypatch.setattr(F, "linear", multiply)
    recipes = modules[1].sb_recipes
    recipes["weight"] = dataclasses.replace(recipes["weight"], requires_grad=True)  # as of a layer that was not frozen
    modules[0](x_of(1, 1))
    assert prefetched_of(modules[1])
    with torch.no_grad():
        modules[1](torch.zeros(2, 6, K, dtype=torch.bfloat16)[:, 1:4])
    assert seen == [True]


def test_a_weight_whose_memory_was_replaced_is_not_decoded_ahead(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As offloading does it, behind torch's back and at the same address: what comes there may be on its way yet."""
    modules = carrying(driver, monkeypatch)
    data = modules[1]._parameters[packed_linear._DATA]
    version, address = data._version, data.data_ptr()
    memory = (ctypes.c_uint8 * data.numel()).from_address(address)
    held, data.data = data.data, data.data.clone()  # offloaded
    data.data = torch.frombuffer(memory, dtype=torch.uint8)
    assert (data._version, data.data_ptr()) == (version, address)
    for _ in range(3):
        modules[0](x_of(1, 1))
        assert prefetched_of(modules[1]) is None
        step(modules[1:])
    assert prefetched_of(modules[2]) is None
    assert held.data_ptr() == address  # lived until here


def test_weights_decoded_ahead_that_nobody_asked_for(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next launch is made in the usual way, which forgets them."""
    modules = carrying(driver, monkeypatch)
    modules[0](x_of(1, 1))
    assert ways(driver) == (0, 2)
    modules[0](x_of(1, 1))
    assert ways(driver) == (1, 0)
    assert prefetched_of(modules[1]) is None


def test_products_of_one_input_that_decode_ahead(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """One launch makes them and decodes what comes behind, by native code as well."""
    monkeypatch.setattr(torch.Tensor, "any", lambda self: True)  # nothing was computed
    carrying(driver, monkeypatch, steps=0)
    memory = linear_job.Arrangement(0, K, 8, 0, (6, 12), (4096, 4352), part_steps=4)
    launch = dataclasses.replace(joint(2), arrangement=memory, spare=linear_job.Spare(1 << 30, 1 << 20, 1 << 20))
    monkeypatch.setattr(group, "launch_together", lambda *arguments: launch)
    modules, behind = [layer(0), layer(1)], layer(2, bias=True)
    for _ in range(12):
        ask(modules, driver, 1)
        behind(x_of(1, 1))
    ask(modules, driver, 1)
    assert [name for name, _ in driver.again] == ["arrange", "joint"]
    assert not driver.usual
    assert prefetched_of(behind) is not None


def test_what_was_decoded_ahead_in_vain_is_not_decoded_again(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where so much follows that all is noted before the next launch."""
    modules, other = carrying(driver, monkeypatch), layer(3)
    modules[0](x_of(1, 1))
    modules[0](x_of(1, 1))
    for _ in range(prefetch._NOTED):
        other(x_of(1, 1))
    assert not dispatch.together.turns.windows
    ways(driver)
    modules[0](x_of(1, 1))
    assert ways(driver) == (1, 0)
    assert prefetched_of(modules[1]) is None


@pytest.mark.parametrize("early", [0, 2])
@pytest.mark.parametrize("is_slower", [False, True])
def test_a_launch_is_made_again_once_its_choice_is_settled(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, early: int, is_slower: bool
) -> None:
    """Not as it was first, when less was known of what is behind; nor is its weight decoded first again, if it was."""
    found = iter([carry.Way(0.0, ())] * early)

    def best_way(carrying: carry.Carrying, coming: Sequence[carry.Coming]) -> carry.Way:
        return (next(found, None) if carrying.is_beside else None) or carry.best_way(carrying, coming)

    monkeypatch.setattr(prefetch, "best_way", best_way)
    if is_slower:
        slower, usual = key_of(x_of(1), (CARRIER_ROWS, K), None), driver.plans.outcome
        driver.plans.known[slower] = SLOWER
        driver.plans.outcome = lambda key: SLOWER if key == slower else usual(key)
    modules = carrying(driver, monkeypatch, steps=0)
    for _ in range(1 + early + 3):
        modules[0](x_of(1, 1))
        assert ways(driver) == (1, 0)
        step(modules[1:])
        ways(driver)
    modules[0](x_of(1, 1))
    assert ways(driver) == (0, 2)
    assert None not in map(prefetched_of, modules[1:])


@pytest.mark.parametrize("is_slower", [False, True])
def test_a_launch_that_has_nothing_to_decode_is_made_again(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, is_slower: bool
) -> None:
    if is_slower:
        driver.plans.outcome = lambda key: SLOWER
        driver.plans.known[key_of(x_of(1), (CARRIER_ROWS, K), None)] = SLOWER
    modules = carrying(driver, monkeypatch, steps=0)
    for _ in range(4):
        modules[0](x_of(1, 1))
        assert ways(driver) == (1, 0)
    modules[0](x_of(1, 1))
    assert ways(driver) == (0, 1 if is_slower else 2)  # is decoded, or is arranged and multiplied


def test_a_launch_that_is_given_up_is_made_again(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = carrying(driver, monkeypatch)
    for _ in range(carrier._MAX_UNWANTED):
        assert not carrier_of(modules[0]).is_given_up
        modules[0](x_of(1, 1))
        for _ in range(6):
            step(modules)
    assert carrier_of(modules[0]).is_given_up
    ways(driver)
    modules[0](x_of(1, 1))
    assert ways(driver) == (0, 2)
    assert prefetched_of(modules[1]) is None


def test_weights_decoded_ahead_on_another_stream(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = carrying(driver, monkeypatch)
    modules[0](x_of(1, 1))
    ways(driver)
    driver.stream = 8
    modules[1](x_of(1, 1))
    assert ways(driver) == (1, 0)
    assert prefetched_of(modules[1]) is None


def test_nothing_that_was_decoded_ahead_is_kept_alive(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = carrying(driver, monkeypatch)
    data = [module._parameters[packed_linear._DATA] for module in modules]
    kept = [resident(each) for each in data]
    watched = [*data, *kept, modules[2].bias, kept[0].shortcuts[torch.Size((1, 1, K))]]  # type: ignore[union-attr]

    def check() -> list[weakref.ref[torch.Tensor]]:
        modules[0](x_of(1, 1))
        found = [prefetched_of(module) for module in modules[1:]]
        refs = [weakref.ref(each[1]) for each in found if each]
        del found
        for module in modules[1:]:
            module(x_of(1, 1))
        return refs

    check()
    before = [sys.getrefcount(each) for each in watched]
    dead = [ref for _ in range(500) for ref in check()]
    assert len(dead) == 1000
    assert not any(ref() is not None for ref in dead)
    assert [sys.getrefcount(each) for each in watched] == before
    assert len(driver.again) >= 1000
    modules[0](x_of(1, 1))
    found = [prefetched_of(module) for module in modules[1:]]
    last = [weakref.ref(each[1]) for each in found if each]
    refs = [weakref.ref(each) for each in data]
    del found, data, kept, watched
    modules.clear()
    gc.collect()
    assert not any(ref() is not None for ref in (*refs, *last))


def test_while_it_is_noted_what_comes_all_is_made_as_usual(driver: Driver) -> None:
    module = layer(0)
    warm(module, driver)
    dispatch.together.turns.windows = (Window(Carrier(), 0, nvrtc.Where(7, 0), []),)
    module(x_of(1, 1))
    assert ways(driver) == (1, 0)
    dispatch.together.turns.windows = ()
    module(x_of(1, 1))
    assert ways(driver) == (0, 1)


def test_products_of_one_input(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second and third are those that were made with the first; their addresses say so."""
    monkeypatch.setattr(sys.modules[__name__], "ROOM", 3 * ctypes.sizeof(ProductStructure))
    modules = [layer(0), layer(1, rows=128, bias=True), layer(2, rows=72)]
    monkeypatch.setattr(torch.Tensor, "any", lambda self: True)  # nothing was computed
    ask(modules, driver, 4)
    ways(driver)
    x = x_of(1, 1)
    made = [module(x) for module in modules]
    [(name, (told,))] = driver.again
    assert (name, len(driver.usual)) == ("joint", 0)
    for number, (module, y) in enumerate(zip(modules, made, strict=True)):
        job = product(told, number).job
        assert (job.x, job.y) == (x.data_ptr(), y.data_ptr())
        assert job.bias == (None if module.bias is None else module.bias.data_ptr())
        assert y.shape == (1, 1, module.out_features)
    assert not dispatch.together.turns.last.made
    ways(driver)
    ask(modules, driver, 1, x)  # another round, of the input that had its turn
    assert ways(driver) == (0, 1)
    modules[0](x_of(1, 1))
    driver.stream = 8
    assert ways(driver) == (0, 1)
    modules[1](x)
    assert ways(driver) == (1, 0)  # was made for another stream, and for another input
    driver.stream = 7
    held = dispatch.together.turns.last.made
    modules[0](x_of(1, 1))  # two were not asked for: counted as usual
    assert held is not dispatch.together.turns.last.made


def test_products_of_one_input_after_the_first_alone(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOM", 2 * ctypes.sizeof(ProductStructure))
    monkeypatch.setattr(torch.Tensor, "any", lambda self: True)  # nothing was computed
    modules = [layer(0), layer(1)]
    warm(modules[0], driver)
    ask(modules, driver, 5)
    assert [name for name, _ in driver.again] == ["joint"]


def test_products_of_one_input_after_inference_mode(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where inputs have no versions, and nothing is made with others."""
    monkeypatch.setattr(sys.modules[__name__], "ROOM", 2 * ctypes.sizeof(ProductStructure))
    monkeypatch.setattr(torch.Tensor, "any", lambda self: True)  # nothing was computed
    modules = [layer(0), layer(1)]
    with torch.inference_mode():
        ask(modules, driver, 4)
    assert [name for name, _ in driver.again] == ["kernel", "kernel"]
    ask(modules, driver, 8)
    assert [name for name, _ in driver.again] == ["joint"]


def test_one_product_of_one_input_again_and_again(driver: Driver) -> None:
    module, x = layer(0), x_of(1, 1)
    ask([module], driver, 2, x)
    assert ways(driver) == (1, 0)
    ask([module], driver, 1, x)
    assert ways(driver) == (0, 1)


def test_the_first_product_of_one_input_alone(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was made with it each time, and nobody asked for, soon no longer is."""
    monkeypatch.setattr(sys.modules[__name__], "ROOM", 3 * ctypes.sizeof(ProductStructure))
    modules, x = [layer(0), layer(1)], x_of(1, 1)
    monkeypatch.setattr(torch.Tensor, "any", lambda self: True)  # nothing was computed
    ask(modules, driver, 4)
    ask(modules[:1], driver, 1, x)
    assert [name for name, _ in driver.again] == ["joint"]
    ask(modules[:1], driver, 6, x)
    assert [name for name, _ in driver.again] == ["kernel"]
    assert not dispatch.together.turns.last.made


def test_one_by_one_where_that_is_faster(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "launch_together", lambda *arguments: None)
    modules = [layer(0), layer(1), layer(2)]
    ask(modules, driver, 4)
    assert ways(driver) == (0, 3)


def test_first_of_an_input_and_then_behind_another(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "launch_together", lambda *arguments: None)
    modules = [layer(0), layer(1)]
    warm(modules[1], driver)
    ask(modules[1:], driver, 1)
    assert ways(driver) == (0, 1)
    ask(modules, driver, 5)
    assert ways(driver) == (0, 2)


def test_another_weight_of_a_launch_is_gone_or_changed(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "any", lambda self: True)
    modules = [layer(0), layer(1, bias=True)]
    ask(modules, driver, 4)
    ways(driver)
    x = x_of(1, 1)
    modules[0](x)
    modules[1].bias.add_(0)
    modules[1](x)
    assert ways(driver) == (1, 1)
    ask(modules, driver, 5)
    assert ways(driver) == (0, 1)
    del modules[1]
    gc.collect()
    for _ in range(2):
        modules[0](x_of(1, 1))
        assert ways(driver) == (1, 0)
    modules[0](x_of(1, 1))
    assert ways(driver) == (0, 1)


class SevenForProducts(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return 7 if function is F.linear else function(*args, **(kwargs or {}))


def test_a_mode_that_replaces_products(driver: Driver) -> None:
    module = layer(0)
    warm(module, driver)
    with SevenForProducts():
        assert module(x_of(1, 1)) == 7
    assert ways(driver) == (1, 0)  # of its weight
    with torch.device("cpu"):  # which only says where new tensors are
        module(x_of(1, 1))
    assert ways(driver) == (0, 1)


@pytest.mark.parametrize(("routine", "backend"), [("mm", "CUDA"), ("linear", "")])
def test_products_that_others_make(driver: Driver, routine: str, backend: str) -> None:
    """As batch-invariant modes have it: no plan says which bits these have."""
    module = layer(0)
    warm(module, driver)
    library = torch.library.Library("aten", "IMPL")
    library.impl(routine, lambda a, b, *_: a, backend)
    try:
        module(x_of(1, 1))
        [decoded] = driver.usual
        assert len(decoded) == len(DECODE_SIZES)  # first, and then multiplied by whoever does it
    finally:
        library._destroy()
    driver.usual.clear()
    module(x_of(1, 1))
    module(x_of(1, 1))
    assert ways(driver) == (1, 1)


@pytest.mark.parametrize("is_decided", [False, True])
def test_weights_without_a_plan_are_decoded_first(driver: Driver, is_decided: bool) -> None:
    """Natively only where nobody will look for a plan, as the calls of inputs with many tokens are counted."""
    module, key = layer(0), key_of(x_of(8), (64, K), None)
    driver.plans.outcome = lambda key: Outcome(None, "none")
    if is_decided:
        driver.plans.known[key] = Outcome(None, "none")
    for _ in range(4):
        module(x_of(8))
    assert (len(driver.usual), len(driver.again)) == ((2, 2) if is_decided else (4, 0))
    if is_decided:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(not before)
        try:
            module(x_of(8))
        finally:
            torch.use_deterministic_algorithms(before)
        assert len(driver.again) == 2


SLOWER = Outcome(LinearPlan(1), "decoding first is faster", 2.0, 1.0)


@pytest.mark.parametrize("joins", [False, True])
def test_products_of_one_input_that_are_decoded_first_alone(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, joins: bool
) -> None:
    """One launch for all, or each weight decoded: the latter too is remembered, and does not end what is learned."""
    monkeypatch.setattr(torch.Tensor, "any", lambda self: True)  # nothing was computed
    driver.plans.outcome = lambda key: SLOWER
    driver.plans.together = lambda *arguments: GroupOutcome(0 if joins else None)
    modules = [layer(0), layer(1, rows=128), layer(2, rows=72)]
    for module in modules:
        driver.plans.known[key_of(x_of(1), (module.out_features, K), None)] = SLOWER
    ask(modules, driver, 5)
    assert [name for name, _ in driver.again] == (["joint"] if joins else ["decode"] * 3)
    assert not driver.usual


def slower(driver: Driver, modules: list[nn.Linear]) -> None:
    """Products of these with one token take less time if the weight is decoded first."""
    driver.plans.outcome = lambda key: SLOWER
    for module in modules:
        driver.plans.known[key_of(x_of(1), (module.out_features, K), None)] = SLOWER


def test_products_of_one_input_after_the_first_was_decoded_alone(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is known whose input that was, though native code decoded the weight."""
    monkeypatch.setattr(torch.Tensor, "any", lambda self: True)  # nothing was computed
    modules = [layer(0), layer(1)]
    slower(driver, modules)
    ask(modules[:1], driver, 4)
    assert [name for name, _ in driver.again] == ["decode"]
    ask(modules, driver, 5)
    assert [name for name, _ in driver.again] == ["joint"]


@pytest.mark.parametrize("is_slower", [False, True])
def test_products_of_one_input_one_by_one_that_another_one_joins(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, is_slower: bool
) -> None:
    """Each is made again by native code as it is fastest alone; what comes behind them then is learned all the same."""
    monkeypatch.setattr(torch.Tensor, "any", lambda self: True)  # nothing was computed
    modules, found = [layer(0), layer(1), layer(2)], [GroupOutcome(0, -1.0)]
    if is_slower:
        slower(driver, modules)
    driver.plans.together = lambda *arguments: found[-1]
    ask(modules[:2], driver, 6)
    assert [name for name, _ in driver.again] == ["decode" if is_slower else "kernel"] * 2
    found.append(GroupOutcome(0, 1.0))
    ask(modules, driver, 6)
    assert [name for name, _ in driver.again] == ["joint"]


def test_too_little_memory_for_what_is_remembered(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then it is made in the usual way, which says so or knows another one."""
    repeat = Products.repeat

    def repeat_with_much_memory(self: Products, x: torch.Tensor, bias: torch.Tensor | None) -> Repeat | None:
        found = repeat(self, x, bias)
        return found and found._replace(scratch=1 << 60)

    monkeypatch.setattr(Products, "repeat", repeat_with_much_memory)
    module = layer(0)
    for _ in range(6):
        module(x_of(1, 1))
        assert ways(driver) == (1, 0)


def test_two_threads_with_too_little_memory(driver: Driver) -> None:
    """The other one has forgotten the product before this one does, and both make it in the usual way."""
    module = layer(0)
    warm(module, driver)
    kept = resident(packed_of(module).data)
    assert kept is not None
    assert kept.shortcuts

    def out_of_memory(*arguments: Any) -> torch.Tensor:
        kept.forget_products()
        raise torch.OutOfMemoryError

    driver.empty = out_of_memory
    module(x_of(1, 1))
    assert ways(driver) == (1, 0)


def test_many_tokens_are_decoded_first(driver: Driver) -> None:
    module, found = layer(0, bias=True), []
    for _ in range(MANY_TIMES + 2):
        found.append(module(x_of(600)))
    usual, (name, again) = driver.usual[-1], driver.again[-1]
    assert (len(driver.usual), len(driver.again), name) == (MANY_TIMES, 2, "decode")
    assert [again[i] for i in (0, 1, 3)] == [usual[i] for i in (0, 1, 3)]
    assert again[2] != bytes(8)
    assert {y.shape for y in found} == {(600, 64)}
    module.bias.data = module.bias.data.clone()  # F.linear takes what there is
    module(x_of(600))
    assert ways(driver) == (MANY_TIMES, 3)


def decoding_together(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[nn.Linear]:
    """Layers, warmed up, whose weights are decoded with the first one's."""
    monkeypatch.setattr(carry, "_TOGETHER_WEIGHTS", 1 << 20)
    modules = [layer(0, rows=CARRIER_ROWS), layer(1), layer(2, bias=True)]
    for _ in range(8):
        for module in modules:
            module(x_of(600))
    ways(driver)
    return modules


def test_weights_that_are_decoded_with_the_first_one(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the usual way, by one launch; the products are torch's."""
    modules = decoding_together(driver, monkeypatch)
    modules[0](x_of(600))
    [(name, (told, division))] = driver.again
    assert (name, driver.usual) == ("decode_together", [])
    every = DecodedTogetherStructure.from_buffer_copy(told).tensors
    found = [prefetched_of(module) for module in modules[1:]]
    assert [each.output for each in every[1:3]] == [each[1].data_ptr() for each in found if each]
    assert [each[1].shape for each in found if each] == [module.weight.shape for module in modules[1:]]
    assert every[0].output not in (0, None)
    assert [each.packed.data for each in every[:3]] == [packed_of(module).data.data_ptr() for module in modules]
    assert [each.first_block for each in every[:4]][::3] == [0, (1 << 31) - 1]
    for number, (module, each) in enumerate(zip(modules[1:], found, strict=True), 1):
        assert each is not None
        each[1].copy_(matrix(number))
        x = matrix(9, rows=1).expand(600, K).contiguous()
        y = module(x)
        assert torch.equal(y.view(torch.int16), F.linear(x, matrix(number), module.bias).view(torch.int16))
        assert prefetched_of(module) is None
    driver.again.clear()
    assert ways(driver) == (0, 0)
    resident(packed_of(modules[0]).data).forget_products()  # type: ignore[union-attr]
    modules[0](x_of(600))
    [usual] = driver.usual
    as_usual = DecodedTogetherStructure.from_buffer_copy(usual[0])
    for one, other in zip(every, as_usual.tensors, strict=True):
        other.output = one.output
    assert (bytes(as_usual), usual[1]) == (told, division)


def test_a_loop_of_many_layers_settles(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """All launches are made by native code, a few rounds after it was noted what comes behind; the last one, too."""
    monkeypatch.setattr(carry, "_TOGETHER_WEIGHTS", 3 * 64 * K)
    modules = [layer(number) for number in range(41)]
    for _ in range(6):
        for module in modules:
            module(x_of(600))
    for _ in range(3):
        ways(driver)
        for module in modules:
            module(x_of(600))
        assert [name for name, _ in driver.again] == ["decode_together"] * 10 + ["decode"]
        assert not driver.usual


def test_a_loop_of_launches_of_both_kinds_settles(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks as Stable Diffusion XL's: squares that are decoded first, and two matrices whose launches have room for
    some of the others' weights, but take long for them: they do not take from each other what they decode.
    """
    one = 64 * K  # weights of a square
    prices = {"_FIRST_US": 1.5 / one, "_UNMEASURED_US": 1.5 / one, "_TOGETHER_WEIGHTS": 10 * one}
    for name, value in prices.items():
        monkeypatch.setattr(carry, name, value)
    outcomes = {
        64: Outcome(LinearPlan(1), "decoding first is faster", 19.9, 18.3, 1.4 / one),
        512: Outcome(LinearPlan(1), "", 91.7, 94.3, 0.8 / one),
        256: Outcome(LinearPlan(1), "", 46.7, 46.9, 2.3 / one),
    }
    memory = linear_job.Arrangement(0, K, 8, 0, (6 + MAX_PREFETCHED,), (4096,), part_steps=4)
    spares = {rows: linear_job.Spare(squares * one, 1 << 20, 1 << 20) for rows, squares in ((512, 7), (256, 5))}
    launches = {
        rows: linear_job.Launch("f.cu", f"relay_{rows}", 132, 16, 1000, (JOB,), memory, None, spare)
        for rows, spare in spares.items()
    }
    monkeypatch.setattr(
        linear_products, "nearest_launch", lambda header, *others: launches.get(header.shape[0], LAUNCH)
    )
    monkeypatch.setattr(prefetch, "is_prefetchable", lambda packed, launch, device: True)
    monkeypatch.setattr(linear_products, "_without_addresses", lambda packed: PrefetchedStructure())
    driver.plans.outcome = lambda key: outcomes[key.rows]
    modules = [layer(number, rows) for number, rows in enumerate([*[64] * 6, 512, 256] * 4)]
    driver.plans.known = {key_of(x_of(400), (rows, K), None): outcomes[rows] for rows in outcomes}
    for _ in range(8):
        ways(driver)
        for module in modules:
            module(x_of(400))
    names = [name for name, _ in driver.again if name != "arrange"]
    assert names == ["decode_together", "relay_512"] * 4  # of a block's squares and that of 256 rows
    assert not driver.usual


def test_weights_decoded_with_another_on_another_stream(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = decoding_together(driver, monkeypatch)
    modules[0](x_of(600))
    ways(driver)
    driver.stream = 8
    modules[1](x_of(600))
    assert ways(driver)[1] == 0
    assert prefetched_of(modules[1]) is None


def test_a_weight_that_changes_is_not_decoded_with_another(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = decoding_together(driver, monkeypatch)
    for module in modules:
        module(x_of(600))
    ways(driver)
    data = packed_of(modules[1]).data
    data.copy_(data.clone())
    modules[0](x_of(600))
    assert ways(driver) == (1, 0)
    assert prefetched_of(modules[1]) is None
    assert prefetched_of(modules[2]) is not None


def test_what_f_linear_is_given(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(recall, "F", SimpleNamespace(linear=lambda *given: seen.append(given) or given[0]))
    module = layer(0, bias=True)
    warm(module, driver, 600)
    x = x_of(600)
    assert module(x) is x
    (given, weight, bias), (_, told) = seen[-1], driver.again[-1]
    assert given is x
    assert bias is module.bias
    assert (weight.shape, weight.dtype) == ((64, K), torch.bfloat16)
    assert int.from_bytes(told[2], sys.byteorder) == weight.data_ptr()


class Watch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Tensor(torch.Tensor):
    pass


def change_stream(driver: Driver, module: nn.Linear) -> None:
    driver.stream = 8


def capture(driver: Driver, module: nn.Linear) -> None:
    driver.capturing = True


def change_bias(driver: Driver, module: nn.Linear) -> None:
    module.bias.add_(1)


def replace_bias(driver: Driver, module: nn.Linear) -> None:
    module.bias = nn.Parameter(module.bias.clone(), requires_grad=False)


def no_bias(driver: Driver, module: nn.Linear) -> None:
    module.bias = None


def change_bytes(driver: Driver, module: nn.Linear) -> None:
    module._parameters[packed_linear._DATA].add_(0)


def move_bytes(driver: Driver, module: nn.Linear) -> None:
    own = module._parameters[packed_linear._DATA]
    own.data = own.data.clone()


def replace_bytes(driver: Driver, module: nn.Linear) -> None:
    own = module._parameters
    own[packed_linear._DATA] = nn.Parameter(own[packed_linear._DATA].clone(), requires_grad=False)


@pytest.mark.parametrize(
    "change",
    [change_stream, capture, change_bias, replace_bias, no_bias, change_bytes, move_bytes, replace_bytes],
)
def test_anything_changed_goes_the_usual_way(driver: Driver, change: Callable[[Driver, nn.Linear], None]) -> None:
    module = layer(0, bias=True)
    warm(module, driver)
    module(x_of(1, 1))
    assert ways(driver) == (0, 1)
    change(driver, module)
    module(x_of(1, 1))
    assert ways(driver) == (1, 0)


def test_what_is_captured_takes_the_place_of_nothing(driver: Driver) -> None:
    module = layer(0)
    warm(module, driver)
    driver.stream, driver.capturing = 8, True
    for _ in range(3):
        module(x_of(1, 1))
    assert ways(driver) == (3, 0)
    driver.stream, driver.capturing = 7, False
    module(x_of(1, 1))
    assert ways(driver) == (0, 1)


def test_a_product_whose_bytes_another_thread_replaced_meanwhile(driver: Driver) -> None:
    module = layer(0)
    x = warm(module, driver)
    packed = packed_of(module)
    kept = resident(packed.data)
    assert kept is not None
    known = kept.calls[x.shape]
    change_bytes(driver, module)
    for _ in range(3):
        recall.remember(x, packed, None, known, known.products)
    assert not any(resident(packed.data).shortcuts.values())


def packed_of(module: nn.Linear) -> PackedTensor:
    header = module.sb_recipes["weight"].matrix
    return PackedTensor(header, module._parameters[packed_linear._DATA])


def test_gradients_of_inputs(driver: Driver) -> None:
    """The weight is decoded again, by native code from the third time on, and multiplied by torch."""
    module, grad = layer(0), torch.ones(3, 64, dtype=torch.bfloat16)
    for _ in range(2):
        dispatch.gradient(grad, packed_of(module))
        assert ways(driver) == (1, 0)
    seen = fill(driver)
    made = dispatch.gradient(grad, packed_of(module))
    [(name, told)], [weight] = driver.again, seen
    assert name == "decode"
    assert int.from_bytes(told[2], sys.byteorder) == weight.data_ptr()
    assert torch.equal(made.view(torch.int16), grad.mm(matrix(0)).view(torch.int16))
    assert ways(driver) == (0, 1)


def convolution() -> nn.Conv2d:
    made = nn.Conv2d(64, 64, 4, bias=False, dtype=torch.bfloat16).requires_grad_(False)
    made.weight.copy_(matrix(0).view(made.weight.shape))
    samebits.compress(made)
    return made


def image() -> torch.Tensor:
    return torch.ones(1, 64, 8, 8, dtype=torch.bfloat16)


def fill(driver: Driver) -> list[torch.Tensor]:
    """Has all that the native code allocates filled with ``matrix(0)``, as the kernel does; a list of it."""
    allocate, seen = driver.empty, list[torch.Tensor]()

    def allocated(*arguments: Any) -> torch.Tensor:
        made = allocate(*arguments)
        seen.append(made)
        return made.copy_(matrix(0).view(made.shape))

    driver.empty = allocated
    return seen


def test_weights_of_other_layers(driver: Driver) -> None:
    """Decoded by native code from the third time on."""
    module = convolution()
    for _ in range(2):
        module(image())
        assert ways(driver) == (1, 0)
    seen = fill(driver)
    found = module(image())
    [(name, told)], [weight] = driver.again, seen
    assert name == "decode"
    assert int.from_bytes(told[2], sys.byteorder) == weight.data_ptr()
    assert (weight.shape, weight.dtype, weight.is_contiguous()) == ((64, 64, 4, 4), torch.bfloat16, True)
    plain = F.conv2d(image(), matrix(0).view(64, 64, 4, 4))
    assert torch.equal(found.view(torch.int16), plain.view(torch.int16))
    assert ways(driver) == (0, 1)


@pytest.mark.parametrize(
    "change", [change_stream, capture, change_bytes, move_bytes, replace_bytes], ids=lambda change: change.__name__
)
def test_weights_of_what_has_changed(driver: Driver, change: Callable[[Driver, nn.Module], None]) -> None:
    module = convolution()
    for _ in range(3):
        module(image())
    assert ways(driver) == (2, 1)
    change(driver, module)
    module(image())
    assert ways(driver) == (1, 0)


class Operation(nn.Module):
    """Whose product is no nn.Linear's; ``seen``: its weight as its forward saw it, twice a call."""

    def __init__(self, seed: int, rows: int = 64, requires_grad: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(matrix(seed, rows), requires_grad=requires_grad)
        self.seen: list[tuple[Any, ...]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in (self.weight, self.weight):
            version = None if weight.is_inference() else weight._version
            self.seen.append((weight.requires_grad, weight.is_inference(), weight.is_leaf, weight._is_view(), version))
        return F.linear(x, self.weight)


def operation(seed: int, *, times: int = 0, **options: Any) -> Operation:
    """Packed, and called so many times."""
    made = Operation(seed, **options)
    samebits.compress(made)
    for _ in range(times):
        made(x_of(2))
    return made


MODES: dict[str, list[Callable[[], Any]]] = {
    "no_grad": [torch.no_grad],
    "grad": [torch.enable_grad],
    "inference": [torch.inference_mode],
    "bf16": [torch.no_grad, lambda: torch.autocast("cpu", torch.bfloat16)],
    "fp16": [torch.no_grad, lambda: torch.autocast("cpu", torch.float16)],
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_weight_shows_the_same_again(driver: Driver, mode: str, requires_grad: bool) -> None:
    module = operation(0, requires_grad=requires_grad)
    with ExitStack() as modes:
        for each in MODES[mode]:
            modes.enter_context(each())
        for _ in range(4):
            module(x_of(2))
    assert ways(driver) == (2, 2)
    assert len(set(module.seen[::2])) == len(set(module.seen[1::2])) == 1
    assert module.seen[0][0] == (requires_grad and mode not in ("grad", "fp16"))


def test_bytes_of_another_weight_are_looked_at(driver: Driver) -> None:
    """Though they have been decoded, for another module."""
    one, other = operation(0, times=3), operation(1, rows=128, times=3)
    with pytest.raises(SamebitsError):
        functional_call(one, dict(other.named_parameters()), (x_of(2),))


def test_bytes_that_two_share_are_looked_at_by_each(driver: Driver) -> None:
    one, other = operation(0), operation(0, times=3)
    one.sb_packed = other.sb_packed
    one(x_of(2))
    with torch.no_grad():
        one.sb_packed[-64:].add_(1)
    with pytest.raises(DigestError):
        one(x_of(2))


def test_a_comfyui_module_takes_its_bytes_to_its_input(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    class Cast(Operation):
        comfy_cast_weights = False

    module = Cast(0)
    samebits.compress(module)
    assert isinstance(module, PatchableModule)
    for _ in range(3):
        module(x_of(2))
    known = recall.decode_weight
    meta = torch.empty(64, K, dtype=torch.bfloat16, device="meta")
    monkeypatch.setattr(recall, "decode_weight", lambda packed: meta if packed.data.is_meta else known(packed))
    assert module(x_of(2).to("meta")).is_meta


def test_weights_that_a_mode_watches(driver: Driver) -> None:
    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **kwargs or {})

    module = convolution()
    for _ in range(3):
        module(image())
    ways(driver)
    with Watching():
        module(image())
    assert ways(driver) == (1, 0)
    with torch.autocast("cpu", torch.float16):  # which is nothing to a weight
        module(image())
    assert ways(driver) == (0, 1)


def changing(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> tuple[nn.Linear, Iterator[int]]:
    """A layer whose number of tokens changes from call to call, as long as that was learned; and numbers to come."""
    monkeypatch.setattr(call, "_waits", WAITS)
    module, numbers = layer(0, bias=True), iter(range(200, 500))
    for _ in range(5):
        module(x_of(next(numbers)))
    assert ways(driver) == (5, 0)
    return module, numbers


def test_numbers_of_tokens_that_change(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a new shape, and decoded first by native code all the same."""
    module, numbers, found = *changing(driver, monkeypatch), []
    fill(driver)
    for number in (next(numbers) for _ in range(100)):
        x = torch.randn(number, K).bfloat16()
        y, plain = module(x), F.linear(x, matrix(0), module.bias)
        assert {name for name, _ in driver.again} <= {"decode"}
        assert not driver.again or torch.equal(y.view(torch.int16), plain.view(torch.int16))
        found.append(ways(driver))
    assert sorted(found) == [(0, 1)] * 99 + [(1, 0)]  # whether they still change is looked at now and then


def test_a_number_of_tokens_that_has_a_plan(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """As samebits.prepare found it: that one is asked for in the usual way, and remembered."""
    module, numbers = changing(driver, monkeypatch)
    same, kept = next(numbers), resident(packed_of(module).data)
    assert kept is not None
    key = key_of(x_of(same), (64, K), module.bias)
    driver.plans.known[key] = driver.plans.outcome(key)
    kept.planned.add(same)
    found = []
    for _ in range(4):
        module(x_of(next(numbers)))
        module(x_of(same))
        found.append({name for name, _ in driver.again})
        ways(driver)
    assert found == [{"decode"}] * 2 + [{"decode", "kernel"}] * 2
    module(x_of(3))  # few tokens have plans
    assert ways(driver) == (1, 0)


@pytest.mark.parametrize(
    "change", [change_stream, capture, change_bytes, move_bytes, replace_bytes], ids=lambda change: change.__name__
)
def test_changing_numbers_of_tokens_of_what_has_changed(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, change: Callable[[Driver, nn.Module], None]
) -> None:
    module, numbers = changing(driver, monkeypatch)
    module(x_of(next(numbers)))
    assert ways(driver) == (0, 1)
    change(driver, module)
    module(x_of(next(numbers)))
    assert ways(driver) == (1, 0)


def test_inputs_that_torch_takes_for_a_matrix(driver: Driver) -> None:
    """A part of one sequence has strides of its own; it is made again by native code as any other."""
    module, found = layer(0, bias=True), list[tuple[int, int]]()
    for _ in range(4):
        y = module(x_of(1, 12)[:, 3:])
        assert y.shape == (1, 9, 64)
        found.append(ways(driver))
    assert found == [(1, 0)] * 2 + [(0, 1)] * 2


def test_products_of_one_input_without_a_plan(driver: Driver) -> None:
    """Each is made again by native code, whatever was asked for before it."""
    driver.plans.outcome = lambda key: Outcome(None, "none")
    modules = [layer(0), layer(1, rows=128), layer(2, rows=72)]
    for module in modules:
        driver.plans.known[key_of(x_of(1), (module.out_features, K), None)] = Outcome(None, "none")
    ask(modules, driver, 4)
    assert [name for name, _ in driver.again] == ["decode"] * 3
    assert not driver.usual


def test_inputs_with_gaps_of_changing_length(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes a batch of products of some, and these as it would of the plain weight."""
    module, numbers = changing(driver, monkeypatch)
    module(torch.zeros(next(numbers), 2 * K, dtype=torch.bfloat16)[:, :K])
    assert ways(driver) == (1, 0)


def test_gradients_and_products_of_one_shape(driver: Driver) -> None:
    """What is remembered of the one is nothing to the other."""
    module = layer(0, rows=K)
    warm(module, driver, 3)
    for _ in range(3):
        dispatch.gradient(x_of(3), packed_of(module))
    assert ways(driver) == (2, 1)
    assert driver.functions[-1] == "decode"
    module(x_of(3))
    assert ways(driver) == (0, 1)


@pytest.mark.parametrize(
    "change", [change_stream, capture, change_bytes, move_bytes, replace_bytes], ids=lambda change: change.__name__
)
def test_gradients_of_what_has_changed(driver: Driver, change: Callable[[Driver, nn.Linear], None]) -> None:
    module, grad = layer(0), torch.ones(3, 64, dtype=torch.bfloat16)
    for _ in range(3):
        dispatch.gradient(grad, packed_of(module))
    assert ways(driver) == (2, 1)
    change(driver, module)
    dispatch.gradient(grad, packed_of(module))
    assert ways(driver) == (1, 0)


def test_gradients_that_want_gradients(driver: Driver) -> None:
    module, grad = layer(0), torch.ones(3, 64, dtype=torch.bfloat16)
    for _ in range(3):
        dispatch.gradient(grad, packed_of(module))
    ways(driver)
    assert dispatch.gradient(grad.requires_grad_(), packed_of(module)).requires_grad
    assert ways(driver) == (1, 0)


def test_gradients_are_forgotten_with_the_weight(driver: Driver) -> None:
    gc.collect()
    module, before = layer(0), len(gradients)
    for _ in range(3):
        dispatch.gradient(torch.ones(3, 64, dtype=torch.bfloat16), packed_of(module))
    assert len(gradients) == before + 1
    del module
    gc.collect()
    assert len(gradients) == before


def test_training_decodes_nothing_ahead(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = carrying(driver, monkeypatch, steps=0)
    for _ in range(12):
        with torch.no_grad():  # as inside of an operation of autograd's
            [module(x_of(1, 1).requires_grad_()) for module in modules]
    assert all(prefetched_of(module) is None for module in modules[1:])
    assert not resident(modules[0]._parameters[packed_linear._DATA]).carriers
    assert len(driver.again) > 0


def train(modules: list[nn.Linear]) -> None:
    """What an operation of autograd's does."""
    with torch.no_grad():
        [module(x_of(1, 1).requires_grad_()) for module in modules]


def test_training_and_not_in_turns(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only outside of training weights are decoded ahead; both are made again by native code."""
    modules = carrying(driver, monkeypatch)
    for _ in range(3):
        train(modules)
    ways(driver)
    for _ in range(2):
        train(modules)
        assert ways(driver) == (0, len(modules) + 1)  # the carrier has its memory arranged
        assert all(prefetched_of(module) is None for module in modules)
        modules[0](x_of(1, 1))
        assert all(prefetched_of(module) for module in modules[1:])
        [module(x_of(1, 1)) for module in modules[1:]]
        assert ways(driver) == (0, 2)


@pytest.mark.parametrize("result", [0, 719])
def test_a_device_that_is_not_the_current_one(driver: Driver, result: int) -> None:
    """Products are made on their input's, and the current one stays; whatever happens."""
    module = layer(0)
    warm(module, driver)
    driver.device, driver.result = 1, result
    with pytest.raises(DeviceError, match="719") if result else nullcontext():
        module(x_of(1, 1))
    assert ways(driver) == (0, 1)
    assert driver.device == 1
    driver.result, driver.stream = 0, 8
    module(x_of(1, 1))  # in the usual way
    assert driver.device == 1


def test_a_device_that_cannot_be_left(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device: int) -> int:
        raise RuntimeError(f"no device {device}")

    module = layer(0)
    warm(module, driver)
    monkeypatch.setattr(torch._C, "_cuda_maybeExchangeDevice", refuse, raising=False)
    monkeypatch.setattr(dispatch, "product_again", recall.recall_of(dispatch.together.turns).product)
    driver.device = 1
    with pytest.raises(RuntimeError, match="no device 1"):
        module(x_of(1, 1))


@pytest.mark.parametrize("raising", ["_cuda_exchangeDevice", "shape"])
def test_what_cannot_be_asked_goes_the_usual_way(driver: Driver, raising: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's device in a forked process, or a nested tensor's shape."""

    def refuse(*_: object) -> None:
        raise RuntimeError("cannot")

    module = layer(0)
    warm(module, driver)
    if raising == "shape":
        x = torch.nested.nested_tensor([x_of(2)])
        monkeypatch.setattr("samebits.nn.product._is_plain", lambda tensor: False)
    else:
        x = x_of(1, 1)
        monkeypatch.setattr(torch._C, raising, refuse, raising=False)
        monkeypatch.setattr(dispatch, "product_again", recall.recall_of(dispatch.together.turns).product)
    module(x)
    assert not driver.again


def test_other_inputs_go_the_usual_way(driver: Driver) -> None:
    module = layer(0)
    warm(module, driver, 2)
    room = torch.zeros(4 * K + 8, dtype=torch.bfloat16)
    data = module._parameters[packed_linear._DATA]
    for x in (room[1:][: 2 * K].view(2, K), room[: 4 * K].view(2, 2 * K)[:, :K], room[: 2 * K].view(K, 2).t()):
        dispatch.product_again(x_of(2), data, None)  # is remembered
        assert ways(driver) == (0, 1)
        assert dispatch.product_again(x, data, None) is None
    for x in (x_of(2).float(), x_of(2).as_subclass(Tensor), x_of(2).requires_grad_(), x_of(3)):
        assert dispatch.product_again(x, data, None) is None
    with torch.no_grad():  # in training, of which nothing is remembered yet
        assert dispatch.product_again(x_of(2).requires_grad_(), data, None) is None


def test_settings_of_torch(driver: Driver) -> None:
    module = layer(0)
    warm(module, driver)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(not before)
    try:
        module(x_of(1, 1))
        assert ways(driver) == (1, 0)
        module(x_of(1, 1))
        assert ways(driver) == (0, 1)  # remembered anew
    finally:
        torch.use_deterministic_algorithms(before)
    module(x_of(1, 1))
    assert ways(driver) == (1, 0)


@contextmanager
def autocast(dtype: torch.dtype) -> Iterator[None]:
    """torch.autocast for a GPU that is not there."""
    before = torch.get_autocast_dtype("cuda")
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", before)


def test_who_asks_for_more_than_values(driver: Driver) -> None:
    module = layer(0, bias=True)
    data, bias = module._parameters[packed_linear._DATA], module.bias
    warm(module, driver)

    def again(b: torch.Tensor | None = bias) -> bool:
        return dispatch.product_again(x_of(1, 1), data, b) is not None

    assert again()
    with autocast(torch.float16):
        assert not again()
    with autocast(torch.bfloat16):
        assert again()
    with forward_ad.dual_level():
        assert not again()
    with Watch():
        assert not again()
    asked = []
    torch.func.vmap(lambda v: asked.append(again()) or v)(torch.zeros(2))
    torch.jit.trace(lambda v: asked.append(again()) or v + 1, torch.zeros(2), check_trace=False)
    assert asked == [False, False]
    bias.requires_grad_()
    assert not again()
    bias.requires_grad_(False)
    with torch.inference_mode():
        assert not again(bias.clone())
    assert again()


def test_inference_tensors(driver: Driver) -> None:
    """Have no version, so nothing is made for others; alone they may be multiplied again."""
    module = layer(0)
    warm(module, driver)
    turn = dispatch.together.turns.last.now()
    with torch.inference_mode():
        y = module(x_of(1, 1))
    assert ways(driver) == (0, 1)
    assert y.is_inference()
    assert dispatch.together.turns.last.now() is turn


def test_the_drivers_error(driver: Driver) -> None:
    module = layer(0)
    warm(module, driver)
    driver.result = 700
    with pytest.raises(DeviceError, match="700"):
        module(x_of(1, 1))


def test_other_threads_go_on_while_the_driver_waits(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver is a semaphore, for which it waits until another thread of Python's lets it go on."""
    libc, semaphore = ctypes.CDLL(None), ctypes.create_string_buffer(64)
    latest = (ctypes.c_long * 2)(int(time.time()) + 20, 0)  # else an error
    own = nvrtc.Configured(SimpleNamespace(getPtr=lambda: ctypes.addressof(semaphore)), ctypes.addressof(latest))
    monkeypatch.setattr(nvrtc, "launch_address", lambda: ctypes.cast(libc.sem_timedwait, ctypes.c_void_p).value)
    monkeypatch.setattr(nvrtc, "configured", lambda *settings: own)
    libc.sem_init(semaphore, 0, 8)
    module = layer(0)
    warm(module, driver)
    while not libc.sem_trywait(semaphore):
        pass

    def let_go() -> None:
        time.sleep(0.2)
        libc.sem_post(semaphore)

    other = threading.Thread(target=let_go)
    other.start()
    y = module(x_of(1, 1))
    other.join()
    assert y.shape == (1, 1, 64)
    assert ways(driver) == (0, 0)


def test_each_thread_has_its_turn(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "any", lambda self: True)
    modules = [layer(0), layer(1)]
    ask(modules, driver, 4)
    x = x_of(1, 1)
    modules[0](x)
    ways(driver)
    other = threading.Thread(target=lambda: modules[1](x))
    other.start()
    other.join(60)
    assert ways(driver) == (1, 0)
    modules[1](x)
    assert ways(driver) == (0, 0)


def test_nothing_is_kept_alive(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "any", lambda self: True)
    modules = [layer(0, bias=True), layer(1, bias=True)]
    data = [module._parameters[packed_linear._DATA] for module in modules]
    watched = (*data, *(module.bias for module in modules), torch.bfloat16, x_of(1, 1).shape)

    def step() -> weakref.ref[torch.Tensor]:
        x = x_of(1, 1)
        y = [module(x) for module in modules]
        return weakref.ref(y[1])

    for _ in range(4):
        step()
    before = [sys.getrefcount(each) for each in watched]
    dead = [step() for _ in range(1000)]
    assert len(driver.again) >= 1000
    assert [sys.getrefcount(each) for each in watched] == before
    assert not any(ref() is not None for ref in dead)
    refs = [weakref.ref(each) for each in data]
    known = [id(each) for each in data]
    assert all(each in residents for each in known)
    modules.clear()
    del data, watched
    gc.collect()
    assert not any(ref() is not None for ref in refs)
    assert not any(each in residents for each in known)


def test_no_more_shapes_than_there_is_room_for(driver: Driver) -> None:
    module = layer(0)
    for tokens in range(1, 40):
        warm(module, driver, tokens)
    kept = resident(module._parameters[packed_linear._DATA])
    assert kept is not None
    assert 1 <= len(kept.shortcuts) <= MAX_SHAPES


GOOD = {
    "device": 0, "strides": (1,), "state": None, "where": (7, 0), "bias": None, "ids": None, "joins": False,
    "group": None, "others": (), "plans": (), "prefetched": (), "allocations": ((),), "scratch": None,
    "room": bytes(16), "patches": ((8, 1, 0),), "launches": ((1, 1, (0,)),), "start": 1, "failed": None,
    "finish": None, "kept": None,
}  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"patches": ((9, 1, 0),)},  # behind the room
        {"patches": ((0, 2, 0),)},  # no such address
        {"patches": ((0, 1),)},
        {"patches": ((8, 1, 0),) * 100},
        {"launches": ()},
        {"launches": ((1, 1, (16,)),)},
        {"launches": ((1, 1, (-1,)),)},
        {"launches": ((1, 1, (0,) * 9),)},
        {"allocations": ()},
        {"allocations": ((),) * 5},
        {"allocations": (None,)},
        {"scratch": 1},
        {"ids": 1},
        {"ids": (1, 2)},
        {"ids": (1, 2, 3), "patches": ((8, 3, 0),)},
        {"scratch": (), "patches": ((8, 3, 0),)},
        {"others": (1,)},
        {"where": (7,)},
        {"start": 0},
        {"room": "text"},
        {"room": bytes(8193)},
        {"prefetched": (1,)},
        {"prefetched": (1,) * 9, "allocations": ((),) * 10},
    ],
)
def test_fields_that_do_not_fit(wrong: dict[str, Any]) -> None:
    assert recall.native is not None
    recall.native.Shortcut(**GOOD)
    with pytest.raises((ValueError, TypeError)):
        recall.native.Shortcut(**GOOD | wrong)


def test_the_largest_launch_fits() -> None:
    """Of as many weights as one takes, behind a kernel that arranges their input, with as many decoded ahead."""
    assert recall.native is not None
    room = bytes(ctypes.sizeof(TogetherStructure) + ctypes.sizeof(ArrangementStructure))
    patches = MAX_TOGETHER * (4 + 2 * MAX_PREFETCHED) + 3  # Products.repeat
    every = ((),) * (MAX_TOGETHER + MAX_PREFETCHED)
    others = {"others": (1,) * (MAX_TOGETHER - 1), "plans": (1,) * (MAX_TOGETHER - 1)}
    largest = {
        "room": room,
        "patches": ((0, 1, 0),) * patches,
        "allocations": every,
        "prefetched": (1,) * MAX_PREFETCHED,
    }
    recall.native.Shortcut(**GOOD | others | largest)


def stack() -> PackedTensor:
    """Two experts' matrices [128, K]."""
    return samebits.encode(torch.stack([matrix(0, 128), matrix(1, 128)]))


def experts_stack() -> Any:
    """A packed module with such matrices."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.stack([matrix(0, 128), matrix(1, 128)]), requires_grad=False)
    samebits.compress(module)
    return module


Operands = tuple[torch.Tensor, PackedTensor, torch.Tensor]


def routed(dtype: torch.dtype = torch.int64, packed: PackedTensor | None = None) -> Operands:
    """Six rows, a stack, and each row's expert."""
    return x_of(6), packed or stack(), torch.arange(6).remainder(2).to(dtype)


def multiply(x: torch.Tensor, packed: PackedTensor, ids: torch.Tensor) -> torch.Tensor:
    """As an experts module does: with rows in the order of their experts where indices have 32 bits."""
    made = dispatch.experts_again(x, packed.data, ids)
    offsets = torch.tensor([3, 6], dtype=torch.int32) if ids.dtype is torch.int32 else None
    return experts.multiply_experts(x, packed, ids, offsets) if made is None else made


def warm_experts(driver: Driver, dtype: torch.dtype = torch.int64) -> Operands:
    """Until they are remembered."""
    x, packed, ids = routed(dtype)
    for _ in range(3):
        multiply(x, packed, ids)
    ways(driver)
    return x, packed, ids


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_routed_experts(driver: Driver, dtype: torch.dtype) -> None:
    """The third time by native code, which hands over what was handed over before, but for where x, y and ids are."""
    packed, told = stack(), []
    for _ in range(3):
        x, _, ids = routed(dtype, packed)
        y = multiply(x, packed, ids)
        assert (y.shape, y.dtype) == ((6, 128), torch.bfloat16)
        told.append([x.data_ptr(), y.data_ptr(), ids.data_ptr()])
    assert len(driver.usual) == 2
    [(name, again)] = driver.again
    assert name == EXPERTS
    for arguments, addresses in zip([*driver.usual, again], told, strict=True):
        job, routing = JobStructure.from_buffer_copy(arguments[2]), RoutingStructure.from_buffer_copy(arguments[3])
        assert [job.x, job.y, routing.ids] == addresses
        assert (routing.pairs, routing.wide, routing.scales) == (6, dtype is torch.int64, None)
        assert without_addresses(arguments) == without_addresses(driver.usual[0])


def test_many_pairs_of_each_expert(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three launches, with memory for what the first two leave the last."""
    monkeypatch.setattr(nvrtc, "has_wgmma", lambda device: True)
    number = next(i for i, variant in enumerate(linear_experts.VARIANTS) if variant.input is Input.ARRANGED)
    driver.plans.experts = lambda key, packed: ExpertsOutcome(number, "", 1.0, 2.0)
    packed, told, made = stack(), [], driver.empty
    linear_experts.launch_of.cache_clear()
    kept: list[torch.Tensor] = []
    driver.empty = lambda *arguments: kept.append(made(*arguments)) or kept[-1]
    for _ in range(3):
        x, ids = x_of(12), torch.arange(12).remainder(2)
        y = multiply(x, packed, ids)
        told.append([x.data_ptr(), y.data_ptr(), ids.data_ptr()])
    launch = linear_experts.launch_of(packed.header, 12, 1, number, DEVICE)
    linear_experts.launch_of.cache_clear()
    assert launch is not None
    assert [name for name, _ in driver.again] == [*ROUTED]
    assert len(driver.usual) == 6
    y, scratch = kept
    assert scratch.nbytes >= launch.scratch_bytes
    for (name, arguments), usual in zip(driver.again, driver.usual, strict=False):
        fields = {kind: kind.from_buffer_copy(own) for kind, own in zip(ROUTED[name], arguments, strict=True)}
        job, routing = fields[JobStructure], fields[RoutingStructure]
        assert [job.x, job.y, routing.ids] == told[2]
        assert (job.parts, job.done) == (scratch.data_ptr(), scratch.data_ptr() + launch.arranged_bytes)
        before = JobStructure.from_buffer_copy(usual[ROUTED[name].index(JobStructure)])
        assert before.done - before.parts == launch.arranged_bytes


def without_addresses(arguments: list[bytes]) -> tuple[list[bytes], bytes, bytes]:
    job, routing = JobStructure.from_buffer_copy(arguments[2]), RoutingStructure.from_buffer_copy(arguments[3])
    job.x = job.y = routing.ids = None
    return arguments[:2], bytes(job), bytes(routing)


def other_stream(driver: Driver, x: torch.Tensor, packed: PackedTensor, ids: torch.Tensor) -> Operands:
    driver.stream = 8
    return x, packed, ids


def captured(driver: Driver, x: torch.Tensor, packed: PackedTensor, ids: torch.Tensor) -> Operands:
    driver.capturing = True
    return x, packed, ids


def written(driver: Driver, x: torch.Tensor, packed: PackedTensor, ids: torch.Tensor) -> Operands:
    packed.data.add_(0)
    return x, packed, ids


def narrow(driver: Driver, x: torch.Tensor, packed: PackedTensor, ids: torch.Tensor) -> Operands:
    return x, packed, ids.int()


def fewer(driver: Driver, x: torch.Tensor, packed: PackedTensor, ids: torch.Tensor) -> Operands:
    return x[:5], packed, ids[:5]


@pytest.mark.parametrize("change", [other_stream, captured, written, narrow, fewer])
def test_routed_experts_of_what_has_changed(driver: Driver, change: Callable[..., Operands]) -> None:
    operands = warm_experts(driver)
    multiply(*operands)
    assert ways(driver) == (0, 1)
    multiply(*change(driver, *operands))
    assert ways(driver) == (1, 0)


def test_indices_that_do_not_fit_go_the_usual_way(driver: Driver) -> None:
    x, packed, ids = warm_experts(driver)
    apart = ids.repeat_interleave(2)[::2]
    for wrong in (
        ids[:5],
        ids.view(2, 3),
        apart,
        ids.float(),
        ids.as_subclass(Tensor),
        torch.nested.nested_tensor([ids]),
    ):
        assert dispatch.experts_again(x, packed.data, wrong) is None
    for other in (x.float(), x[:, :8], x[:5], x.as_strided((6, K), (0, 1))):
        assert dispatch.experts_again(other, packed.data, ids) is None
    assert dispatch.experts_again(x, stack().data, ids) is None
    assert ways(driver) == (0, 0)
    assert dispatch.experts_again(x, packed.data, ids) is not None


def test_operations_of_experts_are_not_taken_for_each_other(driver: Driver) -> None:
    """Their plans are others: a product of gathered matrices is not that of sorted rows, whatever its indices are."""
    module = experts_stack()
    x, ids = x_of(6), torch.arange(6, dtype=torch.int32) % 2
    for _ in range(3):
        _Routed(module, "weight", _Route(ids)).product(x, torch.tensor([3, 6], dtype=torch.int32))
    assert ways(driver) == (2, 1)
    for _ in range(3):
        _Gathered(module, "weight", _Route(ids)).product(x)
    assert ways(driver) == (3, 0)


def test_rows_of_a_route() -> None:
    route, offsets = _Route(torch.zeros(4, 2)), torch.tensor([3, 3, 7, 8], dtype=torch.int32)
    ids = route.sorted_ids(offsets, 8)
    assert (ids.dtype, ids.tolist()) == (torch.int32, [0, 0, 0, 2, 2, 2, 2, 3])
    assert route.sorted_ids(offsets, 8) is ids
    assert route.sorted_ids(offsets, 9).tolist() == [*ids.tolist(), 4]  # of no expert
    assert route.sorted_ids(torch.tensor([1, 2]), 2).tolist() == [0, 1]


def test_indices_of_another_type_take_the_place(driver: Driver) -> None:
    x, packed, ids = warm_experts(driver)
    multiply(x, packed, ids.int())
    multiply(x, packed, ids.int())
    assert ways(driver) == (1, 1)


def test_experts_bytes_of_another_module_are_looked_at(driver: Driver) -> None:
    def product(module: Any) -> object:
        return _Gathered(module, "weight", _Route(torch.arange(6) % 2)).product(x_of(6))

    one, other = experts_stack(), experts_stack()
    for _ in range(3):
        product(other)
    assert ways(driver) == (2, 1)
    one.sb_packed = other.sb_packed
    product(one)
    with torch.no_grad():
        other.sb_packed[-64:].add_(1)  # type: ignore[operator]
    with pytest.raises(DigestError):
        product(one)


def test_experts_and_products_are_not_taken_for_each_other(driver: Driver) -> None:
    x, packed, ids = warm_experts(driver)
    assert dispatch.product_again(x, packed.data, None) is None
    module = layer(0)
    other = warm(module, driver, 6)
    assert dispatch.experts_again(other, module._parameters[packed_linear._DATA], ids) is None  # type: ignore[arg-type]
    assert ways(driver) == (0, 0)


def test_settings_of_torch_and_experts(driver: Driver) -> None:
    operands = warm_experts(driver)
    before = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    try:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = not before
        multiply(*operands)
        assert ways(driver) == (1, 0)
    finally:
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = before
    multiply(*operands)
    with Watch():
        assert dispatch.experts_again(operands[0], operands[1].data, operands[2]) is None


def test_experts_keep_nothing_alive(driver: Driver) -> None:
    x, packed, ids = warm_experts(driver)
    key = id(packed.data)
    watched = [x, packed.data, ids, residents[key], residents[key].shortcuts[x.shape]]
    counts = [sys.getrefcount(each) for each in watched]
    dead = [weakref.ref(multiply(x, packed, ids)) for _ in range(1000)]
    assert ways(driver) == (0, 1000)
    assert [sys.getrefcount(each) for each in watched] == counts
    assert not any(ref() is not None for ref in dead)
    del packed, watched
    assert key not in residents


def test_without_the_native_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "native", None)
    for made in (recall.recall_of(dispatch.together.turns), recall.recall_of_gradients()):
        assert made.product(x_of(1), torch.zeros(1), None) is None
        assert made.weight(torch.zeros(1)) is None
        assert made.experts(x_of(1), torch.zeros(1), torch.zeros(1, dtype=torch.int64)) is None


def test_constants_are_those_of_the_native_part() -> None:
    source = Path(recall.__file__).with_name("recall.c").read_text()
    assert f"MAX_PRODUCTS = {MAX_TOGETHER}, MAX_PREFETCHED = {MAX_PREFETCHED}," in source
