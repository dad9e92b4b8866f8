"""What the tests of decode_rows and decode_experts share."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import torch

from samebits.format.packed import PackedTensor
from tests.codecs.surgery import Parts
from tests.codecs.tensors import bytes_of, packed_of
from tests.codecs.zoo import ZOO

WITH_ROWS = [case for case in ZOO if case.words.ndim]
# Several chunks in a row group, several row groups in a chunk, experts that share row groups, flat.
SHAPES = [(64, 2048), (999, 128), (640, 64), (8, 64, 256), (6, 100, 192), (40, 31, 65)]


def some_ids(entries: int) -> Iterator[torch.Tensor]:
    """First, last, none, several times the same, many, and ids of 0 to 3 dimensions."""
    rng = np.random.default_rng(entries)
    yield torch.tensor(entries - 1)
    yield torch.tensor([], dtype=torch.int32)
    yield torch.tensor([[0, entries - 1], [entries // 2, 0]], dtype=torch.int32)
    yield torch.from_numpy(rng.integers(0, entries, 7))
    yield torch.from_numpy(rng.integers(0, entries, (2, 3, 2)))
    yield torch.from_numpy(rng.integers(0, entries, (4, 6))).T


def only(packed: PackedTensor, entry: int) -> PackedTensor:
    """The packed tensor with the streams of all chunks destroyed in which no word of an entry lies."""
    geometry, words = packed.header.geometry, packed.header.entry_words
    first, last = entry * words // geometry.columns // 8, ((entry + 1) * words - 1) // geometry.columns // 8
    offsets = packed.array("offsets", "<u4")
    parts = Parts.of(bytes_of(packed))
    for chunk, (start, end) in enumerate(pairwise(offsets)):
        group, groups, *_ = geometry.chunk(chunk)
        if group + groups <= first or group > last:
            parts.streams[4 * start : 4 * end] = bytes(4 * int(end - start))
    return packed_of(parts.joined())
