"""A source that is written to while a job or a verification reads it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from samebits.errors import InputError
from samebits.format.container import Checkpoint
from samebits.format.safetensors_file import SafetensorsWriter
from samebits.jobs.compress import Compression
from samebits.jobs.compress_df11 import Df11Compression
from samebits.jobs.decompress import Decompression
from samebits.jobs.job import Job
from samebits.jobs.options import RunOptions
from samebits.progress import Progress
from samebits.verify import verify_against, verify_digests
from tests.jobs.checkpoints import shards, weights, write_folder

LAYERS = 4


def write(path: Path, seed: int) -> None:
    torch.manual_seed(seed)
    save_file({f"layers.{i}.weight": weights(64, 128) for i in range(LAYERS)}, path, {"format": "pt"})


def overwrite(path: Path) -> None:
    """As if another program wrote the next version: the last tensor's last bytes."""
    with path.open("r+b") as file:
        file.seek(-64, os.SEEK_END)
        file.write(bytes(64))
    os.utime(path, ns=(0, 0))  # clocks of file systems are coarse


def replace(path: Path) -> None:
    other = path.with_suffix(".other")
    write(other, seed=7)
    os.utime(other, ns=(0, 0))
    other.replace(path)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 4096)


CHANGES = [overwrite, replace, truncate]


def behind(first: int, act: Callable[[], None]) -> Progress:
    """``act`` once so many bytes are done."""
    done = False

    def progress(now: int, total: int) -> None:
        nonlocal done
        if now >= first and not done:
            done = True
            act()

    return progress


def compression(source: Path, destination: Path, progress: Progress) -> Job:
    return Compression(Checkpoint.open(source), destination, run=RunOptions(device="cpu"), progress=progress)


def decompression(source: Path, destination: Path, progress: Progress) -> Job:
    packed = source.with_name("packed.safetensors")
    compression(source, packed, lambda done, total: None).run()
    packed.replace(source)
    return Decompression(Checkpoint.open(source), destination, RunOptions(device="cpu"), progress)


def df11_compression(source: Path, destination: Path, progress: Progress) -> Job:
    patterns: dict[str, list[str]] = {r"layers\.\d+": []}
    return Df11Compression(Checkpoint.open(source), destination, patterns, RunOptions(device="cpu"), progress)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("make", [compression, decompression, df11_compression])
def test_of_a_job(tmp_path: Path, make: Callable[[Path, Path, Progress], Job], change: Callable[[Path], None]) -> None:
    source, destination = tmp_path / "source.safetensors", tmp_path / "destination.safetensors"
    write(source, seed=0)
    job = make(source, destination, behind(64 * 128 * 2, lambda: change(source)))
    with pytest.raises(InputError, match=r"source\.safetensors: the file has changed while it was read; run it again"):
        job.run()
    assert [path.name for path in tmp_path.iterdir()] == ["source.safetensors"]


def test_what_ends_while_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tensor that is not packed: writing what is no memory any more is an error of the operating system."""
    source, append = tmp_path / "source.safetensors", SafetensorsWriter.append
    save_file({"a": torch.arange(1 << 20)}, source)

    def cut_off(writer: SafetensorsWriter, *arguments: object) -> None:
        os.truncate(source, 4096)
        append(writer, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(SafetensorsWriter, "append", cut_off)
    with pytest.raises(InputError, match=r"source\.safetensors: the file has changed while it was read; run it again"):
        compression(source, tmp_path / "destination.safetensors", lambda done, total: None).run()
    assert [path.name for path in tmp_path.iterdir()] == ["source.safetensors"]


@pytest.mark.parametrize("change", CHANGES)
def test_of_a_job_that_is_done_with_the_file(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """Shards of two versions would be one model."""
    source, destination = write_folder(tmp_path / "source"), tmp_path / "destination"
    first, second, _ = (sum(tensor.nbytes for tensor in shard.values()) for shard in shards())
    changing = behind(first + second + 1, lambda: change(source / "model-00001-of-00003.safetensors"))
    with pytest.raises(InputError, match=r"model-00001-of-00003\.safetensors: the file has changed while it was read"):
        compression(source, destination, changing).run()
    assert not destination.exists()


@pytest.mark.parametrize("change", CHANGES)
def test_of_a_verification(tmp_path: Path, change: Callable[[Path], None]) -> None:
    source, packed = tmp_path / "source.safetensors", tmp_path / "packed.safetensors"
    write(source, seed=0)
    compression(source, packed, lambda done, total: None).run()
    checkpoints = Checkpoint.open(packed), Checkpoint.open(source)
    assert verify_against(*checkpoints).identical
    at_the_end = behind(LAYERS * 64 * 128 * 2, lambda: change(source))
    with pytest.raises(InputError, match=r"source\.safetensors: the file has changed"):
        verify_against(*checkpoints, progress=at_the_end)
    at_the_end = behind(LAYERS * 64 * 128 * 2, lambda: change(packed))
    with pytest.raises(InputError, match=r"packed\.safetensors: the file has changed"):
        verify_digests(checkpoints[0], progress=at_the_end)
