"""Products of modules that are made once more: by native code, which takes the host a fraction of the time.

Whoever has made a product in the usual way says so. The second time, what it rests on is kept beside the weight's
bytes, for each shape of the input: torch's settings, the stream, the bias, the launch with all that its kernels are
told. recall.c asks torch all of this again at each call, and launches; where an answer is another, the product is made
in the usual way. So it is with gradients of inputs, for which the weight is decoded again.

The native part is compiled when samebits is installed. Without it (no C compiler, a source tree that is not installed)
every product is made in the usual way: with the same bits, but the host takes longer.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn import functional as F

from samebits.format.packed import PackedTensor
from samebits.kernels import decode, nvrtc
from samebits.kernels.decode_together import DecodeTogether
from samebits.kernels.linear.products import LinearPlan, Products
from samebits.kernels.repeat import Repeat
from samebits.kernels.residents import ParameterBytes, Recalled, Resident, gradients, make_room, resident, residents
from samebits.plans import environment
from samebits.plans.call import Call, decoding
from samebits.plans.carrier import Choice
from samebits.plans.key import is_gapless
from samebits.plans.turn import Turns

native: ModuleType | None
try:
    from samebits.plans import _recall as native
except ImportError:
    native = None

_can_recall = native is not None and hasattr(torch._C, "_cuda_exchangeDevice")


Product = Callable[[torch.Tensor, torch.Tensor, "torch.Tensor | None"], Any]


def product_of(turns: Turns) -> Product:
    """A function of an input, a weight's packed bytes and a bias: the product; None if it is to be made as usual."""
    return _recall_of(turns, residents)


def gradient_of() -> Product:
    """A function of an output's gradient, a weight's packed bytes and None: the input's; None as of ``product_of``."""
    alone = SimpleNamespace(windows=(), last=SimpleNamespace(made={}))  # nothing is made together with it, or noted
    return _recall_of(alone, gradients)


def _recall_of(turns: Any, known: Mapping[int, ParameterBytes]) -> Product:
    if native is None or not _can_recall:
        return lambda x, data, bias: None
    own = torch._C
    recall = native.Recall(
        turns=turns, residents=known, tensor=torch.Tensor, parameter=nn.Parameter, dtype=torch.bfloat16,
        exchange_device=own._cuda_exchangeDevice, restore_device=own._cuda_maybeExchangeDevice,
        current_stream=own._cuda_getCurrentRawStream, is_capturing=own._cuda_isCurrentStreamCapturing,
        autocasts=torch.is_autocast_enabled, casts=environment.casts, forward_ad=forward_ad,
        interpreter=own._functorch.peek_interpreter_stack, modes=own._len_torch_dispatch_stack,
        tracing=own._get_tracing_state, is_grad_enabled=torch.is_grad_enabled, environment=environment,
        getters=environment.getters(), linear=F.linear, is_gapless=is_gapless,
        is_observed=environment.is_observed,
    )  # fmt: skip
    product: Product = recall.product
    return product


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
    if kept is None or not _has_room(kept, x, is_settled=is_settled) or kept.calls.get(x.shape) is not call:
        return
    where = nvrtc.Where(nvrtc.current_stream(call.device), 0)
    basis = (products, where, call.key.state, call.strides, call.bias, joint.others, joins, ahead)
    if _is_known(kept, x, basis):
        return
    beside = ahead.launch if ahead else None
    repeat = (beside if isinstance(beside, Products) else products).repeat(x, bias)
    if repeat:
        _shortcuts(kept, x)[x.shape] = _shortcut(
            repeat, call.device, where, basis, joint, strides=call.strides, state=call.key.state, bias=call.bias,
            joins=joins, prefetched=ahead.weights if ahead else (),
        )  # fmt: skip


def remember_decoded(
    x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None, *, joins: bool, ahead: Choice | None,
    is_settled: bool,
) -> None:  # fmt: skip
    """That the weight of a product was decoded first; where it always will be, under these settings.

    Args:
        joins: as in ``remember``.
        ahead, is_settled: likewise; what was decoded with it.
    """
    kept = resident(packed.data)
    if kept is None or not _has_room(kept, x, is_settled=is_settled):
        return
    state, is_final = decoding(x, packed, bias)
    if is_final:
        _remember_decoding(kept, x, packed, F.linear, state=state, joins=joins, ahead=ahead)


def gradient(grad: torch.Tensor, packed: PackedTensor) -> torch.Tensor:
    """Of the input of a product, ``grad.mm(weight)``; that is remembered.

    Args:
        grad: of the output [tokens, N], on a CUDA device.
        packed: of the weight [N, K].
    """
    made = grad.mm(decode.decode_cuda(packed))
    kept = gradients.get(id(packed.data)) if resident(packed.data) else None
    if kept is not None and _has_room(kept, grad, is_settled=True):
        _remember_decoding(kept, grad, packed, _multiply)
    return made


def _multiply(grad: torch.Tensor, weight: torch.Tensor, bias: None) -> torch.Tensor:
    return grad.mm(weight)


def _remember_decoding(
    kept: Recalled, x: torch.Tensor, packed: PackedTensor, finish: Callable[..., torch.Tensor], *,
    state: str | None = None, joins: bool = False, ahead: Choice | None = None,
) -> None:  # fmt: skip
    """That the weight was decoded, and others with it, and x then multiplied by ``finish``."""
    device, strides = x.get_device(), x.stride()
    where = nvrtc.Where(nvrtc.current_stream(device), 0)
    basis = ("decoded", where, strides, state, joins, ahead)
    if _is_known(kept, x, basis):
        return
    together = ahead.launch if ahead else None
    repeat = together.repeat(device) if isinstance(together, DecodeTogether) else decode.repeat(packed)
    if repeat:
        _shortcuts(kept, x)[x.shape] = _shortcut(
            repeat, device, where, basis, strides=strides, state=state, joins=joins,
            prefetched=ahead.weights if ahead else (), finish=finish,
        )  # fmt: skip


def _has_room(kept: Recalled, x: torch.Tensor, *, is_settled: bool) -> bool:
    """Whether something can be remembered, and now: a shape that comes once, as of a prompt, is not worth it.

    What is not settled takes the place of what was remembered before, so that the next call comes here again.
    """
    if not _can_recall or torch.cuda.is_current_stream_capturing():
        return False
    shortcuts = _shortcuts(kept, x)
    if is_settled and x.shape in shortcuts:
        return True
    make_room(shortcuts, x.shape)
    shortcuts[x.shape] = None
    return False


def _shortcuts(kept: Recalled, x: torch.Tensor) -> dict[Hashable, Any]:
    """What is remembered for inputs like this one: in training nothing is decoded ahead, see prefetch.py."""
    return kept.training if x.requires_grad else kept.shortcuts


def _is_known(kept: Recalled, x: torch.Tensor, basis: tuple[Any, ...]) -> bool:
    """Whether a call like this is remembered, and was made in the usual way for another reason."""
    known = _shortcuts(kept, x).get(x.shape)
    return known is not None and known.kept[0] == basis


def _shortcut(
    repeat: Repeat, device: int, where: nvrtc.Where, basis: tuple[Any, ...], joint: Joint = ALONE, *,
    strides: tuple[int, ...], state: str | None, joins: bool, bias: ParameterBytes | None = None,
    prefetched: tuple[Resident, ...] = (), finish: Callable[..., torch.Tensor] | None = None,
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
    return native.Shortcut(
        device=device, strides=strides, state=state, where=where, bias=bias, joins=joins, **joint._asdict(),
        prefetched=prefetched,
        sizes=repeat.sizes, scratch=(-(-repeat.scratch // 2),) if repeat.scratch else None, room=repeat.room,
        patches=repeat.patches, launches=launches, start=nvrtc.launch_address(), failed=nvrtc.check_code,
        finish=finish, kept=(basis, every),
    )  # fmt: skip
