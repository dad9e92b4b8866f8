"""Jobs that are interrupted, run twice, or run out of space."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from samebits.df11.checkpoint import open_checkpoint
from samebits.errors import FormatError, InputError, ResourceError, SamebitsError
from samebits.format import mapping
from samebits.format.container import Checkpoint
from samebits.format.folder import JOB
from samebits.format.mapping import create_mapped
from samebits.format.safetensors_file import SafetensorsWriter
from samebits.jobs import job, pieces, workspace
from samebits.jobs.compress import Compression
from samebits.jobs.options import CompressOptions, RunOptions
from samebits.jobs.workers import Workers
from samebits.jobs.workspace import Workspace
from samebits.verify import verify_against
from tests.jobs.checkpoints import files_of, stored, weights, write_file, write_folder
from tests.jobs.in_workers import blocked, die, double, threads_of
from tests.jobs.test_jobs import compress, decompress, in_planes

KILLED_AFTER_ONE_SHARD = """
import os, signal, sys
from pathlib import Path
from samebits.format.container import Checkpoint
from samebits.jobs.compress import Compression
from samebits.format.folder import JOB
from samebits.jobs.workspace import Workspace

record = Workspace.record
def record_and_die(self, name):
    record(self, name)
    os.kill(os.getpid(), signal.SIGKILL)
Workspace.record = record_and_die
Compression(Checkpoint.open(Path(sys.argv[1])), Path(sys.argv[2])).run()
"""


def kill_after_one_shard(source: Path, destination: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_AFTER_ONE_SHARD, source, destination], timeout=100)
    assert done.returncode == -signal.SIGKILL


def count_encodes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all tensors encoded from now on."""
    names: list[str] = []
    encode = pieces._encode

    def counted(task: pieces.Task) -> pieces.Piece:
        names.append(task.name)
        return encode(task)

    monkeypatch.setattr(pieces, "_encode", counted)
    return names


def test_a_killed_job_is_not_loadable_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    kill_after_one_shard(source, destination)
    assert [path.name for path in destination.iterdir()] == [JOB]
    with pytest.raises(InputError, match="a job has not finished this folder"):
        Checkpoint.open(destination)
    encoded = count_encodes(monkeypatch)
    report = compress(source, destination)
    assert (report.resumed_shards, report.shards) == (1, 3)
    assert "model.embed_tokens.weight" not in encoded
    assert "lm_head.weight" in encoded
    compress(source, tmp_path / "at once")
    assert files_of(destination) == files_of(tmp_path / "at once")


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def compress_with(target: object, name: str, function: object, source: Path, destination: Path, **run: Any) -> None:
    """Compress while ``target.name`` is ``function``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, name, function)
        compress(source, destination, **run)


def interrupted(source: Path, destination: Path, **run: Any) -> Path:
    """Compress until all is there but nothing published, as Ctrl-C would leave it; the workspace's folder."""
    with pytest.raises(KeyboardInterrupt):
        compress_with(Workspace, "publish", interrupt, source, destination, **run)
    return destination / JOB


def test_a_finished_shard_that_was_damaged_is_made_again(tmp_path: Path) -> None:
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    folder = interrupted(source, destination)
    shard = folder / "out" / "samebits-00002-of-00003.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert compress(source, destination).resumed_shards == 2
    assert verify_against(Checkpoint.open(destination), Checkpoint.open(source)).identical


@pytest.mark.parametrize("content", ["", "[", "3"])
def test_a_finished_shard_of_which_nothing_is_known_is_made_again(tmp_path: Path, content: str) -> None:
    """As where power failed before the note of it was on the disk."""
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    (interrupted(source, destination) / "samebits-00002-of-00003.safetensors.done").write_text(content)
    assert compress(source, destination).resumed_shards == 2
    assert verify_against(Checkpoint.open(destination), Checkpoint.open(source)).identical


def test_another_source_starts_from_the_beginning(tmp_path: Path) -> None:
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    interrupted(source, destination)
    write_file(source / "model-00003-of-00003.safetensors", {"lm_head.weight": weights(500, 128, seed=9),
                                                            "model.norm.weight": weights(128)})  # fmt: skip
    assert compress(source, destination).resumed_shards == 0
    assert verify_against(Checkpoint.open(destination), Checkpoint.open(source)).identical


def test_other_options_throw_nothing_away_unasked(tmp_path: Path) -> None:
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    interrupted(source, destination)
    other = CompressOptions(min_weights=1)
    message = (
        r"packed: another job has begun here, with min_weights \d+; give that command again to finish it, or add --ov"
    )
    for _ in range(2):
        with pytest.raises(InputError, match=message):
            compress(source, destination, other)
    with pytest.raises(InputError, match=rf"another job has begun here, with source .*{source.name}"):
        compress(write_folder(tmp_path / "another"), destination)
    assert compress(source, destination).resumed_shards == 3
    interrupted(source, tmp_path / "again")
    assert compress(source, tmp_path / "again", other, overwrite=True).resumed_shards == 0
    assert verify_against(Checkpoint.open(tmp_path / "again"), Checkpoint.open(source)).identical


def test_without_a_finished_shard_nothing_is_lost(tmp_path: Path) -> None:
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    with pytest.raises(KeyboardInterrupt):
        compress_with(Workspace, "record", interrupt, source, destination)
    assert compress(source, destination, CompressOptions(min_weights=1)).resumed_shards == 0


def test_a_workspace_with_a_damaged_description_starts_from_the_beginning(tmp_path: Path) -> None:
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    (interrupted(source, destination) / "job.json").write_text("{")
    assert compress(source, destination).resumed_shards == 0


@pytest.mark.parametrize("moves", range(7))
def test_interrupted_while_publishing(tmp_path: Path, moves: int) -> None:
    """After any number of moves the folder is no model, also where its files are those of one; and the job goes on."""
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    replace, left = Path.replace, [moves]

    def replace_some(path: Path, target: Path) -> Path:
        if "out" in path.parent.parts[-2:] and not path.name.endswith(".partial"):
            if not left[0]:
                raise KeyboardInterrupt
            left[0] -= 1
        return replace(path, target)

    with pytest.raises(KeyboardInterrupt):
        compress_with(Path, "replace", replace_some, source, destination)
    assert not (destination / "config.json").exists()
    for reader in (Checkpoint.open, open_checkpoint):
        with pytest.raises(InputError, match=f"{destination}: a job has not finished this folder; run the same"):
            reader(destination)
    assert compress(source, destination).resumed_shards == 3
    compress(source, tmp_path / "at once")
    assert files_of(destination) == files_of(tmp_path / "at once")


def test_interrupted_while_publishing_what_has_another_source_now(tmp_path: Path) -> None:
    """What it has published is some files in the folder, which only --overwrite replaces."""
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    with pytest.raises(KeyboardInterrupt):
        compress_with(Workspace, "_remove", interrupt, source, destination)
    write_file(source / "model-00002-of-00003.safetensors", {"model.layers.0.experts": weights(3, 64, 64)})
    (source / "model.safetensors.index.json").unlink()
    before = files_of(destination)
    with pytest.raises(InputError, match="packed: the folder is not empty; empty it or add --overwrite"):
        compress(source, destination)
    assert files_of(destination) == before
    compress(source, destination, overwrite=True)
    assert verify_against(Checkpoint.open(destination), Checkpoint.open(source)).identical


def test_interrupted_while_old_weights_are_removed(tmp_path: Path) -> None:
    """What makes them loadable goes first."""
    source, destination = write_folder(tmp_path / "source"), write_folder(tmp_path / "packed")

    def left() -> set[str]:
        return {path.name for path in destination.iterdir() if path.is_file()}

    before, unlink = left(), Path.unlink

    def unlink_one(path: Path, missing_ok: bool = False) -> None:
        if path.parent == destination and left() != before:
            raise KeyboardInterrupt
        unlink(path, missing_ok)

    with pytest.raises(KeyboardInterrupt):
        compress_with(Path, "unlink", unlink_one, source, destination, overwrite=True)
    assert before - left() == {"config.json"}
    assert compress(source, destination, overwrite=True).resumed_shards == 3


def test_interrupted_before_old_weights_of_the_same_names_are_removed(tmp_path: Path) -> None:
    """What is done already is not replaced by these."""
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    compress(source, destination, CompressOptions(min_weights=1))
    with pytest.raises(KeyboardInterrupt):
        compress_with(Workspace, "_remove_old_weights", interrupt, source, destination, overwrite=True)
    assert compress(source, destination, overwrite=True).resumed_shards == 3


def test_interrupted_while_overwriting(tmp_path: Path) -> None:
    source, destination = write_folder(tmp_path / "source"), write_folder(tmp_path / "packed")
    interrupted(source, destination, overwrite=True)
    assert stored(destination) == stored(source)  # the old weights are untouched until the new ones are complete
    compress(source, destination, overwrite=True)
    assert verify_against(Checkpoint.open(destination), Checkpoint.open(source)).identical
    assert not (destination / JOB).exists()


def test_what_cannot_be_opened_is_not_published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a folder of one file, whose name without packing says that there is a second one, if no index tells."""
    monkeypatch.setattr(job, "is_numbered", lambda _: False)
    shard = write_file(tmp_path / "model-00001-of-00002.safetensors")
    compress(shard, tmp_path / "packed" / "samebits.safetensors")
    destination = write_folder(tmp_path / "back")
    before = files_of(destination)
    with pytest.raises(FormatError, match=r"the shard model-00002-of-00002.safetensors is missing"):
        decompress(tmp_path / "packed", destination, overwrite=True)
    assert files_of(destination) == before
    assert not (destination / JOB).exists()


@pytest.mark.parametrize("name", ["tokenizer.json", "samebits.safetensors", "config.json", "older.safetensors"])
def test_a_folder_in_the_way(tmp_path: Path, name: str) -> None:
    source, destination = write_folder(tmp_path / "source"), write_folder(tmp_path / "packed")
    (destination / name).unlink(missing_ok=True)
    (destination / name / "mine").mkdir(parents=True)
    before = files_of(destination)
    with pytest.raises(InputError, match=f"packed/{name}: a folder is in the way; remove it"):
        compress(source, destination, overwrite=True)
    assert files_of(destination) == before


def test_a_folder_that_comes_in_the_way_meanwhile(tmp_path: Path) -> None:
    """Nothing of the old model is gone then."""
    source, destination = write_folder(tmp_path / "source"), write_folder(tmp_path / "packed")
    before, publish = stored(destination), Workspace.publish

    def publish_late(space: Workspace) -> None:
        (destination / "samebits.safetensors.index.json").mkdir()
        publish(space)

    with pytest.raises(InputError, match="a folder is in the way"):
        compress_with(Workspace, "publish", publish_late, source, destination, overwrite=True)
    (destination / "samebits.safetensors.index.json").rmdir()
    assert stored(destination) == before
    report = compress(source, destination, overwrite=True)
    assert (report.resumed_shards, report.shards) == (3, 3)  # what is finished stays, since this can be mended


@pytest.mark.parametrize("name", [".", "extra"])
@pytest.mark.parametrize("fault", ["read-only", "elsewhere", "sticky"])
def test_a_folder_that_files_cannot_be_moved_to(
    tmp_path: Path, fault: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the old model is gone then, and it goes on once that is mended."""
    source, destination = write_folder(tmp_path / "source"), write_folder(tmp_path / "packed")
    folder, access, stat_of = destination / name, os.access, Path.stat
    before = files_of(destination)
    with monkeypatch.context() as patch:
        if fault == "read-only":
            patch.setattr(os, "access", lambda path, mode: Path(path) != folder and access(path, mode))
        else:

            def stat(self: Path, **options: Any) -> Any:
                found = stat_of(self, **options)
                if self != folder:
                    return found
                changed = {"st_dev": -1} if fault == "elsewhere" else {"st_mode": found.st_mode | 0o1000, "st_uid": 12}
                return SimpleNamespace(
                    **{each: getattr(found, each) for each in dir(found) if each[:3] == "st_"} | changed
                )

            patch.setattr(Path, "stat", stat)
            patch.setattr(os, "geteuid", lambda: 34)
        with pytest.raises(InputError, match=r"cannot be written to|on another file system|another user.s file"):
            compress(source, destination, overwrite=True)
        assert files_of(destination) == before
    compress(source, destination, overwrite=True)
    assert verify_against(Checkpoint.open(destination), Checkpoint.open(source)).identical


@pytest.mark.parametrize(("user", "is_empty"), [(34, True), (12, False)], ids=["another's", "one's own"])
def test_a_folder_in_which_only_owners_replace_files(
    tmp_path: Path, user: int, is_empty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not there yet is in nobody's way, and the folder's owner may replace all."""
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    destination.mkdir() if is_empty else write_folder(destination)
    stat_of = Path.stat

    def stat(self: Path, **options: Any) -> Any:
        found = stat_of(self, **options)
        if self != destination:
            return found
        return SimpleNamespace(st_mode=found.st_mode | 0o1000, st_uid=12, st_dev=found.st_dev)

    monkeypatch.setattr(Path, "stat", stat)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    compress(source, destination, overwrite=True)
    assert verify_against(Checkpoint.open(destination), Checkpoint.open(source)).identical


def test_files_that_the_source_has_no_more(tmp_path: Path) -> None:
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    interrupted(source, destination)
    (source / "tokenizer.json").unlink()
    (source / "extra" / "notes.txt").rename(source / "extra" / "others.txt")
    report = compress(source, destination)
    assert report.resumed_shards == 3
    found = {path for path in files_of(destination) if "safetensors" not in path}
    assert found == {"config.json", "extra/others.txt"}


def test_a_shard_called_as_what_jobs_make(tmp_path: Path) -> None:
    source, destination = write_file(tmp_path / "x.safetensors"), tmp_path / "spools.safetensors"
    interrupted(source, destination)
    assert compress(source, destination).resumed_shards == 1


@pytest.mark.parametrize("name", ["tokenizer.json", "samebits.safetensors", "config.json", "older.safetensors"])
def test_a_link_to_a_folder_in_the_way(tmp_path: Path, name: str) -> None:
    """Only the link goes."""
    source, destination = write_folder(tmp_path / "source"), write_folder(tmp_path / "packed")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    (destination / name).unlink(missing_ok=True)
    (destination / name).symlink_to(tmp_path / "mine")
    compress(source, destination, overwrite=True)
    assert not (destination / name).is_dir()
    assert verify_against(Checkpoint.open(destination), Checkpoint.open(source)).identical
    assert files_of(tmp_path / "mine") == {"notes.txt": b"mine"}


def test_a_file_in_the_way_of_a_folder(tmp_path: Path) -> None:
    source, destination = write_folder(tmp_path / "source"), write_folder(tmp_path / "packed")
    (destination / "extra" / "notes.txt").unlink()
    (destination / "extra").rmdir()
    (destination / "extra").write_text("mine")
    before = files_of(destination)
    with pytest.raises(InputError, match="packed/extra: a file is in the way; remove it"):
        compress(source, destination, overwrite=True)
    assert files_of(destination) == before


def test_two_jobs_on_one_destination(tmp_path: Path) -> None:
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    message = rf"another job \(process {os.getpid()}\) is writing here"
    with Workspace(destination, True, {"job": 1}, overwrite=False), pytest.raises(ResourceError, match=message):
        compress(source, destination)
    compress(source, destination)
    assert verify_against(Checkpoint.open(destination), Checkpoint.open(source)).identical


def test_another_job_that_has_just_begun(tmp_path: Path) -> None:
    """It holds the lock, but has not said yet which process it is."""
    with Workspace(tmp_path / "packed", True, {"job": 1}, overwrite=False):
        os.truncate(tmp_path / "packed" / JOB / "lock", 0)
        with pytest.raises(ResourceError, match=r"packed: another job is writing here; wait until it is done"):
            compress(write_folder(tmp_path / "source"), tmp_path / "packed")


def test_a_lock_that_a_killed_job_left_behind(tmp_path: Path) -> None:
    """Whoever waits is told which process is at work now, and nothing of the one that was."""
    lock = tmp_path / "packed" / JOB / "lock"
    lock.parent.mkdir(parents=True)
    lock.write_text("123456789")
    message = rf"another job \(process {os.getpid()}\) is writing here"
    with Workspace(tmp_path / "packed", True, {"job": 1}, overwrite=False), pytest.raises(ResourceError, match=message):
        compress(write_folder(tmp_path / "source"), tmp_path / "packed")


@pytest.mark.parametrize("is_followed", [False, True])
def test_a_lock_that_its_owner_removes_before_it_is_taken(
    tmp_path: Path, is_followed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock of a file that is in no folder any more would keep nobody out."""
    flock, folder, taken = fcntl.flock, tmp_path / "packed" / JOB, 0

    def removed_before(*arguments: Any) -> None:
        nonlocal taken
        taken += 1
        if taken == 1:
            shutil.rmtree(folder)
            if is_followed:  # by the next job
                folder.mkdir()
                (folder / "lock").touch()
        flock(*arguments)

    monkeypatch.setattr(fcntl, "flock", removed_before)
    with (
        Workspace(tmp_path / "packed", True, {"job": 1}, overwrite=False),
        pytest.raises(ResourceError, match="another job"),
        Workspace(tmp_path / "packed", True, {"job": 1}, overwrite=False),
    ):
        pass
    assert taken == 3


@pytest.mark.parametrize("exists", [False, True])
def test_a_file_system_without_locks(tmp_path: Path, exists: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    if exists:
        destination.mkdir()
    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with pytest.raises(ResourceError, match=rf"{destination}: files cannot be locked here \(No locks available\)"):
        compress(source, destination)
    assert destination.exists() == exists
    assert not exists or not list(destination.iterdir())


def test_all_is_on_the_disk_before_it_is_where_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files before old weights are removed, and their folder before the workspace is."""
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    happened: list[str] = []
    to_disk, removes, ends = workspace._to_disk, Workspace._remove_old_weights, Workspace._remove

    def remember(*paths: Path) -> None:
        happened.extend(path.name for path in paths)
        to_disk(*paths)

    monkeypatch.setattr(workspace, "_to_disk", remember)
    monkeypatch.setattr(Workspace, "_remove_old_weights", lambda space: (happened.append("old"), removes(space)))
    monkeypatch.setattr(Workspace, "_remove", lambda space: (happened.append("ends"), ends(space)))
    compress(source, destination)
    before, behind = happened[: happened.index("old")], happened[happened.index("old") :]
    assert {*before} >= {path.name for path in destination.rglob("*") if path.is_file()}
    assert (behind[0], {*behind[1:-1]}, behind[-1]) == ("old", {destination.name, "extra"}, "ends")


def test_a_file_system_that_waits_for_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def of_files(opened: int) -> None:
        if stat.S_ISDIR(os.fstat(opened).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(opened)

    monkeypatch.setattr(os, "fsync", of_files)
    compress(write_folder(tmp_path / "source"), tmp_path / "packed")
    assert Checkpoint.open(tmp_path / "packed").is_packed


def test_killed_while_the_workspace_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever goes first, all is there then, and a model."""
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    compress(source, tmp_path / "whole")
    monkeypatch.setattr(Workspace, "_remove", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        compress(source, destination)
    assert Checkpoint.open(destination).entries.keys() == Checkpoint.open(tmp_path / "whole").entries.keys()
    monkeypatch.undo()
    compress(source, destination, overwrite=True)
    assert files_of(destination) == files_of(tmp_path / "whole")


def test_an_error_without_a_place_is_the_destinations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SafetensorsWriter, "append", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error") as caught:
        compress(write_folder(tmp_path / "source"), tmp_path / "packed")
    assert caught.value.filename == str(tmp_path / "packed")


def test_a_long_name_is_not_given_back(tmp_path: Path) -> None:
    """What is being written has a longer one."""
    source = tmp_path / "source"
    for length, name in ((247, "m" * 235 + ".safetensors"), (248, "model.safetensors")):
        write_folder(source)
        for file in source.glob("model*"):
            file.unlink()
        write_file(source / ("m" * (length - 12) + ".safetensors"))
        compress(source, tmp_path / "packed")
        decompress(tmp_path / "packed", tmp_path / "plain")
        assert [path.name for path in (tmp_path / "plain").glob("*.safetensors")] == [name]
        for folder in (source, tmp_path / "packed", tmp_path / "plain"):
            shutil.rmtree(folder)


def test_a_shard_is_on_the_disk_before_it_counts_as_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[int, bool]] = []
    with Workspace(tmp_path / "packed", True, {"job": 1}, overwrite=False) as space:
        shard = write_file(space.out / "a.safetensors")
        monkeypatch.setattr(
            os, "fsync", lambda file: synced.append((os.fstat(file).st_ino, space.is_finished("a.safetensors")))
        )
        space.record("a.safetensors")
        assert synced == [(shard.stat().st_ino, False)]
        assert space.is_finished("a.safetensors")


def test_a_folder_that_its_owner_removes_before_it_is_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_lock, fails = Workspace._has_lock, [FileNotFoundError(), FileExistsError(), False]

    def later(space: Workspace) -> bool:
        if not fails:
            return has_lock(space)
        if isinstance(fail := fails.pop(), OSError):
            raise fail
        return fail

    monkeypatch.setattr(Workspace, "_has_lock", later)
    compress(write_folder(tmp_path / "source"), tmp_path / "packed")
    assert Checkpoint.open(tmp_path / "packed").is_packed
    monkeypatch.setattr(Workspace, "_has_lock", Mock(side_effect=FileExistsError("something in the way")))
    with pytest.raises(FileExistsError, match="in the way"):
        compress(tmp_path / "source", tmp_path / "another")


@pytest.mark.parametrize("ends", [True, False])
def test_the_next_job_begins_while_a_folder_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    """Its lock is left alone, and what was done is done."""
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    rmdir = Path.rmdir

    def late(folder: Path) -> None:
        if folder.name == JOB:
            (folder / "lock").write_text("the next one's")
        rmdir(folder)

    monkeypatch.setattr(Path, "rmdir", late)
    if ends:
        compress(source, destination)
        assert verify_against(Checkpoint.open(destination), Checkpoint.open(source)).identical
    else:
        with pytest.raises(FormatError, match="torn"):
            compress_with(Workspace, "publish", Mock(side_effect=FormatError("torn")), source, destination)
    assert (destination / JOB / "lock").read_text() == "the next one's"


def test_a_job_that_was_refused_holds_nothing(tmp_path: Path) -> None:
    """As long as its error is there, too."""
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    interrupted(source, destination)
    with pytest.raises(InputError, match="another job has begun here") as refused:
        compress(source, destination, CompressOptions(min_weights=1))
    assert compress(source, destination).resumed_shards == 3
    assert refused.value.__traceback__


def test_two_jobs_on_one_file(tmp_path: Path) -> None:
    source = write_file(tmp_path / "a.safetensors")
    target = tmp_path / "b.safetensors"
    with Workspace(target, False, {"job": 1}, overwrite=False), pytest.raises(ResourceError, match="another job"):
        compress(source, target)
    assert not target.exists()


def fill_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def exhaust_quota(*_: object) -> None:
    raise OSError(errno.EDQUOT, "Disk quota exceeded")


@pytest.mark.parametrize("fail", [fill_disk, exhaust_quota])
def test_disk_full_while_encoding(tmp_path: Path, fail: Callable[..., None]) -> None:
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    with pytest.raises(ResourceError, match="no space left; free some"):
        compress_with(os, "posix_fallocate", fail, source, destination)
    assert list(tmp_path.glob("*packed*")) == []  # nothing was finished, so nothing is left to go on with
    with pytest.raises(InputError):
        Checkpoint.open(destination)
    compress(source, destination)
    assert verify_against(Checkpoint.open(destination), Checkpoint.open(source)).identical


@pytest.mark.parametrize(
    ("error", "stays"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.EIO, "Input/output error"), True),
        (ResourceError("a worker process was killed", mend="free memory"), True),
        (FormatError("torn"), False),
    ],
    ids=str,
)
def test_what_is_finished_stays_where_going_on_may_help(tmp_path: Path, error: Exception, stays: bool) -> None:
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    record = Workspace.record

    def fail(space: Workspace, name: str) -> None:
        if space._has_finished():
            raise error
        record(space, name)

    with pytest.raises((SamebitsError, OSError)):
        compress_with(Workspace, "record", fail, source, destination)
    assert destination.exists() is stays
    assert compress(source, destination).resumed_shards == (1 if stays else 0)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_shard_that_does_not_reach_the_disk(tmp_path: Path, number: int) -> None:
    """Nothing is published then, whichever shard it is."""
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    record, asked = Workspace.record, list[str]()

    def fail(space: Workspace, name: str) -> None:
        asked.append(name)
        if f"{number:05}-of" in name:
            raise OSError(errno.EIO, "Input/output error")
        record(space, name)

    with pytest.raises(OSError, match="Input/output error"):
        compress_with(Workspace, "record", fail, source, destination)
    assert not list(destination.glob("*.safetensors"))
    assert len(asked) == number
    assert compress(source, destination).resumed_shards == number - 1


def test_without_a_call_that_reserves_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS: the space is written."""
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    compress(source, tmp_path / "reserved")
    monkeypatch.delattr(os, "posix_fallocate")
    monkeypatch.setattr(mapping, "_WRITTEN", 1000)
    compress(source, destination)
    assert files_of(destination) == files_of(tmp_path / "reserved")
    written = create_mapped(tmp_path / "zeros", 2500)
    assert written.shape == (2500,)
    assert not written.any()


def test_a_disk_that_fills_while_space_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    if not Path("/dev/full").exists():
        pytest.skip("needs /dev/full")
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        create_mapped(Path("/dev/full"), 2500)


def test_windows_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    monkeypatch.setattr(workspace, "sys", SimpleNamespace(platform="win32"))
    with pytest.raises(ResourceError, match=r"packed: files are not written on Windows.*Linux"):
        compress(source, destination)
    assert not destination.exists()


@pytest.mark.parametrize("exists", [True, False])
def test_a_disk_that_is_full_from_the_start(tmp_path: Path, exists: bool) -> None:
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    if exists:
        destination.mkdir()
    with pytest.raises(ResourceError, match="packed: no space left; free some"):
        compress_with(os, "write", fill_disk, source, destination)
    assert list(tmp_path.glob("packed*/*")) == []
    assert destination.exists() is exists


@pytest.mark.parametrize("nbytes", [0, 10_000])
def test_a_file_larger_than_the_limit(tmp_path: Path, nbytes: int) -> None:
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        with pytest.raises(ResourceError, match="packed: a file would be larger than it may be; raise the limit"):
            compress(source, destination)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not destination.exists()  # nothing was finished that another run could go on from
    compress(source, destination)
    assert verify_against(Checkpoint.open(destination), Checkpoint.open(source)).identical


def test_space_for_all_that_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What workers are ahead of, and other files, too."""
    source, asked = write_folder(tmp_path / "source"), list[int]()

    def refuse(folder: Path, nbytes: int) -> None:
        asked.append(nbytes)
        raise ResourceError("no space", mend="none")

    monkeypatch.setattr(job, "require_space", refuse)
    for workers, other in ((1, 0), (2, 0), (1, 12345)):
        (source / "other").write_bytes(bytes(other))
        with pytest.raises(ResourceError, match="no space"):
            compress(source, tmp_path / "packed", workers=workers)
    assert asked[0] < asked[1]
    assert asked[2] == asked[0] + 12345


def test_what_was_written_for_a_tensor_takes_no_space_behind_it(tmp_path: Path) -> None:
    source, destination = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    write_file(source, {name: weights(64, 128).half() for name in "abc"})
    left: list[int] = []

    def look(done: int, total: int) -> None:
        left.append(len(list(tmp_path.glob("*/spools/*"))))

    Compression(Checkpoint.open(source), destination, CompressOptions(cast=True), RunOptions(device="cpu"), look).run()
    assert len(left) > 3
    assert not any(left)


def test_progress_of_a_job_that_goes_on(tmp_path: Path) -> None:
    """What an earlier run finished is done."""
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    kill_after_one_shard(source, destination)
    seen: list[tuple[int, int]] = []
    Compression(
        Checkpoint.open(source), destination, None, RunOptions(device="cpu"), lambda *now: seen.append(now)
    ).run()
    assert seen[0][0] > 0
    assert seen[-1][0] == seen[-1][1]


def test_too_little_space_is_seen_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage(1 << 40, 1 << 40, 100_000))
    encoded = count_encodes(monkeypatch)
    with pytest.raises(ResourceError, match=r"needs .* kB, 100.00 kB are free; free .* kB or choose"):
        compress(write_folder(tmp_path / "source"), tmp_path / "packed")
    assert encoded == []
    assert not (tmp_path / "packed").exists()


def test_what_an_interrupted_run_left_unfinished_takes_no_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may be just large enough for what the run makes."""
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    usage = namedtuple("usage", "total used free")
    unfinished: list[list[Path]] = []

    def full(_: object) -> tuple[int, ...]:
        unfinished.append(list(tmp_path.rglob("*.partial")))
        return usage(1 << 40, 1 << 40, 1 << 39)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(SafetensorsWriter, "finish", interrupt)
        with pytest.raises(KeyboardInterrupt):
            compress(source, destination)
    assert list(tmp_path.rglob("*.partial"))
    monkeypatch.setattr("shutil.disk_usage", full)
    compress(source, destination)
    assert unfinished[0] == []
    assert verify_against(Checkpoint.open(destination), Checkpoint.open(source)).identical


def test_a_read_only_destination(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    source = write_folder(tmp_path / "source")
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PermissionError):
        compress(source, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_workers_keep_the_order_and_stay_bounded() -> None:
    asked: list[int] = []

    def numbers() -> object:
        for number in range(20):
            asked.append(number)
            yield number

    with Workers(2) as workers:
        results = workers.map(double, numbers())
        assert next(results) == 0
        assert len(asked) <= 5
        assert list(results) == [2 * number for number in range(1, 20)]


def test_workers_share_the_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samebits.jobs.workers.threads", lambda: 6)
    with Workers(2) as workers:
        assert list(workers.map(threads_of, range(2))) == [3, 3]


def test_no_worker_is_left_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    executor = Mock()
    monkeypatch.setattr("samebits.jobs.workers.threads", lambda: 3)
    monkeypatch.setattr("samebits.jobs.workers.ProcessPoolExecutor", executor)
    with Workers(4):
        pass
    assert executor.call_args.args[-1] == (1,)


def test_a_killed_worker_is_an_error_not_a_hang() -> None:
    with Workers(2) as workers, pytest.raises(ResourceError, match="a worker process was killed"):
        list(workers.map(die, range(3)))


ORPHANS = """
import os, time
from samebits.jobs.workers import Workers

def report(number):
    os.write(1, f"{os.getpid()}\\n".encode())  # at once: two processes write here
    time.sleep(60)

if __name__ == "__main__":
    with Workers(2) as workers:
        list(workers.map(report, range(2)))
"""


def test_ctrl_c_reaches_no_worker() -> None:
    """Not even one that is still importing, which would leave a traceback of its own."""
    with Workers(2) as workers:
        assert list(workers.map(blocked, range(2))) == [True, True]
    assert not blocked(0)


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "orphans.py"
    script.write_text(ORPHANS)
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    workers = [int(parent.stdout.readline()) for _ in range(2)]
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30
    while any(is_alive(worker) for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_alive(worker) for worker in workers)


INTERRUPTED_TWICE = """
import os, signal, time
from concurrent.futures import ProcessPoolExecutor
from samebits.jobs.workers import Workers

def wait(number):
    os.write(1, f"{os.getpid()}\\n".encode())
    time.sleep(1000)

def interrupt(*_):
    raise KeyboardInterrupt

def interrupted(*arguments, **options):
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGINT)
    shutdown(*arguments, **options)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    shutdown, ProcessPoolExecutor.shutdown = ProcessPoolExecutor.shutdown, interrupted
    with Workers(2) as workers:
        list(workers.map(wait, range(2)))
"""


def test_signals_during_the_end_of_workers(tmp_path: Path) -> None:
    """The first one ends them, whatever they are at; those that follow do not leave them behind."""
    script = tmp_path / "twice.py"
    script.write_text(INTERRUPTED_TWICE)
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert parent.stdout
    workers = [int(parent.stdout.readline()) for _ in range(2)]
    parent.terminate()
    try:
        _, errors = parent.communicate(timeout=60)
    finally:
        parent.kill()
    assert errors.endswith("KeyboardInterrupt\n")
    assert not any(is_alive(worker) for worker in workers)


def test_an_error_in_a_worker_names_the_tensor(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source")
    compress(source, tmp_path / "packed")
    entry = Checkpoint.open(tmp_path / "packed").entries["lm_head.weight"]
    data = bytearray(entry.file.path.read_bytes())
    data[in_planes(entry)] ^= 4
    entry.file.path.write_bytes(data)
    with pytest.raises(SamebitsError, match=r"samebits-00003-of-00003.safetensors: lm_head.weight: the decoded words"):
        decompress(tmp_path / "packed", tmp_path / "back", workers=2)
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("place", ["link", "link/inside"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_destination_behind_a_link_that_leads_nowhere(tmp_path: Path, place: str, overwrite: bool) -> None:
    """Neither goes a job there, nor does it take the link's place."""
    source, file = write_folder(tmp_path / "source"), write_file(tmp_path / "a.safetensors", {"a": weights(64, 64)})
    for path, suffix in ((source, ""), (file, ".safetensors")):
        link = tmp_path / (f"link{suffix}" if place == "link" else "link")
        link.unlink(missing_ok=True)
        link.symlink_to(tmp_path / f"nothing{suffix}")
        before = files_of(tmp_path)
        with pytest.raises(InputError) as refused:
            compress(path, tmp_path / f"{place}{suffix}", overwrite=overwrite)
        assert str(refused.value) == f"{link}: the link leads nowhere; remove it"
        assert (link.is_symlink(), link.exists(), files_of(tmp_path)) == (True, False, before)


def test_a_link_that_leads_nowhere_where_a_folder_goes(tmp_path: Path) -> None:
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    destination.mkdir()
    (destination / "extra").symlink_to("nothing")
    with pytest.raises(InputError, match=r"packed/extra: a file is in the way; remove it"):
        compress(source, destination, overwrite=True)
    assert [path.name for path in destination.iterdir()] == ["extra"]
