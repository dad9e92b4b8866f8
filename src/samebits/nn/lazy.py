"""A weight that is decoded when something is computed with it, not when its shape is read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from samebits.errors import InputError

if TYPE_CHECKING:
    from samebits.nn.recipe import Recipe


# Views of a whole weight, as products take them: autograd keeps them for the backward pass, so they stay packed.
_VIEWS = frozenset(
    getattr(torch.ops.aten, name).default for name in ("t", "permute", "view", "unsqueeze", "expand", "alias")
) | {torch.ops.aten.transpose.int}


class LazyTensor(torch.Tensor):
    """Has the shape, strides, dtype and device of what ``decode`` gives, and decodes anew for each operation.

    It has no gradient and cannot be written to.
    """

    # Operations arrive below, where torch chooses its kernels as for a plain tensor: some it does not use for a tensor
    # with a __torch_function__, and others round differently.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    def decode(self) -> torch.Tensor:
        """The plain tensor."""
        raise NotImplementedError

    def view_like(self, shadow: torch.Tensor) -> LazyTensor:
        """The view of it that ``shadow`` is of a tensor of the same geometry."""
        raise NotImplementedError

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares no class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.detach.default:
            return args[0].view_like(args[0])
        if func in _VIEWS:
            shadow = torch.empty_strided(args[0].shape, args[0].stride(), dtype=args[0].dtype, device="meta")
            return args[0].view_like(func(shadow, *args[1:], **kwargs))
        arguments = zip(func._schema.arguments, args, strict=False)
        written = [value for argument, value in arguments if argument.is_write]
        if any(isinstance(value, LazyTensor) for value in tree_leaves((written, kwargs.get("out")))):
            _refuse(func.__name__)
        if func is torch.ops.aten._to_copy.default and isinstance(args[0], LazyWeight):
            return func(args[0].decode_near(kwargs.get("device")), **kwargs)
        indexed = _indexed(func, args)
        return indexed if indexed is not None else func(*_decoded(args), **_decoded(kwargs))

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
    It counts as an ``nn.Parameter``, as the weight that it stands for did.

    Attributes:
        recipe, packed: the weight in packed form.
    """

    _is_param = True  # isinstance(weight, nn.Parameter) asks for this
    _is_hf_initialized = True  # transformers initialises no parameter that has this
    recipe: Recipe
    packed: tuple[torch.Tensor, ...]

    @staticmethod
    def __new__(cls, recipe: Recipe, data: Sequence[torch.Tensor]) -> LazyWeight:
        """Args: what Recipe.decode takes."""
        weight: LazyWeight = torch.Tensor._make_wrapper_subclass(
            cls, recipe.shape, strides=recipe.stride or None, dtype=recipe.dtype, device=data[0].device
        )
        weight.recipe, weight.packed = recipe, tuple(data)
        return weight

    def decode(self) -> torch.Tensor:
        return self.recipe.decode(self.packed)

    def decode_near(self, device: torch.device | None) -> torch.Tensor:
        """The plain tensor, on ``device`` if that decodes faster and this is in main memory, else where this is."""
        if device is None or device.type == "cpu" or self.device.type != "cpu":
            return self.decode()
        return self.recipe.decode([stored.to(device) for stored in self.packed])

    def view_like(self, shadow: torch.Tensor) -> LazyTensor:
        return LazyWeight(self.recipe, self.packed) if shadow is self else LazyView(self, shadow)


class LazyView(LazyTensor):
    """A view of a whole LazyWeight."""

    weight: LazyWeight

    @staticmethod
    def __new__(cls, weight: LazyWeight, shadow: torch.Tensor) -> LazyView:
        """Args: shadow: a tensor of the view's shape and strides."""
        view: LazyView = torch.Tensor._make_wrapper_subclass(
            cls, shadow.shape, strides=shadow.stride(), dtype=weight.dtype, device=weight.device
        )
        view.weight = weight
        return view

    def decode(self) -> torch.Tensor:
        return self.weight.decode().as_strided(self.shape, self.stride())

    def view_like(self, shadow: torch.Tensor) -> LazyView:
        return LazyView(self.weight, shadow)


def _indexed(func: Any, args: Sequence[Any]) -> torch.Tensor | None:
    """What ``func`` gives if it only takes entries of a weight along its first dimension: no others are decoded."""
    weight, *rest = args
    if not isinstance(weight, LazyWeight) or not weight.dim():
        return None
    recipe, packed = weight.recipe, weight.packed
    first, aten = (0, -weight.dim()), torch.ops.aten
    if func is aten.embedding.default:
        return recipe.rows(packed, rest[0])
    if func is aten.index_select.default and rest[0] in first and rest[1].dim() == 1:
        return recipe.rows(packed, rest[1])
    if func is aten.select.int and rest[0] in first:
        return recipe.entry(packed, rest[1])
    if func is aten.index.Tensor and len(rest[0]) == 1 and rest[0][0].dtype in (torch.int32, torch.int64):
        ids = rest[0][0].to(weight.device)
        return recipe.rows(packed, torch.where(ids < 0, ids + len(weight), ids))
    return None


def _decoded(values: Any) -> Any:
    return tree_map_only(LazyTensor, lambda tensor: tensor.decode(), values)


def _refuse(what: str) -> Any:
    """Writing into a decoded copy would be lost without a word."""
    mend = "call samebits.decompress on its module first"
    raise InputError(f"a packed weight cannot be changed ({what})", mend=mend)
