"""How fast others decode the same weights on the same GPU: DFloat11's released kernel and nvCOMP's ANS.

    pip install --no-deps --target DIR dfloat11==0.5.0 nvidia-nvcomp-cu13 nvidia-libnvcomp-cu13
    python benchmarks/peers.py --dfloat11 DIR --nvcomp DIR [--name peers]        writes results/<name>.json

Everything is compared as bytes before its time counts. Times are medians over more than 900 MB of distinct packed
bytes: of CUDA graph replays, or, where a library's calls cannot be captured, of a stream's events (column timed_by).
DFloat11 gets units made by samebits.df11, which writes the bytes of its own encoder, and decodes all matrices of a
block in one launch. nvCOMP only gets the exponents; its rate is that of the BF16 weights they belong to. The roofs are
measured by plain kernels in the same run. What is not installed is reported as such.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import torch

import samebits
from common import DECODER_LAYERS, Measured, encode_checked, significant, synthetic_matrix, write_results
from dfloat11_kernel import DFloat11
from gpu import OUTPUTS, Roofs, device_name, distinct, measure_roofs, time_graph
from nvcomp_ans import NvcompAns
from samebits.errors import SamebitsError

Row = dict[str, Any]
Shape = tuple[int, int]

CASES: dict[str, Sequence[Shape]] = {
    "4096 x 4096": [(4096, 4096)],
    "12288 x 4096": [(12288, 4096)],
    "28672 x 8192": [(28672, 8192)],
    "a block of Llama 3.1 8B": list(DECODER_LAYERS["Llama 3.1 8B"].values()),
}
ROOF = "roof: fill the output, read samebits' bytes"
# A library that fails, also for want of what another version had, is reported so and costs nobody else's results.
FAILURES = (RuntimeError, ValueError, TypeError, AttributeError, SamebitsError)


class Decoder(Protocol):
    name: str

    def measure(self, weights: Sequence[torch.Tensor], repeats: int) -> Measured: ...


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="peers")
    parser.add_argument("--repeats", type=int, default=15)
    for package in ("dfloat11", "nvcomp"):
        parser.add_argument(f"--{package}", metavar="DIR", help="where it was installed to, if Python does not find it")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device")
    sys.path += filter(None, dict.fromkeys([arguments.dfloat11, arguments.nvcomp]))
    rows = measure_all(installed(), arguments.repeats, "cuda")
    print(write_results(arguments.name, device_name(), rows))
    return 0


def installed() -> dict[str, Decoder | None]:
    """The peers by name; None for those that are not there."""
    return {peer.name: peer.installed() for peer in (DFloat11, NvcompAns)}


def measure_all(peers: Mapping[str, Decoder | None], repeats: int, device: str) -> list[Row]:
    """The rows of the tables "decode" and "roofs": ours for every case, then one peer after the other."""
    rates: dict[str, float] = {}
    rows: list[Row] = []
    for matrix, shapes in CASES.items():
        weights = matrices(shapes, device)
        packed = [encode_checked(weight) for weight in weights]
        words = sum(weight.numel() for weight in weights)
        copies = distinct(packed)
        roofs = measure_roofs([tensor.data for copy in copies for tensor in copy], words, repeats)
        roof_rate = rates[matrix] = 2 * words / roofs.decode_seconds(sum(tensor.nbytes for tensor in packed))
        rows += [
            decode_row(matrix, "samebits", words, measure_samebits(copies, weights, repeats), roof_rate),
            empty_row(matrix, ROOF) | {"decode_tb_per_s": significant(roof_rate / 1e12), "of_roof": 1.0},
            roofs_row(matrix, words, roofs),
        ]
        print(*rows[-3:], sep="\n", flush=True)
    for name, peer in peers.items():
        for matrix, shapes in CASES.items():
            rows.append(measure_peer(matrix, shapes, name, peer, rates[matrix], repeats, device))
            print(rows[-1], flush=True)
    order = list(CASES)
    return sorted(rows, key=lambda row: (row["table"], order.index(row["matrix"])))


def measure_peer(
    matrix: str, shapes: Sequence[Shape], name: str, peer: Decoder | None, roof_rate: float, repeats: int, device: str
) -> Row:
    """What it reached, or why there is nothing."""
    if peer is None:
        return empty_row(matrix, name) | {"note": "not installed"}
    weights = matrices(shapes, device)
    try:
        measured = peer.measure(weights, repeats)
    except FAILURES as error:
        traceback.print_exc()
        return empty_row(matrix, peer.name) | {"note": f"failed: {error}"}
    return decode_row(matrix, peer.name, sum(weight.numel() for weight in weights), measured, roof_rate)


def matrices(shapes: Sequence[Shape], device: str) -> list[torch.Tensor]:
    return [synthetic_matrix(*shape, seed=seed, device=device) for seed, shape in enumerate(shapes)]


def measure_samebits(
    blocks: Sequence[Sequence[samebits.PackedTensor]], weights: Sequence[torch.Tensor], repeats: int
) -> Measured:
    """``samebits.decode`` of each tensor of a block, one after the other.

    Raises:
        SystemExit: an output differs from the weights, so there is nothing worth measuring.
    """
    outputs: list[list[torch.Tensor]] = [[] for _ in range(OUTPUTS)]

    def decode(i: int) -> None:
        outputs[i % OUTPUTS] = [samebits.decode(tensor) for tensor in blocks[i]]

    timing = time_graph([partial(decode, i) for i in range(len(blocks))], repeats)
    pairs = ((out, weight) for block in outputs if block for out, weight in zip(block, weights, strict=True))
    if not all(torch.equal(out.view(torch.int16), weight.view(torch.int16)) for out, weight in pairs):
        raise SystemExit("samebits: an output differs from the weights")
    return Measured(sum(tensor.nbytes for tensor in blocks[0]), timing, "CUDA graph")


def empty_row(matrix: str, decoder: str) -> Row:
    """A row of the table "decode" in which nothing is known."""
    columns = ("bits_per_weight", "decode_tb_per_s", "decode_microseconds", "of_roof", "timed_by", "note")
    return {"table": "decode", "matrix": matrix, "decoder": decoder} | dict.fromkeys(columns)


def decode_row(matrix: str, decoder: str, weights: int, measured: Measured, roof_rate: float) -> Row:
    """``roof_rate``: bytes of BF16 a second that the memory allows."""
    return empty_row(matrix, decoder) | {
        "bits_per_weight": round(8 * measured.nbytes / weights, 4),
        **measured.timing.rates("decode_tb_per_s", 2 * weights / 1e12),
        "decode_microseconds": significant(measured.timing.median * 1e6),
        "of_roof": significant(2 * weights / measured.timing.median / roof_rate),
        "timed_by": measured.timed_by,
    }


def roofs_row(matrix: str, weights: int, roofs: Roofs) -> Row:
    return {
        "table": "roofs",
        "matrix": matrix,
        "fill_tb_per_s": significant(2 * weights / roofs.fill_seconds / 1e12),
        "read_tb_per_s": significant(roofs.read_rate / 1e12),
        "read_and_write_tb_per_s": significant(roofs.read_write_rate / 1e12),
    }


if __name__ == "__main__":
    raise SystemExit(main())
