"""Weights that the fused linear layer is tested with."""

from __future__ import annotations

import torch

KINDS = ("normal", "row scales", "patches", "raw chunks", "raw ends", "not finite", "subnormal")
SHAPES = (
    (64, 1024), (1064, 2880), (2048, 1088), (136, 6080), (4104, 1024), (8456, 1088), (10568, 2112), (12808, 1024),
)  # fmt: skip


def weight_of(kind: str, rows: int, columns: int) -> torch.Tensor:
    """bfloat16 [rows, columns] of a kind that packs with the quad code."""
    generator = torch.Generator().manual_seed(rows * columns)
    weight = torch.randn(rows, columns, generator=generator) * 0.02
    if kind == "row scales":
        weight *= torch.exp2(torch.randint(-30, 30, (rows, 1), generator=generator))
    elif kind == "patches":
        weight[torch.rand(rows, columns, generator=generator) < 0.004] = 0.0
        weight[:, 100:132] *= 1e-4
    elif kind == "raw chunks":
        weight[8:16] = torch.exp2(torch.randint(-120, 120, (8, columns), generator=generator).float())
    elif kind == "raw ends":  # chunks that may be small
        end = (rows, columns % 1024)
        weight[:, columns - end[1] :] = torch.exp2(torch.randint(-120, 120, end, generator=generator).float())
    elif kind == "not finite":
        weight[3, 5], weight[9, 70], weight[17, 1000] = float("nan"), float("inf"), -float("inf")
    elif kind == "subnormal":
        weight[4:6] *= 2.0**-124
    return weight.bfloat16()
