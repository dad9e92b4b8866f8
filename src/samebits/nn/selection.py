"""Which parameters of a module there are, and which are to be packed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import index

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.parameter import is_lazy

from samebits.errors import InputError
from samebits.format.names import MIN_WEIGHTS, is_selected
from samebits.nn.packed_module import PackedModule, refuses_subclasses
from samebits.nn.spared import reason_to_spare

_NOT_SELECTED = "not selected"
Owned = tuple[str, nn.Module, str]  # full name of a parameter, the module that owns it, its name there

# torch's attention computes otherwise if one of its parameters has a gradient: one at least is left as it is.
_ATTENTION = (nn.MultiheadAttention, NonDynamicallyQuantizableLinear)

# A bias so many times smaller than its matrix stays plain: decoding it takes more than it saves.
_SMALL_SHARE = 64


@dataclass(frozen=True)
class Selection:
    """Which parameters are to be packed.

    A parameter is eligible if it is floating point, has at least ``min_weights`` elements, and its module owns a
    matrix (which norms do not) beside which it is not small. Its full name must match one of the shell patterns
    ``include`` (empty: all) and none of ``exclude``.

    Raises:
        InputError: something else than a number from 1 on, or than strings.
    """

    min_weights: int = MIN_WEIGHTS
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()

    def __post_init__(self) -> None:
        if isinstance(self.min_weights, bool) or not hasattr(self.min_weights, "__index__"):
            raise InputError(f"min_weights is {self.min_weights!r}, which is no whole number", mend="give one")
        object.__setattr__(self, "min_weights", index(self.min_weights))
        if self.min_weights < 1:
            raise InputError(f"min_weights is {self.min_weights}, which is less than 1", mend="1 packs all that it can")
        for name in ("include", "exclude"):
            patterns = getattr(self, name)
            if not isinstance(patterns, str) and isinstance(patterns, Iterable):
                patterns = tuple(patterns)  # which is read more than once
            if not isinstance(patterns, tuple) or not all(isinstance(pattern, str) for pattern in patterns):
                raise InputError(f"{name} is {patterns!r}, no list of patterns", mend="give a list of strings")
            object.__setattr__(self, name, patterns)

    def reason_against(self, module: nn.Module, name: str, full_name: str) -> str | None:
        """Why the parameter ``name`` of ``module`` is not to be packed, whatever its dtype; None if it is."""
        if isinstance(module, torch.jit.ScriptModule):
            return "belongs to a TorchScript module, whose class must stay"
        parameter = module._parameters[name]
        if parameter is not None and type(parameter) not in (nn.Parameter, torch.Tensor):
            return f"is a {type(parameter).__name__}, not a plain tensor"
        if parameter is None or not parameter.is_floating_point():
            return "not floating point"
        if torch.empty_like(parameter, device="meta").stride() != parameter.stride():
            return "has gaps or repetitions in memory"
        if parameter.numel() < self.min_weights:
            return f"fewer than {self.min_weights} weights"
        if hasattr(module, "save_pretrained"):
            return "belongs to a model itself, whose class must stay"
        if isinstance(module, nn.RNNBase):
            return "belongs to a recurrent module, which keeps it in a list too"
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            return "changes while its module runs (max_norm)"
        if isinstance(module, _ATTENTION) and (parameter.dim() < 2 or _bias(module) is None):
            return "tells torch's attention, by having a gradient, how to compute"
        in_matrices = _weights_in_matrices(module)
        if not in_matrices:
            return "belongs to a module without matrices"
        if parameter.dim() < 2 and _SMALL_SHARE * parameter.numel() < in_matrices:
            return "a vector, small beside its module's matrix"
        if reason := reason_to_spare(module, name):
            return reason
        if not is_selected(full_name, self.include, self.exclude):
            return _NOT_SELECTED
        refused = refuses_subclasses(module, (name,))  # last, as it may run code of the class
        return f"belongs to a module of whose class no subclass can be made ({refused})" if refused else None

    def reason_against_tied(self, owned: Sequence[Owned]) -> str | None:
        """The same of a parameter that several modules own, which stays one: all must be able to hold it packed.

        It is selected by any of its names, unless one of them is excluded.
        """
        if reason := self._reason_of_one(owned):
            return reason
        names = [full_name for full_name, _, _ in owned]
        included = any(is_selected(name, self.include, ()) for name in names)
        if not included or not all(is_selected(name, (), self.exclude) for name in names):
            return _NOT_SELECTED
        return replace(self, include=(), exclude=())._reason_of_one(owned)

    def _reason_of_one(self, owned: Sequence[Owned]) -> str | None:
        """Why one of them cannot hold it, but for not being selected."""
        for full_name, module, name in owned:
            reason = self.reason_against(module, name, full_name)
            if reason not in (None, _NOT_SELECTED):
                return reason if full_name == owned[0][0] else f"tied to {full_name}: {reason}"
        return None


def _weights_in_matrices(module: nn.Module) -> int:
    """Of its own, packed or not."""
    made = (parameter for parameter in module._parameters.values() if parameter is not None and not is_lazy(parameter))
    shapes = [tuple(parameter.shape) for parameter in made]
    if isinstance(module, PackedModule):
        shapes += [recipe.shape for recipe in module.sb_recipes.values()]
    return sum(math.prod(shape) for shape in shapes if len(shape) >= 2)


def _bias(attention: nn.Module) -> nn.Parameter | None:
    return attention._parameters["in_proj_bias" if isinstance(attention, nn.MultiheadAttention) else "bias"]


HOLDS_ANY = Selection(min_weights=1)  # what a module can hold packed, if it were worth it


def unpacked(module: nn.Module) -> Iterator[Owned]:
    """Every parameter that is not packed and holds no packed one."""
    for prefix, owner in module.named_modules():
        slots = owner.sb_slots if isinstance(owner, PackedModule) else ()
        for name, parameter in owner._parameters.items():
            if parameter is not None and name not in slots:
                yield f"{prefix}.{name}" if prefix else name, owner, name


def tied(owners: Sequence[Owned]) -> list[list[Owned]]:
    """Groups of owners that hold the same parameter, packed or not."""
    groups: dict[tuple[int, ...], list[Owned]] = {}
    for owned in owners:
        groups.setdefault(held(owned), []).append(owned)
    return list(groups.values())


def held(owned: Owned) -> tuple[int, ...]:
    """The parameters that hold a weight, packed or not, by their ids: the same for all who share it."""
    _, owner, name = owned
    recipe = owner.sb_recipes.get(name) if isinstance(owner, PackedModule) else None
    return tuple(id(owner._parameters[slot]) for slot in (recipe.slots if recipe else [name]))
