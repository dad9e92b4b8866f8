"""Loading a compressed folder: which parameter of the model each of its tensors belongs to.

transformers renames, stacks and concatenates a checkpoint's tensors on their way into the model. Packed tensors go the
same way without being decoded: a tensor that is a parameter becomes its packed form; one that is a part of a parameter,
such as one expert's matrix, becomes a piece of it. What goes another way, or to a module that cannot hold packed
weights, is decoded as it is loaded, and packed again where the parameter can be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.core_model_loading import dot_natural_key

from samebits.errors import DtypeError, FormatError, InputError
from samebits.format.container import Checkpoint, Entry
from samebits.format.names import stored_name
from samebits.format.safetensors_file import FLOATS
from samebits.integrations.transformers.names import Claims, DecodingConverter, Names, arrange, dtype_in_model
from samebits.integrations.transformers.parallel import local
from samebits.nn.packed_module import pack, slot_name
from samebits.nn.recipe import Piece, Recipe
from samebits.nn.selection import HOLDS_ANY


class Source(NamedTuple):
    """A tensor of the checkpoint, and the converter's source pattern that takes it."""

    entry: Entry
    pattern: str | None

    @property
    def stored_name(self) -> str:
        return stored_name(self.entry.name) if self.entry.is_packed else self.entry.name


def place_packed(model: Any, conversions: Sequence[Any], files: Sequence[Path], takes_other_shapes: bool) -> list[Any]:
    """Make the model's parameters, still on the meta device, packed as the checkpoint has them.

    Args:
        takes_other_shapes: parameters of other shapes than the checkpoint's are initialised anew.

    Returns:
        The conversions with which transformers is to load.

    Raises:
        FormatError, DigestError: damaged files, or files that do not fit the model.
        InputError: no files.
    """
    if not files:
        mend = "name their folder, or load them into a plain model with samebits.load_state_dict"
        raise InputError("packed weights that are in no files cannot be loaded here", mend=mend)
    placement = _Placement(model, Names(model, conversions), takes_other_shapes)
    return placement.run(Checkpoint.open(files[0].parent))


class _Placement:
    def __init__(self, model: Any, names: Names, takes_other_shapes: bool) -> None:
        self.model, self.names, self.claims = model, names, Claims()
        self.takes_other_shapes = takes_other_shapes

    def run(self, checkpoint: Checkpoint) -> list[Any]:
        for target, sources in self._by_target(checkpoint).items():
            if target not in self.names.parameters:
                continue  # transformers reports it
            if sources[0].pattern is None:
                self._place_whole(target, sources)
            elif any(source.entry.is_packed for source in sources) and not self._place_pieces(target, sources):
                self._convert_decoded(target, sources)
        self.names.mark_used()
        return [self.claims, *self.names.conversions]

    def _by_target(self, checkpoint: Checkpoint) -> dict[str, list[Source]]:
        """The checkpoint's tensors, in the order in which transformers collects them."""
        targets: dict[str, list[Source]] = {}
        for entry in sorted(checkpoint, key=lambda entry: dot_natural_key(entry.name)):
            entry.check()
            target, pattern = self.names.target(entry.name)
            targets.setdefault(target, []).append(Source(entry, pattern))
        return targets

    def _place_whole(self, target: str, sources: Sequence[Source]) -> None:
        """Of several tensors for one parameter the first is taken, as transformers has it."""
        entry, dtype = sources[0].entry, self._dtype(target)
        if entry.is_packed:
            fits = self._fits(entry, entry.shape, target)
            piece = Piece(slot_name(target.rpartition(".")[2]), entry.header)
            if fits and self._pack(target, Recipe(entry.shape, (piece,), dtype), sources[:1]):
                for source in sources[1:]:
                    self.claims.bring(self.names.renamed(source.stored_name), self._slot(target, piece))
                return
        is_other = FLOATS.get(entry.dtype, self.names.parameters[target].dtype) != dtype
        if is_other or any(source.entry.is_packed for source in sources):
            for source in sources:
                self.claims.bring_dense(self.names.renamed(source.stored_name), target, dtype)

    @staticmethod
    def _slot(target: str, piece: Piece) -> str:
        return target.removesuffix(target.rpartition(".")[2]) + piece.slot

    def _place_pieces(self, target: str, sources: Sequence[Source]) -> bool:
        """Keep a parameter that is put together from several tensors in pieces; False if that cannot be done."""
        converter = self.names.converter(sources[0].pattern)
        layout = arrange([(source.pattern or "", source.entry.shape) for source in sources], converter)
        if layout is None or any(source.entry.dtype != "BF16" for source in sources):
            return False
        shape, indices = layout
        if not self._fits(sources[0].entry, shape, target):
            return False
        leaf = target.rpartition(".")[2]
        pieces = tuple(
            Piece(slot_name(leaf, number), source.entry.header, index, source.entry.name)
            for number, (source, index) in enumerate(zip(sources, indices, strict=True))
        )
        return self._pack(target, Recipe(shape, pieces, self._dtype(target)), sources)

    def _pack(self, target: str, recipe: Recipe, sources: Sequence[Source]) -> bool:
        """Put packed parameters without bytes yet in the place of a dense one; False if its module cannot hold them."""
        found = find_parameter(self.model, target)
        if found is None or HOLDS_ANY.reason_against(found[0], found[1], target):
            return False
        module, leaf, _ = found
        pack(module, leaf, recipe, [_without_bytes(source.entry) for source in sources])
        for source, piece in zip(sources, recipe.pieces, strict=True):
            self.claims.bring(self.names.renamed(source.stored_name), self._slot(target, piece))
        return True

    def _convert_decoded(self, target: str, sources: Sequence[Source]) -> None:
        for source in sources:
            assert source.pattern is not None
            self.names.converter(source.pattern).__class__ = DecodingConverter
            if source.entry.is_packed:
                self.claims.pass_on(self.names.renamed(source.stored_name), target, source.pattern)

    def _fits(self, entry: Entry, shape: tuple[int, ...], target: str) -> bool:
        parameter = self.names.parameters[target]
        if shape == tuple(parameter.shape):
            return True
        if self.takes_other_shapes:
            return False
        raise another_shape(shape, parameter.shape, entry.where, "ignore_mismatched_sizes=True initialises others")

    def _dtype(self, target: str) -> torch.dtype:
        return dtype_in_model(self.model, target, self.names.parameters[target])


def another_shape(shape: Sequence[int], expected: Sequence[int], where: str, mend: str) -> FormatError:
    what = f"shape {list(shape)} where the model has {list(expected)}"
    return FormatError(what, where=where, mend=f"these weights do not belong to this config.json; {mend}")


def find_parameter(model: Any, name: str) -> tuple[nn.Module, str, nn.Parameter] | None:
    """The module that owns the parameter ``name``, its name there, and itself; None if there is no such parameter.

    Of a parameter that is split over devices it is this rank's part.
    """
    path, _, leaf = name.rpartition(".")
    try:
        module: nn.Module = model.get_submodule(path)
    except AttributeError:
        return None
    parameter = module._parameters.get(leaf)
    return None if parameter is None else (module, leaf, local(parameter))


def _without_bytes(entry: Entry) -> torch.Tensor:
    if entry.header is None:
        return torch.empty(entry.shape, dtype=torch.bfloat16, device="meta")
    return torch.empty(entry.nbytes, dtype=torch.uint8, device="meta")


PACK_AFTERWARDS = "load without a quantization_config, with dtype=torch.bfloat16, and call samebits.compress(model)"


def check_dtypes(
    model: Any, conversions: Sequence[Any], files: Sequence[str], selects: Callable[[Any, str], bool]
) -> None:
    """Refuse a checkpoint most of whose weights to be packed are not BF16: rounding them must be asked for.

    Args:
        selects: whether a parameter of the model is to be packed.

    Raises:
        DtypeError: so it is.
    """
    from transformers.modeling_utils import load_state_dict

    names = Names(model, conversions)
    words: dict[bool, int] = {True: 0, False: 0}
    where = ""
    for file in files:
        for name, tensor in load_state_dict(file, map_location="meta").items():
            if tensor.is_floating_point() and selects(model, names.target(name)[0]):
                words[tensor.dtype == torch.bfloat16] += tensor.numel()
                where = where if tensor.dtype == torch.bfloat16 else f"{file}: {name} ({tensor.dtype})"
    if words[False] > words[True]:
        cast = "`samebits compress --cast bf16` converts them to BF16, and says whether that loses bits"
        mend = f"{cast}; or {PACK_AFTERWARDS}"
        raise DtypeError("only BF16 weights can be packed without loss", where=where, mend=mend)
