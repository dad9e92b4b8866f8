"""Products of packed linear layers: which of them have plans, how torch would make them, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad

from samebits.errors import InputError
from samebits.format.packed import PackedTensor
from samebits.plans import dispatch
from samebits.plans.environment import casts, is_transformed
from samebits.plans.key import is_gapless


class FrozenProduct(torch.autograd.Function):
    """A product whose weight takes no gradient: of it autograd keeps the packed bytes, which backward decodes again.

    Gradients are torch's own of a product of two dimensions.
    """

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, bias: torch.Tensor | None, packed: PackedTensor,
        multiply: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        """
        Args:
            input: [..., K].
            bias: [N]; here only for its gradient.
            packed: of the weight [N, K].
            multiply: makes the product [..., N] of the input; called without recording gradients.
        """
        ctx.packed, ctx.version = packed, version_of(packed.data)
        y = multiply(input)
        return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y  # or it could not be written to

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """
        Raises:
            InputError: see check_unchanged.
        """
        packed: PackedTensor = ctx.packed
        has_input, has_bias, *_ = ctx.needs_input_grad
        rows, of_input = grad.reshape(-1, grad.shape[-1]), None
        if has_input:
            check_unchanged([packed.data], [ctx.version])
            fuses = is_fusible(rows, None)
            product = dispatch.gradient(rows, packed) if fuses else rows.mm(dispatch.decoded_weight(packed))
            of_input = product.view(*grad.shape[:-1], packed.shape[1])
        return of_input, rows.sum(0) if has_bias else None, None, None


def version_of(tensor: torch.Tensor) -> int:
    """How often it has been written to, as torch counts; 0 where torch does not."""
    return 0 if tensor.is_inference() else tensor._version


def check_unchanged(data: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """
    Args:
        versions: of packed bytes, when a forward pass read them.

    Raises:
        InputError: they were written to since, so that gradients would be of other weights.
    """
    if [version_of(each) for each in data] != versions:
        what = "packed weights were written to between a forward pass and its backward pass"
        raise InputError(what, mend="run the forward pass again")


def is_matrix(input: torch.Tensor, bias: object, requires_grad: bool) -> bool:
    """Whether torch multiplies an input [..., K] as one matrix without gaps, whatever strides a dimension of 1 has.

    Args:
        requires_grad: what the weight says.
    """
    return input.is_contiguous() and (bias is not None or requires_grad)


def is_fusible(input: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether nothing but the values of a product is asked for."""
    return not _is_watched() and _is_plain(input) and (bias is None or _is_plain(bias))


def is_alone(input: torch.Tensor, bias: torch.Tensor | None, data: torch.Tensor) -> bool:
    """Whether that is all that is asked for on a CPU, of an input that torch multiplies as it lies.

    Args:
        data: the packed weight's bytes.
    """
    if not (_takes_no_gradient(input) and (bias is None or _takes_no_gradient(bias))):
        return False
    is_here = input.is_cpu and type(data) in (torch.Tensor, nn.Parameter) and data.is_cpu
    return is_here and not _is_watched("cpu") and (input.dim() <= 2 or is_gapless(input))


def is_trained(input: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether gradients of these are recorded, and the product is of two dimensions and BF16."""
    if not torch.is_grad_enabled() or not (_is_own(input) and (bias is None or _is_own(bias))):
        return False
    wants = input.requires_grad or (bias is not None and bias.requires_grad)
    return wants and input.dim() >= 2 and not casts(input.device.type)


def is_frozen(input: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """Whether gradients of these are recorded, and nothing else, of a product that torch makes of two dimensions.

    Strides of a dimension of 1 count: torch makes a batch of products, or a transposed gradient, where they say so.
    """
    return is_trained(input, bias) and not _is_watched() and is_gapless(input)  # a trace would keep that it is asked


def _is_own(tensor: torch.Tensor) -> bool:
    """A tensor of torch's own, with strides, BF16."""
    is_own = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested
    return is_own and tensor.dtype is torch.bfloat16


def _is_plain(tensor: torch.Tensor) -> bool:
    """One of these on a GPU, of which no gradient is wanted."""
    return _takes_no_gradient(tensor) and tensor.is_cuda


def _takes_no_gradient(tensor: torch.Tensor) -> bool:
    return _is_own(tensor) and not (tensor.requires_grad and torch.is_grad_enabled())


def _is_watched(device: str = "cuda") -> bool:
    """Whether more than values is asked for: by autocast, forward-mode differentiation, torch.func, a mode, a trace."""
    if casts(device) or forward_ad._current_level >= 0:
        return True
    if torch.compiler.is_compiling():  # the graph has the operator, which knows torch.vmap
        return False
    return is_transformed()
