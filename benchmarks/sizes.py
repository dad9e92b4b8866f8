"""How small do weights get? Bits a weight, everything counted, beside the entropy limit and DFloat11.

    python benchmarks/sizes.py [--name sizes]        writes results/<name>.json, a minute on two cores

Each tensor's round trip is checked before it counts; the smallest stay as they are, as in `samebits compress`. The
limit is 8 bits of sign and mantissa and the entropy of the exponents, tensor by tensor. DFloat11's size is counted from
its layout (dfloat11_size.py), one unit a layer, as it groups them.

Table "cache" is about keys and values instead: those that the embedded model has of SEQUENCES times TOKENS tokens of
the text that it was trained on, in the form in which samebits.PackedCache packs them.
"""

from __future__ import annotations

import argparse
import gzip
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, AutoTokenizer

import dfloat11_size
from common import (
    DECODER_LAYERS,
    EXAMPLE_MODEL,
    checkpoint_tensors,
    cpu_name,
    encode_checked,
    minilm_folder,
    synthetic_matrix,
    write_results,
)
from samebits.bf16 import entropy, exponent_histogram
from samebits.format.names import MIN_WEIGHTS
from samebits.nn.packed_states import matrix_of

NamedTensors = Iterable[tuple[str, torch.Tensor]]
TEXT = EXAMPLE_MODEL.parent / "kjv.txt.gz"
SEQUENCES, TOKENS = 64, 256


@dataclass
class Size:
    """Sums over tensors."""

    weights: int = 0
    packed_bytes: int = 0
    dfloat11_bytes: int = 0
    exponent_bits: float = 0.0
    tensors: int = 0
    raw_tensors: int = 0
    histogram: NDArray[np.int64] = field(default_factory=lambda: np.zeros(256, np.int64))

    def add_tensor(self, tensor: torch.Tensor) -> None:
        packed = encode_checked(tensor) if tensor.numel() >= MIN_WEIGHTS else None
        histogram = exponent_histogram(tensor)
        self.histogram += histogram
        self.weights += tensor.numel()
        self.packed_bytes += packed.nbytes if packed else 2 * tensor.numel()
        self.exponent_bits += tensor.numel() * entropy(histogram)
        self.tensors += 1
        self.raw_tensors += packed is None or packed.is_raw

    def add(self, other: Size) -> None:
        for name in ("weights", "packed_bytes", "dfloat11_bytes", "exponent_bits", "tensors", "raw_tensors"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def row(self, table: str, name: str) -> dict[str, Any]:
        bits = 8 * self.packed_bytes / self.weights
        limit = 8 + self.exponent_bits / self.weights
        return {
            "table": table,
            "name": name,
            "weights": self.weights,
            "bf16_bytes": 2 * self.weights,
            "packed_bytes": self.packed_bytes,
            "ratio": round(self.packed_bytes / (2 * self.weights), 4),
            "entropy_bits": round(limit - 8, 3),
            "limit_bits_per_weight": round(limit, 3),
            "bits_per_weight": round(bits, 3),
            "overhead_bits": round(bits - limit, 3),
            "dfloat11_bits_per_weight": round(8 * self.dfloat11_bytes / self.weights, 3) or None,
            "tensors": self.tensors,
            "raw_tensors": self.raw_tensors,
        }


def size_of_unit(tensors: NamedTensors) -> Size:
    """Pack each tensor; for DFloat11, matrices are one unit and vectors stay as they are."""
    unit, vectors, matrices = Size(), Size(), 0
    for _, tensor in tensors:
        matrices += tensor.dim() >= 2
        (unit if tensor.dim() >= 2 else vectors).add_tensor(tensor)
    vectors.dfloat11_bytes = 2 * vectors.weights
    unit.dfloat11_bytes = dfloat11_size.unit_bytes(unit.histogram, matrices) if matrices else 0
    unit.add(vectors)
    return unit


def part_of(name: str) -> str:
    """Which row of the per-layer table a tensor belongs to."""
    layer = re.search(r"layers?\.(\d+)\.", name)
    if layer:
        return f"layer {layer[1]}"
    return "embedding" if "embed" in name else "rest"


def checkpoint_rows(table: str, title: str, tensors: NamedTensors) -> Iterator[dict[str, Any]]:
    """One row a layer, and the whole."""
    total = Size()
    by_part = sorted(tensors, key=lambda item: part_of(item[0]))
    for part, members in groupby(by_part, key=lambda item: part_of(item[0])):
        size = size_of_unit(members)
        yield size.row(table, part)
        total.add(size)
    yield total.row(table, "whole model")
    yield total.row("models", title)


def synthetic_rows() -> Iterator[dict[str, Any]]:
    for model, shapes in DECODER_LAYERS.items():
        matrices = ((name, synthetic_matrix(*shape, seed=seed)) for seed, (name, shape) in enumerate(shapes.items()))
        yield size_of_unit(matrices).row("models", f"a layer of {model}'s shapes, synthetic weights")


@torch.no_grad()
def cache_rows() -> Iterator[dict[str, Any]]:
    """Keys and values, each of all layers."""
    tokenizer = AutoTokenizer.from_pretrained(EXAMPLE_MODEL)
    model = AutoModelForCausalLM.from_pretrained(EXAMPLE_MODEL, dtype=torch.bfloat16)
    text = gzip.decompress(TEXT.read_bytes()).decode()[: 16 * SEQUENCES * TOKENS]
    verses = " ".join(line.partition(" ")[2] for line in text.splitlines())
    tokens = tokenizer(verses, return_tensors="pt").input_ids[0, : SEQUENCES * TOKENS].view(SEQUENCES, TOKENS)
    cache = model(tokens, use_cache=True).past_key_values
    for name in ("keys", "values"):
        size = Size()
        for layer in cache.layers:
            size.add_tensor(matrix_of(getattr(layer, name)))
        yield size.row("cache", name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="sizes")
    options = parser.parse_args()
    rows = [
        *checkpoint_rows(
            "minilm", "all-MiniLM-L6-v2, cast to BF16", checkpoint_tensors(minilm_folder() / "model.safetensors")
        ),
        *checkpoint_rows(
            "king-james", "king-james (examples/)", checkpoint_tensors(EXAMPLE_MODEL / "model.safetensors")
        ),
        *synthetic_rows(),
        *cache_rows(),
    ]
    print(write_results(options.name, cpu_name(), rows))


if __name__ == "__main__":
    main()
