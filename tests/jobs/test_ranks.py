"""Jobs that several processes do together; here they are threads that share a store."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from samebits.errors import DigestError, InputError, ResourceError, SamebitsError
from samebits.format.container import Checkpoint
from samebits.jobs import ranks
from samebits.jobs.compress import Compression
from samebits.jobs.compress_df11 import Df11Compression
from samebits.jobs.decompress import Decompression
from samebits.jobs.job import Job, JobReport
from samebits.jobs.options import CompressOptions, RunOptions
from samebits.jobs.ranks import Ranks
from samebits.jobs.workspace import Workspace
from samebits.parallel import THREADS_VARIABLE
from tests.jobs.checkpoints import files_of, write_file, write_folder

Result = JobReport | SamebitsError


def together(
    kind: Any, source: Path, destination: Path, size: int, options: Sequence[CompressOptions] | None = None
) -> list[Result]:
    """What each of ``size`` processes gives, with its own options."""
    store = HashStore()

    def process(rank: int) -> Result:
        try:
            with Ranks(rank, size, store).together() as ranks:
                run = RunOptions(device="cpu", workers=1, ranks=ranks)
                report: JobReport = kind(Checkpoint.open(source), destination, options and options[rank], run).run()
        except SamebitsError as error:
            return error
        return report

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(process, range(size)))


def decompression(checkpoint: Checkpoint, destination: Path, _: None, run: RunOptions) -> Decompression:
    return Decompression(checkpoint, destination, run)


def compress(source: Path, destination: Path) -> Path:
    Compression(Checkpoint.open(source), destination, None, RunOptions(device="cpu")).run()
    return destination


@pytest.mark.parametrize("size", [2, 3, 5])
def test_the_same_files_as_one_process_writes(tmp_path: Path, size: int) -> None:
    source = write_folder(tmp_path / "source")
    alone = compress(source, tmp_path / "alone")
    reports = together(Compression, source, tmp_path / "packed", size)
    assert files_of(tmp_path / "packed") == files_of(alone)
    assert all(isinstance(report, JobReport) and report.shards == 3 for report in reports)
    assert len({str(report.sizes) for report in reports if isinstance(report, JobReport)}) == 1
    together(decompression, alone, tmp_path / "back", size)
    assert {path: data for path, data in files_of(source).items() if path != "pytorch_model.bin"} == files_of(
        tmp_path / "back"
    )


@pytest.mark.parametrize("kind", [Compression, Df11Compression])
def test_a_single_file_is_the_first_ones(tmp_path: Path, kind: Any) -> None:
    source = write_file(tmp_path / "a.safetensors")
    kind(Checkpoint.open(source), tmp_path / "alone.safetensors", None, RunOptions(device="cpu")).run()
    assert all(isinstance(each, JobReport) for each in together(kind, source, tmp_path / "b.safetensors", 2))
    assert (tmp_path / "b.safetensors").read_bytes() == (tmp_path / "alone.safetensors").read_bytes()


def test_one_that_fails_ends_all_and_the_next_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, first_has_written, write_own = write_folder(tmp_path / "source"), Event(), Job._write_own

    def fail_behind_the_first(job: Job, space: Workspace) -> int:
        if not job.run_options.ranks.is_first:
            first_has_written.wait()
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        resumed = write_own(job, space)
        first_has_written.set()
        return resumed

    with monkeypatch.context() as patched:
        patched.setattr(Job, "_write_own", fail_behind_the_first)
        first, second = together(Compression, source, tmp_path / "packed", 2)
    assert isinstance(first, ResourceError)
    assert isinstance(second, ResourceError)
    assert first.what == f"process 1 of 2 has failed: {tmp_path / 'packed'}: no space left"
    assert second.what == "no space left"
    assert [path.name for path in (tmp_path / "packed").iterdir()] == [".samebits-job"]
    reports = together(Compression, source, tmp_path / "packed", 2)
    assert [each.resumed_shards for each in reports if isinstance(each, JobReport)] == [2, 2]
    assert files_of(tmp_path / "packed") == files_of(compress(source, tmp_path / "alone"))


def test_a_damaged_tensor_ends_all(tmp_path: Path) -> None:
    packed = compress(write_folder(tmp_path / "source"), tmp_path / "packed")
    file = packed / "samebits-00002-of-00003.safetensors"  # the second process's
    [entry, *_] = [entry for entry in Checkpoint.open(packed).by_file[file] if entry.header]
    assert entry.header
    data = bytearray(file.read_bytes())
    data[entry.spec.start + entry.header.sections["planes"].start + 500] ^= 1
    file.write_bytes(data)
    first, second = together(decompression, packed, tmp_path / "back", 2)
    assert isinstance(first, ResourceError)
    assert isinstance(second, DigestError)
    assert f"process 1 of 2 has failed: {file}: model.layers.0.experts" in first.what
    assert not list(tmp_path.glob("back/*.safetensors"))


def test_the_first_one_that_fails_takes_nothing_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which write into the same folder, until they hear of it."""
    source, write_own, leave = write_folder(tmp_path / "source"), Job._write_own, Workspace.__exit__
    first_has_left, second_has_written = Event(), Event()

    def write_behind_the_first(job: Job, space: Workspace) -> int:
        if job.run_options.ranks.is_first:
            raise DigestError("damaged", where="file")
        first_has_left.wait(60)
        try:
            return write_own(job, space)
        finally:
            second_has_written.set()

    def leave_and_wait(space: Workspace, *error: Any) -> None:
        leave(space, *error)
        first_has_left.set()
        second_has_written.wait(60)

    with monkeypatch.context() as patched:
        patched.setattr(Job, "_write_own", write_behind_the_first)
        patched.setattr(Workspace, "__exit__", leave_and_wait)
        first, second = together(Compression, source, tmp_path / "packed", 2)
    assert isinstance(first, DigestError)
    assert isinstance(second, ResourceError)
    assert second.what == "process 0 of 2 has failed: file: damaged"
    assert all(isinstance(each, JobReport) for each in together(Compression, source, tmp_path / "packed", 2))
    assert files_of(tmp_path / "packed") == files_of(compress(source, tmp_path / "alone"))


def test_a_destination_in_use_ends_all(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source")
    used = shutil.copytree(source, tmp_path / "used")
    before = files_of(used)
    first, second = together(Compression, source, used, 2)
    assert isinstance(first, InputError)
    assert isinstance(second, ResourceError)
    assert "process 0 of 2 has failed" in second.what
    assert files_of(used) == before


def test_a_source_that_one_does_not_see_ends_all(tmp_path: Path) -> None:
    source, packed = write_folder(tmp_path / "source"), tmp_path / "packed"
    sources = [source, tmp_path / "elsewhere"]
    first, second = launched([["compress", str(each), str(packed), "--device", "cpu"] for each in sources])
    assert (first.returncode, second.returncode) == (2, 2)
    assert "process 1 of 2 has failed" in first.stderr
    assert "no such file or folder" in second.stderr
    assert not packed.exists()


class Gone(HashStore):
    """The store of a process that has ended."""

    def check(self, keys: list[str]) -> bool:
        raise RuntimeError("Connection reset by peer")


def test_the_first_one_is_gone(tmp_path: Path) -> None:
    run = RunOptions(device="cpu", ranks=Ranks(1, 2, Gone()))
    job = Compression(Checkpoint.open(write_folder(tmp_path / "source")), tmp_path / "packed", None, run)
    with pytest.raises(ResourceError, match="the first process of this job is gone"):
        job.run()
    assert not (tmp_path / "packed").exists()


def test_one_that_is_silent_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed, say, where nobody tells the others; one that takes long is."""
    monkeypatch.setattr(ranks, "_SECONDS_OF_SILENCE", 2.0)
    monkeypatch.setattr(ranks, "_SECONDS_BETWEEN_BEATS", 0.02)
    store = HashStore()
    first = Ranks(0, 3, store)
    with pytest.raises(ResourceError, match="process 1 of 3 has been silent for 2 seconds"):
        first.hear("written", 1)

    def take_long() -> None:
        with Ranks(2, 3, store).together() as second:
            time.sleep(4)
            second.tell("written", 7)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(take_long)
        assert first.hear("written", 2) == 7
        done.result()
    with pytest.raises(ResourceError, match="silent"):  # it has left, and says nothing any longer
        first.hear("published", 2)


def launched(commands: Sequence[list[str]]) -> list[subprocess.CompletedProcess[str]]:
    """samebits, as torchrun starts processes, each with its own arguments."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    size = str(len(commands))
    shared = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}

    def start(rank: int) -> subprocess.CompletedProcess[str]:
        environment = os.environ | shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-m", "samebits", *commands[rank]]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    with ThreadPoolExecutor(len(commands)) as pool:
        return list(pool.map(start, range(len(commands))))


def test_commands_share_a_job_and_the_first_one_reports(tmp_path: Path) -> None:
    source, packed = write_folder(tmp_path / "source"), tmp_path / "packed"
    first, second = launched([["compress", str(source), str(packed), "--device", "cpu"]] * 2)
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    assert str(packed) in first.stdout
    assert (second.stdout, second.stderr) == ("", "")
    assert files_of(packed) == files_of(compress(source, tmp_path / "alone"))


def test_other_commands_share_nothing(tmp_path: Path) -> None:
    source, options = (
        write_folder(tmp_path / "source"),
        [CompressOptions(min_weights=1), CompressOptions(min_weights=2)],
    )
    first, second = together(Compression, source, tmp_path / "packed", 2, options)
    assert isinstance(first, ResourceError)
    assert isinstance(second, InputError)
    assert "the first process of this job does another one" in second.what
    assert not (tmp_path / "packed" / "config.json").exists()


def test_jobs_behind_each_other_are_kept_apart(tmp_path: Path) -> None:
    """In one launch, whose store keeps what was told before."""
    source = write_folder(tmp_path / "source")
    program = """
import sys
from samebits.cli import main

source, *places = sys.argv[1:]
for place in places:
    try:
        sys.argv = ["samebits", "compress", source, place, "--device", "cpu"]
        main()
    except SystemExit as done:
        assert not done.code, done
"""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "--no-python",
        sys.executable, "-c", program, str(source), str(tmp_path / "one"), str(tmp_path / "two"),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two") == files_of(compress(source, tmp_path / "alone"))


def test_processes_that_do_not_come_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(ranks, "_JOINING", ranks.timedelta(seconds=1))
    with pytest.raises(ResourceError, match="2 processes of this job have not found each other"):
        Ranks.of_environment()


@pytest.mark.parametrize("name", ["WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_RANK"])
@pytest.mark.parametrize("value", ["x", "-1", "1.5"])
def test_a_variable_that_is_no_number(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for each, usual in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(each, usual)
    monkeypatch.setenv(name, value)
    with pytest.raises(InputError, match=rf"{name}='{value}' is no .*; set it to [01] or more"):
        Ranks.of_environment()


def test_processes_of_a_host_share_its_cores_and_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    variables = {"RANK": "5", "WORLD_SIZE": "8", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "LOCAL_RANK": "1"}
    for name, value in (variables | {"LOCAL_WORLD_SIZE": "4"}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(THREADS_VARIABLE, raising=False)
    rendezvous = sys.modules["torch.distributed.rendezvous"]  # torch.distributed has a function of that name
    store = HashStore()
    for rank in range(8):
        store.set(f"samebits 1/here {rank}", "null")
    monkeypatch.setattr(rendezvous, "rendezvous", lambda *_, **__: iter([(store, 5, 8)]))
    threads = cache(lambda: 16)
    threads()
    monkeypatch.setattr(ranks, "threads", threads)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    found = Ranks.of_environment()
    assert (found.rank, found.size, found.is_first) == (5, 8, False)
    assert os.environ[THREADS_VARIABLE] == "4"
    assert not threads.cache_info().currsize
    assert chosen == [1]


@pytest.mark.parametrize("given", [{}, {"WORLD_SIZE": "1"}, {"WORLD_SIZE": "4", "RANK": "2"}])
def test_one_process_is_alone(given: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    alone = Ranks.of_environment()
    assert (alone.rank, alone.size, alone.is_first) == (0, 1, True)
    assert alone.own([1, 2, 3]) == [1, 2, 3]
