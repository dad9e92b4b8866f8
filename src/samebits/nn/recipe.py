"""How a module's weight is put together from the packed tensors that it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from samebits.format.packed import Header, PackedTensor
from samebits.kernels.ops import decode_packed

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
    """

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    dtype: torch.dtype = torch.bfloat16
    requires_grad: bool = True

    @property
    def slots(self) -> list[str]:
        return [piece.slot for piece in self.pieces]

    @property
    def matrix(self) -> Header | None:
        """The header, if the weight is one packed matrix and nothing else."""
        piece = self.pieces[0]
        is_matrix = not piece.index and len(self.shape) == 2 and self.dtype is torch.bfloat16
        return piece.header if is_matrix else None

    def decode(self, data: Sequence[torch.Tensor]) -> torch.Tensor:
        """The weight, a new tensor.

        Args:
            data: what the slots hold, in the order of ``pieces``: uint8 [nbytes], or unpacked words.
        """
        if not self.pieces[0].index:
            return _decode(self.pieces[0], data[0]).to(self.dtype)
        weight = torch.empty(self.shape, dtype=torch.bfloat16, device=data[0].device)
        for piece, stored in zip(self.pieces, data, strict=True):
            weight[piece.index] = _decode(piece, stored)
        return weight.to(self.dtype)


def _decode(piece: Piece, data: torch.Tensor) -> torch.Tensor:
    return data if piece.header is None else decode_packed(PackedTensor(piece.header, data))
