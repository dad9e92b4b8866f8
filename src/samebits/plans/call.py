"""What is found out for a product is kept for the next one like it: its key, its plan, its launch."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

from samebits.format.header import Header
from samebits.format.packed import PackedTensor
from samebits.kernels.decode import decode_cuda
from samebits.kernels.linear.launch import MAX_HOPPER_TOKENS
from samebits.kernels.linear.products import LinearPlan, Operands, Products, is_launchable, is_supported, products_of
from samebits.kernels.residents import ParameterBytes, make_room, resident
from samebits.plans.environment import blas_state
from samebits.plans.key import ALIGNMENT, PlanKey, key_of
from samebits.plans.planner import FEW_TOKENS, Mode, Planner, mode
from samebits.plans.store import Outcome


class Call(NamedTuple):
    """A product that has a plan.

    Attributes:
        is_fused: it is faster alone than if the weight is decoded first.
        gained_us: microseconds that it takes less then.
        carried_us: as Outcome's.
    """

    header: Header
    bias: ParameterBytes | None
    device: int
    strides: tuple[int, ...]
    key: PlanKey
    plan: LinearPlan
    products: Products
    is_fused: bool
    gained_us: float
    carried_us: float | None

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

    def multiply(self, x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Alone."""
        if not self.is_fused:
            return F.linear(x, decode_cuda(packed), bias)
        return self.products(x, bias, lambda: [Operands(packed, bias, self.plan)])[0]


def call_of(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None) -> Call | None:
    """None where no fused product has the right bits, or none is known.

    To find out anew takes the host as long as to launch, so the last call of each shape is kept beside the bytes of the
    weight; it holds as long as all that it rests on is the same.
    """
    kept = resident(packed.data)
    known: Call | None = kept.calls.get(x.shape) if kept else None
    if known and known.is_like(x, packed, bias):
        return known
    key, device = key_of(x, packed.header.shape, bias), x.get_device()
    outcome = _outcome(key, packed, device) if key else None
    if key is None or outcome is None or outcome.plan is None:
        return None
    plan = outcome.plan
    products = products_of(packed.header, key.tokens, plan, device)
    changes_unseen = bias is not None and bias.is_inference()
    own = None if bias is None or changes_unseen else ParameterBytes(bias)
    call = Call(packed.header, own, device, x.stride(), key, plan, products, outcome.fused is not None,
                outcome.gained_us, outcome.carried_us)  # fmt: skip
    if kept and not changes_unseen:
        make_room(kept.calls, x.shape)
        kept.calls[x.shape] = call
        if key.tokens > FEW_TOKENS:
            kept.planned.add(key.tokens)
    return call


def plan_of(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None) -> LinearPlan | None:
    """The plan under which a product is made alone; None where the weight is decoded first."""
    key = key_of(x, packed.header.shape, bias)
    outcome = _outcome(key, packed, x.get_device()) if key else None
    return outcome.fused if outcome else None


class Decoding(NamedTuple):
    """Why a weight is decoded first.

    Attributes:
        state: torch's settings that count; None where none do: under others, products of many tokens may be faster,
            but little, and asking takes the host longer.
        is_final: the next input of this shape and these settings will find the same.
    """

    state: str | None
    is_final: bool


def decoding(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None) -> Decoding:
    """Of a product that is not fused."""
    if x.dtype is torch.bfloat16 and x.numel() > MAX_HOPPER_TOKENS * x.shape[-1]:
        return Decoding(None, True)
    key, device = key_of(x, packed.header.shape, bias), x.get_device()
    if key is None:
        return Decoding(None, False)
    is_final = not is_supported(packed.header, key.tokens, device) or key in Planner.of(device).known
    return Decoding(key.state if key.tokens <= FEW_TOKENS else None, is_final)


def _outcome(key: PlanKey, packed: PackedTensor, device: int) -> Outcome | None:
    """Of one product; None if none is known or looked for yet, or it is of no use for this weight."""
    if not is_supported(packed.header, key.tokens, device):
        return None
    if packed.data.data_ptr() % ALIGNMENT or packed.data.get_device() != device:
        return None
    planner = Planner.of(device)
    if key not in planner.known and _waits(key, packed):
        return None
    outcome = planner.outcome(key)
    return outcome if outcome.plan and is_launchable(packed.header, key.tokens, outcome.plan, device) else None


def _waits(key: PlanKey, packed: PackedTensor) -> bool:
    """Whether a plan is not to be looked for yet: few tokens never wait."""
    if key.tokens <= FEW_TOKENS:
        return False
    kept = resident(packed.data)
    comes_often = kept is not None and kept.comes_often(key.tokens)
    return mode() is Mode.ON and not comes_often
