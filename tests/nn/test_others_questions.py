"""What other code asks of modules, and does with them, that knows nothing of packed ones."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.fx.experimental.proxy_tensor import make_fx

import samebits
from samebits.errors import DtypeError, InputError
from tests.nn.modules import INPUT, MIN_WEIGHTS, TOKENS, Tied, make, same_bits


class Block(nn.Module):
    """With a matrix of its own, and an argument that not all blocks have."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(64, 64))

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = x @ self.table
        return y if mask is None else y * mask


class Parent(nn.Module):
    """Gives its block what the block's signature says that it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        takes_mask = "mask" in inspect.signature(self.block.forward).parameters
        return self.block(x, mask=torch.zeros(1)) if takes_mask else self.block(x)


@pytest.fixture
def parent() -> Parent:
    torch.manual_seed(0)
    return Parent().to(torch.bfloat16)


def compressed(module: nn.Module) -> nn.Module:
    packed = copy.deepcopy(module)
    assert samebits.compress(packed, min_weights=MIN_WEIGHTS).packed
    return packed


def test_signatures(parent: Parent) -> None:
    packed = compressed(parent)
    assert inspect.signature(packed.block.forward) == inspect.signature(parent.block.forward)
    assert inspect.signature(type(packed.block).forward) == inspect.signature(Block.forward)
    assert not packed(INPUT).any()
    layer = nn.Conv2d(16, 32, 3).to(torch.bfloat16)
    assert inspect.signature(compressed(layer).forward) == inspect.signature(layer.forward)


def test_names_of_inputs_of_what_is_exported(parent: Parent) -> None:
    exported = torch.export.export(compressed(parent.block), (INPUT,), dynamic_shapes={"x": None})
    assert exported.graph_signature.user_inputs == ("x",)
    assert same_bits(exported.module()(INPUT), parent.block(INPUT))


@pytest.mark.parametrize("gradients", [True, False])
@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Linear(64, 96)),
        nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 64)),
        Parent(),
        nn.TransformerEncoderLayer(64, 4),
    ],
)
def test_jit_traces(module: nn.Module, gradients: bool) -> None:
    """Which torch checks by tracing anew."""
    module = copy.deepcopy(module).to(torch.bfloat16).eval()
    packed = compressed(module)
    with torch.set_grad_enabled(gradients):
        traced = torch.jit.trace(packed, INPUT)
        assert same_bits(traced(INPUT), module(INPUT))


@pytest.mark.parametrize("module", [Parent(), nn.Conv2d(16, 64, 3), nn.Linear(64, 96)])
def test_symbolic_traces_are_refused(module: nn.Module) -> None:
    """They would hold decoded weights."""
    packed = compressed(copy.deepcopy(module).to(torch.bfloat16))
    with pytest.raises(InputError, match=r"symbolic_trace would keep decoded weights.*torch\.export"):
        torch.fx.symbolic_trace(packed)


class OfList(Block):
    def forward(self, inputs: list[torch.Tensor]) -> torch.Tensor:  # type: ignore[override]
        return inputs[0] @ self.table


class OfNothing(Block):
    def forward(self) -> torch.Tensor:  # type: ignore[override]
        return self.table @ self.table


class Caller(nn.Module):
    def __init__(self, block: nn.Module, arguments: Callable[[torch.Tensor], tuple[object, ...]]) -> None:
        super().__init__()
        self.block, self.arguments = block, arguments

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.block(*self.arguments(x))


CALLERS = [(OfList, lambda x: ([x],)), (OfNothing, lambda x: ())]


@pytest.mark.parametrize(("block", "arguments"), CALLERS, ids=["inputs in a list", "no inputs"])
def test_symbolic_traces_whose_inputs_do_not_show_are_refused(
    block: type[Block], arguments: Callable[[torch.Tensor], tuple[object, ...]]
) -> None:
    packed = compressed(Caller(block(), arguments).to(torch.bfloat16))
    with pytest.raises(InputError, match="symbolic_trace would keep decoded weights"):
        torch.fx.symbolic_trace(packed)


def test_modules_that_run_while_torch_traces(parent: Parent) -> None:
    """By make_fx, with tensors; and by another thread, which is not theirs."""
    packed, x = compressed(parent.block), INPUT.clone()
    expected = parent.block(x)
    assert same_bits(make_fx(packed)(x)(x), expected)

    class Other(nn.Module):
        def forward(self, y: torch.Tensor) -> torch.Tensor:
            with ThreadPoolExecutor(1) as pool:
                assert same_bits(pool.submit(packed.forward, x).result(), expected)
            return y + 1

    assert torch.fx.symbolic_trace(Other())(torch.zeros(1)).item() == 1


def update_own(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    own = module.state_dict()
    own.update(state)
    module.load_state_dict(own)


def set_part(module: nn.Module, state: dict[str, torch.Tensor]) -> None:
    set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True, strict=False))


@pytest.mark.parametrize("load", [update_own, set_part])
@pytest.mark.parametrize("kept", ["embedding", "head"])
def test_a_tied_weight_under_one_of_its_names(load: Callable[..., None], kept: str) -> None:
    """As libraries save ties: the module's own memory stands under the other name, and means what it is by then."""
    torch.manual_seed(0)
    source, target = (compressed(Tied().to(torch.bfloat16)) for _ in range(2))
    with torch.no_grad():
        assert not same_bits(target(TOKENS), source(TOKENS))
    dropped = {"embedding": "head", "head": "embedding"}[kept]
    load(target, {key: value for key, value in source.state_dict().items() if not key.startswith(dropped)})
    assert target.head.sb_packed is target.embedding.sb_packed
    with torch.no_grad():
        assert same_bits(target(TOKENS), source(TOKENS))


@pytest.mark.parametrize("strict", [True, False])
def test_a_plain_state_dict(strict: bool) -> None:
    """It is not left out without a word."""
    plain, call, _ = make("linear")
    packed = compressed(plain)
    expected = call(packed)
    with pytest.raises(RuntimeError, match=r"weight is packed in the module, and plain.*samebits\.decompress"):
        packed.load_state_dict(plain.state_dict(), strict=strict)
    assert same_bits(call(packed), expected)


def test_compressed_in_inference_mode() -> None:
    plain, call, _ = make("linear")
    packed, expected = copy.deepcopy(plain), call(plain)
    with torch.inference_mode():
        samebits.compress(packed)
    assert not any(parameter.is_inference() for parameter in packed.parameters())
    packed.load_state_dict(packed.state_dict())
    x = INPUT.clone().requires_grad_()
    packed(x).sum().backward()
    assert same_bits(call(packed), expected)


def test_where_torch_makes_tensors_on_another_device() -> None:
    packed = compressed(make("linear")[0])
    with torch.device("meta"):
        packed.cpu()
        packed.to("cpu", torch.bfloat16)
        packed.share_memory()
    assert packed.sb_packed.device.type == "cpu"


def test_numbers_of_packed_bytes() -> None:
    with pytest.raises(DtypeError, match=r"packed bytes cannot become numbers; call module\.to"):
        compressed(make("linear")[0]).type(torch.bfloat16)
