"""How transformers names, renames and converts a checkpoint's tensors, and how packed tensors get past that."""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from samebits.api import decode
from samebits.format.packed import PackedTensor
from samebits.nn.recipe import Index

_CLAIMED = "samebits"  # stands for a source pattern


class Names:
    """Where a checkpoint's tensors go in a model. The conversions' own state is left as it is."""

    def __init__(self, model: Any, conversions: Sequence[Any]) -> None:
        self.conversions = list(conversions)
        self._copies = deepcopy(self.conversions)
        self._renamings = [copy for copy in self._copies if isinstance(copy, WeightRenaming)]
        self._converters = [copy for copy in self._copies if isinstance(copy, WeightConverter)]
        self._prefix = model.base_model_prefix
        self.parameters: dict[str, torch.Tensor] = model.state_dict()

    def target(self, name: str) -> tuple[str, str | None]:
        """The parameter (a converter's first) that ``name`` goes to, and its converter's source pattern, if any."""
        target, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self.parameters)
        if target not in self.parameters and name in self.parameters:
            target, pattern = rename_source_key(name, [], [], self._prefix, self.parameters)
        return target, pattern

    def renamed(self, name: str) -> str:
        """What converters get to see of ``name``."""
        return str(rename_source_key(name, self._renamings, [])[0])

    def converter(self, pattern: str | None) -> Any:
        """The converter with this source pattern: of several the last, as transformers has it."""
        converters = [conversion for conversion in self.conversions if isinstance(conversion, WeightConverter)]
        return [converter for converter in converters if pattern in converter.source_patterns][-1]

    def mark_used(self) -> None:
        """Saving reverts the conversions that were used, and packed tensors bypass some."""
        for conversion, copy in zip(self.conversions, self._copies, strict=True):
            conversion._was_used = conversion._was_used or copy._was_used


class Claims(WeightConverter):  # type: ignore[misc]
    """Comes before all other converters and takes the tensors that they must not see."""

    def __init__(self) -> None:
        super().__init__([_CLAIMED], [_CLAIMED], [Concatenate()])
        self._targets: dict[str, tuple[str, str]] = {}
        self._dense: dict[str, torch.dtype] = {}

    def bring(self, name: str, parameter: str) -> None:
        """Let ``name``, as converters see it, become this parameter, as it is."""
        self._targets[name] = parameter, _CLAIMED

    def bring_dense(self, name: str, parameter: str, dtype: torch.dtype) -> None:
        """The same, decoded if it is packed, and converted to ``dtype``."""
        self.bring(name, parameter)
        self._dense[parameter] = dtype

    def pass_on(self, name: str, parameter: str, pattern: str) -> None:
        """Let the converter with this source pattern make it part of ``parameter``."""
        self._targets[name] = parameter, pattern

    def rename_source_key(self, source_key: str) -> tuple[str, str | None]:
        return self._targets.get(source_key, (source_key, None))

    def convert(self, layer_name: str, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        tensor = self.materialize_tensors()[_CLAIMED][0]
        if layer_name in self._dense:
            tensor = _decoded(tensor).to(self._dense[layer_name])
        return {layer_name: tensor}

    def was_used(self) -> bool:
        """Nothing to revert when the model is saved."""
        return False

    def __deepcopy__(self, memo: Any) -> Claims:
        """transformers makes one copy for each parameter."""
        copy = Claims()
        copy._targets, copy._dense = self._targets, self._dense
        return copy


class DecodingConverter(WeightConverter):  # type: ignore[misc]
    """A converter of any kind: decodes what is packed of the tensors that it gets, and packs its results where it can.

    Made by changing a converter's class.
    """

    __slots__ = ()

    def convert(
        self, layer_name: str, model: Any = None, config: Any = None, hf_quantizer: Any = None, loading_info: Any = None
    ) -> dict[str, Any]:
        if hf_quantizer is None:  # saving
            return super().convert(layer_name, model, config, hf_quantizer, loading_info)  # type: ignore[no-any-return]
        dtype = dtype_in_model(model, layer_name, model.get_parameter_or_buffer(layer_name))
        for pattern, tensors in self.materialize_tensors().items():  # those that are not packed are of this dtype
            self.collected_tensors[pattern] = [_decoded(tensor).to(dtype) for tensor in tensors]
        results: dict[str, Any] = super().convert(layer_name, model, config, hf_quantizer, loading_info)
        if self.quantization_operation:  # it has packed all: transformers asks about the first, whether it is to be
            return results
        return hf_quantizer.pack(model, results, loading_info.missing_keys)  # type: ignore[no-any-return]


def _decoded(tensor: torch.Tensor) -> torch.Tensor:
    return decode(PackedTensor.from_data(tensor)) if tensor.dtype == torch.uint8 else tensor


def dtype_in_model(model: Any, name: str, parameter: torch.Tensor) -> torch.dtype:
    """The dtype that transformers gives a parameter of a bfloat16 model: some are kept in float32."""
    kept = model._get_dtype_plan(torch.bfloat16).items()
    return next((dtype for pattern, dtype in kept if re.search(pattern.replace("*", ".*"), name)), parameter.dtype)


@dataclass(frozen=True)
class _Block:
    """Parts put together: their shape, and the place of each part by its number."""

    shape: tuple[int, ...]
    places: dict[int, Index]


def arrange(parts: Sequence[tuple[str, tuple[int, ...]]], converter: Any) -> tuple[tuple[int, ...], list[Index]] | None:
    """Where a converter that only stacks and concatenates puts its parts.

    Args:
        parts: source pattern and shape of each, in the order in which transformers collects them.

    Returns:
        The shape of the whole, and each part's place in it; None for other converters, and for parts that do not fit.
    """
    groups: dict[str, list[_Block]] = {pattern: [] for pattern in converter.source_patterns}
    for number, (pattern, shape) in enumerate(parts):
        groups[pattern].append(_Block(shape, {number: tuple(slice(0, size) for size in shape)}))
    blocks = list(groups.values())
    for operation in converter.operations:
        if not all(blocks):  # a source is missing, or did not fit
            return None
        if type(operation) is MergeModulelist:
            blocks = [_stacked(group, operation.dim) for group in blocks]
        elif type(operation) is Concatenate:
            blocks = [_concatenated([block for group in blocks for block in group], operation.dim)]
        else:
            return None
    if len(converter.target_patterns) != 1 or [len(group) for group in blocks] != [1]:
        return None
    (whole,) = blocks[0]
    return whole.shape, [whole.places[number] for number in range(len(parts))]


def _stacked(blocks: Sequence[_Block], dim: int) -> list[_Block]:
    """One block, or none if they do not fit."""
    if len({block.shape for block in blocks}) != 1:
        return []
    shape = blocks[0].shape
    dim %= len(shape) + 1
    numbered = [(number, block.places) for number, block in enumerate(blocks)]
    places = {part: (*at[:dim], row, *at[dim:]) for row, found in numbered for part, at in found.items()}
    return [_Block((*shape[:dim], len(blocks), *shape[dim:]), places)]


def _concatenated(blocks: Sequence[_Block], dim: int) -> list[_Block]:
    """One block, or none if they do not fit."""
    if not blocks:
        return []
    dim %= len(blocks[0].shape)
    if len({(*block.shape[:dim], *block.shape[dim + 1 :]) for block in blocks}) != 1:
        return []
    places: dict[int, Index] = {}
    start = 0
    for block in blocks:
        places |= {part: _moved(at, dim, start) for part, at in block.places.items()}
        start += block.shape[dim]
    shape = blocks[0].shape
    return [_Block((*shape[:dim], start, *shape[dim + 1 :]), places)]


def _moved(place: Index, dim: int, start: int) -> Index:
    at = place[dim]
    moved = at + start if isinstance(at, int) else slice(at.start + start, at.stop + start)
    return (*place[:dim], moved, *place[dim + 1 :])
