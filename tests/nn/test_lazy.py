"""A packed weight outside its module's forward: described for nothing, computes like the original, read-only."""

from __future__ import annotations

import copy
import ctypes
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import samebits
from samebits.errors import InputError
from samebits.nn import recipe
from samebits.nn.lazy import LazyWeight
from tests.nn.modules import INPUT, same_bits

SHAPE = (96, 64)


@pytest.fixture
def plain() -> torch.Tensor:
    return (torch.randn(SHAPE, generator=torch.Generator().manual_seed(3)) / 8).to(torch.bfloat16)


@pytest.fixture
def layer(plain: torch.Tensor) -> nn.Linear:
    layer = nn.Linear(64, 96, bias=False)
    layer.weight = nn.Parameter(plain.clone())
    samebits.compress(layer)
    return layer


@pytest.fixture
def decodes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    seen: list[int] = []
    decoded_weight = recipe.decoded_weight
    monkeypatch.setattr(recipe, "decoded_weight", lambda packed: (seen.append(1), decoded_weight(packed))[1])
    return seen


def test_describing_decodes_nothing(layer: nn.Linear, plain: torch.Tensor, decodes: list[int]) -> None:
    weight = layer.weight
    assert isinstance(weight, LazyWeight)
    assert isinstance(weight, nn.Parameter)
    assert not weight.requires_grad
    assert weight.is_leaf
    assert len(weight) == len(plain)
    for describe in (
        lambda t: (t.shape, t.dtype, t.device, t.layout, t.ndim, t.nbytes, t.itemsize, t.is_cuda, t.is_meta),
        lambda t: (t.size(), t.size(0), t.dim(), t.numel(), t.stride(), t.element_size(), t.is_contiguous()),
        lambda t: (
            t.is_floating_point(),
            t.is_complex(),
            t.data.shape,
            t.detach().dtype,
            t.requires_grad_(False).shape,
        ),
    ):
        assert describe(weight) == describe(plain)
    assert not decodes


OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "linear": lambda t: F.linear(INPUT, t),
    "linear with bias": lambda t: F.linear(INPUT[0], t, INPUT.reshape(-1)[:96]),
    "embedding": lambda t: F.embedding(torch.tensor([[1, 5]]), t),
    "matmul": lambda t: INPUT @ t.T,
    "einsum": lambda t: torch.einsum("oi,bni->bno", t, INPUT),
    "arithmetic": lambda t: (2 * t + 1) / t.abs().max(),
    "cat": lambda t: torch.cat([t, t]),
    "foreach": lambda t: torch._foreach_mul([t, t], 2)[1],
    "float": lambda t: t.float().to(torch.bfloat16),
    "words": lambda t: (t.view(torch.int16) ^ 1).view(torch.bfloat16),
    "clone": lambda t: t.clone(),
    "transposed": lambda t: t.t().contiguous(),
    "sum": lambda t: t.sum(0),
    "deepcopy": copy.deepcopy,
    "pickle": lambda t: pickle.loads(pickle.dumps(t)),
    "cpu": lambda t: t.cpu() + 0,
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_operations_give_plain_tensors(
    layer: nn.Linear, plain: torch.Tensor, operation: str, mode: Callable[[], torch.no_grad]
) -> None:
    with mode():
        expected, result = OPERATIONS[operation](plain), OPERATIONS[operation](layer.weight)
    assert type(result) is (nn.Parameter if operation in ("deepcopy", "pickle") else torch.Tensor)
    assert torch.equal(result.contiguous().view(torch.int16), expected.contiguous().view(torch.int16))


PARTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "row": lambda t: t[3],
    "row of a transposed": lambda t: t.T[3],
    "slice of data": lambda t: t.data[2:5],
    "slice of a slice": lambda t: t[2:9][1:3, 4:],
    "row of a slice": lambda t: t[2:9][-1],
    "steps": lambda t: t[::3, 1::2],
    "chunk": lambda t: t.chunk(3)[1],
    "split": lambda t: t.split([10, 80, 6])[2],
    "columns": lambda t: t.split(10, 1)[3],
    "unbind": lambda t: t.unbind()[7],
    "last of all": lambda t: list(t)[-1],
    "narrow": lambda t: t.narrow(0, 3, 2).t(),
    "diagonal": lambda t: t.diagonal(3),
    "unfold": lambda t: t.unfold(1, 8, 8)[2],
    "squeezed": lambda t: t[3:4].squeeze(0),
    "strided": lambda t: t.as_strided((3, 2), (64, 1), 7),
    "words": lambda t: t.view(torch.int16),
    "words of rows": lambda t: t[3:9].view(torch.int16)[1:],
    "columns of three": lambda t: t.tensor_split(3, 1)[1],
}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize("part", PARTS)
def test_parts_are_read_once_and_never_written(
    layer: nn.Linear, plain: torch.Tensor, decodes: list[int], part: str, mode: Callable[[], torch.no_grad]
) -> None:
    with mode():
        expected, result = PARTS[part](plain), PARTS[part](layer.weight)
        assert (result.shape, result.stride()) == (expected.shape, expected.stride())
        for _ in range(2):
            assert torch.equal(result.clone().view(torch.int16), expected.clone().view(torch.int16))
        assert result.tolist() == expected.tolist()
        assert len(decodes) <= 1
    with torch.no_grad(), pytest.raises(InputError, match=r"cannot be changed.*samebits\.decompress"):
        result.zero_()
    with torch.no_grad(), pytest.raises(InputError, match="cannot be changed"):
        result.data[0] = 1
    assert torch.equal(layer.weight.view(torch.int16), plain.view(torch.int16))


@pytest.mark.parametrize(
    "lent",
    [lambda t: t, lambda t: t.data, lambda t: t.detach(), lambda t: t[2:5], lambda t: t.t(), lambda t: t.to("cpu")],
)
def test_no_other_tensor_becomes_what_has_no_memory(layer: nn.Linear, lent: Callable[..., torch.Tensor]) -> None:
    """torch would take the geometry, and read at address 0."""
    other = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        other.data = lent(layer.weight)
    assert other.tolist() == [1, 1, 1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_sees_where_it_is(layer: nn.Linear, plain: torch.Tensor, dtype: torch.dtype) -> None:
    with torch.autocast("cpu", dtype):
        made, expected = layer.weight.t() @ layer.weight, plain.t() @ plain
    assert made.dtype is expected.dtype is dtype
    assert torch.equal(made.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("ask", ["share_memory_", "data_ptr", "untyped_storage", "storage"])
def test_it_has_no_memory_to_share(layer: nn.Linear, ask: str) -> None:
    for weight in (layer.weight, layer.weight[2:]):
        with pytest.raises(InputError, match=rf"no memory of its own \((untyped_)?{ask}\); take a copy"):
            getattr(weight, ask)()


def test_kernels_of_others_get_no_address_of_nothing(layer: nn.Linear) -> None:
    """As they ask in C++, where the method of Python is not called."""
    for weight in (layer.weight, layer.weight[2:], layer.weight.t()):
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            torch.Tensor.data_ptr(weight)


VIEWS_OF_A_CONVOLUTION: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "squeezed": lambda t: t.squeeze(1),
    "viewed": lambda t: t.view(t.size(0), t.size(2)),
    "rows": lambda t: t[16:48],
    "rows of a squeezed": lambda t: t.squeeze(1)[3:7],
    "transposed": lambda t: t.squeeze(1).t(),
    "chunk": lambda t: t.squeeze(1).chunk(2)[1],
}


@pytest.mark.parametrize("view", VIEWS_OF_A_CONVOLUTION)
def test_a_parent_hands_the_weight_of_a_convolution_to_a_kernel(view: str) -> None:
    """As Mamba does: the kernel reads memory."""
    layer = nn.Conv1d(2048, 2048, 4, groups=2048, dtype=torch.bfloat16)
    expected = VIEWS_OF_A_CONVOLUTION[view](layer.weight.detach().clone())
    assert samebits.compress(layer).packed
    result = VIEWS_OF_A_CONVOLUTION[view](layer.weight)
    assert (result.shape, result.stride()) == (expected.shape, expected.stride())
    assert torch.Tensor.data_ptr(result) == result.data_ptr()
    size = expected.nbytes if expected.is_contiguous() else expected.t().nbytes
    assert ctypes.string_at(result.data_ptr(), size) == ctypes.string_at(expected.data_ptr(), size)
    assert torch.equal((result + 0).view(torch.int16), expected.view(torch.int16))
    with torch.no_grad(), pytest.raises(InputError, match=r"cannot be changed.*samebits\.decompress"):
        result.zero_()


def test_dlpack_gives_a_copy(layer: nn.Linear, plain: torch.Tensor) -> None:
    assert torch.equal(torch.from_dlpack(layer.weight).view(torch.int16), plain.view(torch.int16))


WRITES: dict[str, Callable[[nn.Module], object]] = {
    "in place": lambda m: m.weight.add_(1),
    "data": lambda m: m.weight.data.zero_(),
    "detached": lambda m: m.weight.detach().mul_(2),
    "copy": lambda m: m.weight.copy_(torch.zeros(SHAPE)),
    "item": lambda m: m.weight.__setitem__(0, 1),
    "new data": lambda m: setattr(m.weight, "data", torch.zeros(SHAPE)),
    "out": lambda m: torch.add(INPUT[0, 0], 1, out=m.weight),
    "init": lambda m: nn.init.normal_(m.weight),
    "foreach": lambda m: torch._foreach_add_([m.weight], 1),
    "training": lambda m: m.weight.requires_grad_(),
    "resize": lambda m: m.weight.detach().resize_(3),
    "row": lambda m: m.weight[0].zero_(),
    "row of data": lambda m: m.weight.data[5].zero_(),
    "rows": lambda m: m.weight[:3].fill_(1),
    "columns of rows": lambda m: m.weight[2].__setitem__(slice(None), 5),
    "words": lambda m: m.weight.view(torch.int16).zero_(),
    "gradient": lambda m: setattr(m.weight, "grad", torch.zeros(SHAPE)),
}


@pytest.mark.parametrize("write", WRITES)
def test_writing_is_refused(layer: nn.Linear, plain: torch.Tensor, write: str) -> None:
    with torch.no_grad(), pytest.raises(InputError, match=r"cannot be changed.*samebits\.decompress"):
        WRITES[write](layer)
    assert torch.equal(layer.weight.view(torch.int16), plain.view(torch.int16))


def test_it_cannot_be_trained(layer: nn.Linear) -> None:
    for train in (lambda weight: weight.requires_grad_(), lambda weight: setattr(weight, "requires_grad", True)):
        with pytest.raises(InputError, match=r"cannot be changed \(requires_grad_?\)"):
            train(layer.weight)
    layer.weight.requires_grad = False
    layer.weight.grad = None
    assert layer.weight.grad is None


def test_it_gets_no_gradient(layer: nn.Linear, plain: torch.Tensor) -> None:
    """Nor is one kept for it that nobody sees, where it was taken while none are recorded."""
    with torch.no_grad():
        weight = layer.weight
    assert weight.requires_grad
    x = torch.ones(3, weight.shape[1], dtype=torch.bfloat16, requires_grad=True)
    (x @ weight.T).sum().backward()
    assert x.grad is not None
    assert same_bits(x.grad, torch.ones(3, len(plain), dtype=torch.bfloat16) @ plain)
    assert weight.grad is torch._C.TensorBase.grad.__get__(weight) is None


def test_zeros_may_be_written_where_they_are() -> None:
    """As ChineseCLIP does with an embedding's row for padding, whenever it is loaded."""
    layer = nn.Embedding(64, 64, padding_idx=3).to(torch.bfloat16)
    samebits.compress(layer)
    with torch.no_grad():
        assert nn.init.zeros_(layer.weight[3]).tolist() == 64 * [0.0]
        with pytest.raises(InputError, match=r"cannot be changed"):
            nn.init.zeros_(layer.weight[4])


def test_repr_shows_the_values(layer: nn.Linear, plain: torch.Tensor) -> None:
    assert repr(plain)[10:30] in repr(layer.weight)
    assert f"{layer.weight[2, 3]:.3f}" == f"{plain[2, 3]:.3f}"


def test_what_moves_to_a_device_is_decoded_there(layer: nn.Linear, monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed bytes travel, and a GPU decodes faster than the CPU; what comes to main memory is decoded before."""
    seen: list[str] = []
    decoded_weight = recipe.decoded_weight
    monkeypatch.setattr(
        recipe, "decoded_weight", lambda packed: (seen.append(packed.data.device.type), decoded_weight(packed))[1]
    )
    moved = layer.weight.to("meta", torch.float32)
    assert (moved.device.type, moved.dtype, moved.shape) == ("meta", torch.float32, SHAPE)
    layer.weight.to("cpu", torch.float32)
    assert seen == ["meta", "cpu"]
