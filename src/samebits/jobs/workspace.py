"""The hidden folder in which a job builds its output: one job at a time, resumable, published when all is there."""

from __future__ import annotations

import errno
import json
import os
import shutil
import stat
import sys
from collections.abc import Iterable
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import IO, Any, Self

from samebits.digest import digest
from samebits.errors import FormatError, InputError, ResourceError, SamebitsError
from samebits.format.folder import CONFIG, INDEX_SUFFIX, JOB, PUBLISHING, read_json
from samebits.format.mapping import map_file
from samebits.format.safetensors_file import PARTIAL, SUFFIX
from samebits.sizes import size

if sys.platform != "win32":
    import fcntl

_SHORT = 300  # characters
_ATTEMPTS = 100
FILES = "files"  # of an identity: what the source's files are, which may have changed since a job began


class Workspace:
    """A job's folder: inside a destination folder, beside a destination file.

    ``out`` holds the finished files; a ``NAME.done`` beside it records size and digest of each finished shard, and
    ``job.json`` what the job is. A job that is interrupted leaves all of it behind, and the same job takes it up.

    Attributes:
        is_shared: whether other processes write here, too, who do not know yet of an error of this one: nothing is
            removed then.

    Args:
        destination: folder or file that is to appear.
        identity: of the job, as JSON: sources and options. What a job left behind whose source has changed since is
            thrown away.
        overwrite: replace weights that the destination holds, and what another job left behind.

    Raises (on entering):
        ResourceError: another job holds the destination, or this is Windows.
        InputError: the destination is in use, or another job left finished shards, and ``overwrite`` is not set; it is
            a link that leads nowhere, or in a folder that is one.
    """

    def __init__(self, destination: Path, is_folder: bool, identity: dict[str, Any], overwrite: bool) -> None:
        self.destination, self.is_folder, self.overwrite = destination, is_folder, overwrite
        self.identity: dict[str, Any] = json.loads(json.dumps(identity))
        self.folder = destination / JOB if is_folder else destination.with_name(f".{destination.name}{JOB}")
        self.out = self.folder / "out"
        self.spools = self.folder / "spools"
        self._publishing = self.folder / PUBLISHING
        self._lock: IO[str] | None = None
        self._made_destination = self._is_fresh = self._has_no_place = self.is_shared = False

    def __enter__(self) -> Self:
        for path in (self.destination, *self.destination.parents):
            if path.is_symlink() and not path.exists():
                raise InputError("the link leads nowhere", where=str(path), mend="remove it")
        if self.is_folder and self.destination.exists() and not self.destination.is_dir():
            raise InputError("a file is in the way", where=str(self.destination), mend="give a folder")
        self._made_destination = self.is_folder and not self.destination.exists()
        try:
            self._take_lock()
            self._check_destination()
            self._prepare()
        except (SamebitsError, OSError):
            if self._is_fresh:
                self._discard()
            self._release()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, SamebitsError | OSError):
            can_be_mended = isinstance(error, ResourceError | OSError) or self._has_no_place
            others_write = self.is_shared and not isinstance(error, ResourceError)  # which is what they have told
            if not others_write and not (can_be_mended and self._has_finished()):
                self._discard()  # running it again would end the same way, or begin anew
        self._release()

    def _take_lock(self) -> None:
        if sys.platform == "win32":
            what = "files are not written on Windows, where one that is open can be neither replaced nor removed"
            raise ResourceError(what, where=str(self.destination), mend="use the Windows Subsystem for Linux")
        for attempt in count(1):
            try:
                if self._has_lock():
                    return
            except (FileNotFoundError, FileExistsError):  # another job is removing the folder just now
                if attempt == _ATTEMPTS:
                    raise

    def _has_lock(self) -> bool:
        """Whether the lock file is there and ours; the job that had it may just have removed it."""
        path = self.folder / "lock"
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = path.open("a+")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._held_by(lock) from None
        except OSError as error:  # of a file system that has none
            lock.close()
            path.unlink()
            with suppress(OSError):  # they are not empty
                self.folder.rmdir()
                if self._made_destination:
                    self.destination.rmdir()
            what = f"files cannot be locked here ({error.strerror})"
            mend = "choose a destination on another file system"
            raise ResourceError(what, where=str(self.destination), mend=mend) from error
        if not path.exists() or not os.path.samestat(path.stat(), os.fstat(lock.fileno())):
            lock.close()
            return False
        self._lock, self._is_fresh = lock, all(each == path for each in self.folder.iterdir())
        lock.truncate(0)
        os.write(lock.fileno(), str(os.getpid()).encode())  # a buffer would be written again when the file is closed
        return True

    def _held_by(self, lock: IO[str]) -> ResourceError:
        lock.seek(0)
        owner = lock.read()
        lock.close()
        mend = "wait until it is done, or end it"
        process = f" (process {owner})" if owner else ""  # one that has just begun has not said it yet
        return ResourceError(f"another job{process} is writing here", where=str(self.destination), mend=mend)

    def _release(self) -> None:
        if self._lock:
            self._lock.close()
            self._lock = None

    def _check_destination(self) -> None:
        if self.overwrite or (self._publishing.exists() and self._is_same_job()):
            return
        if self.is_folder and any(path.name != JOB for path in self.destination.iterdir()):
            raise InputError("the folder is not empty", where=str(self.destination), mend="empty it or add --overwrite")
        if not self.is_folder and self.destination.exists():
            raise InputError("the file exists", where=str(self.destination), mend="remove it or add --overwrite")

    def _is_same_job(self) -> bool:
        return self._begun() == self.identity

    def _begun(self) -> dict[str, Any]:
        """What an earlier job was; nothing, if there was none that can be gone on with."""
        return _left_behind(self.folder / "job.json")

    def _has_finished(self) -> bool:
        """Whether a shard is there."""
        return any(self.folder.glob("*.done"))

    def _check_begun(self) -> None:
        """Refuse to throw away hours of another job's work."""
        begun = self._begun()
        changed = {key for key in {**begun, **self.identity} if begun.get(key) != self.identity.get(key)}
        others = sorted(changed - {FILES})
        if self.overwrite or not begun or not others or not self._has_finished():
            return
        how = ", ".join(f"{key} {_short(json.dumps(begun.get(key)))}" for key in others)
        mend = "give that command again to finish it, or add --overwrite to begin anew"
        raise InputError(f"another job has begun here, with {how}", where=str(self.destination), mend=mend)

    def _prepare(self) -> None:
        if not self._is_same_job():
            self._check_begun()
            self._empty()
            (self.folder / "job.json").write_text(json.dumps(self.identity))
            _to_disk(self.folder / "job.json", self.folder)
        if self.spools.exists():
            shutil.rmtree(self.spools)
        self.spools.mkdir()
        self.out.mkdir(exist_ok=True)
        for path in self.out.rglob(f"*{SUFFIX}{PARTIAL}"):  # begun anew, and its space is needed
            path.unlink()
        if self._publishing.exists():
            self._take_back()

    def _take_back(self) -> None:
        """Into ``out`` again what an interrupted run has published, so that it is looked at as a whole."""
        for name in (path.stem for path in self.folder.glob("*.done")):
            if not (self.out / name).exists() and self._place(Path(name)).exists():
                self._place(Path(name)).replace(self.out / name)

    def _empty(self) -> None:
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()

    def _remove(self) -> None:
        """The folder, but for what another job may have put there since the lock is gone."""
        self._empty()
        (self.folder / "lock").unlink()
        with suppress(OSError):
            self.folder.rmdir()

    def _discard(self) -> None:
        self._remove()
        if self._made_destination:
            with suppress(OSError):  # it is not empty
                self.destination.rmdir()

    @property
    def staged(self) -> Path:
        """What the destination is going to be: ``out``, or the file in it."""
        return self.out if self.is_folder else self.out / self.destination.name

    def _place(self, relative: Path) -> Path:
        return self.destination / relative if self.is_folder else self.destination

    def record(self, name: str) -> None:
        """Note that the shard ``name`` is complete in ``out``, and on the disk."""
        _to_disk(self.out / name)
        path = self.folder / f"{name}.done"
        partial = path.with_suffix(PARTIAL)
        partial.write_text(json.dumps(_fingerprint(self.out / name)))
        partial.replace(path)

    def is_finished(self, name: str) -> bool:
        """Whether an earlier run completed the shard ``name``, and it is still what it was."""
        path, file = self.folder / f"{name}.done", self.out / name
        return path.exists() and file.exists() and _fingerprint(file) == _left_behind(path)

    def remove_others(self, shards: Iterable[str]) -> None:
        """All that is in ``out`` but these: an earlier run's files, which the source may not have any more."""
        for path in {*self.out.iterdir()} - {self.out / name for name in shards}:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    def check_places(self, files: Iterable[Path]) -> None:
        """Refuse to publish ``files``, relative to ``out``, where that would fail half way.

        Raises:
            InputError: a folder stands where a file goes or weights are looked for, or a file where a folder goes; a
                folder cannot be written to, or is on another file system. What is finished stays for the next run.
        """
        if not self.is_folder:
            return
        self._has_no_place = True
        files = list(files)
        weights = [path for path in self.destination.iterdir() if publishing_order(Path(path.name))]
        for place in (*weights, *map(self._place, files)):
            if place.is_dir() and not place.is_symlink():
                raise InputError("a folder is in the way", where=str(place), mend="remove it")
            if place.parent.is_dir():
                self._check_replaceable(place)
        for folder in {self._place(parent) for file in files for parent in file.parents}:
            if os.path.lexists(folder) and not folder.is_dir():
                raise InputError("a file is in the way", where=str(folder), mend="remove it")
            if folder.is_dir():
                self._check_writable(folder)
        self._has_no_place = False

    def _check_writable(self, folder: Path) -> None:
        """That files can be moved from ``out`` to there."""
        if not os.access(folder, os.W_OK | os.X_OK):
            raise InputError("this folder cannot be written to", where=str(folder), mend="change its permissions")
        if folder.stat().st_dev != self.out.stat().st_dev:
            mend = "remove what is mounted or linked there, and link it to the finished model's place again"
            raise InputError("this folder is on another file system", where=str(folder), mend=mend)

    def _check_replaceable(self, place: Path) -> None:
        """That a file may go, as others' may not in a folder like /tmp."""
        folder, user = place.parent.stat(), os.geteuid()
        if not folder.st_mode & stat.S_ISVTX or not os.path.lexists(place) or user in (0, folder.st_uid):
            return
        if place.lstat().st_uid != user:
            raise InputError("another user's file is in the way", where=str(place), mend="choose another destination")

    def publish(self) -> None:
        """Move everything from ``out`` into its place, what makes it loadable last, and remove the workspace.

        Raises:
            InputError: as check_places; nothing has changed then.
        """
        staged = sorted(
            (path.relative_to(self.out) for path in self.out.rglob("*") if path.is_file()), key=publishing_order
        )
        self.check_places(staged)
        _to_disk(*(self.out / path for path in staged))
        self._publishing.touch()
        _to_disk(self.folder)
        self._remove_old_weights()
        places = [self._place(relative) for relative in staged]
        for relative, place in zip(staged, places, strict=True):
            place.parent.mkdir(parents=True, exist_ok=True)
            (self.out / relative).replace(place)
        _to_disk(*{place.parent for place in places})
        self._publishing.unlink()  # before what says which job it was: nobody could go on with it
        self._remove()

    def _remove_old_weights(self) -> None:
        """Remove weights, index and config of another model."""
        if not self.is_folder:
            return
        for path in sorted(
            self.destination.iterdir(), key=lambda path: publishing_order(Path(path.name)), reverse=True
        ):
            if publishing_order(Path(path.name)):
                path.unlink()


def _to_disk(*paths: Path) -> None:
    """Wait until what files, or folders' lists, have been given is on the disk, so that it is there if power fails.

    Not all file systems have a way to say so of folders.
    """
    for path in paths:
        try:
            opened = os.open(path, os.O_RDONLY)
            try:
                os.fsync(opened)
            finally:
                os.close(opened)
        except OSError as error:
            if path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
                continue
            error.filename = error.filename or str(path)
            raise


def _left_behind(path: Path) -> dict[str, Any]:
    """What an earlier run wrote; nothing, if it did not, or if power failed before that was on the disk."""
    try:
        return read_json(path)
    except (FormatError, FileNotFoundError):
        return {}


def _short(text: str) -> str:
    return text if len(text) <= _SHORT else f"{text[:_SHORT]}..."


def _fingerprint(path: Path) -> dict[str, int]:
    size = path.stat().st_size
    return {"size": size, "digest": digest(map_file(path, 0, size))}


def publishing_order(relative: Path) -> int:
    """The order in which files appear: a loader finds nothing until the last of them is there.

    Not 0: those of one model, which stay beside no other's.
    """
    if len(relative.parts) > 1:
        return 0
    if relative.name == CONFIG:
        return 3
    return 2 if relative.name.endswith(INDEX_SUFFIX) else int(relative.suffix == SUFFIX)


def require_space(folder: Path, nbytes: int) -> None:
    """
    Raises:
        ResourceError: fewer than ``nbytes`` bytes are free where ``folder`` is.
    """
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        mend = f"free {size(nbytes - free)} or choose another destination"
        raise ResourceError(f"needs {size(nbytes)}, {size(free)} are free", where=str(folder), mend=mend)


def out_of_space(error: OSError, folder: Path) -> ResourceError | None:
    """The disk is full, or takes no file this large, as one of our errors; None if ``error`` is another one."""
    if error.errno == errno.EFBIG:
        mend = "raise the limit that `ulimit -f` shows, or choose another destination"
        return ResourceError("a file would be larger than it may be", where=str(folder), mend=mend)
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return None
    mend = "free some and run the same command again: it goes on with the first file that was not finished"
    return ResourceError("no space left", where=str(folder), mend=mend)
