"""sentence-transformers: a model takes the dtype of its first parameter, or its first module's, for that of all."""

from __future__ import annotations

from collections.abc import Iterator

from sentence_transformers.base.model import BaseModel
from sentence_transformers.base.modules import Module
from torch import nn

from samebits.nn.packed_module import PackedModule


def register() -> None:
    """Have packed bytes come last."""
    BaseModel.parameters = Module.parameters = parameters


def parameters(self: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
    packed = [module for module in self.modules() if isinstance(module, PackedModule)]
    slots = {id(module._parameters[slot]) for module in packed for slot in module.sb_slots}
    return iter(sorted(nn.Module.parameters(self, recurse), key=lambda parameter: id(parameter) in slots))


register()
