"""The operator samebits::linear: the fused product under a plan, or decode and cuBLAS; the same bits either way."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from samebits.format.packed import Header, PackedTensor
from samebits.kernels.decode import decode_cuda
from samebits.kernels.linear import LinearPlan, Operands, fused_linear, is_launchable, is_supported
from samebits.kernels.ops import decode_packed, header_of
from samebits.kernels.residents import Bytes, resident
from samebits.plans.environment import blas_state
from samebits.plans.key import ALIGNMENT, PlanKey, key_of
from samebits.plans.planner import Planner
from samebits.plans.together import Together

_LIBRARY = torch.library.Library("samebits", "FRAGMENT")
_LIBRARY.define("linear(Tensor x, Tensor data, Tensor? bias, int[] shape, int[] fields) -> Tensor")

_MAX_SHAPES = 16  # of inputs of one weight, whose calls are kept
_together = Together()


def plan_of(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None) -> LinearPlan | None:
    """The plan under which ``linear`` multiplies; None where it decodes first. See ``Planner.outcome_of_call``."""
    key = key_of(x, packed.header.shape, bias)
    return _plan(key, packed, x.get_device()) if key else None


def _plan(key: PlanKey, packed: PackedTensor, device: int) -> LinearPlan | None:
    if not is_supported(packed.header, key.tokens, device):
        return None
    if packed.data.data_ptr() % ALIGNMENT or packed.data.get_device() != device:
        return None
    plan = Planner.of(device).outcome_of_call(key).plan
    return plan if plan and is_launchable(packed.header, key.tokens, plan, device) else None


def linear_of_module(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``linear`` for the modules of a model, whose products of one input are made together (plans/together.py)."""
    made = _together.take(x, packed, bias)
    if made is not None:
        return made
    call = _call(x, packed, bias)
    if call is None:
        return F.linear(x, decode_cuda(packed), bias)
    return _together.multiply(x, Operands(packed, bias, call.plan), call.key)


class _Call(NamedTuple):
    """A product that has a plan."""

    header: Header
    bias: Bytes | None
    device: int
    strides: tuple[int, ...]
    key: PlanKey
    plan: LinearPlan

    def is_like(self, x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None) -> bool:
        """Whether this is the call of a product of the same shape and the same bytes of the weight."""
        return (
            self.header is packed.header
            and (bias is None if self.bias is None else self.bias.now() is bias)
            and x.dtype is torch.bfloat16
            and not x.data_ptr() % ALIGNMENT
            and x.stride() == self.strides
            and x.get_device() == self.device
            and blas_state() == self.key.state
        )


def _call(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None) -> _Call | None:
    """The last one of these bytes and this shape, if it still holds, for to ask anew takes as long as to launch."""
    kept = resident(packed.data)
    known: _Call | None = kept.calls.get(x.shape) if kept else None
    if known and known.is_like(x, packed, bias):
        return known
    key, device = key_of(x, packed.header.shape, bias), x.get_device()
    plan = _plan(key, packed, device) if key else None
    if key is None or plan is None:
        return None
    changes_unseen = bias is not None and bias.is_inference()
    call = _Call(packed.header, None if bias is None or changes_unseen else Bytes(bias), device, x.stride(), key, plan)
    if kept and not changes_unseen:
        if len(kept.calls) >= _MAX_SHAPES:
            kept.calls.clear()
        kept.calls[x.shape] = call
    return call


def linear(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``F.linear(x, decode(packed), bias)`` on a CUDA device, bit for bit.

    Args:
        x: any shape [..., K] and strides that F.linear takes.
        packed: of a weight [N, K], on the device of ``x``.
        bias: [N].

    Returns:
        [..., N]; without a gradient.
    """
    plan = plan_of(x, packed, bias)
    if plan is None:
        return F.linear(x, decode_cuda(packed), bias)
    return fused_linear(x, packed, bias, plan)


def _packed(data: torch.Tensor, shape: list[int], fields: list[int]) -> PackedTensor:
    return PackedTensor(_header(shape, fields), data)


def _header(shape: list[int], fields: list[int]) -> Header:
    return header_of(tuple(shape), tuple(fields))


def _decode_and_multiply(
    x: torch.Tensor, data: torch.Tensor, bias: torch.Tensor | None, shape: list[int], fields: list[int]
) -> torch.Tensor:
    return F.linear(x, decode_packed(_packed(data, shape, fields)), bias)


def _linear_on_cuda(
    x: torch.Tensor, data: torch.Tensor, bias: torch.Tensor | None, shape: list[int], fields: list[int]
) -> torch.Tensor:
    return linear(x, _packed(data, shape, fields), bias)


def _linear_fake(
    x: torch.Tensor, data: torch.Tensor, bias: torch.Tensor | None, shape: list[int], fields: list[int]
) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], shape[0]))


_LIBRARY.impl("linear", _decode_and_multiply, "CPU")
_LIBRARY.impl("linear", _linear_on_cuda, "CUDA")
_LIBRARY.impl("linear", _decode_and_multiply, "FuncTorchBatched")  # torch.vmap knows what to do with F.linear
torch.library.register_fake("samebits::linear", _linear_fake, lib=_LIBRARY)
