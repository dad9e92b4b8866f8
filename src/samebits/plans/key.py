"""What a plan is valid for."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

import torch

from samebits.kernels.linear.launch import MAX_HOPPER_TOKENS
from samebits.plans.environment import blas_state

ALIGNMENT = 16  # bytes; operands at other addresses make cuBLAS choose other algorithms


class PlanKey(NamedTuple):
    """One product as cuBLAS sees it, within one Environment.

    Attributes:
        rows: N, of the weight.
        columns: K, of the weight.
        tokens: M, rows of the activations; an input [batch, length, K] counts as [batch * length, K].
        has_bias: torch computes with and without one in different ways.
        state: settings of torch and cuBLAS that decide over algorithms.
    """

    rows: int
    columns: int
    tokens: int
    has_bias: bool
    state: str


class Operation(StrEnum):
    """What torch would make a product of rows with the experts that they are routed to by."""

    BATCHED = "bmm"  # of the experts' matrices gathered, one for each row
    GROUPED = "grouped_mm"  # of rows in the order of their experts
    VLLM = "vLLM"  # both products of a layer, by vLLM's kernel; see samebits.integrations.vllm.routed


class ExpertsKey(NamedTuple):
    """One product with routed experts, within one Environment.

    Attributes:
        experts, rows, columns: of the weight, a matrix [N, K] for each expert.
        pairs: of a token and one of its experts: rows of the activations.
        state: as PlanKey's.
    """

    operation: Operation
    experts: int
    rows: int
    columns: int
    pairs: int
    state: str


def key_of(x: torch.Tensor, weight_shape: Sequence[int], bias: torch.Tensor | None) -> PlanKey | None:
    """The key of ``F.linear(x, weight, bias)``; None if it lies outside of what plans are made for.

    Inside: bfloat16, no more tokens than any kernel takes, rows that lie as ``has_planned_layout`` says, every operand
    at a multiple of 16 bytes.
    """
    rows, columns = weight_shape
    if x.dtype is not torch.bfloat16 or x.data_ptr() % ALIGNMENT:
        return None
    if not has_planned_layout(x) or x.shape[-1] != columns or (bias is not None and not _is_plain(bias, rows, x)):
        return None
    tokens = x.numel() // columns
    if tokens > MAX_HOPPER_TOKENS:
        return None
    state = blas_state()
    return None if state is None else PlanKey(rows, columns, tokens, bias is not None, state)


def has_planned_layout(x: torch.Tensor) -> bool:
    """Whether plans are made for inputs that lie so in memory.

    Two or three dimensions, no gaps between rows, no strides of another kind even where a dimension is 1: torch calls
    another routine then. But one row in two dimensions may have a stride of 0, as compiled models do, or of more than
    its length, by which the next one would be as aligned.
    """
    if is_gapless(x):
        return x.dim() in (2, 3)
    if x.dim() != 2 or len(x) != 1 or x.stride(1) != 1:
        return False
    return not 0 < x.stride(0) < x.shape[1] and not x.stride(0) * x.element_size() % ALIGNMENT


def is_gapless(x: torch.Tensor) -> bool:
    """Whether its strides are those of a new tensor of its shape, also where a dimension is 1."""
    width = 1
    for size, stride in zip(reversed(x.shape), reversed(x.stride()), strict=True):
        if stride != width:
            return False
        width *= max(size, 1)
    return True


def _is_plain(bias: torch.Tensor, rows: int, x: torch.Tensor) -> bool:
    return (
        bias.dtype is torch.bfloat16
        and bias.shape == (rows,)
        and bias.stride() == (1,)
        and not bias.data_ptr() % ALIGNMENT
        and bias.get_device() == x.get_device()
    )
