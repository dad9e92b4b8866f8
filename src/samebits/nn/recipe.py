"""How a module's weight is put together from the packed tensors that it holds."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field

import torch
from torch._C._functorch import is_functorch_wrapped_tensor

from samebits.errors import InputError
from samebits.format.geometry import EXPERTS_DIMENSIONS
from samebits.format.header import Header
from samebits.format.packed import PackedTensor
from samebits.kernels.ops import decode_experts, decode_packed, decode_rows, fields_of
from samebits.plans import dispatch
from samebits.plans.dispatch import decoded_weight

Index = tuple[int | slice, ...]


@dataclass(frozen=True)
class Piece:
    """One stored tensor of a weight.

    Attributes:
        slot: name of the module's parameter that holds it.
        header: of the packed tensor; parsed once, so that no decode reads bytes back from a GPU. None: stored unpacked.
        index: where it goes in the weight; empty: it is the weight.
        source: its original name in the checkpoint it comes from, if it is not the whole weight.
    """

    slot: str
    header: Header | None
    index: Index = ()
    source: str = ""


@dataclass(frozen=True)
class Recipe:
    """A weight in packed form, without its bytes.

    Attributes:
        dtype: what the model computes with; float32 where it asks for more than the stored bfloat16.
        requires_grad: of the parameter that was packed.
        stride: of the parameter, in elements; empty: contiguous. torch chooses by strides how it computes.
        whole: the header, if the weight is one packed tensor and nothing else.
        matrix: the same of a matrix.
        operands: for traces, its rows, columns, requires_grad and fields_of(matrix) then, else nothing. As text, since
            torch.compile guards each number of a tuple by itself, at every call, and a text as one.
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    dtype: torch.dtype = torch.bfloat16
    requires_grad: bool = True
    stride: tuple[int, ...] = ()
    whole: Header | None = field(init=False, repr=False, compare=False)
    matrix: Header | None = field(init=False, repr=False, compare=False)
    operands: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        piece = self.pieces[0]
        is_whole = not (piece.index or self.stride) and self.dtype is torch.bfloat16
        whole = piece.header if is_whole else None
        matrix = whole if len(self.shape) == 2 else None
        numbers = (*matrix.shape, self.requires_grad, *fields_of(matrix)) if matrix else ()
        object.__setattr__(self, "whole", whole)
        object.__setattr__(self, "matrix", matrix)
        object.__setattr__(self, "operands", " ".join(str(int(number)) for number in numbers))

    @property
    def slots(self) -> list[str]:
        return [piece.slot for piece in self.pieces]

    def probe(self) -> torch.Tensor:
        """A tensor of two along each dimension, which lie in memory in the order of the weight's."""
        sizes = [2] * len(self.shape)
        if not self.stride:
            return torch.empty(sizes, dtype=torch.bfloat16, device="cpu")
        order = sorted(range(len(sizes)), key=lambda place: -self.stride[place])
        places = sorted(range(len(sizes)), key=lambda place: order[place])
        return torch.empty(sizes, dtype=torch.bfloat16, device="cpu").permute(places)

    def shows_requires_grad(self, device: torch.device) -> bool:
        """Whether the weight is to have requires_grad now: see shows_requires_grad below."""
        return self.requires_grad and shows_requires_grad(self.dtype, device)

    def weight(self, data: Sequence[torch.Tensor]) -> torch.Tensor:
        """``decode(data)``, with requires_grad where it is to show."""
        shows = self.shows_requires_grad(data[0].device)
        if is_functorch_wrapped_tensor(data[0]) or not (shows or torch.is_inference_mode_enabled()):
            return self.decode(data)
        with _outside():  # where torch counts writes to it, too
            return showing(self.decode(data), shows)

    def weight_again(self, stored: torch.Tensor) -> torch.Tensor | None:
        """The same of the only packed tensor's bytes, if native code has decoded them before; else None."""
        if torch.is_inference_mode_enabled():
            return None
        made: torch.Tensor | None = dispatch.weight_again(stored)
        if made is not None and self.shows_requires_grad(stored.device):
            made.requires_grad = True
        return made

    def decode(self, data: Sequence[torch.Tensor], entries: Container[int] | None = None) -> torch.Tensor:
        """The weight, a new tensor.

        Args:
            data: what the slots hold, in the order of ``pieces``: uint8 [nbytes], or unpacked words.
            entries: indices of the first dimension at which the result is to be read. Pieces that are not needed for
                them are not decoded, and whatever the memory held stays in their place.
        """
        if not self.pieces[0].index:
            whole = data[0].clone() if self.pieces[0].header is None else _decode(self.pieces[0], data[0])
            return self._arrange(whole).to(self.dtype)
        weight = torch.empty(self.shape, dtype=torch.bfloat16, device=data[0].device)
        for piece, stored in zip(self.pieces, data, strict=True):
            at = piece.index[0]
            if entries is None or isinstance(at, slice) or at in entries:
                weight[piece.index] = _decode(piece, stored)
        return weight.to(self.dtype)

    def _arrange(self, weight: torch.Tensor) -> torch.Tensor:
        if not self.stride:
            return weight
        return torch.empty_strided(self.shape, self.stride, dtype=weight.dtype, device=weight.device).copy_(weight)

    def rows(self, data: Sequence[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        """``decode(data)[ids]``, decoding no more than that takes.

        Args:
            ids: int32 or int64, any shape, on the device of the data, of indices of the first dimension; not negative.

        Raises:
            IndexError: an index out of range, on the CPU. On a GPU an assertion fails there.
        """
        piece = self.pieces[0]
        if self.stride and len(self.shape) >= EXPERTS_DIMENSIONS:  # of whose strides an indexed stack's depend
            return self.decode(data)[ids]
        if piece.index:
            weight = self.decode(data, _values(ids, self.shape[0]))
            return weight.index_select(0, ids.reshape(-1)).view((*ids.shape, *self.shape[1:]))
        if piece.header is None:
            return data[0].index_select(0, ids.reshape(-1)).view((*ids.shape, *self.shape[1:])).to(self.dtype)
        return decode_rows(_packed(piece.header, data[0]), ids).to(self.dtype)

    def entry(self, data: Sequence[torch.Tensor], number: int) -> torch.Tensor:
        """``decode(data)[number]``, decoding no more than that takes; ``number`` may be negative.

        Raises:
            IndexError: it is out of range.
        """
        size = self.shape[0]
        if not -size <= number < size:
            raise IndexError(f"index {number} is out of range for a weight of shape {list(self.shape)}")
        number %= size
        if self.stride:
            return self.decode(data)[number]
        if not self.pieces[0].index:
            return self.rows(data, torch.full((), number, device=data[0].device))
        entry = torch.empty(self.shape[1:], dtype=torch.bfloat16, device=data[0].device)
        for piece, stored in zip(self.pieces, data, strict=True):
            at = piece.index[0]
            if at == number:
                entry[piece.index[1:]] = _decode(piece, stored)
            elif isinstance(at, slice) and at.start <= number < at.stop:
                entry[piece.index[1:]] = _decode(piece, stored)[number - at.start]
        return entry.to(self.dtype)

    def routed(self, data: Sequence[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
        """A tensor like ``decode(data)`` that is to be read at the indices ``ids`` of the first dimension only.

        Args:
            ids: as ``rows`` takes them.

        Raises:
            IndexError: as ``rows``.
        """
        piece = self.pieces[0]
        if piece.index:
            return self.decode(data, _values(ids, self.shape[0]))
        if piece.header is None or self.stride:
            return self.decode(data)
        return decode_experts(_packed(piece.header, data[0]), ids).to(self.dtype)


def shows_requires_grad(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether decoded weights are to have requires_grad now, if the parameters had it.

    Where gradients are recorded, they have none. Elsewhere that says only how torch multiplies: inputs [batch, length,
    K] with gaps as one matrix, else as a batch, which may round otherwise (should_fold in ATen's LinearAlgebra.cpp).
    Autocast to another dtype multiplies with a copy, which has none; some it would keep.
    """
    if torch.is_grad_enabled() or device.type == "meta":
        return False
    return not torch.is_autocast_enabled(device.type) or torch.get_autocast_dtype(device.type) is dtype


def showing(weight: torch.Tensor, shows: bool) -> torch.Tensor:
    """A weight with requires_grad or without, as it is to show."""
    if weight.requires_grad == shows or is_functorch_wrapped_tensor(weight):
        return weight
    with _outside():
        weight = weight.detach()
        weight.requires_grad = shows  # the method requires_grad_ is refused in torch.func
        return weight


def _outside() -> AbstractContextManager[object]:
    """As parameters are made: views of other tensors show nothing, nor does what is made in torch.func."""
    is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
    return _outside_of_transforms() if is_transformed else torch.inference_mode(False)


@contextmanager
def _outside_of_transforms() -> Iterator[None]:
    with torch.inference_mode(False), torch._C._DisableFuncTorch():
        yield


def _values(ids: torch.Tensor, size: int) -> Container[int] | None:
    """The different values of ``ids``; None where they cannot be read because a graph is made."""
    if torch.compiler.is_compiling() or (ids.is_cuda and torch.cuda.is_current_stream_capturing()):
        return None
    values = set(ids.unique().tolist())
    wrong = [value for value in values if not 0 <= value < size]
    if wrong:
        raise IndexError(f"index {wrong[0]} is out of range for {size} entries")
    return values


def is_sharded(data: torch.Tensor) -> bool:
    """Whether each process has a part of it, as torch's fully_shard leaves it outside of a forward or backward pass."""
    return type(data) not in (torch.Tensor, torch.nn.Parameter) and hasattr(data, "full_tensor")


def _packed(header: Header, data: torch.Tensor) -> PackedTensor:
    """
    Raises:
        InputError: it is sharded.
    """
    if is_sharded(data):
        what = "a packed weight is sharded, so its bytes are not all here"
        raise InputError(what, mend="call unshard() of the module that fully_shard was given first")
    return PackedTensor(header, data)


def _decode(piece: Piece, data: torch.Tensor) -> torch.Tensor:
    if piece.header is None:
        return data
    packed = _packed(piece.header, data)
    return decode_packed(packed) if torch.compiler.is_compiling() else decoded_weight(packed)
