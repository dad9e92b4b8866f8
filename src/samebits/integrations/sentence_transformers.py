"""sentence-transformers: a model takes the dtype of its first parameter, or its first module's, for that of all.

Modules of its own are saved plain, as their classes load nothing else; a model of transformers in it is saved packed.
"""

from __future__ import annotations

from collections.abc import Iterator

from sentence_transformers.base.model import BaseModel
from sentence_transformers.base.modules import Module
from torch import nn

from samebits.nn.convert import saving_plain
from samebits.nn.packed_module import PackedModule


def register() -> None:
    """Have packed bytes come last, and what is saved be plain."""
    BaseModel.parameters = Module.parameters = parameters
    Module.save_torch_weights = saving_plain(Module.save_torch_weights)


def parameters(self: nn.Module, recurse: bool = True) -> Iterator[nn.Parameter]:
    packed = [module for module in self.modules() if isinstance(module, PackedModule)]
    slots = {id(module._parameters[slot]) for module in packed for slot in module.sb_slots}
    return iter(sorted(nn.Module.parameters(self, recurse), key=lambda parameter: id(parameter) in slots))


register()
