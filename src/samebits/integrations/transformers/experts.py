"""Mixtures of experts in transformers: a forward decodes the experts that its tokens are routed to.

transformers has an experts module's forward (use_experts_implementation in transformers.integrations.moe) call one of
several functions, by ``config._experts_implementation``, with the indices of each token's experts:

    eager        the class's own loop over the experts that are hit: reads weight[number]
    batched_mm   one product for each token and expert: reads weight[ids]
    grouped_mm   one product for each expert, of all its tokens: takes the whole weight, reads the experts with tokens

For any other, such as kernels of third parties, weights are decoded whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from transformers.integrations import moe

from samebits.nn.lazy import LazyWeight
from samebits.nn.packed_module import PackedModule, register_kind


class PackedExperts(PackedModule):
    """An experts module with packed weights."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, PackedModule):  # see PackedModule.forward
            return type(self).forward(self, *args, **kwargs)
        read = self._sb_reader(args, kwargs)
        if read is None:
            return super().forward(*args, **kwargs)
        return self.sb_base.forward(_Reading(self, read), *args, **kwargs)

    def sb_weight(self, name: str) -> torch.Tensor:
        if self.sb_decoded is not None and self._sb_implementation() == "eager" and not torch.is_grad_enabled():
            weight = LazyWeight(self.sb_recipes[name], self.sb_data(name))
            weight.is_read_by_entry = True
            return weight
        return super().sb_weight(name)

    def _sb_implementation(self) -> str | None:
        """The name of the function that forward calls, if it is known how that reads weights."""
        name = str(cast(Any, self.config)._experts_implementation)
        if getattr(self, "_is_expert_parallel", False):  # there are indices of no expert
            return None
        known = name == "eager" or _KNOWN.get(name) is moe.ALL_EXPERTS_FUNCTIONS.get(name, moe)
        return name if known else None

    def _sb_reader(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[str], Any] | None:
        """What to give the function as the weight of a name; None: plain tensors, which autograd needs too."""
        name = None if torch.is_grad_enabled() else self._sb_implementation()
        if name == "batched_mm":
            return lambda weight: _Entries(self, weight)
        routed = args[1] if len(args) > 1 else kwargs.get("top_k_index")
        if name == "grouped_mm" and routed is not None:
            return lambda weight: self.sb_routed(weight, routed)
        return None


_KNOWN = {"batched_mm": moe.batched_mm_experts_forward, "grouped_mm": moe.grouped_mm_experts_forward}


class _Reading:
    """An experts module as one of transformers' functions is to see it: with other weights."""

    def __init__(self, module: PackedExperts, read: Callable[[str], Any]) -> None:
        self.module, self.read = module, read

    def __getattr__(self, name: str) -> Any:
        return self.read(name) if name in self.module.sb_recipes else getattr(self.module, name)


class _Entries:
    """A packed weight of which only entries are read; anything else decodes it whole."""

    def __init__(self, module: PackedExperts, name: str) -> None:
        self.module, self.name = module, name

    def __getitem__(self, ids: torch.Tensor) -> torch.Tensor:
        return self.module.sb_rows(self.name, ids)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module.sb_decode(self.name), name)


def is_experts(base: type[nn.Module]) -> bool:
    """Whether a class's forward is what use_experts_implementation makes of it."""
    return getattr(base.forward, "__globals__", None) is vars(moe)


register_kind(lambda base, names: is_experts(base), PackedExperts)
