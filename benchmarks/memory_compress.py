"""Does memory grow with the model? Anonymous memory of all processes at work on a large checkpoint.

    python benchmarks/memory_compress.py                          20 GB with a 2.5 GB embedding; needs 60 GB of disk
    python benchmarks/memory_compress.py --gigabytes 2 --embedding-gigabytes 0.5 --workers 2 --name memory_small

Makes a synthetic BF16 checkpoint, runs compress, verify, verify --against and decompress, and samples what the kernel
counts as anonymous memory of each process and its children (not mapped files, whose pages it can drop at any time).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from common import cpu_name, synthetic_matrix, write_results
from samebits.format.folder import shard_name
from samebits.format.mapping import create_mapped
from samebits.format.safetensors_file import TensorSpec, header_bytes

COLUMNS = 4096
LAYER = {"q_proj": 4096, "o_proj": 4096, "gate_proj": 12288, "up_proj": 12288, "down_proj": 12288}  # rows
SHARD_BYTES = 5 * 10**9
BLOCK_ROWS = 4096
SECONDS_BETWEEN_SAMPLES = 0.1
COMMAND = [sys.executable, "-c", "from samebits.cli import main; main()"]


def tensors(nbytes: int, embedding_bytes: int) -> Iterator[tuple[str, int]]:
    """Names and rows of matrices with COLUMNS columns: an embedding, then layers until ``nbytes`` are reached."""
    row_bytes = 2 * COLUMNS
    yield "model.embed_tokens.weight", embedding_bytes // row_bytes
    left, layer = nbytes - embedding_bytes, 0
    while left > 0:
        for name, rows in LAYER.items():
            yield f"model.layers.{layer}.{name}.weight", rows
            left -= rows * row_bytes
        layer += 1


def shards(nbytes: int, embedding_bytes: int) -> list[list[TensorSpec]]:
    """The tensors in files of about SHARD_BYTES; offsets count from the end of each file's header."""
    result: list[list[TensorSpec]] = [[]]
    for name, rows in tensors(nbytes, embedding_bytes):
        if result[-1] and result[-1][-1].stop >= SHARD_BYTES:
            result.append([])
        start = result[-1][-1].stop if result[-1] else 0
        result[-1].append(TensorSpec(name, "BF16", (rows, COLUMNS), start, start + 2 * rows * COLUMNS))
    return result


def write_shard(path: Path, specs: list[TensorSpec], block: torch.Tensor) -> None:
    """A file whose tensors repeat ``block``; it is mapped, so that writing takes no memory either."""
    header = header_bytes(specs, {"format": "pt"})
    data = create_mapped(path, len(header) + specs[-1].stop)
    data[: len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for spec in specs:
        matrix = data[len(header) + spec.start : len(header) + spec.stop].view(torch.bfloat16).reshape(spec.shape)
        for first in range(0, spec.shape[0], BLOCK_ROWS):
            rows = matrix[first : first + BLOCK_ROWS]
            rows.copy_(block[: len(rows)])


def write_checkpoint(folder: Path, nbytes: int, embedding_bytes: int) -> None:
    folder.mkdir()
    block = synthetic_matrix(BLOCK_ROWS, COLUMNS)
    planned = shards(nbytes, embedding_bytes)
    for number, specs in enumerate(planned, 1):
        write_shard(folder / shard_name("model", number, len(planned)), specs, block)


def anonymous_bytes(process: psutil.Process) -> int:
    """Of one process; 0 once it is gone."""
    try:
        text = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return sum(1024 * int(line.split()[1]) for line in text.splitlines() if line.startswith("Anonymous:"))


def family(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def watch(*arguments: object) -> tuple[int, int, float]:
    """Run a command; peak anonymous bytes of its processes together, most processes at once, seconds."""
    start = time.perf_counter()
    process = subprocess.Popen([*COMMAND, *map(str, arguments)])
    watched = psutil.Process(process.pid)
    peak = most = 0
    while process.poll() is None:
        members = family(watched)
        peak, most = max(peak, sum(map(anonymous_bytes, members))), max(most, len(members))
        time.sleep(SECONDS_BETWEEN_SAMPLES)
    if process.returncode:
        raise SystemExit(f"{arguments[0]} ended with exit code {process.returncode}")
    return peak, most, time.perf_counter() - start


def measure(folder: Path, workers: list[str]) -> Iterator[dict[str, Any]]:
    source, packed, back = folder / "source", folder / "packed", folder / "back"
    original_bytes = sum(path.stat().st_size for path in source.iterdir())
    steps: list[tuple[object, ...]] = [
        ("compress", source, packed, *workers),
        ("verify", packed),
        ("verify", packed, "--against", source),
        ("decompress", packed, back, *workers),
    ]
    for arguments in steps:
        peak, most, seconds = watch(*arguments)
        command = f"{arguments[0]}{' --against' if '--against' in arguments else ''}"
        yield {"table": "memory", "command": command, "original_bytes": original_bytes, "processes": most,
               "peak_anonymous_bytes": peak, "seconds": round(seconds, 1),
               "gb_per_s": round(original_bytes / 1e9 / seconds, 3)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=20)
    parser.add_argument("--embedding-gigabytes", type=float, default=2.5)
    parser.add_argument("--workers", type=int, help="passed on to compress and decompress")
    parser.add_argument("--folder", type=Path, help="where to put the checkpoints; default: the temporary folder")
    parser.add_argument("--name", default="memory", help="of the result file")
    options = parser.parse_args()
    workers = ["--workers", str(options.workers)] if options.workers else []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        size, embedding = int(options.gigabytes * 1e9), int(options.embedding_gigabytes * 1e9)
        write_checkpoint(Path(folder) / "source", size, embedding)
        rows = list(measure(Path(folder), workers))
    for row in rows:
        row["embedding_bytes"] = embedding
    print(write_results(options.name, cpu_name(), rows))


if __name__ == "__main__":
    main()
