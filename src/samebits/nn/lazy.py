"""A weight that is decoded when something is computed with it, not when its shape is read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from samebits.errors import InputError

if TYPE_CHECKING:
    from samebits.nn.recipe import Recipe

_PROPERTIES = [
    "shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "grad", "grad_fn", "is_leaf",
    "retains_grad", "output_nr", "_version", "is_cpu", "is_cuda", "is_meta", "is_mps", "is_xpu", "is_mtia", "is_sparse",
    "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn",
]  # fmt: skip
_METHODS = [
    "size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "is_contiguous",
    "get_device", "is_floating_point", "is_complex", "is_signed", "__len__",
]  # fmt: skip
_OPERATORS = [
    "add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift",
]  # fmt: skip
_DESCRIBING = {getattr(torch.Tensor, name).__get__ for name in _PROPERTIES}
_DESCRIBING |= {getattr(torch.Tensor, name) for name in _METHODS}
_SAME = {torch.Tensor.detach, torch.Tensor.data.__get__}  # type: ignore[attr-defined]
_SETTERS = {getattr(torch.Tensor, name).__set__ for name in ("data", "grad")}
_SET_GRAD = {torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__}  # type: ignore[attr-defined]
_IN_PLACE = {"__setitem__", *(f"__i{name}__" for name in _OPERATORS)}


class LazyWeight(torch.Tensor):
    """Stands for a packed weight: has its shape, dtype and device, and decodes anew for each operation.

    It counts as an ``nn.Parameter``, as the weight that it stands for did. It cannot be written to.

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
            cls, recipe.shape, dtype=recipe.dtype, device=data[0].device
        )
        weight.recipe, weight.packed = recipe, tuple(data)
        return weight

    def decode(self) -> torch.Tensor:
        """The weight as a plain tensor."""
        return self.recipe.decode(self.packed)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DESCRIBING:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func in _SAME:
            return args[0]
        if _writes(func, args, kwargs):
            name = getattr(func, "__name__", "")
            mend = "call samebits.decompress on its module first"
            raise InputError(f"a packed weight cannot be changed ({name})", mend=mend)
        return args[0] if func in _SET_GRAD else func(*_decoded(args), **_decoded(kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares no class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Only for what comes here without __torch_function__: calls from C++."""
        return func(*_decoded(args), **_decoded(kwargs or {}))


def _decoded(values: Any) -> Any:
    return tree_map_only(LazyWeight, LazyWeight.decode, values)


def _writes(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a packed weight would be written to; in a decoded copy that would be lost without a word."""
    if isinstance(kwargs.get("out"), LazyWeight):
        return True
    if not isinstance(args[0], LazyWeight):
        return False
    if func in _SET_GRAD:
        return bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True))
    name = getattr(func, "__name__", "")
    in_place = name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    return in_place or func in _SETTERS
