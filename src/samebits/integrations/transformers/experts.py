"""Mixtures of experts in transformers: a forward reads no more than the experts that its tokens are routed to.

transformers has an experts module's forward (use_experts_implementation in transformers.integrations.moe) call one of
several functions, by ``config._experts_implementation``, with the indices of each token's experts:

    eager        the class's own loop over the experts that are hit: reads weight[number]
    batched_mm   one product for each token and expert: reads weight[ids]
    grouped_mm   one product for each expert, of all its tokens: takes the whole weight, reads the experts with tokens

The last two make their products by a function of transformers' own each, which is handed what stands for the weight:
on a GPU the product may be fused (samebits.plans.experts), else what it reads is decoded. For any other function, such
as kernels of third parties, weights are decoded whole.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import FunctionType
from typing import Any, ClassVar, cast

import torch
from torch import nn
from transformers.integrations import moe

from samebits.format.geometry import EXPERTS_DIMENSIONS
from samebits.format.packed import PackedTensor
from samebits.kernels.linear.experts import is_supported
from samebits.kernels.ops import fields_of
from samebits.nn.lazy import LazyWeight
from samebits.nn.packed_module import PackedModule, register_kind
from samebits.nn.product import is_fusible
from samebits.nn.recipe import is_sharded
from samebits.plans import dispatch
from samebits.plans.experts import RECALLED, multiply_experts
from samebits.plans.key import Operation


class PackedExperts(PackedModule):
    """An experts module with packed weights.

    Attributes:
        sb_seen: the class's own forward when the subclass was made; others may replace it.
        sb_interface: whom that asks which function is meant.
    """

    sb_seen: ClassVar[Any]
    sb_interface: ClassVar[Any]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "sb_base" not in vars(cls):  # one that others derive, as to parametrize a module
            return
        forward = cls.sb_base.forward
        names = dict(zip(forward.__code__.co_freevars, forward.__closure__ or (), strict=True))
        cls.sb_seen, cls.sb_interface = staticmethod(forward), names[_INTERFACE].cell_contents

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, PackedModule):  # see PackedModule.forward
            return type(self).forward(self, *args, **kwargs)
        name = None if torch.is_grad_enabled() else self._sb_implementation()
        routed = args[1] if len(args) > 1 else kwargs.get("top_k_index")
        if routed is None or name not in _FORWARDS:  # plain tensors, which autograd needs too
            return super().forward(*args, **kwargs)
        return _FORWARDS[name](_Reading(self, _STAND_INS[name], _Route(routed)), *args, **kwargs)

    def sb_weight(self, name: str) -> torch.Tensor:
        if self.sb_decoded is not None and self._sb_implementation() == "eager" and not torch.is_grad_enabled():
            weight = LazyWeight(self.sb_recipes[name], self.sb_data(name))
            weight.is_read_by_entry = True
            return weight
        return super().sb_weight(name)

    def sb_routed_rows(self, tokens: int) -> int | None:
        each = getattr(self.config, "num_experts_per_tok", None)
        return tokens * each if isinstance(each, int) and self.sb_base.forward is self.sb_seen else None

    def _sb_implementation(self) -> str | None:
        """The name of the function that forward calls, if it is known how that reads weights."""
        name: str | None = cast(Any, self.config)._experts_implementation
        if getattr(self, "_is_expert_parallel", False):  # there are indices of no expert
            return None
        if self.sb_base.forward is not self.sb_seen:
            return None
        is_known = name in _KNOWN and self.sb_interface.get_interface(name, moe) is _KNOWN[name]
        return name if is_known or name == "eager" else None


class _Route:
    """Where a forward's tokens go.

    Attributes:
        ids: the router's, of experts.
    """

    def __init__(self, ids: torch.Tensor) -> None:
        self.ids = ids
        self._sorted: tuple[torch.Tensor, torch.Tensor] | None = None

    def sorted_ids(self, offsets: torch.Tensor, rows: int) -> torch.Tensor:
        """Each row's expert, int32; the same offsets are those of each of the forward's products.

        Args:
            offsets: where each expert's rows end.
        """
        if torch.compiler.is_compiling():
            return _experts_of(offsets, rows)
        if self._sorted is None or self._sorted[0] is not offsets or len(self._sorted[1]) != rows:
            self._sorted = offsets, _experts_of(offsets, rows)
        return self._sorted[1]


def _experts_of(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    each = torch.arange(rows, dtype=offsets.dtype, device=offsets.device)
    return torch.searchsorted(offsets, each, right=True, out_int32=True)


class _Reading:
    """An experts module as one of transformers' functions is to see it: with what stands for its weights."""

    def __init__(self, module: PackedExperts, stand_in: type[_Entries | _Routed], route: _Route) -> None:
        self.module, self.stand_in, self.route = module, stand_in, route

    def __getattr__(self, name: str) -> Any:
        module: Any = self.module
        recipe = module.sb_recipes.get(name)
        if recipe is None or recipe.shape[0] != module.num_experts:
            return getattr(module, name)
        return self.stand_in(module, name, self.route).seen()


class _StandIn(ABC):
    """For a packed parameter."""

    def __init__(self, module: PackedExperts, name: str, route: _Route) -> None:
        self.module, self.name, self.route = module, name, route

    def seen(self) -> Any:
        """What a function is given: this, for a weight [experts, N, K], else a plain tensor."""
        return self if len(self.module.sb_recipes[self.name].shape) == EXPERTS_DIMENSIONS else self.decoded()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.decoded(), name)  # whatever else a function asks of a weight

    @abstractmethod
    def decoded(self) -> torch.Tensor:
        """A plain tensor in its place."""

    def product(self, x: torch.Tensor, offsets: torch.Tensor | None = None) -> torch.Tensor | None:
        """See multiply_decoded, of x on a GPU; None: transformers is to make it, of ``decoded``.

        Args:
            offsets: with them, ids are those of rows in the order of their experts.
        """
        header, is_traced = self.module.sb_recipes[self.name].whole, torch.compiler.is_compiling()
        if header is None or not is_supported(header) or not _are_own():
            return None
        stored = None if is_traced else self.module.sb_known(self.name)
        operation, ids = Operation.BATCHED, self.route.ids
        if offsets is not None:
            operation, ids = Operation.GROUPED, self.route.sorted_ids(offsets, x.shape[0])
        if stored is not None and ids.dtype is RECALLED[operation]:
            made: torch.Tensor | None = dispatch.experts_again(x, stored, ids)
            if made is not None:
                return made
        if not is_fusible(x, None):
            return None
        [data] = self.module.sb_data(self.name)
        if is_sharded(data):
            return None
        if is_traced:
            return torch.ops.samebits.experts(x, data, header.shape, fields_of(header), ids, offsets)  # type: ignore[no-any-return]
        return multiply_experts(x, PackedTensor(header, data), ids, offsets)


class _Entries(_StandIn):
    """A parameter of which only entries are read, in the order in which they are to be multiplied or added."""

    def seen(self) -> Any:
        return self

    def __getitem__(self, ids: torch.Tensor) -> Any:
        return _Gathered(self.module, self.name, _Route(ids)).seen()

    def decoded(self) -> torch.Tensor:
        return self.module.sb_decode(self.name)


class _Gathered(_StandIn):
    """The matrix of each expert of a route."""

    def decoded(self) -> torch.Tensor:
        return self.module.sb_rows(self.name, self.route.ids)


class _Routed(_StandIn):
    """A weight that is read at the indices of a router."""

    def decoded(self) -> torch.Tensor:
        return self.module.sb_routed(self.name, self.route.ids)


def _batched_linear(
    input: torch.Tensor, weight: Any, bias: torch.Tensor | None = None, is_transposed: bool = False
) -> torch.Tensor:
    """In place of transformers' own."""
    made = weight.product(input) if isinstance(weight, _Gathered) and not is_transposed else None
    if made is None:
        return moe._batched_linear(input, _plain(weight), bias, is_transposed)  # type: ignore[no-any-return]
    return made if bias is None else made.add_(bias)


def _grouped_linear(
    input: torch.Tensor, weight: Any, offs: torch.Tensor, bias: torch.Tensor | None = None, is_transposed: bool = False
) -> torch.Tensor:
    """In place of transformers' own."""
    made = weight.product(input, offs) if isinstance(weight, _Routed) and not is_transposed else None
    if made is None:
        return moe._grouped_linear(input, _plain(weight), offs, bias, is_transposed)  # type: ignore[no-any-return]
    return made if bias is None else made.add_(bias)


def _are_own() -> bool:
    """Whether transformers' products are made as it makes them itself: others may replace these functions."""
    return (moe._batched_linear, moe._grouped_linear, moe._grouped_mm) == _PRODUCTS


def _plain(weight: Any) -> Any:
    return weight.decoded() if isinstance(weight, _StandIn) else weight


def _calling(function: FunctionType, own: FunctionType) -> FunctionType:
    """The same function, which calls ``own`` instead of what has that name where it is defined."""
    names = {name: value for name, value in vars(moe).items() if name != "__name__"}  # by which a tracer looks them up
    made = FunctionType(function.__code__, names | {own.__name__: own}, function.__name__, function.__defaults__)
    made.__kwdefaults__ = function.__kwdefaults__
    return made


_INTERFACE = "experts_interface"  # a variable of use_experts_implementation
_PRODUCTS = (moe._batched_linear, moe._grouped_linear, moe._grouped_mm)
_KNOWN = {"batched_mm": moe.batched_mm_experts_forward, "grouped_mm": moe.grouped_mm_experts_forward}
_STAND_INS: dict[str, type[_Entries | _Routed]] = {"batched_mm": _Entries, "grouped_mm": _Routed}
_LINEARS: tuple[Any, ...] = (_batched_linear, _grouped_linear)
_FORWARDS = {name: _calling(function, own) for (name, function), own in zip(_KNOWN.items(), _LINEARS, strict=True)}


def is_experts(base: type[nn.Module]) -> bool:
    """Whether a class's forward is what use_experts_implementation makes of it."""
    forward: Any = base.forward
    return getattr(forward, "__globals__", None) is vars(moe) and _INTERFACE in forward.__code__.co_freevars


register_kind(lambda base, names: is_experts(base), PackedExperts)
