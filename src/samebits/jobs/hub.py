"""Checkpoints on the hub: how they are named, what is downloaded of them, and their headers alone."""

from __future__ import annotations

import glob
import re
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote

from samebits.df11.checkpoint import UNIT_TENSORS
from samebits.df11.unit import LARGE
from samebits.errors import InputError, SamebitsError
from samebits.format.folder import CONFIG, HUB_NAMES, INDEX_SUFFIX
from samebits.format.header import HEADER_BYTES, MAX_DIMENSIONS
from samebits.format.names import original_name
from samebits.format.safetensors_file import SUFFIX, SafetensorsFile, TensorSpec
from samebits.jobs.source import EXPORTS, OTHER_WEIGHTS, goes_along

CONFIGS = (CONFIG, "generation_config.json")  # what a model is made of, without weights
_NAME = re.compile(
    r"(?P<repository>\w[\w.-]*/\w[\w.-]*)"
    r"(?:@(?P<revision>refs/pr/\d+|refs/convert/[\w.-]+|[\w.+%-]+))?"  # as huggingface_hub's HfFileSystem has it
    r"(?:/(?P<folder>\w[\w.-]*(?:/\w[\w.-]*)*))?"
    r"(?<!\.safetensors)"
)
_LENGTH_BYTES = 8  # in front of a header
_MAX_HEADER_BYTES = 100_000_000  # that the safetensors library takes
_AT_ONCE = 8  # files that are asked for

Announce = Callable[[int], object]  # is called with the bytes that are going to be downloaded, if there are any


@dataclass(frozen=True)
class HubFolder:
    """A folder of a model on the hub.

    Attributes:
        name: as it was given.
        repository: OWNER/NAME.
        revision: a branch, tag or commit; None: the main branch.
        folder: within the repository; empty: all of it.
    """

    name: str
    repository: str
    revision: str | None
    folder: str

    @classmethod
    def parse(cls, text: str) -> HubFolder | None:
        """None if no model on the hub may be named so."""
        match = _NAME.fullmatch(text)
        if match is None:
            return None
        return cls(text, match["repository"], match["revision"] and unquote(match["revision"]), match["folder"] or "")

    @property
    def prefix(self) -> str:
        """What the names of its files begin with."""
        return f"{self.folder}/" if self.folder else ""

    def files(self) -> list[str]:
        """Its files' names, relative to it.

        Raises:
            OSError, or an HTTP library's error: the hub cannot be asked, or has no such model.
        """
        from huggingface_hub import HfApi

        names = HfApi().list_repo_files(self.repository, revision=self.revision)
        return [name.removeprefix(self.prefix) for name in names if name.startswith(self.prefix)]


def find_on_hub(text: str) -> HubFolder | None:
    """What a source names on the hub; None for a path: one that exists, or might in a folder that does, or that names
    nothing there."""
    found = None if Path(text).exists() else HubFolder.parse(text)
    return None if found and found.folder and Path(found.repository).is_dir() else found


def resolve_source(text: str, only: Collection[str] = (), announce: Announce = lambda _: None) -> Path:
    """A path as it is; what is on the hub (HUB_NAMES) as the folder that it was downloaded to.

    Args:
        only: names of files, if no others are needed.

    Raises:
        InputError: neither a path nor a model on the hub; one whose weights are in folders of it.
    """
    found = find_on_hub(text)
    if found is None:
        return Path(text)
    with _hub_errors(text):
        return _download(found, only, announce)


def _download(source: HubFolder, only: Collection[str], announce: Announce) -> Path:
    """The snapshot's folder, with what ``goes_along`` takes: patterns, whose * crosses / on the hub, cannot say it."""
    try:
        names = source.files()
    except (_transport_error(), OSError):  # offline, say: what was downloaded before, of which less can be asked for
        return Path(_snapshot(source, **_patterns(source, only))) / source.folder
    _check_files(source, names, CONFIG if only else f"*{SUFFIX}")
    taken = [name for name in names if (name in only if only else goes_along(PurePosixPath(name)))]
    wanted = [glob.escape(source.prefix + name) for name in taken]
    missing = [file for file in _snapshot(source, allow_patterns=wanted, dry_run=True) if file.will_download]
    if missing:
        announce(sum(file.file_size or 0 for file in missing))
    return Path(_snapshot(source, allow_patterns=wanted)) / source.folder


def _snapshot(source: HubFolder, **options: Any) -> Any:
    from huggingface_hub import snapshot_download

    return snapshot_download(source.repository, revision=source.revision, **options)


def _patterns(source: HubFolder, only: Collection[str]) -> dict[str, list[str]]:
    prefix = glob.escape(source.prefix)
    if only:
        return {"allow_patterns": [prefix + name for name in only]}
    patterns = [*OTHER_WEIGHTS, "*.bin", *(f"{folder}/*" for folder in EXPORTS)]
    ignored = [*(prefix + pattern for pattern in patterns), *(f"{prefix}*/{pattern}" for pattern in patterns)]
    return {"allow_patterns": [f"{prefix}*"], "ignore_patterns": ignored}


def _check_files(source: HubFolder, names: Sequence[str], needed: str) -> None:
    """Before anything is downloaded: a pipeline's folders are models, it is none.

    Args:
        needed: pattern of what a model has at the top of its folder.
    """
    if not names:
        what = f"no folder {source.folder} in {source.repository}" if source.folder else "no files on the hub"
        raise InputError(what, where=source.name, mend=f"look there for what it is called; sources are {HUB_NAMES}")
    places = {PurePosixPath(name).parent for name in names if name.endswith(SUFFIX)}
    folders = sorted(f"{source.name}/{place}" for place in places if place.name)
    is_pipeline = "model_index.json" in names  # which may have single files of the same models beside its folders
    if folders and (is_pipeline or not any(PurePosixPath(name).match(needed) for name in names if "/" not in name)):
        what = "a pipeline" if is_pipeline else "no model"
        mend = f"give one of these: {', '.join(folders)}"
        raise InputError(f"{what}: its safetensors files are in folders of it", where=source.name, mend=mend)


@contextmanager
def open_headers(text: str) -> Iterator[Path]:
    """A path as it is; for what is on the hub a folder with its headers, and holes in the place of weights.

    No weights are downloaded. Without a network it is what was downloaded before.

    Raises:
        InputError: as resolve_source.
    """
    found = find_on_hub(text)
    if found is None:
        yield Path(text)
        return
    with _hub_errors(text):
        try:
            names, downloaded = found.files(), None
        except (_transport_error(), OSError) as error:
            names, downloaded = [], _downloaded(found, error)
    if downloaded is not None:
        yield downloaded
        return
    _check_files(found, names, f"*{SUFFIX}")
    with tempfile.TemporaryDirectory(prefix="samebits-") as scratch:
        folder = Path(scratch, text)
        try:
            _fetch_headers(found, names, folder)
            yield folder
        except SamebitsError as error:
            where = error.where and error.where.replace(f"{scratch}/", "")
            raise type(error)(error.what, where=where, mend=error.mend) from None


def _downloaded(source: HubFolder, why: Exception) -> Path:
    """The folder of what was downloaded before; ``why``, of a hub that does not answer, is raised if nothing was."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(_snapshot(source, local_files_only=True, **_patterns(source, ()))) / source.folder
    except LocalEntryNotFoundError:
        raise why from None


def _fetch_headers(source: HubFolder, names: Sequence[str], folder: Path) -> None:
    from huggingface_hub import HfFileSystem

    hub, revision = HfFileSystem(), source.revision

    def fetch(name: str) -> None:
        remote = f"{source.repository}/{source.prefix}{name}"
        with hub.open(remote, "rb", revision=revision, cache_type="none") as file:  # which reads what is asked for
            if name.endswith(SUFFIX):
                _copy_header(file, folder / name)
            else:
                (folder / name).write_bytes(file.read())

    folder.mkdir(parents=True)
    wanted = [name for name in names if "/" not in name and (name == CONFIG or name.endswith((SUFFIX, INDEX_SUFFIX)))]
    with _hub_errors(source.name), ThreadPoolExecutor(_AT_ONCE) as pool:
        list(pool.map(fetch, wanted))


def _copy_header(remote: Any, path: Path) -> None:
    """What opening a checkpoint reads of a safetensors file, in one of the same size."""
    with path.open("w+b") as file:
        file.truncate(remote.size)
        length = remote.read(_LENGTH_BYTES)
        file.write(length)
        file.write(remote.read(min(int.from_bytes(length, "little"), _MAX_HEADER_BYTES)))
        file.flush()
        for spec in SafetensorsFile.open(path).tensors.values():
            if nbytes := _bytes_read(spec):
                remote.seek(spec.start)
                file.seek(spec.start)
                file.write(remote.read(nbytes))


def _bytes_read(spec: TensorSpec) -> int:
    """How many of a tensor's bytes opening a checkpoint reads: a packed tensor's header, and of a unit the tables."""
    if original_name(spec.name) is not None:
        return min(spec.nbytes, HEADER_BYTES + 8 * MAX_DIMENSIONS)
    leaf = spec.name.rpartition(".")[2]
    return spec.nbytes if leaf in UNIT_TENSORS and leaf not in LARGE else 0


def _transport_error() -> type[Exception]:
    """Of whichever HTTP library this huggingface_hub uses."""
    from huggingface_hub.errors import HfHubHTTPError

    return HfHubHTTPError.__mro__[1]


@contextmanager
def _hub_errors(text: str) -> Iterator[None]:
    """Inside, the hub is asked for what is no path.

    Raises:
        InputError: it does not give it.
    """
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        yield
    except (_transport_error(), ConnectionError, HFValidationError, LocalEntryNotFoundError) as error:
        reason = str(error).strip().partition("\n")[0]
        mend = f"check the path, the name on the hub ({HUB_NAMES}), the network, or log in with `hf auth login`"
        raise InputError(f"no such path, and not available on the hub ({reason})", where=text, mend=mend) from None
