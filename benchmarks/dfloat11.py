"""What DFloat11 would need for the same weights: its published layout, counted without writing it.

One unit (all matrices of a layer behind each other) holds sign_mantissa (a byte a weight), the Huffman stream of the
exponents, 5 bits for each 8 bytes and 4 bytes for each 4096 bytes of that stream, decode tables of 256 bytes each, and
8 bytes for each matrix but the last.
"""

from __future__ import annotations

import heapq

import numpy as np
from numpy.typing import NDArray

WINDOW_BYTES = 8
BLOCK_BYTES = 4096
GAP_BYTES_PER_BLOCK = 5 * BLOCK_BYTES // WINDOW_BYTES // 8
MAX_CODE_LENGTH = 32
MAX_EXPONENT = 239  # table entries from 240 on are pointers
TABLE_BYTES = 256
END = -1  # a symbol of count 1 that sorts before all exponents and has no entry in the tables

Node = int | tuple["Node", "Node"]


def huffman_codes(counts: dict[int, int]) -> dict[int, str]:
    """Codes as text of 0 and 1, from a heap of (count, leftmost symbol); the smaller node gets the 0 side."""
    heap: list[tuple[int, int, Node]] = [(count, symbol, symbol) for symbol, count in counts.items()]
    heapq.heapify(heap)
    while len(heap) > 1:
        (first, leftmost, left), (second, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        heapq.heappush(heap, (first + second, leftmost, (left, right)))
    return dict(_walk(heap[0][2], ""))


def _walk(node: Node, code: str) -> list[tuple[int, str]]:
    if isinstance(node, int):
        return [(node, code)]
    return _walk(node[0], code + "0") + _walk(node[1], code + "1")


def limited_codes(counts: dict[int, int]) -> dict[int, str]:
    """Codes of at most 32 bits: where they are longer, the rarest counts become 1, more of them each time."""
    for rarest in range(len(counts) + 1):
        lowered = dict(counts)
        for symbol in sorted(counts, key=counts.__getitem__)[:rarest]:
            lowered[symbol] = 1
        codes = huffman_codes(lowered)
        if max(map(len, codes.values())) <= MAX_CODE_LENGTH:
            return codes
    raise AssertionError("256 equal counts give codes of 8 bits")


def unit_bytes(histogram: NDArray[np.int64], matrices: int) -> int:
    """Bytes of one unit of ``matrices`` matrices with this histogram of exponents, int64 [256].

    A unit with an exponent that the layout cannot code stays uncompressed: two bytes a weight.
    """
    weights = int(histogram.sum())
    if histogram[MAX_EXPONENT + 1 :].any():
        return 2 * weights
    counts = {exponent: int(count) for exponent, count in enumerate(histogram) if count}
    codes = limited_codes(counts | {END: 1})
    stream = -(-sum(count * len(codes[exponent]) for exponent, count in counts.items()) // 8)
    blocks = -(-stream // BLOCK_BYTES)
    prefixes = {codes[exponent][:length] for exponent in counts for length in range(0, len(codes[exponent]), 8)}
    tables = TABLE_BYTES * (len(prefixes) + 1)  # one each, and one of code lengths
    return weights + stream + tables + GAP_BYTES_PER_BLOCK * blocks + 4 * (blocks + 1) + 8 * (matrices - 1)
