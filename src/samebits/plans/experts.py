"""The operator samebits::experts: rows times the experts that they are routed to, fused or decoded first.

    experts(x, data, shape, fields, ids, offsets)     of x [pairs, K] and matrices [experts, N, K]: [pairs, N]

Without offsets it is ``torch.bmm(decode(...)[ids], x.unsqueeze(-1)).squeeze(-1)``, with them
``F.grouped_mm(x, decode(...).transpose(-2, -1), offs=offsets)``, where ids says which expert a row has; bit for bit.
The host never waits for ids, and what is launched depends on their number alone. No gradients.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from samebits.format.geometry import EXPERTS_DIMENSIONS
from samebits.format.packed import PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.linear.experts import experts_product, is_supported, launch_of
from samebits.kernels.ops import packed_of
from samebits.kernels.residents import resident
from samebits.plans import recall
from samebits.plans.calibrate import UNSUPPORTED
from samebits.plans.calibrate_experts import multiply_decoded
from samebits.plans.environment import blas_state
from samebits.plans.key import ALIGNMENT, ExpertsKey, Operation
from samebits.plans.planner import Planner
from samebits.plans.store import ExpertsOutcome

FEW_PAIRS = 1024  # with more, a search waits until their number comes back
MAX_PAIRS = 1 << 16  # as many as there are kernels for
# By the indices' dtype native code knows which of the operations a product is (samebits.plans.recall).
RECALLED = {Operation.BATCHED: torch.int64, Operation.GROUPED: torch.int32}

_LIBRARY = torch.library.Library("samebits", "FRAGMENT")
_LIBRARY.define(
    "experts(Tensor x, Tensor data, int[] shape, int[] fields, Tensor ids, Tensor? offsets) -> Tensor",
    tags=(torch.Tag.flexible_layout,),  # as samebits::linear
)


def multiply_experts(
    x: torch.Tensor, packed: PackedTensor, ids: torch.Tensor, offsets: torch.Tensor | None
) -> torch.Tensor:
    """What the operator does, on a CUDA device; arguments as those of multiply_decoded."""
    device, variant = x.get_device(), None
    with nvrtc.on_device(device):
        key = _key_of(x, packed, ids, offsets)
        if key:
            variant = _variant(key, packed, device)
        if variant is None or launch_of(packed.header, len(x), 1, variant, device) is None:  # of chunks that are larger
            return multiply_decoded(x, packed, ids, offsets)
        y = torch.empty(len(x), packed.shape[1], dtype=torch.bfloat16, device=x.device)
        experts_product(x, packed, ids, None, y, variant)
        if key and ids.dtype is RECALLED[key.operation]:
            recall.remember_experts(x, packed, ids, key.state, variant)
    return y


def steps_plan(packed: PackedTensor, pairs: int) -> ExpertsOutcome | None:
    """What is known, or found now, for the operator without offsets; None where torch's settings have no plans.

    Args:
        packed: matrices [experts, N, K] on a CUDA device.
        pairs: rows of x.
    """
    state, device = blas_state(), packed.data.get_device()
    if state is None:
        return None
    if pairs > MAX_PAIRS or not is_supported(packed.header) or packed.data.data_ptr() % ALIGNMENT:
        return ExpertsOutcome(None, UNSUPPORTED)
    experts, rows, columns = packed.shape
    with nvrtc.on_device(device):
        return Planner.of(device).experts(ExpertsKey(Operation.BATCHED, experts, rows, columns, pairs, state), packed)


class _Searches(threading.local):
    """
    Attributes:
        at_once: any number of pairs is worth a search, in this thread.
    """

    at_once = False


_searches = _Searches()


@contextmanager
def searching_at_once() -> Iterator[None]:
    """Inside, plans are looked for at once for all numbers of pairs, which will come back."""
    before, _searches.at_once = _searches.at_once, True
    try:
        yield
    finally:
        _searches.at_once = before


def _variant(key: ExpertsKey, packed: PackedTensor, device: int) -> int | None:
    planner = Planner.of(device)
    if key.pairs > FEW_PAIRS and not _searches.at_once and not planner.knows(key):
        kept = resident(packed.data)
        if kept is None or not kept.comes_often(key.pairs):
            return None
    return planner.experts(key, packed).fused


def _key_of(
    x: torch.Tensor, packed: PackedTensor, ids: torch.Tensor, offsets: torch.Tensor | None
) -> ExpertsKey | None:
    """None where no plan is made."""
    if len(packed.shape) != EXPERTS_DIMENSIONS or x.dim() != 2 or not 0 < len(x) <= MAX_PAIRS:
        return None
    operation = Operation.BATCHED if offsets is None else Operation.GROUPED
    experts, rows, columns = packed.shape
    if x.dtype is not torch.bfloat16 or x.shape[1] != columns or not x.is_contiguous():
        return None
    if ids.dtype not in (torch.int32, torch.int64) or ids.shape != x.shape[:1] or not ids.is_contiguous():
        return None
    are_here = x.device == ids.device == packed.data.device
    state = blas_state()
    if not are_here or x.data_ptr() % ALIGNMENT or packed.data.data_ptr() % ALIGNMENT or state is None:
        return None
    return ExpertsKey(operation, experts, rows, columns, len(x), state)


def _on_cpu(
    x: torch.Tensor, data: torch.Tensor, shape: list[int], fields: list[int], ids: torch.Tensor,
    offsets: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    return multiply_decoded(x, packed_of(data, shape, fields), ids, offsets)


def _on_cuda(
    x: torch.Tensor, data: torch.Tensor, shape: list[int], fields: list[int], ids: torch.Tensor,
    offsets: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    return multiply_experts(x, packed_of(data, shape, fields), ids, offsets)


def _fake(
    x: torch.Tensor, data: torch.Tensor, shape: list[int], fields: list[int], ids: torch.Tensor,
    offsets: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    are_experts = len(shape) == EXPERTS_DIMENSIONS and x.dim() == 2
    torch._check(are_experts and x.shape[1] == shape[-1], lambda: f"an input {list(x.shape)} for experts {shape}")
    torch._check(ids.shape == x.shape[:1], lambda: f"{list(ids.shape)} indices for an input {list(x.shape)}")
    return x.new_empty((x.shape[0], shape[1]))


_LIBRARY.impl("experts", _on_cpu, "CPU")
_LIBRARY.impl("experts", _on_cuda, "CUDA")
torch.library.register_fake("samebits::experts", _fake, lib=_LIBRARY)
