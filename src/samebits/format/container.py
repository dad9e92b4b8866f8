"""Checkpoints (FORMAT.md section 7): a model folder or a single file, plain or packed, opened by headers alone."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from samebits.cached import cached_property
from samebits.digest import digest
from samebits.errors import CHANGED, DAMAGED, DigestError, FormatError, SamebitsError
from samebits.format.folder import KEY, VERSION, Folder, check_version, file_name_of, single_file
from samebits.format.header import STORED_DIGEST_END, Header
from samebits.format.names import original_name
from samebits.format.packed import PackedTensor
from samebits.format.safetensors_file import SINGLE_SUFFIXES, SafetensorsFile, TensorSpec

_FIELDS = {"version", "file", "digests", "digest"}  # of a file's samebits metadata


@dataclass(frozen=True)
class FileInfo:
    """What FORMAT.md 7.3 keeps in a file's ``__metadata__``.

    Attributes:
        digests: of every unchanged tensor's bytes, by name; None if not recorded.
        original: name of the file that was compressed, None if unknown.
        own_digest: of the above, and of all tensors' names, dtypes and shapes (``digest_with``); None if not recorded.
    """

    digests: dict[str, int] | None = None
    original: str | None = None
    own_digest: int | None = None

    @classmethod
    def parse(cls, text: str) -> FileInfo:
        """Read the JSON text of the ``samebits`` entry.

        Raises:
            FormatError, VersionError: malformed, or of a later version.
        """
        try:
            info = json.loads(text)
        except (ValueError, RecursionError):
            info = None
        if not isinstance(info, dict):
            raise FormatError("its samebits metadata is not a JSON object", mend=DAMAGED)
        check_version(info.get("version"))
        if unknown := info.keys() - _FIELDS:
            raise FormatError(f"its samebits metadata has a field {min(unknown)!r}", mend=DAMAGED)
        own = _digests(None if info.get("digest") is None else {"": info["digest"]})
        original = None if info.get("file") is None else file_name_of(info["file"], SINGLE_SUFFIXES)
        return cls(_digests(info.get("digests")), original, own[""] if own else None)

    def to_json(self) -> str:
        info: dict[str, Any] = {"version": VERSION}
        if self.original is not None:
            info["file"] = self.original
        if self.digests is not None:
            info["digests"] = {name: f"{value:016x}" for name, value in self.digests.items()}
        if self.own_digest is not None:
            info["digest"] = f"{self.own_digest:016x}"
        return json.dumps(info, separators=(",", ":"))

    def digest_with(self, stored: Mapping[str, tuple[str, Sequence[int]]]) -> int:
        """FORMAT.md 7.3's digest of the entry, in a file with tensors of these names, dtypes and shapes."""
        lines, digests = [self.original or ""], self.digests or {}
        for name, (dtype, shape) in sorted(stored.items()):
            lines += [name, f"{dtype} {','.join(map(str, shape))}"]
            lines += [f"{digests[name]:016x}"] if name in digests else []
        return digest("".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass"))

    def sealed(self, stored: Mapping[str, tuple[str, Sequence[int]]]) -> FileInfo:
        """With its own digest."""
        return replace(self, own_digest=self.digest_with(stored))


def _digests(table: object) -> dict[str, int] | None:
    if table is None:
        return None
    valid = isinstance(table, dict) and all(
        isinstance(text, str) and re.fullmatch("[0-9a-f]{16}", text) for text in table.values()
    )
    if not valid:
        raise FormatError("its table of digests is malformed", mend=DAMAGED)
    assert isinstance(table, dict)
    return {name: int(text, 16) for name, text in table.items()}


@dataclass(frozen=True)
class Entry:
    """One tensor of a checkpoint, under its original name.

    Attributes:
        dtype: its original dtype as safetensors names it ("BF16" if packed).
        shape: its original shape.
        spec: how and where it is stored.
        header: of the packed tensor, None if it is stored unchanged.
        digest: of its original bytes, None if none is recorded.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: SafetensorsFile
    spec: TensorSpec
    header: Header | None
    digest: int | None

    @property
    def is_packed(self) -> bool:
        return self.header is not None

    @property
    def where(self) -> str:
        """File and tensor, for errors."""
        return f"{self.file.path}: {self.name}"

    @property
    def words(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return self.spec.nbytes

    @property
    def original_nbytes(self) -> int:
        return 2 * self.words if self.is_packed else self.spec.nbytes

    def data(self) -> torch.Tensor:
        """The stored bytes: uint8 [nbytes], mapped from the file, read-only."""
        return self.file.data(self.spec)

    def tensor(self) -> torch.Tensor:
        """An unchanged tensor of a float dtype, mapped from the file, read-only."""
        return self.spec.typed(self.data())

    def packed(self) -> PackedTensor:
        """A packed tensor, validated, its bytes mapped from the file.

        Raises:
            FormatError: not a valid packed tensor.
        """
        try:
            return PackedTensor.from_data(self.data(), header=self.header)
        except SamebitsError as error:
            raise error.at(self.where) from None

    def check(self) -> None:
        """What decoders trust about a stored tensor, and its digest.

        Raises:
            FormatError, DigestError: the file is damaged.
        """
        found, expected = 0, self.digest or 0
        if self.header is not None:
            self.packed()
            found, expected = digest(self.data()[STORED_DIGEST_END:]), self.header.stored_digest
        elif self.digest is not None:
            found = digest(self.data())
        if found != expected:
            raise DigestError("the bytes differ from their digest", where=self.where, mend=CHANGED)

    @classmethod
    def read(cls, file: SafetensorsFile, spec: TensorSpec, info: FileInfo) -> Entry:
        """Describe one stored tensor from its header.

        Raises:
            FormatError: a packed tensor's name with something else behind it.
        """
        name = original_name(spec.name)
        if name is None:
            return cls(spec.name, spec.dtype, spec.shape, file, spec, None, (info.digests or {}).get(spec.name))
        try:
            header = _packed_header(file, spec)
        except SamebitsError as error:
            raise error.at(f"{file.path}: {name}") from None
        return cls(name, "BF16", header.shape, file, spec, header, header.original_digest)


def _packed_header(file: SafetensorsFile, spec: TensorSpec) -> Header:
    if spec.dtype != "U8" or len(spec.shape) != 1:
        mend = "its name is reserved for packed tensors (FORMAT.md 7.2): rename it"
        raise FormatError(f"stored as {spec.dtype} {list(spec.shape)}, not as one-dimensional U8", mend=mend)
    header = Header.of(file.data(spec))
    if header.nbytes != spec.nbytes:
        raise FormatError(f"{spec.nbytes} bytes where the header asks for {header.nbytes}", mend=DAMAGED)
    return header


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's tensors by original name, in the order of its files and their headers.

    Attributes:
        path: the folder or file it was opened from.
        infos: FORMAT.md 7.3's metadata by file, for files that have it.
        index_metadata: the ``metadata`` of the index, empty without one.
    """

    path: Path
    files: tuple[SafetensorsFile, ...]
    infos: dict[Path, FileInfo]
    entries: dict[str, Entry]
    index_metadata: dict[str, Any]

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Open a model folder or a safetensors file by its headers.

        Raises:
            InputError: nothing to open there.
            FormatError: damaged, incomplete or contradictory files; VersionError for later versions.
            OSError: files that cannot be read.
        """
        folder_files = Folder.scan(path) if path.is_dir() else Folder([single_file(path)], {}, {})
        files = tuple(SafetensorsFile.open(file) for file in folder_files.files)
        infos = {file.path: info for file in files if (info := _info(file)) is not None}
        folder_files.check(files)
        entries = _entries(files, infos)
        return cls(path, files, infos, entries, folder_files.index_metadata)

    @property
    def is_packed(self) -> bool:
        """True for a container of FORMAT.md section 7."""
        return bool(self.infos) or any(entry.is_packed for entry in self.entries.values())

    @cached_property
    def by_file(self) -> dict[Path, list[Entry]]:
        """The entries of each file, in its header's order."""
        result: dict[Path, list[Entry]] = {file.path: [] for file in self.files}
        for entry in self.entries.values():
            result[entry.file.path].append(entry)
        return result

    def check_unchanged(self) -> None:
        """See SafetensorsFile.check_unchanged."""
        for file in self.files:
            file.check_unchanged()

    def __iter__(self) -> Iterator[Entry]:
        return iter(self.entries.values())


def _info(file: SafetensorsFile) -> FileInfo | None:
    if KEY not in file.metadata:
        return None
    try:
        return FileInfo.parse(file.metadata[KEY])
    except SamebitsError as error:
        raise error.at(str(file.path)) from None


def _check_names(file: SafetensorsFile, info: FileInfo) -> None:
    """The table of digests lists the unchanged tensors; it and what the header says of all are what they were."""
    unchanged = {name for name in file.tensors if original_name(name) is None}
    if info.digests is not None:
        for name in sorted(unchanged ^ info.digests.keys()):
            what = "no digest is recorded for it" if name in unchanged else "a digest is recorded, but no such tensor"
            raise FormatError(what, where=f"{file.path}: {name}", mend=DAMAGED)
    stored = {name: (spec.dtype, spec.shape) for name, spec in file.tensors.items()}
    if info.own_digest is not None and info.own_digest != info.digest_with(stored):
        what = "its samebits metadata, or names, dtypes and shapes of its tensors, are not what was written"
        raise FormatError(what, where=str(file.path), mend=DAMAGED)


def _entries(files: Iterable[SafetensorsFile], infos: dict[Path, FileInfo]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    for file in files:
        info = infos.get(file.path, FileInfo())
        _check_names(file, info)
        for spec in file.tensors.values():
            entry = Entry.read(file, spec, info)
            if entry.name in entries:
                other = entries[entry.name].file.path.name
                mend = "remove the file that does not belong to the model"
                raise FormatError(f"the tensor is also in {other}", where=entry.where, mend=mend)
            entries[entry.name] = entry
    return entries
