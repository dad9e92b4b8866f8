"""Checkpoints in DFloat11's layout, opened by headers alone, as checkpoints of BF16 tensors.

Tensors are found by their names, however they are spread over files. Each matrix of a unit becomes an entry of its own,
which is decoded from the blocks of the unit's stream that hold it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from samebits.df11.code import MEND
from samebits.df11.config import KEY, Df11Config
from samebits.df11.decode import decode_words
from samebits.df11.shapes import Known, ModelShapes, Shape, of_no_model
from samebits.df11.unit import Unit
from samebits.df11.unsaid import Unsaid
from samebits.errors import FormatError, InputError, SamebitsError
from samebits.format.container import Checkpoint, Entry
from samebits.format.folder import (
    CONFIG,
    INDEX_SUFFIX,
    Folder,
    check_numbering,
    check_published,
    read_json,
    single_file,
)
from samebits.format.mapping import map_file
from samebits.format.safetensors_file import SUFFIX, SafetensorsFile, TensorSpec

UNIT_TENSORS = {field.name: "I64" if field.name == "split_positions" else "U8" for field in fields(Unit)}
_DIMENSIONS = {"luts": 2}  # of those that are not one-dimensional
_STREAM = "encoded_exponent"
_OF_UNITS_ALONE = (_STREAM, "sign_mantissa")  # where one is, the others have to be
_CHUNK_WORDS = 1 << 26  # decoded at a time


@dataclass(frozen=True)
class StoredUnit:
    """A unit of module ``path``: file and place of each of its tensors."""

    path: str
    tensors: Mapping[str, tuple[Path, TensorSpec]]

    @property
    def where(self) -> str:
        file, _ = self.tensors.get(_STREAM) or next(iter(self.tensors.values()))
        return f"{file}: {self.path}"

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for _, spec in self.tensors.values())

    def check(self) -> None:
        """
        Raises:
            FormatError: a tensor is missing, or is not what a unit's is.
        """
        for name, dtype in UNIT_TENSORS.items():
            if name not in self.tensors:
                raise FormatError(f"the unit has no {name}", where=self.where, mend="fetch all files of the model")
            spec = self.tensors[name][1]
            if spec.dtype != dtype or len(spec.shape) != _DIMENSIONS.get(name, 1):
                what = f"stored as {spec.dtype} {list(spec.shape)}, which no unit of DFloat11 is"
                raise FormatError(what, where=f"{self.where}.{name}", mend=MEND)

    def read(self) -> Unit:
        """The unit, mapped from its files, and validated.

        Raises:
            FormatError: its tensors do not fit each other.
        """
        arrays: dict[str, Any] = {}
        for name, (path, spec) in self.tensors.items():
            data = map_file(path, spec.start, spec.nbytes).numpy()
            arrays[name] = data.view("<i8").astype(np.int64) if spec.dtype == "I64" else data.reshape(spec.shape)
        unit = Unit(**arrays)
        try:
            unit.validate()
        except SamebitsError as error:
            raise error.at(self.where) from None
        return unit


@dataclass(frozen=True)
class Matrix:
    """Words [first, last) of a unit."""

    unit: StoredUnit
    first: int
    last: int

    def decode(self, out: torch.Tensor, device: torch.device | str = "cpu") -> torch.Tensor:
        """Decode on ``device`` into ``out``, bfloat16 and contiguous, on any device.

        Raises:
            FormatError: the unit is damaged.
        """
        unit, flat = self.unit.read(), out.view(-1)
        try:
            for first in range(self.first, self.last, _CHUNK_WORDS):
                last = min(self.last, first + _CHUNK_WORDS)
                part, before = unit.part(first, last)
                decode_words(part, before, flat[first - self.first : last - self.first], device)
        except SamebitsError as error:
            raise error.at(self.unit.where) from None
        return out


@dataclass(frozen=True)
class UnitEntry(Entry):
    """A matrix of a unit. ``spec`` has no bytes of its own: what is stored belongs to all matrices of the unit."""

    matrix: Matrix

    @property
    def is_packed(self) -> bool:
        return True

    @property
    def nbytes(self) -> int:
        """Its share of the unit."""
        unit, matrix = self.matrix.unit, self.matrix
        words = unit.tensors["sign_mantissa"][1].nbytes
        return unit.nbytes * matrix.last // words - unit.nbytes * matrix.first // words


@dataclass(frozen=True)
class Df11Checkpoint(Checkpoint):
    """A checkpoint in DFloat11's layout; ``version`` as it says, None if it does not."""

    version: str | None


def open_checkpoint(path: Path, model_shapes: ModelShapes = of_no_model) -> Checkpoint:
    """Open a model folder or a safetensors file of any layout by its headers.

    Args:
        model_shapes: shapes that the model's class has.

    Raises:
        InputError, FormatError, OSError: as Checkpoint.open; shapes that cannot be known; DFloat11's pickles.
    """
    config = read_config(path) if path.is_dir() else None
    if config is None:
        checkpoint = Checkpoint.open(path)
        if not any(name.endswith(f".{_STREAM}") for name in checkpoint.entries):
            return checkpoint
    folder = path if path.is_dir() else path.parent
    config = config or read_config(folder)
    files = _files_of(path) if path.is_dir() else [SafetensorsFile.open(single_file(path))]
    return _Reader(files, folder, config, model_shapes).checkpoint(path)


def read_config(folder: Path) -> Df11Config | None:
    """The dfloat11_config of a folder's config.json; None if it has none, or something else compressed the model.

    Raises:
        FormatError, VersionError: malformed, or of another version.
    """
    path = folder / CONFIG
    entries = read_json(path) if path.is_file() else {}
    if KEY not in entries or "quantization_config" in entries:
        return None
    try:
        return Df11Config.parse(entries[KEY])
    except SamebitsError as error:
        raise error.at(str(path)) from None


def _files_of(folder: Path) -> list[SafetensorsFile]:
    """All of a folder's, whether an index names them or not."""
    check_published(folder)
    paths = sorted(path for path in folder.iterdir() if path.name.endswith(SUFFIX))
    if not paths:
        raise InputError("no safetensors files in this folder", where=str(folder), mend="fetch all files of the model")
    check_numbering(paths)
    files = [SafetensorsFile.open(path) for path in paths]
    for index in sorted(path for path in folder.iterdir() if path.name.endswith(INDEX_SUFFIX)):
        Folder.of_index(index).check(files)
    return files


class _Reader:
    def __init__(
        self, files: Sequence[SafetensorsFile], folder: Path, config: Df11Config | None, model_shapes: ModelShapes
    ) -> None:
        self.files, self.config = files, config
        self.plain: dict[str, tuple[SafetensorsFile, TensorSpec]] = {}
        self.units: dict[str, dict[str, tuple[Path, TensorSpec]]] = {}
        places = [name.rpartition(".") for file in files for name in file.tensors]
        paths = {path for path, dot, leaf in places if dot and leaf in _OF_UNITS_ALONE}
        for file in files:
            for spec in file.tensors.values():
                self._sort(file, spec, paths)
        vectors = {name: spec.words for name, (_, spec) in self.plain.items() if len(spec.shape) == 1}
        shapes = self._shapes_said()
        names = [name for path in self.units for name in (self.config and self.config.weights(path)) or ()]
        missing = [name for name in names if name not in shapes]
        model = model_shapes(folder, missing) if missing or not names else {}
        self.known = Known(self.config, {**model, **shapes}, vectors)

    def _shapes_said(self) -> dict[str, Shape]:
        """Shapes that samebits put into the metadata of files; a config that is there too is taken if none is known."""
        shapes: dict[str, Shape] = {}
        for file in self.files:
            try:
                said = Unsaid.parse(file.metadata)
            except SamebitsError as error:
                raise error.at(str(file.path)) from None
            shapes |= said.shapes
            self.config = self.config or said.config
        return shapes

    def _sort(self, file: SafetensorsFile, spec: TensorSpec, paths: set[str]) -> None:
        path, _, leaf = spec.name.rpartition(".")
        is_of_unit = path in paths and leaf in UNIT_TENSORS
        tensors = self.units.setdefault(path, {}) if is_of_unit else {}
        if leaf in tensors or spec.name in self.plain:
            what = "the tensor is also in another file"
            raise FormatError(what, where=f"{file.path}: {spec.name}", mend="remove the file that does not belong")
        if is_of_unit:
            tensors[leaf] = file.path, spec
        else:
            self.plain[spec.name] = file, spec

    def checkpoint(self, path: Path) -> Df11Checkpoint:
        entries: dict[str, Entry] = {}
        for entry in self._entries():
            if entry.name in entries:
                raise FormatError("the tensor is there twice", where=entry.where, mend=MEND)
            entries[entry.name] = entry
        held = {entry.file.path for entry in entries.values()}
        files = tuple(file for file in self.files if file.path in held)
        return Df11Checkpoint(path, files, {}, entries, {}, self.config.version if self.config else None)

    def _entries(self) -> Iterator[Entry]:
        for name, (file, spec) in self.plain.items():
            yield Entry(name, spec.dtype, spec.shape, file, spec, None, None)
        for path, tensors in self.units.items():
            yield from self._matrices(StoredUnit(path, tensors))

    def _matrices(self, stored: StoredUnit) -> Iterable[UnitEntry]:
        stored.check()
        unit = stored.read()
        try:
            weights = self.known.weights(stored.path, unit.sizes)
        except SamebitsError as error:
            raise error.at(stored.where) from None
        (file,) = (file for file in self.files if file.path == stored.tensors[_STREAM][0])
        bounds = pairwise([0, *unit.split_positions.tolist(), unit.words])
        for (name, shape), (first, last) in zip(weights.items(), bounds, strict=True):
            matrix = Matrix(stored, first, last)
            yield UnitEntry(name, "BF16", shape, file, TensorSpec(name, "BF16", shape, 0, 0), None, None, matrix)
