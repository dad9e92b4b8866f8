"""Operands, and products with a chosen order of sums, as the fused kernel and cuBLAS have it (float32, on the CPU)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

STAGE, STEP = 64, 16


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Operands."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def split_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, split: int) -> torch.Tensor:
    """One fp32 sum for each range of K, 16 columns at a time; the ranges' sums in order; bias; one rounding."""
    columns = weight.shape[1]
    stages = -(-columns // STAGE)
    width = STAGE * -(-stages // split)
    total = torch.zeros((*x.shape[:-1], len(weight)))
    for start in range(0, columns, width):
        partial = torch.zeros_like(total)
        for step in _steps(start, min(start + width, columns)):
            partial = partial + x[..., step].float() @ weight[:, step].float().T
        total = total + partial
    return (total if bias is None else total + bias.float()).to(torch.bfloat16)


def _steps(start: int, stop: int) -> Iterator[slice]:
    return (slice(step, min(step + STEP, stop)) for step in range(start, stop, STEP))
