"""How fast a GPU encodes and decodes, beside what its memory allows in the same run.

    python benchmarks/gpu.py [--name h200]        writes results/<name>.json; by default named after the card

Decoding is timed inside CUDA graphs over more than 800 MB of distinct packed weights, so that nothing stays in the L2
cache. Each matrix is decoded and compared with the original words before it is timed, and so are the outputs of the
last replay that are still there, OUTPUTS of them, afterwards: a word that differs ends the run. The roof of a decode is
the time to fill its output plus the time to read its packed bytes, both measured in the same run by plain kernels.
Encoding is timed by the clock, planning on the host included. Weights of a layer are decoded one by one, and by one
launch.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

import samebits
from common import Timing, encode_checked, significant, synthetic_matrix, write_results
from samebits.bf16 import same_words
from samebits.kernels.decode_together import DecodeTogether, suits
from samebits.kernels.replay import fast_replay

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
LAYERS = {
    "eight of 1280 x 1280": [(1280, 1280)] * 8,
    "Stable Diffusion XL, but for the text's": [(1280, 1280)] * 6 + [(10240, 1280), (1280, 5120)],
    "Qwen3 0.6B": [(2048, 1024), *[(1024, 1024)] * 2, (1024, 2048), *[(3072, 1024)] * 2, (1024, 3072)],
    "Llama 3.1 8B": [(4096, 4096), *[(1024, 4096)] * 2, (4096, 4096), *[(14336, 4096)] * 2, (4096, 14336)],
}
DISTINCT_BYTES = 900e6
OUTPUTS = 12  # outputs in flight, so that writes do not stay in the cache either
TURNS = 3
TURN_SECONDS, UNTIMED_SECONDS = 1.5, 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", help="default: h200, h100 or what else the card is called")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device")
    rows = [measure(synthetic_matrix(*shape, device="cuda"), arguments.repeats) for shape in SHAPES]
    for layer, shapes in LAYERS.items():
        weights = [synthetic_matrix(*shape, device="cuda") for shape in shapes]
        rows.append(measure_together(layer, weights, arguments.repeats))
    print(write_results(arguments.name or card_name(torch.cuda.get_device_name()), device_name(), rows))
    return 0


def card_name(device: str) -> str:
    """Of "NVIDIA H100 80GB HBM3", "h100"."""
    return next((word for word in device.lower().split() if any(map(str.isdigit, word))), "gpu")


def measure(weights: torch.Tensor, repeats: int) -> dict[str, Any]:
    """One row of the table "codec", of a matrix."""
    packed = encode_checked(weights)
    copies = [copy for (copy,) in distinct([packed])]
    outputs: list[torch.Tensor | None] = [None] * OUTPUTS

    def decode(i: int) -> None:
        outputs[i % OUTPUTS] = samebits.decode(copies[i])

    decoding = time_graph([partial(decode, i) for i in range(len(copies))], repeats)
    if not all(torch.equal(out.view(torch.int16), weights.view(torch.int16)) for out in outputs if out is not None):
        raise SystemExit(f"{tuple(weights.shape)}: not identical")
    roofs = measure_roofs([copy.data for copy in copies], weights.numel(), repeats)
    roof = roofs.decode_seconds(packed.nbytes)
    encoding = time_clock(lambda: samebits.encode(weights), repeats)
    row = {
        "table": "codec",
        "matrix": "{} x {}".format(*weights.shape),
        "bits_per_weight": round(packed.bits_per_weight, 4),
        **decoding.rates("decode_tb_per_s", weights.nbytes / 1e12),
        "decode_microseconds": significant(decoding.median * 1e6),
        "roof_tb_per_s": significant(weights.nbytes / roof / 1e12),
        "of_roof": significant(roof / decoding.median),
        "fill_tb_per_s": significant(weights.nbytes / roofs.fill_seconds / 1e12),
        "read_tb_per_s": significant(roofs.read_rate / 1e12),
        **encoding.rates("encode_gweights_per_s", weights.numel() / 1e9),
    }
    print(row, flush=True)
    return row


def measure_together(layer: str, weights: Sequence[torch.Tensor], repeats: int) -> dict[str, Any]:
    """One row of the table "together", of a layer's weights."""
    packed = [encode_checked(weight) for weight in weights]
    assert all(map(suits, packed))
    copies = distinct(packed)
    launches = [DecodeTogether([each.header for each in packed]) for _ in copies]
    made: dict[str, dict[int, list[torch.Tensor]]] = {"one_by_one": {}, "together": {}}
    places = max(2, OUTPUTS // len(packed))

    def one_by_one(i: int) -> None:
        made["one_by_one"][i % places] = [samebits.decode(each) for each in copies[i]]

    def together(i: int) -> None:
        made["together"][i % places] = launches[i](*(each.data for each in copies[i]))

    ways = [[partial(way, i) for i in range(len(copies))] for way in (one_by_one, together)]
    times = dict(zip(made, time_graphs(ways, repeats), strict=True))
    for way, outputs in made.items():
        for decoded in outputs.values():
            if not all(map(same_words, decoded, weights)):
                raise SystemExit(f"{layer}, {way}: not identical")
    count, nbytes = sum(weight.numel() for weight in weights), sum(each.nbytes for each in packed)
    roofs = measure_roofs([each.data for copy in copies for each in copy], count, repeats)
    row = {
        "table": "together",
        "layer": layer,
        "matrices": len(weights),
        "weights": count,
        **times["one_by_one"].columns("one_by_one_microseconds", 1e6),
        **times["together"].columns("together_microseconds", 1e6),
        "together_tb_per_s": significant(2 * count / times["together"].median / 1e12),
        "of_roof": significant(roofs.decode_seconds(nbytes) / times["together"].median),
    }
    print(row, flush=True)
    return row


def distinct(packed: Sequence[samebits.PackedTensor]) -> list[list[samebits.PackedTensor]]:
    """Some packed tensors, and as many copies of all of them as make up more than DISTINCT_BYTES."""
    count = int(DISTINCT_BYTES / sum(tensor.nbytes for tensor in packed))
    copies = [[replace(tensor, data=tensor.data.clone()) for tensor in packed] for _ in range(count)]
    return [list(packed), *copies]


@dataclass(frozen=True)
class Roofs:
    """What the memory allows, measured with plain kernels.

    Attributes:
        fill_seconds: to write an output in BF16.
        read_rate: bytes a second, of packed weights.
        read_write_rate: bytes a second, read and written, where as much is read as written.
    """

    fill_seconds: float
    read_rate: float
    read_write_rate: float

    def decode_seconds(self, packed_bytes: int) -> float:
        """To read the packed bytes of an output, and to write it."""
        return self.fill_seconds + packed_bytes / self.read_rate


def measure_roofs(packed: Sequence[torch.Tensor], weights: int, repeats: int) -> Roofs:
    """Of outputs of so many weights, and of reading what is packed, contiguous uint8."""
    targets = [torch.empty(weights, dtype=torch.bfloat16, device=packed[0].device) for _ in range(OUTPUTS)]
    filling = time_graph([partial(target.fill_, 1.5) for target in targets], repeats)
    words = [target.view(torch.int16) for target in targets]
    sources = words[OUTPUTS // 2 :] + words[: OUTPUTS // 2]  # far from what has just been written
    adding = [partial(torch.add, source, 1, out=word) for source, word in zip(sources, words, strict=True)]
    moving = time_graph(adding, repeats)
    return Roofs(filling.median, measure_read_rate(packed, repeats), 4 * weights / moving.median)


def measure_read_rate(packed: Sequence[torch.Tensor], repeats: int) -> float:
    """Bytes a second, from a sum over all of them; contiguous uint8, each a multiple of 8 bytes long."""
    words = torch.cat([data.view(torch.int64) for data in packed])
    return words.nbytes / time_graph([words.sum], repeats).median


def time_graph(calls: list[Callable[[], object]], repeats: int) -> Timing:
    """Seconds of one call, from replays of a CUDA graph that holds all of them, behind other replays for a while."""
    [timing] = time_graphs([calls], repeats)
    return timing


def time_graphs(candidates: list[list[Callable[[], object]]], repeats: int, warm_seconds: float = 0.0) -> list[Timing]:
    """``time_graph`` of each candidate; their replays alternate, so that the device's clock is the same for all.

    Each that is timed stands behind one of its own: what another one has written is on its way to memory for a while.
    Their kernels follow each other as they do inside of samebits.cuda_graphs.
    """
    graphs = [captured(calls) for calls in candidates]
    first_replays = [fast_replay(graph) for graph in graphs]
    start_of_replays = time.perf_counter()
    while True:
        for graph in graphs:
            graph.replay()
        torch.cuda.synchronize()
        if time.perf_counter() - start_of_replays >= warm_seconds:
            break
    seconds: list[list[float]] = [[] for _ in candidates]
    for _ in range(repeats):
        for graph, first, calls, found in zip(graphs, first_replays, candidates, seconds, strict=True):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first()
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            found.append(start.elapsed_time(end) / 1e3 / len(calls))
    return [Timing.of(found) for found in seconds]


def captured(calls: list[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph of all of them, each of which has run once before."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


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
    return Timing.of(seconds)


def time_turns(calls: Sequence[Callable[[], object]]) -> list[Timing]:
    """As ``time_clock``, of each call over all its turns: each has the device for seconds, as whoever uses one of them.

    The first part of a turn is not timed, for the device's clock follows the power of the turn before.
    """
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(TURNS):
        for call, found in zip(calls, seconds, strict=True):
            found += turn(call)
    return [Timing.of(found) for found in seconds]


def turn(call: Callable[[], object]) -> list[float]:
    """Seconds of each call that is timed: one at least."""
    found = list[float]()
    start = begin = time.perf_counter()
    while not found or begin < start + TURN_SECONDS:
        call()
        torch.cuda.synchronize()
        end = time.perf_counter()
        if begin >= start + UNTIMED_SECONDS:
            found.append(end - begin)
        begin = end
    return found


def device_name() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()[0]
    return f"{torch.cuda.get_device_name()}, driver {driver}, CUDA {torch.version.cuda}"


if __name__ == "__main__":
    raise SystemExit(main())
