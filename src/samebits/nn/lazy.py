"""A weight that is decoded when something is computed with it, not when its shape is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.overrides import enable_reentrant_dispatch
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from samebits.errors import InputError

if TYPE_CHECKING:
    from samebits.nn.recipe import Recipe


_ATEN = torch.ops.aten
# Views of a whole weight, as products take them: autograd keeps them for the backward pass, so they stay packed.
_VIEWS = frozenset(
    getattr(_ATEN, name).default for name in ("t", "permute", "view", "unsqueeze", "expand", "alias", "detach")
) | {_ATEN.transpose.int}
# Views of a part, or as other numbers, which are decoded once.
_PARTS = frozenset(
    getattr(_ATEN, name).default for name in ("split_with_sizes", "diagonal", "unfold", "as_strided", "squeeze")
) | {
    _ATEN.view.dtype,
    _ATEN.select.int,
    _ATEN.slice.Tensor,
    _ATEN.split.Tensor,
    _ATEN.unbind.int,
    _ATEN.squeeze.dim,
    _ATEN.squeeze.dims,
}

# Weights of convolutions up to this many words: a parent may hand a view of one to a kernel that reads its memory.
_SMALL = 1 << 19


_DEVICE = torch.ops.prim.device.default

_requires_grad: Any = torch._C.TensorBase.requires_grad
_grad: Any = torch._C.TensorBase.grad


class LazyTensor(torch.Tensor):
    """Has the shape, strides, dtype and device of what ``decode`` gives, and decodes anew for each operation.

    It gets no gradient and cannot be written to.

    Attributes:
        source: gives the plain tensor that this is, or is a view of.
        shown_device: where that is.
        shadow: a tensor without memory, of the geometry that this has in what ``source`` gives.
    """

    source: Callable[[], torch.Tensor]
    shown_device: torch.device
    shadow: torch.Tensor
    has_small_views = False

    # Operations arrive below, where torch chooses its kernels as for a plain tensor: some it does not use for a tensor
    # with a __torch_function__, and others round differently.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def decode(self) -> torch.Tensor:
        """The plain tensor."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares no class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE:
            return args[0].shown_device
        kwargs = kwargs or {}
        if func is _ATEN.detach.default and isinstance(args[0], LazyWeight):
            return LazyWeight(args[0].recipe, args[0].packed, requires_grad=False)
        if func in _VIEWS or func in _PARTS:
            with torch.inference_mode(False):  # made as what they are views of
                return _view(func, *args, **kwargs)
        if _is_made_of_views(func):  # it arrives undivided in inference mode
            return func.decompose(*args, **kwargs)
        arguments = zip(func._schema.arguments, args, strict=False)
        written = [value for argument, value in arguments if argument.is_write]
        if any(isinstance(value, LazyTensor) for value in tree_leaves((written, kwargs.get("out")))):
            if func is _ATEN.zero_.default and _is_zero(args[0]):  # ChineseCLIP, of an embedding's row for padding
                return args[0]
            _refuse(func.__name__)
        if func is _ATEN._to_copy.default and isinstance(args[0], LazyWeight):
            return func(args[0].decode_near(kwargs.get("device")), **kwargs)
        indexed = _indexed(func, args)
        return indexed if indexed is not None else _run(func, args, kwargs)

    def tolist(self) -> Any:
        return self.decode().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        return self.decode().numpy(force=force)

    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any:
        return self.decode().__dlpack__(*args, **kwargs)

    def data_ptr(self) -> Any:
        return _has_no_memory("data_ptr")

    def untyped_storage(self) -> Any:
        return _has_no_memory("untyped_storage")

    def share_memory_(self) -> Any:
        return _has_no_memory("share_memory_")

    def is_shared(self) -> bool:
        return False

    def __format__(self, spec: str) -> str:
        return format(self.decode(), spec)

    @property
    def requires_grad(self) -> bool:
        return bool(_requires_grad.__get__(self))

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value and not self.requires_grad:
            _refuse("requires_grad")
        _requires_grad.__set__(self, value)

    @property
    def grad(self) -> torch.Tensor | None:
        return None

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if value is not None:
            _refuse("grad")

    @property
    def data(self) -> LazyTensor:
        return self

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        _refuse("data")

    def __setitem__(self, index: Any, value: Any) -> None:
        _refuse("__setitem__")

    def requires_grad_(self, requires_grad: bool = True) -> LazyTensor:
        return _refuse("requires_grad_") if requires_grad else self

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.decode()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.decode().__reduce_ex__(protocol)


class LazyWeight(LazyTensor):
    """Stands for a packed weight.

    Operations that take entries of it along the first dimension (embedding, weight[number], weight[ids]) decode these.
    Views of a part, such as weight[number] or weight[:8], are lazy too, as nothing can be written to them either.
    It counts as an ``nn.Parameter``, as the weight that it stands for did, and has its ``requires_grad`` where no
    gradients are recorded (Recipe.shows_requires_grad).

    Attributes:
        recipe, packed: the weight in packed form.
        is_read_by_entry: weight[number] is a plain tensor, decoded at once, as whoever takes it only reads it.
    """

    _is_param = True  # isinstance(weight, nn.Parameter) asks for this
    _is_hf_initialized = True  # transformers initialises no parameter that has this
    recipe: Recipe
    packed: tuple[torch.Tensor, ...]
    is_read_by_entry = False

    @staticmethod
    def __new__(cls, recipe: Recipe, data: Sequence[torch.Tensor], *, requires_grad: bool | None = None) -> LazyWeight:
        """Args: what Recipe.decode takes."""
        shows = recipe.shows_requires_grad(data[0].device) if requires_grad is None else requires_grad
        with torch.inference_mode(False):  # see Recipe.weight
            weight: LazyWeight = _without_memory(
                cls, recipe.shape, recipe.stride or None, recipe.dtype, data[0].device, requires_grad=shows
            )
        weight.recipe, weight.packed = recipe, tuple(data)
        weight.has_small_views = weight.dim() > 2 and weight.numel() <= _SMALL
        if shows:  # and is used, maybe, where gradients are recorded
            weight.register_post_accumulate_grad_hook(_drop_gradient)  # type: ignore[no-untyped-call]
        return weight

    def decode(self) -> torch.Tensor:
        return self.recipe.decode(self.packed)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return nn.Parameter(self.decode(), self.recipe.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return nn.Parameter(self.decode(), self.recipe.requires_grad).__reduce_ex__(protocol)

    def decode_near(self, device: torch.device | None) -> torch.Tensor:
        """The plain tensor, on ``device`` if that decodes faster and this is in main memory, else where this is."""
        if device is None or device.type == "cpu" or self.device.type != "cpu":
            return self.decode()
        return self.recipe.decode([stored.to(device) for stored in self.packed])

    @property
    def source(self) -> Callable[[], torch.Tensor]:  # type: ignore[override]  # made when it is asked for
        return self.decode

    @property
    def shadow(self) -> torch.Tensor:  # type: ignore[override]
        return torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device="meta")


class LazyView(LazyTensor):
    """A view of a LazyWeight."""

    @staticmethod
    def __new__(cls, like: LazyTensor, source: Callable[[], torch.Tensor], shadow: torch.Tensor) -> LazyView:
        """Args: like: on its device."""
        view: LazyView = _without_memory(cls, shadow.shape, shadow.stride(), shadow.dtype, like.shown_device)
        view.shadow, view.source = shadow, source
        return view

    def decode(self) -> torch.Tensor:
        plain = self.source()
        if plain.dtype is not self.dtype:  # as numbers of its bits
            plain = plain.view(self.dtype)
        return plain.as_strided(self.shape, self.stride(), self.shadow.storage_offset())


class HeldView(LazyTensor):
    """A view of a small weight, which was decoded for it: it has memory, but cannot be written to either."""

    plain: torch.Tensor
    has_small_views = True

    @staticmethod
    def __new__(cls, plain: torch.Tensor) -> HeldView:
        view: HeldView = torch.Tensor._make_subclass(cls, plain)
        view.plain = plain
        return view

    def decode(self) -> torch.Tensor:
        return self.plain

    def data_ptr(self) -> int:
        return self.plain.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.plain.untyped_storage()


def _drop_gradient(weight: torch.Tensor) -> None:
    _grad.__set__(weight, None)


def _without_memory(
    cls: type, shape: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype, device: torch.device,
    requires_grad: bool = False,
) -> Any:  # fmt: skip
    """A tensor that says it is on ``device``.

    To torch it is on the meta device, which has no memory: so ``other.data = weight`` is refused, which of a wrapper on
    the device would take the geometry, and read at address 0.
    """
    autocast = getattr(torch._C.DispatchKey, f"Autocast{device.type.upper()}", None)
    made: Any = torch.Tensor._make_wrapper_subclass(
        cls, shape, strides=stride, dtype=dtype, device=torch.device("meta"), requires_grad=requires_grad,
        dispatch_device=True,
        _extra_dispatch_keys=None if autocast is None else torch._C.DispatchKeySet(autocast),
    )  # fmt: skip
    torch._C._set_throw_on_mutable_data_ptr(made)
    made.shown_device = device
    return made


class _Once:
    """What ``decode`` gives, kept for the stream that made it; a graph that is captured decodes anew in each replay."""

    def __init__(self, decode: Callable[[], torch.Tensor], device: torch.device) -> None:
        self._decode = decode
        self._device = device
        self._kept: tuple[torch.Tensor, Any] | None = None

    def __call__(self) -> torch.Tensor:
        stream = torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None
        if stream is not None and torch.cuda.is_current_stream_capturing():
            return self._decode()
        if self._kept is None or self._kept[1] != stream:
            with torch.inference_mode(False):  # it outlives that mode
                self._kept = self._decode(), stream
        return self._kept[0]


@cache
def _is_made_of_views(func: Any) -> bool:
    """Whether it gives views, such as chunk, and torch has no kernel of its own for it."""
    writes = any(argument.is_write for argument in func._schema.arguments)
    is_view = not writes and any(made.alias_info for made in func._schema.returns)
    return is_view and torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")


def _is_entry(func: Any, whole: LazyTensor, *rest: Any) -> bool:
    """Whether a view is one entry of a weight."""
    return func is _ATEN.select.int and isinstance(whole, LazyWeight) and rest[0] in (0, -whole.dim())


def _view(func: Any, whole: LazyTensor, *rest: Any, **kwargs: Any) -> Any:
    if whole.has_small_views and not _is_entry(func, whole, *rest):
        return tree_map(HeldView, func(whole.decode(), *rest, **kwargs))
    if func in _VIEWS:
        return LazyView(whole, whole.source, func(whole.shadow, *rest, **kwargs))
    return _parts(func, whole, *rest, **kwargs)


def _parts(func: Any, whole: LazyTensor, *rest: Any, **kwargs: Any) -> torch.Tensor | list[LazyView]:
    """Views of a part: what they are views of is decoded once; of one entry of a weight, no more than that."""
    shadows = func(whole.shadow, *rest, **kwargs)
    if isinstance(whole, LazyWeight) and _is_entry(func, whole, *rest):
        entry = partial(whole.recipe.entry, whole.packed, int(rest[1]))
        if whole.is_read_by_entry:
            return entry()
        if not whole.recipe.stride:
            return LazyView(whole, _Once(entry, whole.device), torch.empty_like(shadows))
    source = _Once(whole.source, whole.device)
    if isinstance(shadows, torch.Tensor):
        return LazyView(whole, source, shadows)
    return [LazyView(whole, source, shadow) for shadow in shadows]


def _indexed(func: Any, args: Sequence[Any]) -> torch.Tensor | None:
    """What ``func`` gives if it only takes entries of a weight along its first dimension: no others are decoded."""
    weight, *rest = args
    if not isinstance(weight, LazyWeight) or not weight.dim():
        return None
    recipe, packed = weight.recipe, weight.packed
    if func is _ATEN.embedding.default:
        return recipe.rows(packed, rest[0])
    if func is _ATEN.index_select.default and rest[0] in (0, -weight.dim()) and rest[1].dim() == 1:
        return recipe.rows(packed, rest[1])
    if func is _ATEN.index.Tensor and len(rest[0]) == 1 and rest[0][0].dtype in (torch.int32, torch.int64):
        ids = rest[0][0].to(weight.device)
        return recipe.rows(packed, torch.where(ids < 0, ids + len(weight), ids))
    return None


def _is_zero(tensor: LazyTensor) -> bool:
    """Whether writing zeros would change no bit."""
    plain = tensor.decode()
    return plain.dtype is torch.bfloat16 and not plain.view(torch.int16).any()


def _decoded(values: Any) -> Any:
    return tree_map_only(LazyTensor, lambda tensor: tensor.decode(), values)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """With plain tensors.

    In inference mode products arrive here undivided. So that torch divides them as ever, their operands have
    requires_grad as what they stand for has, and what torch does above its kernels is done again.
    """
    if not torch.is_inference_mode_enabled():
        return func(*_decoded(args), **_decoded(kwargs))
    with torch.inference_mode(False):
        args, kwargs = tree_map_only(LazyTensor, _marked, (args, kwargs))
    with enable_reentrant_dispatch():
        return func(*args, **kwargs)


def _rms_norm(*arguments: Any) -> Any:
    """With plain tensors, so that torch takes its kernel for their device.

    It is the one operation of weights that torch has a kernel for on GPUs, and on all other devices, meta among them,
    takes apart above autograd, where it does not arrive as one.
    """
    if any(isinstance(value, LazyTensor) for value in arguments):
        return _FUSED_RMS_NORM(*_decoded(arguments))
    return _FUSED_RMS_NORM.decompose(*arguments)


_FUSED_RMS_NORM = _ATEN._fused_rms_norm.default
_library = torch.library.Library("aten", "IMPL", "AutogradMeta")  # as long as it is kept, so is what is put into it
_library.impl("_fused_rms_norm", _rms_norm)


def _marked(tensor: LazyTensor) -> torch.Tensor:
    return tensor.decode().detach().requires_grad_(tensor.requires_grad)


def _has_no_memory(what: str) -> Any:
    mend = "take a copy of it first (weight.clone())"
    raise InputError(f"a packed weight has no memory of its own ({what})", mend=mend)


def _refuse(what: str) -> Any:
    """Writing into a decoded copy would be lost without a word."""
    mend = "call samebits.decompress on its module first"
    raise InputError(f"a packed weight cannot be changed ({what})", mend=mend)
