"""State dicts of compressed modules, loaded into modules that are not compressed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from samebits.api import decode
from samebits.errors import FormatError, InputError, SamebitsError
from samebits.format.names import original_name
from samebits.format.packed import PackedTensor
from samebits.nn.join import Owners, pack_whole
from samebits.nn.packed_module import (
    PIECE,
    PackedModule,
    check_module,
    pack,
    packed_parameters,
    sharers,
    slot_name,
    validated,
    whole,
)
from samebits.nn.selection import HOLDS_ANY, Owned, tied, unpacked
from samebits.nn.spared import spare


def load_state_dict(
    module: nn.Module, state_dict: Mapping[str, Any], *, strict: bool = True, assign: bool = False
) -> Any:
    """``module.load_state_dict`` for the state dict of a compressed module: what is packed there becomes packed here.

    Nothing is encoded, and nothing decoded but buffers, and parameters that ``compress`` would leave as they are, such
    as an embedding's with max_norm. Parameters that are packed in both may have other bytes; those that are packed in
    ``module`` alone are an error. Tied ones stay tied, whichever of their names are there.

    Args:
        module: of the same parameters, on any device; on the meta device with ``assign``.
        state_dict: its packed tensors are validated before anything trusts them.
        strict, assign: as torch's.

    Returns:
        What ``module.load_state_dict`` does.

    Raises:
        FormatError, DigestError: a damaged packed tensor, or one of another shape; ``module`` is as it was then.
        InputError: no module, or no mapping.
        RuntimeError: other keys or shapes that do not fit, as torch raises it.
    """
    check_module(module, "give a torch module and a state dict")
    if not isinstance(state_dict, Mapping):
        raise InputError(f"{type(state_dict).__name__} is no state dict", mend="give a mapping of names to tensors")
    spare(module)
    _refuse_pieces(module, state_dict)
    _refuse_damaged(module, state_dict)
    found: list[tuple[list[Owned], PackedTensor]] = []
    plain: list[tuple[list[Owned], PackedTensor]] = []
    joined = list(_joined(module, state_dict))
    for owned in [*tied(list(unpacked(module))), *([buffer] for buffer in _buffers(module))]:
        stored = [(full_name, owner, name) for full_name, owner, name in owned if _key(full_name, name) in state_dict]
        if stored:
            stays = stored[0][2] in stored[0][1]._buffers or HOLDS_ANY.reason_against_tied(owned)
            packed = _packed(stored[0], state_dict)
            if stays:
                plain.append((stored, packed))
            else:
                found.append(([*stored, *(other for other in owned if other not in stored)], packed))
    for owners, packed in joined:
        pack_whole(owners, packed.header, packed.data.to(_device(*owners[0]), copy=True))
    if plain:
        state_dict = _with_plain(plain, state_dict)
    for owned, packed in found:
        _, first, first_name = owned[0]
        parameter = first._parameters[first_name]
        assert parameter is not None
        filled = packed.data.to(parameter.device, copy=True)  # other threads may run the module already
        data = nn.Parameter(filled, requires_grad=False)
        for _, owner, name in owned:
            recipe = whole(packed, name, parameter)
            pack(owner, name, recipe if assign else replace(recipe, dtype=parameter.dtype), [data])
    result = module.load_state_dict(state_dict, strict=strict, assign=assign)
    for owned, _ in found if assign else ():  # torch has given each its own
        _, first, first_name = owned[0]
        for _, owner, name in owned[1:]:
            owner._parameters[slot_name(name)] = first._parameters[slot_name(first_name)]
    for owners, _ in joined if assign else ():
        held = [holder._parameters[slot_name(name)] for holder, name in owners]
        assigned = next((each for each in held if each is not None and each.device.type != "meta"), held[0])
        for holder, name in owners:
            holder._parameters[slot_name(name)] = assigned
    return result


def name_as_before(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """For ``register_state_dict_post_hook``: weights under the names that they had before, not decoded, at the end."""
    for full_name, owner, name in packed_parameters(module):
        path = prefix + full_name.removesuffix(name)
        for slot in owner.sb_recipes[name].slots:
            state.pop(path + slot, None)
        state[path + name] = getattr(owner, name)


def as_plain(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """A tensor of a checkpoint under the name that it had before it was compressed, decoded if it is packed.

    Raises:
        FormatError, DigestError: a damaged packed tensor.
    """
    original = original_name(name)
    if original is None:
        return name, tensor
    try:
        return original, decode(PackedTensor.from_data(tensor))
    except SamebitsError as error:
        raise error.at(name) from None


def _key(full_name: str, name: str) -> str:
    return full_name[: len(full_name) - len(name)] + slot_name(name)


def _refuse_pieces(module: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """
    Raises:
        FormatError: experts in several packed pieces, whose places only a module that has them so knows.
    """
    known = {path for path, _ in module.named_parameters(remove_duplicate=False)}
    for key in state_dict:
        if key.rpartition(".")[2].startswith(PIECE) and key not in known:
            mend = "save the model with save_pretrained and load that, then this state dict fits"
            raise FormatError("a part of a weight, and the module has no such parts", where=key, mend=mend)


def _joined(module: nn.Module, state_dict: Mapping[str, Any]) -> Iterator[tuple[Owners, PackedTensor]]:
    """Weights that are packed in pieces here, and as one tensor there, as of a model that was loaded to a GPU."""
    paths: dict[nn.Module, list[str]] = {}
    for path, own in module.named_modules(remove_duplicate=False):
        paths.setdefault(own, []).append(f"{path}." if path else "")
    for owners in sharers().values():
        keys = [path + slot_name(name) for owner, name in owners for path in paths.get(owner, ())]
        there = [key for key in keys if key in state_dict]
        owner, name = owners[0]
        recipe = owner.sb_recipes[name]
        if there and len(recipe.pieces) > 1:
            yield owners, validated(state_dict[there[0]], recipe.shape, there[0])


def _device(owner: PackedModule, name: str) -> torch.device:
    stored = owner._parameters[owner.sb_recipes[name].slots[0]]
    assert stored is not None
    return stored.device


def _refuse_damaged(module: nn.Module, state_dict: Mapping[str, Any]) -> None:
    """Of what is packed in the module already: torch loads all that lies before a damaged one.

    Raises:
        FormatError, DigestError: see validated.
    """
    for full_name, owner, name in packed_parameters(module):
        for piece in owner.sb_recipes[name].pieces:
            key = full_name.removesuffix(name) + piece.slot
            if piece.header and key in state_dict:
                validated(state_dict[key], piece.header.shape, key)


def _buffers(module: nn.Module) -> Iterator[Owned]:
    for prefix, owner in module.named_modules():
        for name, buffer in owner._buffers.items():
            if buffer is not None:
                yield f"{prefix}.{name}" if prefix else name, owner, name


def _with_plain(
    groups: Sequence[tuple[Sequence[Owned], PackedTensor]], state_dict: Mapping[str, Any]
) -> dict[str, Any]:
    """A state dict with what these hold packed decoded, under the names that it has then."""
    result = OrderedDict(state_dict)
    if hasattr(state_dict, "_metadata"):
        result._metadata = state_dict._metadata  # type: ignore[attr-defined]
    for owned, packed in groups:
        tensor = decode(packed)
        for full_name, _, name in owned:
            del result[_key(full_name, name)]
            result[full_name] = tensor
    return result


def _packed(owned: Owned, state_dict: Mapping[str, Any]) -> PackedTensor:
    full_name, owner, name = owned
    key, shape = _key(full_name, name), tuple(getattr(owner, name).shape)
    return validated(state_dict[key], shape, key)
