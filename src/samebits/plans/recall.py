"""Products of modules that are made once more: by native code, which takes the host a fraction of the time.

Whoever has made a product in the usual way says so. The second time, what it rests on is kept beside the weight's
bytes, for each shape of the input: torch's settings, the stream, the bias, the launch with all that its kernels are
told. recall.c asks torch all of this again at each call, and launches; where an answer is another, the product is made
in the usual way. So it is with gradients of inputs, for which the weight is decoded again.

The native part is compiled when samebits is installed. Without it (no C compiler, a source tree that is not installed)
every product is made in the usual way: with the same bits, but the host takes longer.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Mapping
from itertools import accumulate
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from samebits.codecs.decode import decode_cpu
from samebits.format.packed import PackedTensor
from samebits.kernels import decode, nvrtc
from samebits.kernels.decode_together import DecodeTogether
from samebits.kernels.linear import experts
from samebits.kernels.linear.products import LinearPlan, Products
from samebits.kernels.ops import decode_packed
from samebits.kernels.repeat import Repeat
from samebits.kernels.residents import ParameterBytes, Recalled, Resident, gradients, make_room, resident, residents
from samebits.plans import environment
from samebits.plans.call import Call, decoding
from samebits.plans.carrier import Choice
from samebits.plans.planner import FEW_TOKENS
from samebits.plans.turn import Turns

native: ModuleType | None
try:
    from samebits.plans import _recall as native
except ImportError:
    native = None

_EMPTY = "_empty_strided_cuda"  # as Inductor allocates, on the current device: less than half the time of torch.empty
_can_recall = (
    native is not None and hasattr(torch._C, "_cuda_exchangeDevice") and hasattr(torch._C._dynamo.guards, _EMPTY)
)
_NO_SHAPE = torch.Size()  # where a weight is decoded alone


class Recall(Protocol):
    """What is made again; each answers None where it is to be made in the usual way."""

    def product(self, x: torch.Tensor, data: torch.Tensor, bias: torch.Tensor | None) -> Any:
        """Of an input and a weight's packed bytes; or of an output's gradient and None."""

    def weight(self, data: torch.Tensor) -> Any:
        """Decoded from its packed bytes."""

    def experts(self, x: torch.Tensor, data: torch.Tensor, ids: torch.Tensor) -> Any:
        """Of rows and the matrices of a stack's packed bytes that ids say: of int64 as torch.bmm makes them, of int32
        as F.grouped_mm."""


class _Nothing:
    """Where native code is missing, or torch without CUDA."""

    def product(self, x: torch.Tensor, data: torch.Tensor, bias: torch.Tensor | None) -> None:
        return None

    def weight(self, data: torch.Tensor) -> None:
        return None

    def experts(self, x: torch.Tensor, data: torch.Tensor, ids: torch.Tensor) -> None:
        return None


def recall_of(turns: Turns) -> Recall:
    """Of a model's products and weights."""
    return _recall_of(turns, residents)


def recall_of_gradients() -> Recall:
    """Of inputs' gradients."""
    alone = SimpleNamespace(windows=(), last=SimpleNamespace(made={}))  # nothing is made together with it, or noted
    return _recall_of(alone, gradients)


def _recall_of(turns: Any, known: Mapping[int, ParameterBytes]) -> Recall:
    if native is None or not _can_recall:
        return _Nothing()
    own = torch._C
    recall: Recall = native.Recall(
        turns=turns, residents=known, tensor=torch.Tensor, parameter=nn.Parameter, dtype=torch.bfloat16,
        exchange_device=own._cuda_exchangeDevice, restore_device=own._cuda_maybeExchangeDevice,
        current_stream=own._cuda_getCurrentRawStream, is_capturing=own._cuda_isCurrentStreamCapturing,
        autocasts=torch.is_autocast_enabled, casts=environment.casts, forward_ad=forward_ad,
        interpreter=own._functorch.peek_interpreter_stack, modes=own._len_torch_dispatch_stack,
        tracing=own._get_tracing_state, is_grad_enabled=torch.is_grad_enabled, environment=environment,
        getters=environment.getters(), linear=F.linear, observers=own._len_torch_function_stack,
        is_observed=environment.is_observed, few_tokens=FEW_TOKENS,
        empty=getattr(own._dynamo.guards, _EMPTY),
    )  # fmt: skip
    return recall


class Joint(NamedTuple):
    """What one launch makes beside a product.

    Attributes:
        group: see together.py; the launch is right as long as its ``others`` are these.
        plans: of the others.
    """

    group: object
    others: tuple[Any, ...]
    plans: tuple[LinearPlan, ...]


ALONE = Joint(None, (), ())


class _Place(NamedTuple):
    """Where something is remembered of a weight."""

    shortcuts: dict[Hashable, Any]
    shape: torch.Size

    def is_free(self, *, is_settled: bool) -> bool:
        """Whether it can be remembered now: a shape that comes once, as of a prompt, is not worth it.

        What is not settled takes the place of what was remembered before, so that the next call comes here again.
        """
        if not _can_recall or torch.cuda.is_current_stream_capturing():
            return False
        if is_settled and self.shape in self.shortcuts:
            return True
        make_room(self.shortcuts, self.shape)
        self.shortcuts[self.shape] = None
        return False

    def holds(self, basis: tuple[Any, ...]) -> bool:
        """Whether a call like this is remembered, and was made in the usual way for another reason."""
        known = self.shortcuts.get(self.shape)
        return known is not None and known.kept[0] == basis


def _place_of(kept: Recalled, x: torch.Tensor) -> _Place:
    """Of products of inputs like this one: in training nothing is decoded ahead, see prefetch.py."""
    return _Place(kept.training if x.requires_grad else kept.shortcuts, x.shape)


def remember(
    x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None, call: Call, products: Products,
    joint: Joint = ALONE, *, joins: bool = True, ahead: Choice | None = None, is_settled: bool = True,
) -> None:  # fmt: skip
    """That ``products`` has made this product, and perhaps others with it, on the current device.

    Args:
        joins: products of the same input may be made together with this one.
        ahead: what was decoded beside.
        is_settled: the next one will be made in this way, see prefetch.py; until then none is made again.
    """
    kept = resident(packed.data)
    if kept is None:
        return
    place = _place_of(kept, x)
    if not place.is_free(is_settled=is_settled) or kept.calls.get(x.shape) is not call:
        return
    where = nvrtc.Where(nvrtc.current_stream(call.device), 0)
    basis = (products, where, call.key.state, call.strides, call.bias, joint.others, joins, ahead)
    if place.holds(basis):
        return
    beside = ahead.launch if ahead else None
    repeat = (beside if isinstance(beside, Products) else products).repeat(x, bias)
    if repeat:
        place.shortcuts[place.shape] = _shortcut(
            repeat, call.device, where, basis, joint, strides=call.strides, state=call.key.state, bias=call.bias,
            joins=joins, prefetched=ahead.weights if ahead else (),
        )  # fmt: skip


def remember_decoded(
    x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None, *, joins: bool, ahead: Choice | None,
    is_settled: bool,
) -> None:  # fmt: skip
    """That the weight of a product was decoded first; where it always will be, under settings that count.

    Args:
        joins: as in ``remember``.
        ahead, is_settled: likewise; what was decoded with it.
    """
    kept = resident(packed.data)
    if kept is None:
        return
    if kept.is_changing and not x.requires_grad and _is_unplanned(kept, x):
        _remember_weight(kept, packed)
        return
    place = _place_of(kept, x)
    if not place.is_free(is_settled=is_settled):
        return
    state, is_final = decoding(x, packed, bias)
    if is_final:
        _remember_decoding(place, x, packed, F.linear, state=state, joins=joins, ahead=ahead)


def _is_unplanned(kept: Recalled, x: torch.Tensor) -> bool:
    tokens = x.numel() // x.shape[-1]
    return tokens > FEW_TOKENS and tokens not in kept.planned


def remember_experts(x: torch.Tensor, packed: PackedTensor, ids: torch.Tensor, state: str, variant: int) -> None:
    """That a product with routed experts was made, without scales, on the current device.

    Args:
        state: torch's settings for which it is right.
        variant: of the kernel.
    """
    kept = resident(packed.data)
    if kept is None:
        return
    place = _place_of(kept, x)
    if not place.is_free(is_settled=True):
        return
    where = nvrtc.Where(nvrtc.current_stream(x.get_device()), 0)
    indices = (ids.shape, ids.stride(), ids.dtype)
    basis = ("experts", where, x.stride(), state, variant, indices)
    made = None if place.holds(basis) else experts.repeat(x, packed, ids, variant)
    if made:
        place.shortcuts[place.shape] = _shortcut(
            made, x.get_device(), where, basis, strides=x.stride(), state=state, ids=indices
        )


def weight(packed: PackedTensor) -> torch.Tensor:
    """Decoded, not for a product here; that is remembered.

    Args:
        packed: on any device.
    """
    made = decode_weight(packed)
    kept = residents.get(id(packed.data))  # as the decoder on a GPU has it, in whatever torch sees of this call
    if kept is not None and kept.now() is packed.data:
        _remember_weight(kept, packed)
    return made


def decode_weight(packed: PackedTensor) -> torch.Tensor:
    """``decode_packed``, on a CPU without torch's operator, which takes longer than a small weight, if none is due."""
    data = packed.data
    is_plain = data.is_cpu and type(data) in (torch.Tensor, nn.Parameter) and packed.header.fits(data)
    return decode_cpu(packed) if is_plain and not environment.is_transformed() else decode_packed(packed)


def _remember_weight(kept: Recalled, packed: PackedTensor) -> None:
    place = _Place(kept.shortcuts, _NO_SHAPE)
    if place.is_free(is_settled=True):
        _remember_decoding(place, packed.data, packed)


def gradient(grad: torch.Tensor, packed: PackedTensor) -> torch.Tensor:
    """Of the input of a product, ``grad.mm(weight)``; that is remembered.

    Args:
        grad: of the output [tokens, N], on a CUDA device.
        packed: of the weight [N, K].
    """
    made = grad.mm(decode.decode_cuda(packed))
    kept = gradients.get(id(packed.data)) if resident(packed.data) else None
    if kept is not None:
        place = _place_of(kept, grad)
        if place.is_free(is_settled=True):
            _remember_decoding(place, grad, packed, _multiply)
    return made


def _multiply(grad: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
    return grad.mm(weight)


def _remember_decoding(
    place: _Place, x: torch.Tensor, packed: PackedTensor, finish: Callable[..., torch.Tensor] | None = None, *,
    state: str | None = None, joins: bool = False, ahead: Choice | None = None,
) -> None:  # fmt: skip
    """That the weight was decoded, and others with it, and x then multiplied by ``finish``; if that is asked for."""
    device, strides = x.get_device(), x.stride()
    where = nvrtc.Where(nvrtc.current_stream(device), 0)
    basis = ("decoded", where, strides, state, joins, ahead)
    if place.holds(basis):
        return
    together = ahead.launch if ahead else None
    repeat = together.repeat(device) if isinstance(together, DecodeTogether) else decode.repeat(packed)
    if repeat:
        place.shortcuts[place.shape] = _shortcut(
            repeat, device, where, basis, strides=strides, state=state, joins=joins,
            prefetched=ahead.weights if ahead else (), finish=finish,
        )  # fmt: skip


def _shortcut(
    repeat: Repeat, device: int, where: nvrtc.Where, basis: tuple[Any, ...], joint: Joint = ALONE, *,
    strides: tuple[int, ...], state: str | None, joins: bool = False, bias: ParameterBytes | None = None,
    ids: tuple[Any, ...] | None = None, prefetched: tuple[Resident, ...] = (),
    finish: Callable[..., torch.Tensor] | None = None,
) -> Any:  # fmt: skip
    every = [
        nvrtc.configured(step.function, step.grid, step.threads, step.shared, where.stream, True, device)
        for step in repeat.steps
    ]
    launches = tuple(
        (int(each.config.getPtr()), int(each.function), step.arguments)
        for each, step in zip(every, repeat.steps, strict=True)
    )
    assert native is not None
    scratch = _allocation((-(-repeat.scratch // torch.bfloat16.itemsize),)) if repeat.scratch else None
    return native.Shortcut(
        device=device, strides=strides, state=state, where=where, bias=bias, ids=ids, joins=joins, **joint._asdict(),
        prefetched=prefetched, allocations=tuple(map(_allocation, repeat.sizes)), scratch=scratch, room=repeat.room,
        patches=repeat.patches, launches=launches, start=nvrtc.launch_address(), failed=nvrtc.check_code,
        finish=finish, kept=(basis, every),
    )  # fmt: skip


def _allocation(size: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Size, strides and dtype of a tensor without gaps."""
    widths = accumulate((max(each, 1) for each in reversed(size[1:])), operator.mul, initial=1)
    return size, tuple(widths)[::-1], torch.bfloat16
