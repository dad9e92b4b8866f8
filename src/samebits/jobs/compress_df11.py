"""samebits compress --format df11: a plain checkpoint to the published layout of DFloat11.

A folder gets a file for each unit, byte for byte that of the original encoder, and one for what is in no unit; a single
file gets all. Shapes, and what else the layout leaves out, are in the metadata of that one file (df11/unsaid.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from samebits.bf16 import words_of
from samebits.df11.checkpoint import UNIT_TENSORS, open_checkpoint
from samebits.df11.config import KEY, Df11Config
from samebits.df11.patterns import Patterns, auto_patterns, find_units
from samebits.df11.unit import UnitPlan
from samebits.df11.unsaid import Unsaid
from samebits.errors import DeviceError, DtypeError, FormatError, InputError
from samebits.format.container import Checkpoint, Entry
from samebits.format.folder import CONFIG, file_name_of
from samebits.format.safetensors_file import (
    FLOATS,
    PARTIAL,
    SUFFIX,
    SafetensorsFile,
    SafetensorsWriter,
    Stored,
    header_size,
)
from samebits.jobs.compress import SPACE, refuse_quantized
from samebits.jobs.job import Job, Shard, write_json
from samebits.jobs.options import RunOptions
from samebits.jobs.pieces import Piece
from samebits.jobs.source import config_of, stem_of
from samebits.jobs.summary import Sizes
from samebits.jobs.workspace import Workspace
from samebits.progress import Progress, silent

if TYPE_CHECKING:
    from numpy.typing import NDArray

_SPLIT = "split_positions"  # of a unit's tensors the one that is not bytes


class Df11Compression(Job):
    """See Job. Units are encoded in this process one after the other, by all of the codec's threads.

    Args:
        patterns: which matrices become a unit; None: as auto_patterns finds them.

    Raises:
        InputError: the source is compressed or quantized already, or the patterns do not fit it.
        DtypeError: most of its weights are not BF16.
        DeviceError: a GPU is asked for.
    """

    command = "compress"

    def __init__(
        self,
        checkpoint: Checkpoint,
        destination: Path,
        patterns: Patterns | None = None,
        run: RunOptions | None = None,
        progress: Progress = silent,
    ) -> None:
        run = run or RunOptions()
        if run.device == "cuda":
            raise DeviceError("DFloat11's layout is written on the CPU", mend="use --device cpu")
        _check_source(checkpoint)
        self.patterns = _auto(checkpoint) if patterns is None else patterns
        self.units = _units(self.patterns, checkpoint)
        self.unit_of = {entry.name: path for path, entries in self.units.items() for entry in entries}
        super().__init__(checkpoint, destination, replace(run, device="cpu", workers=1), progress)

    def stem(self) -> str:
        return stem_of(self.checkpoint)

    def make_shards(self) -> list[Shard]:
        if not self.is_folder:
            (shard,) = self.file_by_file([])
            return [replace(shard, metadata={**shard.metadata, **self._unsaid()})]
        rest = self.stem() + SUFFIX
        files: dict[str, list[Entry]] = {rest: []}
        for entry in self.checkpoint:
            files.setdefault(self._file_of(entry.name) or rest, []).append(entry)
        return [Shard(entries, name, self._unsaid() if name == rest else {}) for name, entries in files.items()]

    def _file_of(self, name: str) -> str | None:
        """The file of the unit that a tensor is part of or beside, None if there is none."""
        path = self.unit_of.get(name)
        while path is None and name:
            name = name.rpartition(".")[0]
            path = name if name in self.units else None
        if path is None:
            return None
        file = path.replace(".", "_") + SUFFIX
        try:
            file_name_of(file + PARTIAL, (PARTIAL,))  # as it is called until it is there
            return file
        except FormatError:
            what, mend = f"the file of its unit cannot be called {file!r}", "give --patterns that leave it out"
            raise InputError(what, where=f"{self.checkpoint.path}: {path}", mend=mend) from None

    def _unsaid(self) -> dict[str, str]:
        """What the file for the rest says, or the only one."""
        shapes = {name: self.checkpoint.entries[name].shape for name in self.unit_of}
        return Unsaid(shapes, None if self.is_folder else Df11Config(self.patterns)).to_metadata()

    def identity(self) -> dict[str, Any]:
        return {"layout": "dfloat11", "patterns": self.patterns}

    def changes(self, entry: Entry) -> bool:
        return False  # in a worker: units are more than one tensor

    def packs(self, entry: Entry) -> bool:
        return False

    def result_bytes(self, entry: Entry) -> int:
        return int(entry.nbytes * SPACE) if entry.name in self.unit_of else entry.nbytes

    def write(self, shard: Shard, path: Path, pieces: Iterator[Piece]) -> None:
        """In the order of the safetensors library: by falling width, then by name. All sizes are known ahead."""
        plans, raw = self._plan(shard)
        unpacked = [Piece.of(entry) for entry in shard.entries if self.unit_of.get(entry.name) not in plans]
        unpacked.sort(key=lambda piece: (-piece.width, piece.name))
        metadata = shard.metadata | replace(Unsaid.parse(shard.metadata), raw=raw).to_metadata()
        stored = [*_splits(plans), *((p.name, p.dtype, p.shape, p.nbytes) for p in unpacked), *_bytes_of(plans)]
        with SafetensorsWriter(path, header_size(stored, metadata)) as writer:
            for (name, dtype, shape, _), plan in zip(_splits(plans), plans.values(), strict=True):
                writer.append(name, dtype, shape, torch.from_numpy(plan.split_positions.view(np.uint8)))
            for piece in unpacked:
                piece.append_to(writer)
                self._advance(piece.nbytes)
            for unit, plan in plans.items():
                self._write_unit(writer, unit, plan)
            writer.finish([name for name, *_ in stored], metadata)

    def _write_unit(self, writer: SafetensorsWriter, unit: str, plan: UnitPlan) -> None:
        rooms = {stored[0].rpartition(".")[2]: writer.allocate(*stored) for stored in _bytes_of({unit: plan})}
        tensors = plan.encode_to(lambda name, start, data: rooms[name](start, data.data), self._words(unit))
        for name in rooms.keys() & tensors:
            rooms[name](0, tensors[name].reshape(-1).data)
        self._advance(sum(entry.nbytes for entry in self.units[unit]))

    def _plan(self, shard: Shard) -> tuple[dict[str, UnitPlan], dict[str, str]]:
        """Of a shard's units: plans by path, in the order of their tensors' names, and why others cannot be held."""
        plans: dict[str, UnitPlan] = {}
        raw: dict[str, str] = {}
        paths = {self.unit_of[entry.name] for entry in shard.entries if entry.name in self.unit_of}
        for path in sorted(paths, key=lambda path: f"{path}."):
            try:
                plans[path] = UnitPlan.of(self._words(path))
            except InputError as error:
                raw[path] = error.what
        return plans, raw

    def _words(self, unit: str) -> list[NDArray[np.uint16]]:
        return [words_of(entry.tensor()) for entry in self.units[unit]]

    def convert_config(self, config: dict[str, Any]) -> dict[str, Any]:
        return {**config, KEY: Df11Config(self.patterns).to_dict()}

    def _stage_others(self, space: Workspace) -> None:
        super()._stage_others(space)
        if not (space.out / CONFIG).exists():
            write_json(space.out / CONFIG, self.convert_config({}))

    def stage_index(self, space: Workspace) -> None:
        """None: tensors are found by their names."""

    def measure(self, path: Path) -> tuple[Sizes, list[str], dict[str, str]]:
        open_checkpoint(path)
        targets = [shard.target for shard in self.shards]
        files = [SafetensorsFile.open(file) for file in ([path / t for t in targets] if self.is_folder else [path])]
        raw: dict[str, str] = {}
        for file in files:
            raw |= Unsaid.parse(file.metadata).raw
        stored = {name: spec.nbytes for file in files for name, spec in file.tensors.items()}
        packed = [entry for path, entries in self.units.items() if path not in raw for entry in entries]
        names = self.checkpoint.entries.keys()
        sizes = replace(
            Sizes.of(self.checkpoint),
            packed_tensors=len(packed),
            packed_weights=sum(entry.words for entry in packed),
            stored_bytes=sum(stored.values()),
            packed_bytes=sum(nbytes for name, nbytes in stored.items() if name not in names),
        )
        return sizes, [], raw


def _splits(plans: Mapping[str, UnitPlan]) -> list[Stored]:
    return [(f"{path}.{_SPLIT}", "I64", plan.shapes()[_SPLIT], plan.split_positions.nbytes)
            for path, plan in plans.items()]  # fmt: skip


def _bytes_of(plans: Mapping[str, UnitPlan]) -> list[Stored]:
    """The other tensors of units."""
    return [
        (f"{path}.{name}", "U8", shape, int(np.prod(shape)))
        for path, plan in plans.items()
        for name, shape in sorted(plan.shapes().items())
        if name != _SPLIT
    ]


def _check_source(checkpoint: Checkpoint) -> None:
    where = str(checkpoint.path)
    if checkpoint.is_packed or KEY in config_of(checkpoint):
        raise InputError("compressed already", where=where, mend="use it as it is, or decompress it")
    refuse_quantized(checkpoint.path / CONFIG)
    floats = [entry for entry in checkpoint if entry.dtype in FLOATS]
    other = [entry for entry in floats if entry.dtype != "BF16"]
    if 2 * sum(entry.words for entry in other) > sum(entry.words for entry in floats):
        what = f"the weights are {other[0].dtype}, DFloat11's layout holds BF16 only"
        raise DtypeError(what, where=other[0].where, mend="give a BF16 checkpoint")


def _is_matrix(entry: Entry) -> bool:
    return entry.dtype == "BF16" and len(entry.shape) == 2 and entry.words > 0


def _auto(checkpoint: Checkpoint) -> Patterns:
    try:
        return auto_patterns(config_of(checkpoint), [entry.name for entry in checkpoint if _is_matrix(entry)])
    except InputError as error:
        raise error.at(str(checkpoint.path)) from None


def _units(patterns: Patterns, checkpoint: Checkpoint) -> dict[str, list[Entry]]:
    """Each unit's weights, in order."""
    units = {
        path: [checkpoint.entries[name] for name in names]
        for path, names in find_units(patterns, checkpoint.entries).items()
    }
    for path, entries in units.items():
        for name in UNIT_TENSORS:
            if f"{path}.{name}" in checkpoint.entries:
                where = checkpoint.entries[f"{path}.{name}"].where
                raise FormatError("a name reserved for DFloat11's units", where=where, mend="rename the tensor")
        for entry in entries:
            if not _is_matrix(entry):
                what = f"{entry.dtype} {list(entry.shape)} in unit {path}: only BF16 matrices can be"
                raise InputError(what, where=entry.where, mend="correct the pattern")
    return units
