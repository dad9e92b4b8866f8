"""How fast a GPU encodes and decodes, beside what its memory allows in the same run.

    python benchmarks/gpu.py [--name h200]        writes results/<name>.json

Decoding is timed inside CUDA graphs over more than 800 MB of distinct packed weights, so that nothing stays in the L2
cache; every output is compared with the original words first. The roof of a decode is the time to fill its output plus
the time to read its packed bytes, both measured in the same run by plain kernels. Encoding is timed by the clock,
planning on the host included.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import samebits
from common import Timing, encode_checked, significant, synthetic_matrix, write_results

SHAPES = [
    (1024, 4096),
    (4096, 4096),
    (5120, 5120),
    (12288, 4096),
    (4096, 12288),
    (14336, 4096),
    (25600, 5120),
    (28672, 8192),
]
DISTINCT_BYTES = 900e6
OUTPUTS = 12  # outputs in flight, so that writes do not stay in the cache either


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="h200")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device")
    rows = [measure(rows, columns, arguments.repeats) for rows, columns in SHAPES]
    print(write_results(arguments.name, device_name(), rows))
    return 0


def measure(rows: int, columns: int, repeats: int) -> dict[str, Any]:
    """One row of the table "codec"."""
    weights = synthetic_matrix(rows, columns, device="cuda")
    packed = encode_checked(weights)
    copies = [packed] + [
        samebits.PackedTensor(packed.header, packed.data.clone()) for _ in range(int(DISTINCT_BYTES / packed.nbytes))
    ]
    outputs: list[torch.Tensor | None] = [None] * OUTPUTS
    nbytes = 2 * weights.numel()

    def decode(i: int) -> None:
        outputs[i % OUTPUTS] = samebits.decode(copies[i])

    decoding = time_graph([partial(decode, i) for i in range(len(copies))], repeats)
    assert all(torch.equal(out.view(torch.int16), weights.view(torch.int16)) for out in outputs if out is not None)
    targets = [torch.empty_like(weights) for _ in range(OUTPUTS)]
    filling = time_graph([partial(out.fill_, 1.5) for out in targets], repeats)
    words = [copy.data.view(torch.int64) for copy in copies]
    reading = time_graph([torch.cat(words).sum], repeats)
    read_rate = len(copies) * packed.nbytes / reading.median
    roof = filling.median + packed.nbytes / read_rate
    encoding = time_clock(lambda: samebits.encode(weights), repeats)
    row = {
        "table": "codec",
        "matrix": f"{rows} x {columns}",
        "bits_per_weight": round(packed.bits_per_weight, 4),
        **decoding.rates("decode_tb_per_s", nbytes / 1e12),
        "decode_microseconds": significant(decoding.median * 1e6),
        "roof_tb_per_s": significant(nbytes / roof / 1e12),
        "of_roof": significant(roof / decoding.median),
        "fill_tb_per_s": significant(nbytes / filling.median / 1e12),
        "read_tb_per_s": significant(read_rate / 1e12),
        **encoding.rates("encode_gweights_per_s", weights.numel() / 1e9),
    }
    print(row, flush=True)
    return row


def time_graph(calls: list[Callable[[], object]], repeats: int) -> Timing:
    """Seconds of one call, from replays of a CUDA graph that holds all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    seconds = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        seconds.append(start.elapsed_time(end) / 1e3 / len(calls))
    return Timing(statistics.median(seconds), min(seconds), max(seconds))


def time_clock(call: Callable[[], object], repeats: int) -> Timing:
    """Seconds of one call by the host's clock, the device's work included."""
    call()
    seconds = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return Timing(statistics.median(seconds), min(seconds), max(seconds))


def device_name() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return f"{torch.cuda.get_device_name()}, driver {driver}, CUDA {torch.version.cuda}"


if __name__ == "__main__":
    raise SystemExit(main())
