"""The operator samebits::linear: the fused product under a plan, or decode and cuBLAS; the same bits either way.

samebits::linears makes several of one input, in one launch where that is faster; Inductor's graphs get it
(plans/graph_pass.py).
samebits::frozen_linear is the same for traces that record gradients of the input and the bias: its backward decodes the
weight again, so a graph need not keep it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from samebits.format.packed import PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.decode import decode_cuda
from samebits.kernels.ops import decode_packed, packed_of
from samebits.plans import at_once, graph_pass, recall
from samebits.plans.call import Call, call_of
from samebits.plans.together import Together

_LIBRARY = torch.library.Library("samebits", "FRAGMENT")

together = Together()
_again = recall.recall_of(together.turns)
product_again, weight_again, experts_again = _again.product, _again.weight, _again.experts
gradient_again = recall.recall_of_gradients().product


def linear_of_module(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``linear`` for the modules of a model.

    Products of one input are made together (plans/together.py), and some weights are decoded ahead (plans/prefetch.py).
    """
    with nvrtc.on_device(x.get_device()):
        together.prefetcher.note(x, packed)
        made = together.take(x, packed, bias)
        if made is not None:
            return made
        weight = together.prefetcher.take(x, packed)
        if weight is not None:
            return F.linear(x, weight, bias)
        call = call_of(x, packed, bias)
        if call is None:
            return together.without_plan(x, packed, bias)
        return together.multiply(x, packed, bias, call)


def gradient(grad: torch.Tensor, packed: PackedTensor) -> torch.Tensor:
    """Of an input: ``grad.mm(decode(packed))``, grad [tokens, N] on a CUDA device."""
    made: torch.Tensor | None = gradient_again(grad, packed.data, None)
    return recall.gradient(grad, packed) if made is None else made


def decoded_weight(packed: PackedTensor) -> torch.Tensor:
    """``decode_packed``, of a module's weight on any device: where it was decoded before, the host is faster."""
    made: torch.Tensor | None = weight_again(packed.data)
    return recall.weight(packed) if made is None else made


def linear(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``F.linear(x, decode(packed), bias)`` on a CUDA device, bit for bit.

    Args:
        x: any shape [..., K] and strides that F.linear takes.
        packed: of a weight [N, K], on the device of ``x``.
        bias: [N].

    Returns:
        [..., N]; without a gradient.
    """
    return _multiply(x, packed, bias, call_of(x, packed, bias))


def _multiply(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None, call: Call | None) -> torch.Tensor:
    return F.linear(x, decode_cuda(packed), bias) if call is None else call.multiply(x, packed, bias)


def linears(x: torch.Tensor, factors: Sequence[at_once.Factor]) -> list[torch.Tensor]:
    """``linear`` of one x with several weights, each with its bias or None."""
    with nvrtc.on_device(x.get_device()):
        calls = [call_of(x, *factor) for factor in factors]
        made = at_once.launch(x, factors, calls)
        if made is not None and made.is_proved:
            return made.products
        alone = [_multiply(x, *factor, call) for factor, call in zip(factors, calls, strict=True)]
        if made is not None:
            made.prove(alone)
    return alone


def _decode_and_multiply(
    x: torch.Tensor, data: torch.Tensor, bias: torch.Tensor | None, shape: list[int], fields: list[int]
) -> torch.Tensor:
    return F.linear(x, decode_packed(packed_of(data, shape, fields)), bias)


def _linear_on_cuda(
    x: torch.Tensor, data: torch.Tensor, bias: torch.Tensor | None, shape: list[int], fields: list[int]
) -> torch.Tensor:
    return linear(x, packed_of(data, shape, fields), bias)


def _linear_fake(
    x: torch.Tensor, data: torch.Tensor, bias: torch.Tensor | None, shape: list[int], fields: list[int]
) -> torch.Tensor:
    torch._check(x.shape[-1] == shape[1], lambda: f"an input of {x.shape[-1]} columns for a weight {shape}")
    graph_pass.register()
    return x.new_empty((*x.shape[:-1], shape[0]))


def _each(
    data: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None], shapes: list[int], fields: list[int]
) -> Iterator[tuple[torch.Tensor, torch.Tensor | None, list[int], list[int]]]:
    """Arguments of samebits::linear behind x, of what samebits::linears gets."""
    count = len(data)
    rank, width = len(shapes) // count, len(fields) // count
    for i in range(count):
        yield data[i], biases[i], shapes[i * rank : (i + 1) * rank], fields[i * width : (i + 1) * width]


def _linears_on_cpu(x: torch.Tensor, *operands: Any) -> list[torch.Tensor]:
    return [_decode_and_multiply(x, *each) for each in _each(*operands)]


def _linears_on_cuda(x: torch.Tensor, *operands: Any) -> list[torch.Tensor]:
    return linears(x, [(packed_of(data, shape, fields), bias) for data, bias, shape, fields in _each(*operands)])


def _linears_fake(x: torch.Tensor, *operands: Any) -> list[torch.Tensor]:
    return [_linear_fake(x, *each) for each in _each(*operands)]


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, data, _, ctx.shape, ctx.fields = inputs
    ctx.save_for_backward(data)


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    """As torch's own, of two dimensions."""
    [data] = ctx.saved_tensors
    has_x, _, has_bias, *_ = ctx.needs_input_grad
    of_x = grad @ decode_packed(packed_of(data, ctx.shape, ctx.fields)) if has_x else None
    return of_x, None, grad.sum(0) if has_bias else None, None, None


for _name in ("linear", "frozen_linear"):
    _LIBRARY.define(
        f"{_name}(Tensor x, Tensor data, Tensor? bias, int[] shape, int[] fields) -> Tensor",
        tags=(torch.Tag.flexible_layout,),  # else Inductor copies x, and rounds what else it makes of x elsewhere
    )
    _LIBRARY.impl(_name, _decode_and_multiply, "CPU")
    _LIBRARY.impl(_name, _linear_on_cuda, "CUDA")
    torch.library.register_fake(f"samebits::{_name}", _linear_fake, lib=_LIBRARY)
_LIBRARY.define(
    "linears(Tensor x, Tensor[] data, Tensor?[] biases, int[] shapes, int[] fields) -> Tensor[]",
    tags=(torch.Tag.flexible_layout,),
)
_LIBRARY.impl("linears", _linears_on_cpu, "CPU")
_LIBRARY.impl("linears", _linears_on_cuda, "CUDA")
torch.library.register_fake("samebits::linears", _linears_fake, lib=_LIBRARY)
_LIBRARY.impl("linear", _decode_and_multiply, "FuncTorchBatched")  # torch.vmap knows what to do with F.linear
torch.library.register_autograd("samebits::frozen_linear", _gradients, setup_context=_keep, lib=_LIBRARY)
