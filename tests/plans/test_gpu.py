"""Plans on a GPU: samebits::linear gives F.linear's bytes, whatever the operands and torch's settings are."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import identity
import samebits
from samebits.kernels.decode_together import DecodeTogether
from samebits.kernels.linear.launch import MAX_HOPPER_TOKENS
from samebits.kernels.linear.products import Operands, Products, is_supported
from samebits.kernels.ops import fields_of
from samebits.kernels.residents import resident
from samebits.plans import dispatch, group, planner, recall
from samebits.plans.call import plan_of
from samebits.plans.carrier import Choice
from samebits.plans.environment import Environment
from samebits.plans.key import key_of
from samebits.plans.planner import Planner
from samebits.plans.probe import Probe
from tests.plans.conftest import decode_beside_products_alone, new_process

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_plans")]
COMBINATIONS = int(os.environ.get("SAMEBITS_FUZZ", "60"))
ROWS, COLUMNS = 4096, 4096
_LEARNED = 8  # rounds in which it is learned what is made together, what comes behind, and what to decode ahead


@pytest.fixture(scope="module")
def weight() -> torch.Tensor:
    """Its sums cancel under ``inputs``, so that another order of sums cannot hide."""
    return Probe.make(ROWS, COLUMNS, torch.device("cuda"), 17).weight


def inputs(tokens: int, seed: int = 0) -> torch.Tensor:
    return Probe.make(8, COLUMNS, torch.device("cuda"), 17).cancelling(tokens, seed)


def assert_same(left: torch.Tensor, right: torch.Tensor) -> None:
    assert left.shape == right.shape
    assert torch.equal(left.view(torch.int16), right.view(torch.int16))


def product(x: torch.Tensor, packed: samebits.PackedTensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return torch.ops.samebits.linear(x, packed.data, bias, list(packed.shape), fields_of(packed.header))


def test_random_products() -> None:
    """More of them with SAMEBITS_FUZZ=1000, or by benchmarks/identity.py."""
    rows = identity.run(COMBINATIONS, seed=1)
    assert [row for row in rows if row["different"]] == []
    assert rows[0]["fused"] + rows[0]["decoded_first"] == COMBINATIONS


@pytest.mark.parametrize("tokens", [1, 8])
def test_some_products_are_fused(weight: torch.Tensor, tokens: int) -> None:
    """Where the kernel takes the shape, a plan exists on the GPUs it was made for."""
    packed = samebits.encode(weight)
    if not is_supported(packed.header, tokens, 0):
        pytest.skip("no fused kernel for this shape")
    outcome = samebits.prepare(_layer(weight), batch_sizes=(tokens,)).products[0].outcome
    assert outcome.plan is not None, outcome.reason
    assert outcome.fused_us < outcome.decode_us


def _layer(weight: torch.Tensor, bias: torch.Tensor | None = None) -> nn.Module:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.clone(), requires_grad=False)
    samebits.compress(layer)
    return layer


SETTINGS: dict[str, Callable[[], object]] = {
    "cublaslt": lambda: torch.backends.cuda.preferred_blas_library("cublaslt"),
    "no reduction": lambda: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "carveout": lambda: torch._C._set_sm_carveout_experimental(40),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_that_change_on_the_way(weight: torch.Tensor, setting: str) -> None:
    packed, x, bias = samebits.encode(weight), inputs(4), torch.randn(ROWS, device="cuda").bfloat16() * 1e-6
    library = torch.backends.cuda.preferred_blas_library()
    assert_same(product(x, packed, bias), F.linear(x, weight, bias))
    try:
        SETTINGS[setting]()
        for case in (None, bias):
            assert_same(product(x, packed, case), F.linear(x, weight, case))
            assert_same(product(x, packed, case), F.linear(x, weight, case))
    finally:
        torch.backends.cuda.preferred_blas_library(library)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
        torch._C._set_sm_carveout_experimental(None)
    assert_same(product(x, packed, bias), F.linear(x, weight, bias))


def test_a_workspace_configured_on_the_way(weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    packed, x = samebits.encode(weight), inputs(4)
    assert_same(product(x, packed), F.linear(x, weight))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    assert plan_of(x, packed, None) is None
    with torch.cuda.stream(torch.cuda.Stream()):
        assert_same(product(x, packed), F.linear(x, weight))
    torch.cuda.synchronize()


def test_a_plan_from_disk(weight: torch.Tensor) -> None:
    packed, x = samebits.encode(weight), inputs(1)
    first = plan_of(x, packed, None)
    new_process()
    assert plan_of(x, packed, None) == first
    assert_same(product(x, packed), F.linear(x, weight))


def test_captured_before_and_after_a_plan_is_known(weight: torch.Tensor) -> None:
    layer, x = _layer(weight), inputs(2)
    samebits.decode(samebits.encode(weight))  # compiles
    torch.cuda.synchronize()
    for _ in range(2):  # at first nothing is known, and capture must not look for it
        F.linear(x, weight)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            output = layer(x)
        for seed in range(3):
            x.copy_(inputs(2, seed))
            graph.replay()
            assert_same(output, F.linear(x, weight))
        samebits.prepare(layer, batch_sizes=(2,))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(weight: torch.Tensor, backend: str) -> None:
    """An opaque operator in the graph: the same kernel as without the compiler."""
    layer, x = _layer(weight), inputs(2)[None]
    torch.compiler.reset()
    with torch.no_grad():
        assert_same(torch.compile(layer, backend=backend, fullgraph=True)(x), F.linear(x, weight))


def test_one_compiled_row_is_not_decoded_first(weight: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stride of its one row is 0 there."""
    layer, x = _layer(weight), inputs(1)[None]
    if samebits.prepare(layer, batch_sizes=(1,)).products[0].outcome.plan is None:
        pytest.skip("no fused kernel for this shape")
    strides = []

    def decode(packed: samebits.PackedTensor) -> torch.Tensor:
        raise AssertionError("decoded first")

    def call_of(x: torch.Tensor, packed: samebits.PackedTensor, bias: torch.Tensor | None) -> object:
        strides.append(x.stride())
        return original(x, packed, bias)

    original = dispatch.call_of
    monkeypatch.setattr(dispatch, "decode_cuda", decode)
    monkeypatch.setattr(dispatch, "call_of", call_of)
    torch.compiler.reset()
    with torch.no_grad():
        y = torch.compile(lambda x: layer(x * 2), fullgraph=True)(x)
    assert_same(y, F.linear(x * 2, weight))
    assert strides == [(0, 1)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("stride", [0, COLUMNS + 8, 2 * COLUMNS])
def test_one_row_of_any_stride(weight: torch.Tensor, stride: int, bias: bool) -> None:
    values = torch.randn(ROWS, device="cuda").bfloat16() * 1e-6 if bias else None
    layer = _layer(weight, values)
    packed = samebits.PackedTensor.from_data(layer.sb_packed)
    samebits.prepare(layer, batch_sizes=(1,))
    for seed in range(20):
        x = torch.cat([inputs(1, seed), inputs(1, seed + 100)], 1).as_strided((1, COLUMNS), (stride, 1))
        assert key_of(x, packed.shape, values) is not None
        expected = F.linear(x, weight, values)
        assert_same(product(x, packed, values), expected)
        assert_same(layer(x), expected)
        assert_same(torch.mm(x, weight.T) if values is None else torch.addmm(values, x, weight.T), expected)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(1,), (1, 1), (8, 1), (1, 16), (2, 100), (1, 1, 4)], ids=str)
def test_modules(weight: torch.Tensor, shape: tuple[int, ...], bias: bool) -> None:
    values = torch.randn(ROWS, device="cuda").bfloat16() * 1e-6 if bias else None
    layer, x = _layer(weight, values), inputs(torch.Size(shape).numel()).view(*shape, COLUMNS)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            assert_same(layer(x), F.linear(x, weight, values))


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("tokens", [1, 8, 40, 300])
def test_parts_of_a_sequence(
    weight: torch.Tensor, tokens: int, bias: bool, trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix to torch with a bias, or if the weight has requires_grad; else it multiplies by another routine."""
    dense = nn.Linear(COLUMNS, ROWS, bias=bias, dtype=torch.bfloat16, device="cuda").requires_grad_(trained)
    with torch.no_grad():
        dense.weight.copy_(weight)
        if bias:
            dense.bias.mul_(1e-6)
    layer, usual, seen = copy.deepcopy(dense), dispatch.linear_of_module, list[torch.Tensor]()

    def noted(x: torch.Tensor, packed: samebits.PackedTensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append(x)
        return usual(x, packed, bias)

    monkeypatch.setattr(dispatch, "linear_of_module", noted)
    samebits.compress(layer)
    samebits.prepare(layer, batch_sizes=(tokens,))
    with torch.no_grad():
        for seed in range(4):
            x = inputs(tokens + 24, seed)[None][:, 8 : tokens + 8]
            assert_same(layer(x), dense(x))
    assert bool(seen) is (bias or trained)


def test_vmap(weight: torch.Tensor) -> None:
    layer, x = _layer(weight), inputs(6).view(2, 3, COLUMNS)
    dense = nn.Linear(COLUMNS, ROWS, bias=False, dtype=torch.bfloat16, device="cuda").requires_grad_(False)
    dense.weight.copy_(weight)
    assert_same(torch.vmap(layer)(x), torch.vmap(dense)(x))


def test_nothing_is_left_behind(weight: torch.Tensor) -> None:
    """Looking for a plan leaves neither memory nor another random state."""
    packed, x = samebits.encode(weight), inputs(3)
    F.linear(x, weight)
    state = torch.cuda.get_rng_state()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    plan_of(x, packed, None)
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(torch.cuda.get_rng_state(), state)


def test_the_environment_names_what_is_there() -> None:
    here = Environment.of(0)
    assert here.device.startswith(torch.cuda.get_device_name(0))
    assert here.multiprocessors == torch.cuda.get_device_properties(0).multi_processor_count
    assert here.torch == torch.__version__
    assert here.cublas[0].isdigit() or here.cublas.startswith("linked")
    assert here.driver[0].isdigit()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_device_has_plans_of_its_own(weight: torch.Tensor) -> None:
    other = weight.to("cuda:1")
    packed, x = samebits.encode(other), inputs(2).to("cuda:1")
    assert_same(product(x, packed), F.linear(x, other))
    assert torch.cuda.current_device() == 0
    assert not Planner.of(0).known


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@torch.no_grad()
def test_products_made_again_on_another_device() -> None:
    """Layers of a model that is divided between GPUs run there, while the first one stays current."""
    if recall.native is None:
        pytest.skip("the native part is not compiled here")
    weights = [Probe.make(rows, COLUMNS, torch.device("cuda"), rows).weight.to("cuda:1") for rows in (4096, 1024, 1024)]
    layers = nn.ModuleList([_layer(weight) for weight in weights])
    samebits.prepare(layers, batch_sizes=(1,))
    for seed in range(10):
        x = inputs(1, seed).to("cuda:1")
        for layer, weight in zip(layers, weights, strict=True):
            made = dispatch.product_again(x, layer.get_parameter("sb_packed"), None)
            assert made is not None or seed < 4
            assert_same(layer(x) if made is None else made, F.linear(x, weight))
            assert torch.cuda.current_device() == 0


@pytest.fixture
def joint(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many products each launch of several made."""
    launches: list[int] = []

    class Counted(Products):
        def __call__(
            self, x: torch.Tensor, bias: torch.Tensor | None, operands: Callable[[], Sequence[Operands]]
        ) -> list[torch.Tensor]:
            made = super().__call__(x, bias, operands)
            launches.append(len(made))
            return made

    monkeypatch.setattr(group, "Products", Counted)
    return launches


@pytest.mark.parametrize("tokens", [1, 8, 1024])
def test_products_of_one_input_together(tokens: int, joint: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a layer of attention asks for them, also in a CUDA graph that is replayed with other inputs."""
    monkeypatch.setattr(dispatch, "product_again", lambda x, data, bias: None)  # which would not be counted
    weights, layers = _of_one_input()
    samebits.prepare(layers, batch_sizes=(tokens,))

    @torch.no_grad()
    def check(x: torch.Tensor) -> None:
        for layer, weight in zip(layers, weights, strict=True):
            assert_same(layer(x), F.linear(x, weight))

    for seed in range(3):
        check(inputs(tokens, seed))
    if not joint:
        pytest.skip("one launch is not faster here, or has no plan")
    joint.clear()
    check(inputs(tokens, 3))
    assert joint == [3]
    x, graph = inputs(tokens, 4), torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        made = [layer(x) for layer in layers]
    assert joint == [3, 3]
    for seed in (5, 6):
        x.copy_(inputs(tokens, seed))
        graph.replay()
        for y, weight in zip(made, weights, strict=True):
            assert_same(y, F.linear(x, weight))


def _of_one_input() -> tuple[list[torch.Tensor], nn.ModuleList]:
    """Queries, keys and values, plain and packed."""
    weights = [Probe.make(rows, COLUMNS, torch.device("cuda"), rows).weight for rows in (4096, 1024, 1024)]
    layers = nn.ModuleList([_layer(weight) for weight in weights])
    samebits.compress(layers)
    return weights, layers


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("tokens", [1, 8])
@torch.no_grad()
def test_products_of_one_input_compiled(tokens: int, mode: str, joint: list[int]) -> None:
    """By one launch, which is in graphs of what was compiled, too."""
    weights, layers = _of_one_input()

    def multiply(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        twice = x * 2
        return tuple(layer(twice) for layer in layers)

    torch.compiler.reset()
    compiled = torch.compile(multiply, fullgraph=True, mode=mode)
    for seed in range(5):
        x = inputs(tokens, seed)[None]
        for y, weight in zip(compiled(x), weights, strict=True):
            assert_same(y, F.linear(x * 2, weight))
    if not joint:
        pytest.skip("one launch is not faster here, or has no plan")
    assert set(joint) == {3}
    assert len(joint) == 5 if mode == "default" else 2 <= len(joint) < 5


@pytest.mark.parametrize("tokens", [1, 8, 40, 700, 17000])
@torch.no_grad()
def test_products_made_again(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By native code: alone and together, with and without bias, on other streams, and with other bytes."""
    if recall.native is None:
        pytest.skip("the native part is not compiled here")
    again: list[bool] = []
    native = dispatch.product_again

    def product_again(x: torch.Tensor, data: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        y: torch.Tensor | None = native(x, data, bias)
        again.append(y is not None)
        return y

    monkeypatch.setattr(dispatch, "product_again", product_again)
    device = torch.device("cuda")
    weights = [Probe.make(rows, COLUMNS, device, rows).weight for rows in (4096, 1024, 1024, 2048)]
    biases = [None, torch.randn(1024, device=device, dtype=torch.bfloat16), None, None]
    layers = [_layer(weight, bias) for weight, bias in zip(weights, biases, strict=True)]

    def check(seed: int) -> list[bool]:
        x, other = inputs(tokens, seed), inputs(tokens, 100 + seed)
        again.clear()
        for layer, weight in zip(layers, weights, strict=True):
            assert_same(
                layer(other if layer is layers[-1] else x),
                F.linear(other if layer is layers[-1] else x, weight, layer.bias),
            )
        return list(again)

    for weight, bias in zip(weights, biases, strict=True):  # of many tokens plans are not looked for at once
        key = key_of(inputs(tokens, 0), weight.shape, bias)
        assert (key is None) == (tokens > MAX_HOPPER_TOKENS)
        if key:
            Planner.of(0).outcome(key)
    for seed in range(_LEARNED):
        check(seed)
    for seed in range(_LEARNED, _LEARNED + 6):
        assert all(check(seed))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for seed in range(_LEARNED):
            check(seed)
        assert all(check(9))
    torch.cuda.current_stream().wait_stream(stream)
    check(3)
    packed = samebits.encode(-weights[0])
    data = layers[0].get_parameter("sb_packed")
    assert packed.data.shape == data.shape
    data.copy_(packed.data)
    weights[0] = -weights[0]
    biases[1].add_(1)
    layers[1].bias.copy_(biases[1])
    assert not all(check(3))
    for seed in range(_LEARNED):
        check(seed)
    assert all(check(_LEARNED))
    with torch.inference_mode():
        check(6)


class Chain:
    """Layers, each of which multiplies what the one in front has made of many tokens; and the same of plain weights."""

    def __init__(self, tokens: int, *shapes: tuple[int, int]) -> None:
        self.tokens, self.shapes = tokens, shapes
        generator = torch.Generator("cuda").manual_seed(0)
        self.weights = [torch.randn(each, device="cuda", generator=generator).mul_(0.02).bfloat16() for each in shapes]
        self.layers = nn.Sequential(*map(_layer, self.weights))
        self.bytes = [layer.get_parameter("sb_packed") for layer in self.layers]

    def choices(self) -> list[Choice]:
        """What launches decode for others."""
        carriers = [each for data in self.bytes if (kept := resident(data)) for each in kept.carriers.values()]
        return [each.choice for each in carriers if each.choice]

    def x(self, seed: int) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(seed)
        return torch.randn(self.tokens, self.shapes[0][1], device="cuda", generator=generator).bfloat16()

    def dense(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = F.linear(x, weight)
        return x

    def check(self, steps: int) -> None:
        for seed in range(steps):
            x = self.x(seed)
            assert_same(self.layers(x), self.dense(x))

    def check_everywhere(self) -> None:
        """In a graph, on another stream, and with other bytes."""
        graph, static = torch.cuda.CUDAGraph(), self.x(0)
        with torch.cuda.graph(graph):
            y = self.layers(static)
        for seed in (8, 9):
            static.copy_(self.x(seed))
            graph.replay()
            assert_same(y, self.dense(static))
        self.check(4)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.check(4)
        torch.cuda.current_stream().wait_stream(stream)
        for number, weight in enumerate(self.weights):
            self.layers[0](self.x(1))  # which may decode what changes now
            packed = samebits.encode(-weight)
            assert packed.data.shape == self.bytes[number].shape
            self.bytes[number].copy_(packed.data)
            self.weights[number] = -weight
            self.check(3)


@torch.no_grad()
@pytest.mark.parametrize("plans", ["on", "off"])
def test_small_weights_are_decoded_together(plans: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a plan or without."""
    monkeypatch.setenv(planner.MODE_VARIABLE, plans)
    planner.mode.cache_clear()
    chain = Chain(2048, (1280, 640), (640, 1280), (1024, 640), (1280, 1024), (640, 1280))
    if plans == "on":
        samebits.prepare(chain.layers, batch_sizes=(chain.tokens,))
    chain.check(_LEARNED)
    assert max(len(each.weights) for each in chain.choices() if isinstance(each.launch, DecodeTogether)) >= 2
    chain.check_everywhere()


@torch.no_grad()
def test_weights_of_products_to_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoded on the way."""
    decode_beside_products_alone(monkeypatch)  # whoever has room for others' weights decodes them
    chain = Chain(4096, (12288, 3072), (3072, 12288), (1024, 3072), (3072, 1024))
    samebits.prepare(chain.layers, batch_sizes=(chain.tokens,))
    chain.check(6)
    if torch.cuda.get_device_capability() == (9, 0):
        assert chain.choices()
    elif not chain.choices():
        pytest.skip("no launch here has the time to decode another weight")
    x = chain.x(7)
    for layer in chain.layers:
        x = layer(x)
        if any((kept := resident(data)) and kept.prefetched for data in chain.bytes):
            break
    else:
        pytest.fail("no weight was decoded ahead")
    chain.check_everywhere()
