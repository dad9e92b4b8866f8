"""Which files of a folder are its weights, and the small JSON files beside them (FORMAT.md 7.1, 7.3, 7.4)."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from samebits.errors import DAMAGED, FormatError, InputError, SamebitsError, VersionError
from samebits.format.mapping import check_regular
from samebits.format.safetensors_file import SINGLE_SUFFIXES, SUFFIX, SafetensorsFile

VERSION = 1
KEY = "samebits"  # in __metadata__, and the value of quant_method
STEM = "samebits"
INDEX_SUFFIX = ".safetensors.index.json"
CONFIG = "config.json"
HUB_NAMES = "OWNER/NAME[@REVISION][/FOLDER]"  # of models on the hub
JOB = ".samebits-job"  # in a folder that a job is writing
PUBLISHING = "publishing"  # in that one, while files move from there to their places
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
MAX_NAME = 255  # bytes, on common file systems
_FETCH = "fetch or write it again"
_UNFINISHED = "a job has not finished this folder", "run the same command again: it goes on where it was interrupted"
DIFFUSERS = "diffusion_pytorch_model"  # what diffusers calls its weights
_STEMS = (STEM, "model", DIFFUSERS)  # where weights are looked for first; others beside them are variants, as .fp16
_SHARD = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


@dataclass(frozen=True)
class Folder:
    """The weight files of a folder, and what its index promises of them (stored name -> file name)."""

    files: list[Path]
    weight_map: dict[str, str]
    index_metadata: dict[str, Any]
    index: Path | None = None

    @classmethod
    def scan(cls, folder: Path) -> Folder:
        check_published(folder)
        check_config(folder / CONFIG)
        names = {path.name for path in folder.iterdir()}
        indexes = sorted(name.removesuffix(INDEX_SUFFIX) for name in names if name.endswith(INDEX_SUFFIX))
        for stem in (*_STEMS, *(indexes if len(indexes) == 1 else ())):
            if stem + SUFFIX in names:
                return cls([folder / (stem + SUFFIX)], {}, {})
            if stem + INDEX_SUFFIX in names:
                return cls.of_index(folder / (stem + INDEX_SUFFIX))
        files = [folder / name for name in sorted(names) if name.endswith(SUFFIX)]
        if not files:
            what, mend = _why_no_weights(folder, names)
            raise InputError(what, where=str(folder), mend=mend)
        check_numbering(files)
        return cls(files, {}, {})

    @classmethod
    def of_index(cls, path: Path) -> Folder:
        index = read_json(path)
        weight_map, metadata = index.get("weight_map"), index.get("metadata") or {}
        if not isinstance(weight_map, dict) or not weight_map:
            raise FormatError("the index has no weight_map", where=str(path), mend=_FETCH)
        if not isinstance(metadata, dict):
            raise FormatError("the index's metadata is no object", where=str(path), mend=_FETCH)
        try:
            names = sorted({file_name_of(name) for name in weight_map.values()})
        except FormatError as error:
            raise error.at(str(path)) from None
        for name in names:
            if not (path.parent / name).exists():
                raise FormatError(f"the shard {name} is missing", where=str(path), mend=_FETCH)
        left_out = _numbered_like(names).difference(names).intersection(os.listdir(path.parent))
        if left_out:
            what = f"the index leaves out the shard {min(left_out)}, which is there"
            raise FormatError(what, where=str(path), mend=f"{_FETCH}, or remove that shard")
        return cls([path.parent / name for name in names], weight_map, metadata, path)

    @property
    def to_open(self) -> Path:
        """What a library is given to load: the index, or the only file.

        Raises:
            FormatError: shards without their index, or an index without what libraries ask for.
        """
        if self.index is not None and "metadata" not in read_json(self.index):
            raise FormatError("the index has no metadata", where=str(self.index), mend=_FETCH)
        if self.index is None and len(self.files) > 1:
            mend = f"fetch {STEM}{INDEX_SUFFIX} too"
            raise FormatError("shards without their index", where=str(self.files[0].parent), mend=mend)
        return self.index or self.files[0]

    def check(self, files: Iterable[SafetensorsFile]) -> None:
        """Every tensor of the index is where it says."""
        held = {file.path.name: file.tensors for file in files}
        for name, file_name in self.weight_map.items():
            if name not in held[file_name]:
                where = f"{self.index}: {name}"
                raise FormatError(f"the index puts it into {file_name}, which lacks it", where=where, mend=_FETCH)


def check_published(folder: Path) -> None:
    """Refuse a folder of which a job has published a part; that may look like a whole model, of fewer weights.

    Raises:
        InputError
    """
    if (folder / JOB / PUBLISHING).exists():
        what, mend = _UNFINISHED
        raise InputError(what, where=str(folder), mend=mend)


def _why_no_weights(folder: Path, names: Iterable[str]) -> tuple[str, str]:
    """Of a folder without safetensors files at its top level: what it is, and the mend."""
    others = sorted(name for name in names if name.endswith(_OTHER_FORMATS))
    below = sorted({path.parent.name for path in folder.glob(f"*/*{SUFFIX}") if not path.parent.name.startswith(".")})
    if JOB in names:
        return _UNFINISHED
    if below:
        return "no safetensors files in this folder, but in folders of it", f"give one of these: {', '.join(below)}"
    if others:
        mend = "load the model and save it anew (save_pretrained writes safetensors)"
        return f"no safetensors files in this folder, but weights of another format ({others[0]})", mend
    return "no safetensors files in this folder", "give a folder with *.safetensors at its top level"


def check_numbering(files: list[Path]) -> None:
    """Shards without an index must be complete."""
    names = {file.name for file in files}
    missing = _numbered_like(names) - names
    if missing:
        raise FormatError(f"the shard {min(missing)} is missing", where=str(files[0].parent), mend=_FETCH)


def _numbered_like(names: Iterable[str]) -> set[str]:
    """All shards that there have to be if these are there."""
    series = {(match["stem"], match["count"]) for match in map(_SHARD.fullmatch, names) if match}
    return {f"{stem}-{number:05}-of-{count}{SUFFIX}" for stem, count in series for number in range(1, int(count) + 1)}


def shard_name(stem: str, number: int, count: int) -> str:
    """The usual name of shard ``number`` (from 1) of ``count``; of the only file if that is 1."""
    return f"{stem}-{number:05}-of-{count:05}{SUFFIX}" if count > 1 else stem + SUFFIX


def is_numbered(name: str) -> bool:
    """Whether a file is named as a shard, be it the only one: loaders look for an index then."""
    return _SHARD.fullmatch(name) is not None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        FormatError: something else is in it.
        InputError: no regular file.
    """
    check_regular(path)
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise FormatError("not a JSON object", where=str(path), mend="fetch or write the file again")
    return value


def check_config(path: Path) -> None:
    """Refuse a config.json of a later format version (FORMAT.md 7.4)."""
    if not path.exists():
        return
    entry = read_json(path).get("quantization_config")
    if isinstance(entry, dict) and entry.get("quant_method") == KEY:
        try:
            check_version(entry.get("version"))
        except SamebitsError as error:
            raise error.at(str(path)) from None


def check_version(version: object) -> None:
    """FORMAT.md 7.4: refuse what is later than this release.

    Raises:
        FormatError: no version number.
        VersionError: not the version this release reads.
    """
    if not isinstance(version, int) or isinstance(version, bool):
        raise FormatError(f"samebits version {version!r} is no number", mend=DAMAGED)
    if version != VERSION:
        raise VersionError(
            f"samebits format version {version}", mend=f"this samebits reads version {VERSION}: upgrade it"
        )


def file_name_of(name: object, suffixes: Sequence[str] = (SUFFIX,)) -> str:
    """A file name from untrusted text: it must stay in its folder."""
    is_name = isinstance(name, str) and Path(name).name == name and Path(name).suffix in suffixes
    if not isinstance(name, str) or not is_name or not _can_be_named(name):
        raise FormatError(f"{name!r} is no name for a safetensors file", mend=DAMAGED)
    return name


def _can_be_named(name: str) -> bool:
    """Whether a file can have this name: no NUL, not too long, no lone surrogates but those that stand for bytes."""
    try:
        encoded = os.fsencode(name)
        return b"\0" not in encoded and len(encoded) <= MAX_NAME
    except UnicodeEncodeError:
        return False


def single_file(path: Path) -> Path:
    if not path.exists():
        mend = f"check the path; a model on the hub is named {HUB_NAMES}"
        raise InputError("no such file or folder", where=str(path), mend=mend)
    if path.suffix not in SINGLE_SUFFIXES:
        mend = "give a model folder or a .safetensors file"
        raise InputError("not a safetensors file", where=str(path), mend=mend)
    return path
