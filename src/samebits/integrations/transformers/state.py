"""What save_pretrained writes of a compressed model: tensors under the names of FORMAT.md 7.2."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    rename_source_key,
    revert_weight_conversion,
)
from transformers.integrations.accelerate import load_offloaded_parameter
from transformers.modeling_utils import remove_tied_weights_from_state_dict

from samebits.api import decode, encode
from samebits.errors import InputError
from samebits.format.header import Header
from samebits.format.names import stored_name
from samebits.format.packed import PackedTensor
from samebits.nn.packed_module import PackedModule

Tensors = dict[str, torch.Tensor]


def checkpoint_tensors(
    model: Any,
    min_weights: int,
    given: Mapping[str, torch.Tensor] | None = None,
    gathered: Mapping[str, torch.Tensor | PackedTensor] | None = None,
) -> Tensors:
    """A compressed model's tensors as a file holds them, tied ones once, by the names of the original checkpoint.

    Args:
        min_weights: smaller tensors stay unpacked where a parameter is turned back into several of the checkpoint's.
        given: the model's state dict, perhaps with other values of what is not packed.
        gathered: parameters that the model holds only a part of (parallel.py).

    Raises:
        InputError: ``given`` has other names than the model, or other packed tensors.
    """
    state = _state(model, given)
    result = _take_pieces(model, state)
    headers = _under_original_names(model, state)
    _put_whole(state, headers, gathered or {})
    state = remove_tied_weights_from_state_dict(state, model)
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    renamed_only, converted = _by_conversion(model, state)
    result |= _renamed(model, {name: state[name] for name in renamed_only}, headers)
    for names in converted:
        result |= _converted(model, {name: state[name] for name in names}, headers, min_weights)
    return result


def _state(model: Any, given: Mapping[str, torch.Tensor] | None) -> Tensors:
    own = model.state_dict()
    if given is not None:
        packed = {path + slot for path, module in _packed(model) for slot in module.sb_slots}
        others = own.keys() ^ given.keys() | {
            name for name in packed & given.keys() if not _same(own[name], given[name])
        }
        if others:
            mend = "load it into the model first, or save the model without it"
            raise InputError("the state_dict is not that of the compressed model", where=min(others), mend=mend)
    return {name: _loaded(model, name, tensor) for name, tensor in (own if given is None else given).items()}


def _same(own: torch.Tensor, given: torch.Tensor) -> bool:
    if own.is_meta or given.is_meta:  # where accelerate leaves what it offloads
        return own.is_meta and given.is_meta
    is_one = own.device == given.device and own.data_ptr() == given.data_ptr() and own.shape == given.shape
    return is_one or torch.equal(own.cpu(), given.cpu())


def _loaded(model: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    return load_offloaded_parameter(model, name) if tensor.device.type == "meta" else tensor


def _packed(model: Any) -> Iterable[tuple[str, PackedModule]]:
    """Under every name: a state dict names a module's parameters as often as the model has it."""
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, PackedModule):
            yield f"{name}." if name else "", module


def _take_pieces(model: Any, state: Tensors) -> Tensors:
    """Remove the pieces that still are tensors of the checkpoint from ``state``; they keep their names."""
    taken: Tensors = {}
    for path, module in _packed(model):
        pieces = [piece for recipe in module.sb_recipes.values() for piece in recipe.pieces if piece.source]
        for piece in pieces:
            tensor = state.pop(path + piece.slot)
            taken[stored_name(piece.source) if piece.header else piece.source] = tensor
    return taken


def _under_original_names(model: Any, state: Tensors) -> dict[str, Header]:
    """Rename packed parameters in ``state`` to what they were; their headers by that name."""
    headers: dict[str, Header] = {}
    for path, module in _packed(model):
        for leaf, recipe in module.sb_recipes.items():
            piece = recipe.pieces[0]
            if piece.header and not piece.source:
                state[path + leaf] = state.pop(path + piece.slot)
                headers[path + leaf] = piece.header
    return headers


def _put_whole(state: Tensors, headers: dict[str, Header], gathered: Mapping[str, torch.Tensor | PackedTensor]) -> None:
    """Replace parts by what they are parts of."""
    for name, whole in gathered.items():
        headers.pop(name, None)
        if isinstance(whole, PackedTensor):
            headers[name], state[name] = whole.header, whole.data
        else:
            state[name] = whole


def _by_conversion(model: Any, state: Tensors) -> tuple[list[str], list[list[str]]]:
    """Names that saving changes at most, and groups of names that it turns into others together."""
    conversions = getattr(model, "_weight_conversions", None)
    if conversions is None:  # the model was not loaded from a checkpoint
        known = get_model_conversion_mapping(model, add_legacy=False)
        conversions = [conversion for conversion in known if not isinstance(conversion, PrefixChange)]
    reverse = [conversion.reverse_transform() for conversion in reversed(conversions)]
    converters = [conversion for conversion in reverse if isinstance(conversion, WeightConverter)]
    alone: list[str] = []
    together: defaultdict[str, list[str]] = defaultdict(list)
    for name in state:
        target, pattern = rename_source_key(name, [], converters)
        (alone if pattern is None else together[target]).append(name)
    return alone, list(together.values())


def _renamed(model: Any, tensors: Tensors, headers: Mapping[str, Header]) -> Tensors:
    packed = {id(tensor) for name, tensor in tensors.items() if name in headers}
    reverted: Tensors = revert_weight_conversion(model, tensors)
    return {stored_name(name) if id(tensor) in packed else name: tensor for name, tensor in reverted.items()}


def _converted(model: Any, tensors: Tensors, headers: Mapping[str, Header], min_weights: int) -> Tensors:
    """Convert back decoded, and pack again."""
    decoded = {
        name: decode(PackedTensor(headers[name], tensor)) if name in headers else tensor
        for name, tensor in tensors.items()
    }
    reverted: Tensors = revert_weight_conversion(model, decoded)
    return reverted if headers.keys().isdisjoint(tensors) else dict(_encoded(reverted, min_weights))


def _encoded(tensors: Tensors, min_weights: int) -> Iterable[tuple[str, torch.Tensor]]:
    for name, tensor in tensors.items():
        large = tensor.dtype == torch.bfloat16 and tensor.numel() >= min_weights
        packed = encode(tensor) if large else None
        if packed is None or packed.is_raw:
            yield name, tensor.cpu()  # where all of them stay for a while
        else:
            yield stored_name(name), packed.data.cpu()
