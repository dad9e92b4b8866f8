"""ComfyUI: packed models that its LoRA nodes patch like any others.

ComfyUI finds weights by name, in state dicts and among a layer's parameters. It computes a patched weight from
``layer.weight`` and assigns it to the layer; of a layer that it leaves in main memory, it patches what the layer's
forward reads. So packed layers keep their weights' names, pack what is assigned to them, and decode on the device of
their input. ComfyUI computes every patch itself, from the weight that the plain model has: the bits are the same.

Nothing of ComfyUI is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from samebits.api import encode
from samebits.format.names import MIN_WEIGHTS
from samebits.nn.convert import Report
from samebits.nn.convert import compress as compress_module
from samebits.nn.packed_module import PackedModule, pack, register_kind, slot_name, whole
from samebits.nn.recipe import Piece, Recipe
from samebits.nn.selection import unpacked
from samebits.nn.state import name_as_before


class PatchableModule(PackedModule):
    """A layer of ComfyUI's with packed weights.

    A weight that is assigned is packed again, whatever patches it has in it. What ComfyUI keeps to undo a patch is the
    packed weight of before.
    """

    def sb_data(self, name: str) -> list[torch.Tensor]:
        data, decoded = super().sb_data(name), None if torch.compiler.is_compiling() else self.sb_decoded
        inputs = (
            [value for value in decoded.arguments if isinstance(value, torch.Tensor)] if decoded is not None else []
        )
        return [stored.to(inputs[0].device) for stored in data] if inputs else data

    def sb_known(self, name: str) -> None:
        return None  # where the input is tells where they are to be

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Packed weights under their own names: ComfyUI patches the parameters that it finds here."""
        names = {slot: name for name, recipe in self.sb_recipes.items() for slot in recipe.slots}
        start = f"{prefix}." if prefix else ""
        for full_name, parameter in super().named_parameters(prefix, recurse, remove_duplicate):
            name = names.get(full_name.removeprefix(start))
            yield (full_name, parameter) if name is None else (start + name, getattr(self, name))

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("sb_recipes", ()) and type(value) is nn.Parameter:
            pack(self, name, *_packed(name, value))
        else:
            super().__setattr__(name, value)


def _packed(name: str, weight: nn.Parameter) -> tuple[Recipe, list[torch.Tensor]]:
    """What ``pack`` takes, also of a weight that does not get smaller: its layer stays what it is."""
    packed = encode(weight)
    if not packed.is_raw:
        return whole(packed, name, weight), [packed.data]
    piece = Piece(slot_name(name), header=None)
    return Recipe(tuple(weight.shape), (piece,), requires_grad=weight.requires_grad), [weight.detach()]


def compress(
    model: Any, *, min_weights: int = MIN_WEIGHTS, include: Sequence[str] = (), exclude: Sequence[str] = ()
) -> Report:
    """Pack the diffusion model of a ComfyUI ``MODEL`` in place, so that ComfyUI's LoRA nodes work on it.

    Layers of other classes than ComfyUI's own are left as they are: they could not be patched.

    Args:
        model: a ModelPatcher; its ``size``, in bytes, by which ComfyUI plans, becomes that of the packed model.
        min_weights, include, exclude: as samebits.compress has them, with names inside of the diffusion model.

    Raises:
        DtypeError, InputError: as samebits.compress.
    """
    module: nn.Module = model.model.diffusion_model
    others = [name for name, owner, _ in unpacked(module) if not is_layer(type(owner))]
    report = compress_module(module, min_weights=min_weights, include=include, exclude=[*exclude, *others])
    if name_as_before not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(name_as_before)
    model.size = sum(tensor.nbytes for tensor in (*model.model.parameters(), *model.model.buffers()))
    return report


def is_layer(cls: type[nn.Module]) -> bool:
    """Whether it is one of comfy.ops."""
    return hasattr(cls, "comfy_cast_weights")


register_kind(lambda base, names: is_layer(base), PatchableModule)
