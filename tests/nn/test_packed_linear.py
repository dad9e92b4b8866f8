"""Packed nn.Linear and its kin: which calls go to the fused product, and that all others stay as they were."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from packaging.version import Version
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

import samebits
from samebits.errors import DigestError
from samebits.format.packed import PackedTensor
from samebits.kernels.ops import decode_packed
from samebits.nn import product
from samebits.nn.packed_linear import PackedLinearModule
from samebits.nn.packed_module import PackedModule
from samebits.plans import dispatch
from tests.nn.modules import INPUT, products_of, same_bits

torch_version = Version(torch.__version__)


class Subclass(nn.Linear):
    """Another name, the same forward."""


class Doubled(nn.Linear):
    """Another forward."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) * 2


def make(
    kind: Callable[..., nn.Module] = nn.Linear, requires_grad: bool = False, **options: object
) -> tuple[nn.Module, nn.Module]:
    """A dense module, and a packed copy of it."""
    torch.manual_seed(0)
    dense = kind(64, 96, **options).to(torch.bfloat16).requires_grad_(requires_grad)
    packed = copy.deepcopy(dense)
    samebits.compress(packed)
    assert isinstance(packed, PackedModule)
    return dense, packed


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Inputs that went to samebits.plans, on a CPU that is taken for a GPU."""
    seen: list[torch.Tensor] = []

    def linear(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append(x)
        return nn.functional.linear(x, decode_packed(packed), bias)

    original = product._is_plain

    def is_plain(tensor: torch.Tensor) -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "is_cuda", True)
            return original(tensor)

    monkeypatch.setattr(dispatch, "linear_of_module", linear)
    monkeypatch.setattr(dispatch, "gradient", lambda grad, packed: grad.mm(decode_packed(packed)))
    monkeypatch.setattr(product, "_is_plain", is_plain)
    return seen


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
@pytest.mark.parametrize("kind", [nn.Linear, Subclass])
@pytest.mark.parametrize("bias", [True, False])
def test_fused(products: list[torch.Tensor], kind: type[nn.Module], bias: bool, mode: Callable[[], object]) -> None:
    dense, packed = make(kind, bias=bias)
    with mode():
        assert same_bits(packed(INPUT), dense(INPUT))
        assert same_bits(packed(input=INPUT), dense(INPUT))
    assert len(products) == 2
    assert products[0] is INPUT


@pytest.mark.parametrize("gaps", ["none", "a part of one sequence"])
def test_bytes_that_were_written_to_are_not_multiplied(products: list[torch.Tensor], gaps: str) -> None:
    """A kernel would go by a header that is not theirs any more."""
    dense, packed = make()
    x = EVERY[gaps]()
    with torch.no_grad():
        assert same_bits(packed(x), dense(x))
        packed.sb_packed[1000] += 1
        with pytest.raises(DigestError, match=r"Linear\.weight: its packed bytes were changed"):
            packed(x)
    assert len(products) == 1


def test_not_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    dense, packed = make()
    monkeypatch.setattr(dispatch, "linear_of_module", None)
    assert same_bits(packed(INPUT), dense(INPUT))


def test_another_forward_is_left_alone(products: list[torch.Tensor]) -> None:
    dense, packed = make(Doubled)
    assert not isinstance(packed, PackedLinearModule)
    assert same_bits(packed(INPUT), dense(INPUT))
    assert not products


def test_a_packed_bias_is_left_alone(products: list[torch.Tensor]) -> None:
    torch.manual_seed(0)
    dense = nn.Linear(64, 5000).to(torch.bfloat16).requires_grad_(False)
    packed = copy.deepcopy(dense)
    samebits.compress(packed)
    assert packed.sb_recipes.keys() == {"weight", "bias"}
    assert same_bits(packed(INPUT), dense(INPUT))
    assert not products


def test_float32_is_left_alone(products: list[torch.Tensor]) -> None:
    """A model may ask for more than the stored bfloat16."""
    dense, packed = make(bias=False)
    packed.sb_recipes["weight"] = replace(packed.sb_recipes["weight"], dtype=torch.float32)
    assert torch.equal(packed(INPUT.float()), dense.float()(INPUT.float()))
    assert not products


def test_transformations_are_left_alone(products: list[torch.Tensor]) -> None:
    dense, packed = make()
    assert same_bits(torch.vmap(packed)(INPUT), torch.vmap(dense)(INPUT))
    tangents = [torch.func.jvp(module, (INPUT,), (INPUT,))[1] for module in (dense, packed)]
    assert same_bits(*tangents)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(INPUT, INPUT)
        tangents = [forward_ad.unpack_dual(module(dual)).tangent for module in (dense, packed)]
        assert same_bits(*tangents)
    assert not products


def test_onlookers_see_what_they_know(products: list[torch.Tensor]) -> None:
    dense, packed = make()
    counts = []
    for module in (dense, packed):
        with FlopCounterMode(display=False) as counter:
            module(INPUT)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
    assert not products


def test_traces_are_left_alone(products: list[torch.Tensor]) -> None:
    """What a trace does not see would be a constant in it."""
    dense, packed = make()
    traced = torch.jit.trace(packed, INPUT, check_trace=False)
    assert same_bits(traced(INPUT * 2), dense(INPUT * 2))
    assert not products


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(products: list[torch.Tensor], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """To BF16 it changes nothing; else it is torch's."""
    dense, packed = make()
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: device == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: dtype)
    assert same_bits(packed(INPUT), dense(INPUT))
    assert len(products) == (dtype is torch.bfloat16)


@pytest.mark.parametrize("given", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bias", [True, False])
def test_gradients_under_autocast(bias: bool, dtype: torch.dtype, given: torch.dtype) -> None:
    dense, packed = make(bias=bias)
    made = []
    for module in (dense, packed):
        x = INPUT.to(given, copy=True).requires_grad_()
        with torch.autocast("cpu", dtype):
            y = module(x)
            own = type(y.grad_fn).__name__ == "FrozenProductBackward"
            assert own == (module is packed and dtype is given is torch.bfloat16)
        y.float().square().sum().backward()
        made.append((y.detach(), x.grad))
    for theirs, ours in zip(*made, strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours.contiguous().view(torch.int16), theirs.contiguous().view(torch.int16))


def test_compiled(products: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph with the operator in it."""
    dense, packed = make()
    monkeypatch.setattr(product, "_is_plain", lambda tensor: True)
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        graphs.append(graph.code)
        return graph.forward

    torch.compiler.reset()
    with torch.no_grad():
        assert same_bits(torch.compile(packed, backend=backend, fullgraph=True)(INPUT), dense(INPUT))
    assert len(graphs) == 1
    assert "samebits.linear" in graphs[0]
    assert not products


def test_compiled_with_strides_of_its_own(products: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator is given two dimensions, as torch's own products are in traces: a plan asks for plain strides."""
    dense, packed = make()
    monkeypatch.setattr(product, "_is_plain", lambda tensor: True)
    shapes: list[torch.Size] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        [node] = (node for node in graph.graph.nodes if "samebits.linear" in str(node.target))
        shapes.append(node.args[0].meta["example_value"].shape)
        return graph.forward

    x = torch.randn(2, 1, 64).to(torch.bfloat16).as_strided((2, 1, 64), (64, 32, 1))
    for given in (x, INPUT[0], torch.randn(2, 3, 2, 64).to(torch.bfloat16), x.expand(2, 5, 64)):
        torch.compiler.reset()
        with torch.no_grad():
            assert same_bits(torch.compile(packed, backend=backend, fullgraph=True)(given), dense(given))
    assert shapes == [(2, 64), INPUT[0].shape, (12, 64), (2, 5, 64)]


class Residual(nn.Module):
    """What comes out of the first layer and into the second is added again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x + self.first(x)
        return self.second(y) + y


def test_compiled_by_inductor(products: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """It rounds between two operations only where the first one's output is in memory: in the same places, then."""
    torch.manual_seed(0)
    dense = Residual().to(torch.bfloat16).requires_grad_(False)
    packed = copy.deepcopy(dense)
    samebits.compress(packed)
    monkeypatch.setattr(product, "_is_plain", lambda tensor: True)
    made = []
    for module in (dense, packed):
        torch.compiler.reset()
        with torch.no_grad(), torch._inductor.config.patch(fx_graph_cache=False):  # but kernels of the same text
            made.append(torch.compile(module, fullgraph=True)(INPUT))
    assert same_bits(*made)
    assert not products


class Wrapped(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_guards_of_what_is_compiled(products: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """They are evaluated at every call: no more than those of torch's own layer, and a text."""
    dense, packed = make()
    monkeypatch.setattr(product, "_is_plain", lambda tensor: True)

    def guarded(module: nn.Module) -> set[str]:
        """What is asked of the module."""
        names: set[str] = set()

        def keep_all(entries: Sequence[Any]) -> list[bool]:
            names.update(entry.name for entry in entries)
            return [True] * len(entries)

        torch.compiler.reset()
        compiled = torch.compile(
            Wrapped(module), backend="eager", fullgraph=True, options={"guard_filter_fn": keep_all}
        )
        with torch.no_grad():
            assert same_bits(compiled(INPUT), dense(INPUT))
        return {name.partition("['layer']")[2] for name in names if "['layer']" in name}

    own, found = guarded(dense), guarded(packed)
    of_class = {").__dict__)"} if torch_version >= Version("2.15") else set()  # which has another one's forward
    assert {name.replace("weight", "sb_packed") for name in own} | {".sb_operands"} | of_class == found


def test_compiled_again_for_another_header(products: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    """The text in which a graph keeps a header is compared at every call."""
    monkeypatch.setattr(product, "_is_plain", lambda tensor: True)
    _, packed = make(bias=False)
    wide = nn.Linear(64, 96, bias=False).to(torch.bfloat16).requires_grad_(False)
    wide.weight.copy_(torch.randn(96, 64).mul(torch.randn(96, 1).mul(4).exp()))
    other = copy.deepcopy(wide)
    samebits.compress(other)
    operands = packed.sb_recipes["weight"].operands
    torch.compiler.reset()
    compiled = torch.compile(packed, backend="eager", fullgraph=True)
    with torch.no_grad():
        compiled(INPUT)
        packed.load_state_dict(other.state_dict())
        assert packed.sb_recipes["weight"].operands != operands
        assert same_bits(compiled(INPUT), wide(INPUT))
    assert not products


@pytest.mark.parametrize(
    "transform",
    [
        lambda module: torch.vmap(module),
        lambda module: torch.vmap(module, in_dims=1, out_dims=1),
        lambda module: lambda x: torch.func.jvp(module, (x,), (x,))[1],
    ],
    ids=["vmap", "vmap of another dimension", "jvp"],
)
def test_compiled_transformations(
    transform: Callable[[nn.Module], Callable[..., torch.Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, packed = make()
    monkeypatch.setattr(product, "_is_plain", lambda tensor: True)
    torch.compiler.reset()
    with torch.no_grad():
        assert same_bits(torch.compile(transform(packed), backend="aot_eager")(INPUT), transform(dense)(INPUT))


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(torch.bfloat16)


# Inputs with gaps, as torch sees them: these it multiplies as one matrix if the weight has requires_grad, else as a
# batch of matrices. Those whose strides say so only where a dimension is 1 are a matrix with a bias, too: diffusion
# models cut a sequence into a text and an image.
GAPS: dict[str, Callable[[], torch.Tensor]] = {
    "the last of each sequence": lambda: _normal(3, 5, 64)[:, -1:],
    "transposed": lambda: _normal(3, 5, 64).transpose(0, 1),
    "four dimensions": lambda: _normal(2, 4, 3, 64)[:, ::2],
}
OF_ONE: dict[str, Callable[[], torch.Tensor]] = {
    "the last of one sequence": lambda: _normal(1, 5, 64)[:, -1:],
    "a part of one sequence": lambda: _normal(1, 12, 64)[:, 3:],
    "a part in four dimensions": lambda: _normal(1, 1, 12, 64)[:, :, :3],
    "one token of each": lambda: _normal(2, 64).as_strided((2, 1, 64), (64, 32, 1)),
}
NO_GAPS = {"none": lambda: _normal(3, 5, 64)}
EVERY = {**GAPS, **OF_ONE, **NO_GAPS}


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("gaps", EVERY)
@pytest.mark.parametrize("kind", [nn.Linear, Doubled])
@pytest.mark.parametrize("bias", [True, False])
def test_torch_multiplies_as_with_the_plain_weight(
    products: list[torch.Tensor], kind: type[nn.Module], gaps: str, mode: Callable[[], AbstractContextManager[None]],
    bias: bool, trained: bool,
) -> None:  # fmt: skip
    dense, packed = make(kind, bias=bias, requires_grad=trained)
    x = EVERY[gaps]()
    with mode():
        assert products_of(lambda: packed(x)) == products_of(lambda: dense(x))
        assert products_of(lambda: F.linear(x, packed.weight)) == products_of(lambda: F.linear(x, dense.weight))
        assert same_bits(packed(x), dense(x))
        assert same_bits(F.linear(x, packed.weight), F.linear(x, dense.weight))
    is_matrix = gaps in NO_GAPS or (gaps in OF_ONE and (bias or trained))
    assert len(products) == (2 if is_matrix and kind is nn.Linear else 0)
    for seen in products:
        assert (seen.shape, seen.stride()) == (x.shape, torch.empty(x.shape).stride())
        assert seen.data_ptr() == x.data_ptr()
    with mode():
        ways = {tuple(products_of(partial(F.linear, x, make(requires_grad=each)[1].weight))) for each in (False, True)}
    is_one_matrix = torch_version >= Version("2.14") and gaps in ("the last of each sequence", *OF_ONE)
    assert len(ways) == (1 if is_one_matrix or gaps in NO_GAPS else 2)


@pytest.mark.parametrize("gaps", ["two dimensions", "transposed token", *EVERY])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("wanted", ["input", "input, no bias", "bias", "both"])
def test_gradients(products: list[torch.Tensor], wanted: str, trained: bool, gaps: str) -> None:
    """An operation of its own, which keeps nothing that hooks of others could see."""
    dense, packed = make(bias=wanted != "input, no bias", requires_grad=trained)
    for module in (dense, packed):
        module.requires_grad_(False)  # as a weight is once it is packed
        if wanted in ("bias", "both"):
            module.bias.requires_grad_()
    of_two = {"two dimensions": lambda: _normal(5, 64), "transposed token": lambda: _normal(64, 1).t()}
    x, kept = {**EVERY, **of_two}[gaps](), list[torch.Tensor]()
    outer = _normal(*x.shape[:-1], 96)
    made, ways = [], []
    for module in (dense, packed):
        leaf = x.detach().requires_grad_(wanted != "bias")
        leaves = [each for each in (leaf, module.bias) if each is not None and each.requires_grad]
        kept.clear()
        with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
            y = module(leaf)
        backward = partial(torch.autograd.grad, y, leaves, outer, retain_graph=True)
        ways.append(products_of(backward))
        made.append([y.detach().clone(), *backward(), *torch.autograd.grad(y.mul_(2), leaves, outer[:1].expand_as(y))])
    assert len(made[0]) == 1 + 2 * len(leaves)
    assert all(same_bits(theirs, ours) for theirs, ours in zip(*made, strict=True))
    assert ways[0] == ways[1]
    is_own = gaps in NO_GAPS or gaps == "two dimensions"
    assert is_own == (type(packed(leaf).grad_fn).__name__ == "FrozenProductBackward")
    assert not (is_own and kept)
    assert not products


def test_gradients_of_gradients() -> None:
    dense, packed = make()
    made = []
    for module in (dense, packed):
        x = INPUT.clone().requires_grad_()
        [first] = torch.autograd.grad(module(x).float().pow(3).sum(), x, create_graph=True)
        first.float().square().sum().backward()
        made.append([first.detach(), x.grad])
    assert all(same_bits(theirs, ours) for theirs, ours in zip(*made, strict=True))


def test_gradients_of_several_outputs_at_once() -> None:
    dense, packed = make()
    outer = torch.randn(4, *INPUT.shape[:-1], 96, generator=torch.Generator().manual_seed(6)).to(torch.bfloat16)
    made = []
    for module in (dense, packed):
        x = INPUT.clone().requires_grad_()
        made += torch.autograd.grad(module(x), x, outer, is_grads_batched=True)
    assert same_bits(*made)


def test_gradients_of_fused_products(products: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    dense, packed = make(bias=False)
    first, second = (INPUT.clone().requires_grad_() for _ in range(2))
    y = dense(first)
    y.float().square().sum().backward()
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", True)
        made = packed(second)
    assert same_bits(made, y)
    made.float().square().sum().backward()
    assert same_bits(second.grad, first.grad)
    assert len(products) == 1
    assert products[0] is second  # by which products of one input are known


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(0, 64), (1, 0, 64), (0, 3, 64), (2, 0, 3, 64)], ids=str)
def test_no_tokens(products: list[torch.Tensor], shape: tuple[int, ...], bias: bool) -> None:
    dense, packed = make(bias=bias)
    for x in (_normal(*shape), _normal(1, 5, 64)[:, 5:]):
        assert same_bits(packed(x), dense(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_autocast_copies_it_does_not_keep(dtype: torch.dtype) -> None:
    """As it keeps the copies of float32 parameters, until it ends."""
    dense, packed = make(requires_grad=True)
    packed.sb_recipes["weight"] = replace(packed.sb_recipes["weight"], dtype=dtype)
    copies: list[weakref.ref[torch.Tensor]] = []

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and result.dtype is torch.float16:
                copies.append(weakref.ref(result))
            return result

    x = GAPS["transposed"]().to(torch.float16)
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        expected = dense.to(dtype)(x)
        with Copies():
            made = packed(x)
        assert copies
        assert all(copy() is None for copy in copies)
    assert same_bits(made, expected)


@pytest.mark.parametrize("way", ["fused", "decoded", "float32"])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("gaps", [*GAPS, "a part of one sequence", "none"])
@pytest.mark.parametrize("bias", [True, False])
def test_traced_as_with_the_plain_weight(
    gaps: str, bias: bool, trained: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    dense, packed = make(bias=bias, requires_grad=trained)
    x, is_fused = EVERY[gaps](), way == "fused"
    monkeypatch.setattr(product, "_is_plain", lambda tensor: is_fused)
    if way == "float32":
        packed.sb_recipes["weight"] = replace(packed.sb_recipes["weight"], dtype=torch.float32)
        for name, parameter in packed.named_parameters():
            parameter.data = parameter.data.float() if name == "bias" else parameter.data
        x, dense = x.float(), dense.float()
    ways: list[list[str]] = []

    def note(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., object]:
        names = {"samebits.linear.default": "linear"}
        ways.append([])
        for node in graph.graph.nodes:
            name = names.get(str(node.target), str(node.target).removeprefix("aten.").removesuffix(".default"))
            if name == "linear":
                name = "addmm" if node.args[2] is not None else "bmm" if node.args[0].meta["val"].dim() > 2 else "mm"
            if name in {"addmm", "mm", "bmm", "add.Tensor"}:
                ways[-1].append(name)
        return make_boxed_func(graph.forward)

    made = []
    for module in (dense, packed):
        torch.compiler.reset()
        with torch.no_grad():
            made.append(torch.compile(module, backend=aot_autograd(fw_compiler=note), fullgraph=True)(x))
    if is_fused and not x.is_contiguous() and not trained:
        assert ways[1] == (["addmm"] if bias else ["bmm"])  # the operator asks torch for what a frozen weight gets
    else:
        assert ways[1] == ways[0]
    assert same_bits(*made)


@pytest.mark.parametrize("trains_bias", [True, False, None])
@pytest.mark.parametrize("trains_input", [True, False])
@pytest.mark.parametrize("dimensions", [2, 3])
def test_compiled_training_keeps_weights_packed(dimensions: int, trains_input: bool, trains_bias: bool | None) -> None:
    """None: no bias. Something else is always trained."""
    dense, packed = make(bias=trains_bias is not None)
    given = INPUT if dimensions == 3 else INPUT[0]
    scales = torch.full((96,), 1.5, dtype=torch.bfloat16)
    made = []
    for module in (dense, packed):
        if trains_bias is not None:
            module.bias.requires_grad_(trains_bias)
        torch.compiler.reset()
        x, scale = given.clone().requires_grad_(trains_input), scales.clone().requires_grad_()
        y = torch.compile(lambda x, scale, module=module: module(x) * scale, backend="aot_eager", fullgraph=True)(
            x, scale
        )
        kept = y.grad_fn.saved_tensors
        if module is packed:
            assert all(tuple(tensor.shape) not in ((96, 64), (64, 96)) for tensor in kept)
            assert any(tensor.dtype is torch.uint8 for tensor in kept) == trains_input
        y.float().square().sum().backward()
        wanted = [x, scale, *([] if trains_bias is None else [module.bias])]
        made.append([y.detach(), *(each.grad for each in wanted if each.requires_grad)])
    assert len(made[0]) == len(made[1]) == 2 + trains_input + bool(trains_bias)
    for theirs, ours in zip(*made, strict=True):
        assert same_bits(ours, theirs)


@pytest.mark.parametrize("case", ["autocast", "float32", "gaps"])
def test_compiled_training_otherwise(case: str) -> None:
    """As torch has it: other types, inputs with gaps."""
    dense, packed = make()
    made = []
    for module in (dense, packed):
        torch.compiler.reset()
        x = GAPS["transposed"]() if case == "gaps" else INPUT.clone()
        x = (x.float() if case == "float32" else x).detach().requires_grad_()
        compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=case != "gaps"):
            y = compiled(x)
        y.float().square().sum().backward()
        made.append((y.detach(), x.grad))
    assert made[1][1] is not None
    for theirs, ours in zip(*made, strict=True):
        assert same_bits(ours, theirs)


def test_hooks_run(products: list[torch.Tensor]) -> None:
    _, packed = make()
    seen: list[int] = []
    packed.register_forward_pre_hook(lambda module, arguments: seen.append(1))
    packed.register_forward_hook(lambda module, arguments, output: seen.append(2))
    packed(INPUT)
    assert seen == [1, 2]
    assert len(products) == 1


def test_wrong_inputs_fail_as_before(products: list[torch.Tensor]) -> None:
    _, packed = make()
    for wrong, error in ((INPUT[..., :5], RuntimeError), (INPUT.float(), RuntimeError), (None, TypeError)):
        with pytest.raises(error):
            packed(wrong)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
@pytest.mark.parametrize("trained", [set(), {"input"}, {"bias"}, {"input", "bias"}])
def test_nested_inputs(products: list[torch.Tensor], trained: set[str], layout: torch.layout) -> None:
    """They have neither a shape nor strides, whatever takes a gradient."""
    found = []
    for module in make():
        leaves = {"input": INPUT[0].clone(), "bias": module.bias}
        for name in trained:
            leaves[name].requires_grad_()
        y = module(torch.nested.as_nested_tensor([leaves["input"], INPUT[1, :3]], layout=layout))
        if trained:
            sum(each.float().square().sum() for each in y.unbind()).backward()
        found.append([*y.unbind(), *(leaves[name].grad for name in sorted(trained))])
    assert all(same_bits(ours, theirs) for theirs, ours in zip(*found, strict=True))
    assert not products


def test_a_bias_that_is_no_parameter(products: list[torch.Tensor]) -> None:
    dense, packed = make(bias=True)
    other = torch.randn(96, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    for module in (dense, packed):
        del module.bias
        module.register_buffer("bias", other)
    with torch.no_grad():
        assert same_bits(packed(INPUT), dense(INPUT))
        del dense.bias, packed.bias
        dense.bias = packed.bias = None
        assert same_bits(packed(INPUT), dense(INPUT))
    assert len(products) == 2
