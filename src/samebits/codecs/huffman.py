"""Canonical, length-limited prefix codes (FORMAT.md section 3).

Lengths come from package-merge (Larmore and Hirschberg, "A fast algorithm for optimal length-limited Huffman codes",
J. ACM 37(3), 1990). All of it is integer arithmetic, so every device that counts the same symbols gets the same code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from samebits.compiled import compiled
from samebits.format.header import COUNTS

if TYPE_CHECKING:
    from numpy.typing import NDArray


@compiled
def package_merge(weights: NDArray[np.int64], limit: int | np.int64) -> NDArray[np.int64]:
    """``code_lengths`` of ascending weights.

    Packages only get lighter from level to level, so a level is like the one before it up to the first package that
    changed, and is merged anew from there on: a third of the work for a thousand symbols.
    """
    count = weights.size
    if count == 1:
        return np.ones(1, np.int64)
    level, packages = np.empty(2 * count, np.int64), np.empty(count, np.int64)
    for i in range(count):
        level[i] = weights[i]
    places = np.full((limit, count), 2 * count, np.int32)  # of each level's packages among its items, cheapest first
    size, changed = count, 0  # items of the level; the first package that the level before has elsewhere
    for depth in range(1, limit):
        first, number = changed // 2, size // 2
        for package in range(first):
            places[depth, package] = places[depth - 1, package]
        for package in range(first, number):
            packages[package] = level[2 * package] + level[2 * package + 1]
        i = int(places[depth, first - 1]) + 1 if first > 0 else 0
        symbol, size = i - first, count + number
        for package in range(first, number):
            while symbol < count and weights[symbol] <= packages[package]:
                level[i] = weights[symbol]
                symbol, i = symbol + 1, i + 1
            level[i] = packages[package]
            places[depth, package] = i
            i += 1
        for rest in range(symbol, count):
            level[number + rest] = weights[rest]
        changed = int(places[depth, first]) if first < number else size
    lengths = np.zeros(count, np.int64)
    take = 2 * count - 2
    for depth in range(limit - 1, -1, -1):
        taken = 0
        for package in range(count):
            taken += places[depth, package] < take
        for symbol in range(take - taken):
            lengths[symbol] += 1
        take = 2 * taken
    return lengths


def code_lengths(weights: NDArray[np.int64], limit: int) -> NDArray[np.int64]:
    """Optimal code lengths of at most ``limit`` bits for 1 to ``2 ** limit`` positive weights; of one alone: 1."""
    order = np.argsort(weights, kind="stable")
    lengths = np.empty(weights.size, np.int64)
    lengths[order] = package_merge(weights[order].astype(np.int64), limit)
    return lengths


@dataclass(frozen=True)
class CanonicalCode:
    """A code as FORMAT.md 3.1 stores it.

    Attributes:
        counts: uint16 [16], codewords of each length.
        symbols: uint16, sorted by code length, then value.
    """

    counts: NDArray[np.uint16]
    symbols: NDArray[np.uint16]

    @classmethod
    def from_lengths(cls, symbols: NDArray[np.int64], lengths: NDArray[np.int64]) -> CanonicalCode:
        by_length = symbols[np.lexsort((symbols, lengths))]
        return cls(np.bincount(lengths, minlength=COUNTS).astype(np.uint16), by_length.astype(np.uint16))

    @classmethod
    def from_section(cls, section: NDArray[np.uint16]) -> CanonicalCode:
        """Read the code section (already validated)."""
        return cls(section[:COUNTS], section[COUNTS:])

    def to_section(self) -> NDArray[np.uint16]:
        return np.concatenate([self.counts, self.symbols])

    @property
    def max_length(self) -> int:
        return int(np.nonzero(self.counts)[0][-1])

    def encode_table(self, size: int) -> NDArray[np.uint32]:
        """uint32 [size]: ``length << 16 | codeword``, the codeword's first bit lowest; 0 for symbols without one."""
        table: NDArray[np.uint32] = _encode_table(self.counts, self.symbols, size)
        return table

    def decode_table(self, width: int) -> NDArray[np.uint16]:
        """uint16 [2 ** width]: ``length << 12 | symbol`` for every window of ``width`` bits, the first bit lowest."""
        table: NDArray[np.uint16] = _decode_table(self.counts, self.symbols, width)
        return table


@compiled
def _reverse(value: int, bits: int) -> int:
    reversed_value = 0
    for _ in range(bits):
        reversed_value = (reversed_value << 1) | (value & 1)
        value >>= 1
    return reversed_value


@compiled
def _encode_table(counts: NDArray[np.uint16], symbols: NDArray[np.uint16], size: int) -> NDArray[np.uint32]:
    table = np.zeros(size, np.uint32)
    code, position = 0, 0
    for length in range(1, counts.size):
        code <<= 1
        for _ in range(counts[length]):
            table[symbols[position]] = (length << 16) | _reverse(code, length)
            code += 1
            position += 1
    return table


@compiled
def _decode_table(counts: NDArray[np.uint16], symbols: NDArray[np.uint16], width: int) -> NDArray[np.uint16]:
    table = np.full(1 << width, 1 << 12, np.uint16)  # windows that no codeword starts: one bit, symbol 0
    code, position = 0, 0
    for length in range(1, counts.size):
        code <<= 1
        for _ in range(counts[length]):
            for window in range(_reverse(code, length), 1 << width, 1 << length):
                table[window] = (length << 12) | symbols[position]
            code += 1
            position += 1
    return table
