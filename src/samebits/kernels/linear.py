"""The fused product of activations and a packed weight. For now it takes nothing, so that everything decodes first."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from samebits.errors import DeviceError
from samebits.format.packed import Header, PackedTensor


@dataclass(frozen=True)
class LinearPlan:
    """How one fused product is launched.

    Attributes:
        split: ranges of K whose fp32 partial sums are added in order, of ceil(ceil(K / 64) / split) stages each.
        variant: tuning choice of the kernel; never changes bits.
    """

    split: int
    variant: int


def is_supported(header: Header, m: int) -> bool:
    """Whether the kernel takes a weight with this header and ``m`` rows of activations."""
    return False


def variants(header: Header, m: int, split: int) -> list[int]:
    """Tuning choices worth timing."""
    return []


def fused_linear(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None, plan: LinearPlan) -> torch.Tensor:
    """``F.linear(x, decode(packed), bias)`` in the order of sums that ``plan`` names.

    Args:
        x: bfloat16 [m, K], contiguous, at a multiple of 16 bytes.
        packed: of a weight [N, K].
        bias: bfloat16 [N], contiguous, at a multiple of 16 bytes.

    Returns:
        bfloat16 [m, N], contiguous.
    """
    raise DeviceError("there is no fused kernel", mend="decode and multiply")
