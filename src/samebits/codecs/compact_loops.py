"""The compiled loops of the compact code.

Decoding is safe on any contents: a state stays below 256 by the table's construction, and reads stay in the streams.
"""

from __future__ import annotations

from math import log2
from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from samebits.format.geometry import RUN_WORDS
from samebits.format.packed import ESCAPE, STATES

if TYPE_CHECKING:
    from numpy.typing import NDArray

U64 = np.uint64
_MAX_FREQUENCY = 255  # what a byte of the code section holds


@njit(cache=True, nogil=True)
def choose_frequencies(histogram: NDArray[np.int64], used: NDArray[np.int64]) -> NDArray[np.int64]:
    """Frequencies for the most frequent of the ``used`` exponents (descending by count), as many as pay.

    The others share the escape's.
    """
    counts = np.zeros(ESCAPE + 1, np.int64)
    counts[ESCAPE] = histogram.sum()
    best, least = np.zeros(ESCAPE + 1, np.int64), np.inf
    for kept in range(min(used.size, STATES - 1)):
        counts[used[kept]] = histogram[used[kept]]
        counts[ESCAPE] -= histogram[used[kept]]
        frequencies = _share_states(counts)
        cost = _cost(counts, frequencies)
        if cost < least:
            best, least = frequencies, cost
    best[ESCAPE] = STATES - best[:ESCAPE].sum()
    return best


@njit(cache=True, nogil=True)
def _share_states(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """One state for each symbol that occurs; each further one to the symbol that gains most by it."""
    frequencies = (counts > 0).astype(np.int64)
    gains = counts.astype(np.float64)  # of one state more: count * log2((f + 1) / f)
    for _ in range(STATES - frequencies.sum()):
        symbol = int(np.argmax(gains))
        if gains[symbol] == 0.0:  # one exponent alone, which has all that a byte can say
            break
        frequencies[symbol] += 1
        f = frequencies[symbol]
        gains[symbol] = counts[symbol] * log2((f + 1) / f) if f < _MAX_FREQUENCY else 0.0
    return frequencies


@njit(cache=True, nogil=True)
def _cost(counts: NDArray[np.int64], frequencies: NDArray[np.int64]) -> float:
    """Bits of the streams and the code section, about."""
    bits, previous = 8.0 * counts[ESCAPE], -1
    for symbol in range(ESCAPE + 1):
        if counts[symbol] > 0:
            bits += counts[symbol] * log2(STATES / frequencies[symbol])
            bits += 8 if symbol == previous + 1 else 24
            previous = symbol
    return bits


@njit(cache=True, nogil=True)
def encode_runs(
    words: NDArray[np.uint16], frequencies: NDArray[np.int64], starts: NDArray[np.int64], states: NDArray[np.int64],
    lengths: NDArray[np.uint16],
) -> NDArray[np.uint32]:  # fmt: skip
    """The streams (FORMAT.md 6.7), and each run's length. A run is coded from its last word to its first."""
    output = np.zeros((16 * words.size + 8 * lengths.size) // 32 + 2, np.uint32)
    values, counts = np.empty(RUN_WORDS, np.int64), np.empty(RUN_WORDS, np.int64)
    position = 0
    for run in range(lengths.size):
        first = RUN_WORDS * run
        size = min(RUN_WORDS, words.size - first)
        state = 0
        for i in range(size - 1, -1, -1):
            exponent = np.int64(words[first + i] >> 7) & 255
            symbol = exponent if frequencies[exponent] > 0 else ESCAPE
            y, bits = STATES + state, 0
            while y >> bits >= 2 * frequencies[symbol]:
                bits += 1
            values[i], counts[i] = y & ((1 << bits) - 1), bits
            if symbol == ESCAPE:
                values[i], counts[i] = exponent | values[i] << 8, bits + 8
            state = states[starts[symbol] + (y >> bits) - frequencies[symbol]]
        start = position
        position = _put(output, position, state, 8)
        for i in range(size):
            position = _put(output, position, values[i], counts[i])
        lengths[run] = position - start
    return output[: (position + 31) // 32].copy()


@njit(cache=True, nogil=True, inline="always")
def _put(output: NDArray[np.uint32], position: int, value: int, bits: int) -> int:
    """Write the low ``bits`` of ``value``; the position behind them."""
    word = position >> 5
    wide = U64(value) << U64(position & 31)
    output[word] |= np.uint32(wide & U64(0xFFFFFFFF))
    output[word + 1] |= np.uint32(wide >> U64(32))
    return position + bits


@njit(cache=True, nogil=True)
def decode_runs(
    output: NDArray[np.uint16], table: NDArray[np.uint32], starts: NDArray[np.int64], raw: NDArray[np.uint8],
    streams: NDArray[np.uint32], first: int, last: int,
) -> None:  # fmt: skip
    """Decode runs [first, last), whose ``starts`` are bits of the streams, into ``output``."""
    for run in range(first, last):
        state = _peek(streams, starts[run]) & 255
        position = starts[run] + 8
        for i in range(RUN_WORDS * run, min(RUN_WORDS * (run + 1), output.size)):
            entry = np.int64(table[state])
            window = _peek(streams, position)
            exponent, bits = entry >> 16, entry >> 8 & 15
            if exponent == ESCAPE:
                exponent = window & 255
                window >>= 8
                position += 8
            state = (entry & 255) + (window & ((1 << bits) - 1))
            position += bits
            output[i] = (raw[i] & 0x80) << 8 | exponent << 7 | raw[i] & 0x7F


@njit(cache=True, nogil=True, inline="always")
def _peek(streams: NDArray[np.uint32], position: int) -> int:
    """At least 16 bits from ``position`` on; behind the end, what is there last."""
    word, last = position >> 5, streams.size - 1
    wide = U64(streams[min(word, last)]) | U64(streams[min(word + 1, last)]) << U64(32)
    return np.int64((wide >> U64(position & 31)) & U64(0xFFFFFFFF))
