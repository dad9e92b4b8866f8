"""What compress and decompress share: shard by shard through worker processes into a workspace, then publish."""

from __future__ import annotations

import json
import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.df11.checkpoint import UnitEntry
from samebits.errors import InputError, SamebitsError
from samebits.format.container import Checkpoint, Entry
from samebits.format.folder import CONFIG, INDEX_SUFFIX, VERSION, is_numbered, read_json
from samebits.format.mapping import check_regular
from samebits.format.safetensors_file import SINGLE_SUFFIXES, SUFFIX, SafetensorsFile
from samebits.jobs.device import resolve_device
from samebits.jobs.options import RunOptions
from samebits.jobs.pieces import Piece, Task, work
from samebits.jobs.source import other_files, plain_names
from samebits.jobs.summary import Sizes
from samebits.jobs.workers import AHEAD, Workers, worker_count
from samebits.jobs.workspace import FILES, Workspace, out_of_space, publishing_order, require_space
from samebits.progress import Progress

_PREPARED, _WRITTEN, _PUBLISHED = "prepared", "written", "published"  # what processes tell each other
_Measured = tuple[Sizes, list[str], dict[str, str]]  # sizes, not_gained and raw_units of a JobReport


@dataclass(frozen=True)
class Shard:
    """Tensors that go into one file of the destination.

    Attributes:
        target: the file's name.
        metadata: of the file that they come from.
        plain: name of the file with the same tensors uncompressed, None if they come from several.
    """

    entries: list[Entry]
    target: str
    metadata: dict[str, str]
    plain: str | None = None

    def check_unchanged(self) -> None:
        """See SafetensorsFile.check_unchanged."""
        for file in {entry.file.path: entry.file for entry in self.entries}.values():
            file.check_unchanged()

    @property
    def nbytes(self) -> int:
        """Bytes of the uncompressed tensors."""
        return sum(entry.original_nbytes for entry in self.entries)


@dataclass(frozen=True)
class JobReport:
    """What a job did.

    Attributes:
        sizes: of the packed side: the result of compress, with its source's original bytes; the source of decompress.
        not_gained: tensors that were to be packed but would not have become smaller.
        skipped_files: files of the source folder that were not copied.
        resumed_shards: finished by an earlier run, here or in another process of this one.
        raw_units: units that a DFloat11 file cannot hold, and why; they are stored unchanged.
    """

    destination: Path
    sizes: Sizes
    not_gained: list[str]
    skipped_files: list[str]
    shards: int
    resumed_shards: int
    device: str
    seconds: float
    raw_units: dict[str, str]


class Job(ABC):
    """One run of compress or decompress over a checkpoint.

    Args:
        checkpoint: the source.
        destination: a folder for a folder, a file for a file.
        run: how to run it.
        progress: told the bytes that this process has done and their total, counted uncompressed.

    Raises:
        InputError: source and destination do not fit together; a link in the source leads nowhere.
        DeviceError: the device asked for is missing.
        OSError: a file of the source cannot be read.
    """

    command: str

    def __init__(self, checkpoint: Checkpoint, destination: Path, run: RunOptions, progress: Progress) -> None:
        self.checkpoint, self.destination, self.run_options = checkpoint, destination, run
        self.is_folder = checkpoint.path.is_dir()
        _check_places(checkpoint.path, destination, self.is_folder)
        self.device = resolve_device(run.device)
        self.shards = self.make_shards()
        weights = {file.path for file in checkpoint.files}
        self.others, self.skipped = other_files(checkpoint.path, weights) if self.is_folder else ([], [])
        self.others = [path for path in self.others if not _is_within(checkpoint.path / path, destination)]
        _check_readable(checkpoint.path / path for path in self.others)
        self._progress, self._done, self._ranks = progress, 0, run.ranks
        self._own_shards = self._ranks.own(self.shards)
        self._total = sum(shard.nbytes for shard in self._own_shards)

    @abstractmethod
    def make_shards(self) -> list[Shard]:
        """The files to write, and their tensors."""

    @abstractmethod
    def stem(self) -> str:
        """How loaders want the index's name to begin, whatever the files of the source are called."""

    def file_by_file(self, targets: list[str]) -> list[Shard]:
        """A shard for each file of the source; for those of a model folder ``targets`` are the new names."""
        targets = targets if self.is_folder else [self.destination.name]
        plain = plain_names(self.checkpoint) if self.is_folder else [self.checkpoint.path.name]
        return [
            Shard(self.checkpoint.by_file[file.path], target, file.metadata, name)
            for file, target, name in zip(self.checkpoint.files, targets, plain, strict=True)
        ]

    @abstractmethod
    def identity(self) -> dict[str, Any]:
        """The options that the result depends on."""

    @abstractmethod
    def changes(self, entry: Entry) -> bool:
        """Whether a tensor goes through a worker."""

    @abstractmethod
    def packs(self, entry: Entry) -> bool:
        """Whether a worker encodes it."""

    @abstractmethod
    def result_bytes(self, entry: Entry) -> int:
        """About how many bytes it will take."""

    @abstractmethod
    def write(self, shard: Shard, path: Path, pieces: Iterator[Piece]) -> None:
        """Write a shard's file from its tensors, which come in the order of ``shard.entries``."""

    @abstractmethod
    def convert_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """config.json as the destination needs it."""

    def run(self) -> JobReport:
        """Do it; of several processes each returns when all is done.

        Raises:
            FormatError, DigestError: a damaged source.
            InputError: the destination is in use; the source was written to meanwhile.
            ResourceError: no space, a killed worker, another job at work on the destination; another process of this
                one has failed.
        """
        start = time.monotonic()
        space = Workspace(self.destination, self.is_folder, self._identity(), self.run_options.overwrite)
        try:
            resumed, found = self._lead(space) if self._ranks.is_first else self._follow(space)
        except SamebitsError:
            self.checkpoint.check_unchanged()  # or that is why
            raise
        except OSError as error:
            self.checkpoint.check_unchanged()  # a source that ends earlier than it did is no memory any more
            if error.errno is not None:
                error.filename = error.filename or str(self.destination)
            raise out_of_space(error, self.destination) or error from None
        sizes, not_gained, raw_units = found
        skipped = [str(path) for path in self.skipped if not path.name.endswith(INDEX_SUFFIX)]
        return JobReport(self.destination, sizes, not_gained, skipped, len(self.shards), resumed, self.device,
                         time.monotonic() - start, raw_units)  # fmt: skip

    def _lead(self, space: Workspace) -> tuple[int, _Measured]:
        """As the process that alone prepares, and publishes; how many shards an earlier run had finished."""
        with space:
            space.check_places([*(Path(shard.target) for shard in self.shards), *self.others])
            space.is_shared = self._ranks.size > 1
            self._ranks.tell(_PREPARED, space.identity)
            resumed = self._write_own(space) + sum(self._ranks.hear_others(_WRITTEN))
            if self.is_folder:
                self._stage_others(space)
            found = self.measure(space.staged)  # what cannot be opened is not published
            self.checkpoint.check_unchanged()
            space.publish()
        self._ranks.tell(_PUBLISHED, resumed)
        return resumed, found

    def _follow(self, space: Workspace) -> tuple[int, _Measured]:
        """As one that writes some of the shards, in a workspace that the first process has."""
        if self._ranks.hear(_PREPARED) != space.identity:
            mend = "give all the same command, for the same files"
            raise InputError("the first process of this job does another one", where=str(self.destination), mend=mend)
        self._ranks.tell(_WRITTEN, self._write_own(space))
        resumed: int = self._ranks.hear(_PUBLISHED)
        return resumed, self.measure(self.destination)

    def measure(self, path: Path) -> _Measured:
        """What JobReport says of the result, opened at ``path`` as readers do: sizes, not_gained, raw_units.

        Raises:
            FormatError: it cannot be opened.
        """
        result = Checkpoint.open(path)
        not_gained = [entry.name for entry in result if self.packs(entry) and not entry.is_packed]
        return Sizes.of(result if result.is_packed else self.checkpoint), not_gained, {}

    def _write_own(self, space: Workspace) -> int:
        """The shards that this process is to write; how many of them an earlier run had finished."""
        pending = [shard for shard in self._own_shards if not space.is_finished(shard.target)]
        self._advance(self._total - sum(shard.nbytes for shard in pending))
        changing = [entry for shard in pending for entry in shard.entries if self.changes(entry)]
        work_bytes = sum(entry.original_nbytes for entry in changing)
        on_cpus = self.device == "cpu"
        count = worker_count(self.run_options.workers, len(changing), work_bytes) if on_cpus else 1
        require_space(space.folder, self._space(pending, count))
        with Workers(count) as workers, ThreadPoolExecutor(1) as recorder:  # a shard reaches the disk beside the next
            results = workers.map(work, self._tasks(changing, space))
            recorded: Future[None] | None = None
            for shard in pending:
                self.write(shard, space.out / shard.target, self._pieces(shard, results))
                shard.check_unchanged()
                if recorded:
                    recorded.result()
                recorded = recorder.submit(space.record, shard.target)
            if recorded:
                recorded.result()
        return len(self._own_shards) - len(pending)

    def _identity(self) -> dict[str, Any]:
        """A job of the same identity may take up what another began."""
        return {
            "command": self.command,
            "format": VERSION,
            "source": str(self.checkpoint.path.resolve()),
            FILES: [[file.path.name, file.size, file.time] for file in self.checkpoint.files],
            **self.identity(),
        }

    def _space(self, shards: list[Shard], workers: int) -> int:
        entries = [entry for shard in shards for entry in shard.entries]
        spools = sorted((self.result_bytes(entry) for entry in entries if self.changes(entry)), reverse=True)
        result = sum(self.result_bytes(entry) for entry in entries) + sum(spools[: AHEAD * workers])
        return result + sum((self.checkpoint.path / path).stat().st_size for path in self.others)

    def _tasks(self, entries: Iterable[Entry], space: Workspace) -> Iterator[Task]:
        for number, entry in enumerate(entries):
            spool, pack = space.spools / f"{self._ranks.rank}-{number}", self.packs(entry)
            matrix = entry.matrix if isinstance(entry, UnitEntry) else None
            yield Task(entry.name, entry.file.path, entry.spec, entry.header, matrix, pack, spool, self.device)

    def _pieces(self, shard: Shard, results: Iterator[Piece]) -> Iterator[Piece]:
        """The shard's tensors, each gone from disk and counted as done once the next is asked for."""
        for entry in shard.entries:
            piece = next(results) if self.changes(entry) else Piece.of(entry)
            yield piece
            self._ranks.check()
            self._advance(entry.original_nbytes)

    def _advance(self, nbytes: int) -> None:
        self._done += nbytes
        self._progress(self._done, self._total)

    def _stage_others(self, space: Workspace) -> None:
        space.remove_others(shard.target for shard in self.shards)
        for relative in self.others:
            target = space.out / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.checkpoint.path / relative, target)
        config = space.out / CONFIG
        if config.exists():
            write_json(config, self.convert_config(read_json(self.checkpoint.path / CONFIG)))
        if len(self.shards) > 1 or any(is_numbered(shard.target) for shard in self.shards):
            self.stage_index(space)

    def stage_index(self, space: Workspace) -> None:
        files = [SafetensorsFile.open(space.out / shard.target) for shard in self.shards]
        total = sum(spec.nbytes for file in files for spec in file.tensors.values())
        weight_map = {name: file.path.name for file in files for name in file.tensors}
        metadata = {**self.checkpoint.index_metadata, "total_size": total}
        index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
        write_json(space.out / (self.stem() + INDEX_SUFFIX), index)


def write_json(path: Path, value: dict[str, Any]) -> None:
    """As transformers writes its JSON files, so that a round trip gives the same text back."""
    path.write_text(json.dumps(value, indent=2) + "\n")


def _is_within(path: Path, folder: Path) -> bool:
    """Wherever links lead: a link to the destination is not copied into it."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _check_readable(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_symlink() and not path.exists():
            raise InputError("the link leads nowhere", where=str(path), mend="remove it, or fetch the file")
        check_regular(path)
        path.open("rb").close()


def _weights_in(folder: Path) -> set[str]:
    """Weights, index and config of a folder, which a job that writes there removes, wherever links lead."""
    return {os.path.realpath(path) for path in folder.iterdir() if publishing_order(Path(path.name))}


def _check_places(source: Path, destination: Path, is_folder: bool) -> None:
    where = str(destination)
    inner, outer = (Path(os.path.realpath(path)) for path in (destination, source))  # resolve() fails if links go round
    overlap = inner == outer or (is_folder and (inner in outer.parents or outer in inner.parents))
    if overlap or (is_folder and destination.is_dir() and _weights_in(source) & _weights_in(destination)):
        raise InputError("source and destination overlap", where=where, mend="choose a destination elsewhere")
    if is_folder and destination.suffix in SINGLE_SUFFIXES and not destination.exists():
        mend = f"the source is a folder: give a name that does not end in {destination.suffix}"
        raise InputError("no name for a folder", where=where, mend=mend)
    if not is_folder and (destination.is_dir() or destination.suffix not in SINGLE_SUFFIXES):
        mend = f"the source is a single file: give a file name that ends in {SUFFIX}"
        raise InputError("not a safetensors file name", where=where, mend=mend)
