"""The compiled loops of the compact code.

Decoding is safe on any contents: a state stays below 256 by the table's construction, and reads stay in the streams.
"""

from __future__ import annotations

from math import log2
from typing import TYPE_CHECKING

import numpy as np

from samebits.compiled import compiled, inlined
from samebits.format.geometry import RUN_WORDS
from samebits.format.header import ESCAPE, STATES
from samebits.vectors import load_bits

if TYPE_CHECKING:
    from numpy.typing import NDArray

U64 = np.uint64
SLACK = RUN_WORDS // 2 + 4  # words behind the streams that a run of 8 + 16 bits for each of its words may reach
_MAX_FREQUENCY = 255  # what a byte of the code section holds


@compiled
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


@compiled
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


@compiled
def _cost(counts: NDArray[np.int64], frequencies: NDArray[np.int64]) -> float:
    """Bits of the streams and the code section, about."""
    bits, previous = 8.0 * counts[ESCAPE], -1
    for symbol in range(ESCAPE + 1):
        if counts[symbol] > 0:
            bits += counts[symbol] * log2(STATES / frequencies[symbol])
            bits += 8 if symbol == previous + 1 else 24
            previous = symbol
    return bits


@compiled
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


@inlined
def _put(output: NDArray[np.uint32], position: int, value: int, bits: int) -> int:
    """Write the low ``bits`` of ``value``; the position behind them."""
    word = position >> 5
    wide = U64(value) << U64(position & 31)
    output[word] |= np.uint32(wide & U64(0xFFFFFFFF))
    output[word + 1] |= np.uint32(wide >> U64(32))
    return position + bits


@compiled
def decode_table(frequencies: NDArray[np.int64]) -> NDArray[np.uint32]:
    """uint32 [256]: ``symbol << 16 | 2 ** n * y - 256 << 8 | n`` for each state (FORMAT.md 3.7)."""
    table, symbols, following = np.empty(STATES, np.uint32), np.empty(STATES, np.int64), frequencies.copy()
    first = 0
    for symbol in range(frequencies.size):
        for number in range(first, first + frequencies[symbol]):
            symbols[number] = symbol
        first += frequencies[symbol]
    for state in range(STATES):
        number, bits = 0, 0
        for i in range(8):
            number |= (state >> i & 1) << (7 - i)
        symbol = symbols[number]
        y = following[symbol]
        following[symbol] += 1
        while y << bits < STATES:
            bits += 1
        table[state] = symbol << 16 | (y << bits) - STATES << 8 | bits
    return table


@compiled
def decode_runs(
    output: NDArray[np.uint16], table: NDArray[np.uint32], starts: NDArray[np.int64], raw: NDArray[np.uint8],
    streams: NDArray[np.uint32], first: int, last: int,
) -> None:  # fmt: skip
    """Decode runs [first, last), whose ``starts`` are bits of the streams, into ``output``.

    Args:
        streams: with SLACK words more than there are.
    """
    run = first
    while run + 4 <= last and RUN_WORDS * (run + 4) <= output.size:
        _four_runs(output, table, starts, run, streams)
        run += 4
    for rest in range(run, last):
        position, state = _begin(streams, starts[rest])
        for i in range(RUN_WORDS * rest, min(RUN_WORDS * (rest + 1), output.size)):
            output[i], state, used = _step(table, state, load_bits(streams, position))
            position += used
    for i in range(RUN_WORDS * first, min(RUN_WORDS * last, output.size)):  # for vector units
        low = np.uint16(raw[i])
        output[i] = np.uint16((low & 0x80) << 8) | np.uint16(output[i] << 7) | np.uint16(low & 0x7F)


@compiled
def _four_runs(
    output: NDArray[np.uint16], table: NDArray[np.uint32], starts: NDArray[np.int64], run: int,
    streams: NDArray[np.uint32],
) -> None:  # fmt: skip
    """The exponents of four whole runs in turns: each waits for its own states, not for the others'."""
    position1, state1 = _begin(streams, starts[run])
    position2, state2 = _begin(streams, starts[run + 1])
    position3, state3 = _begin(streams, starts[run + 2])
    position4, state4 = _begin(streams, starts[run + 3])
    first = U64(RUN_WORDS * run)
    for place in range(first, first + U64(RUN_WORDS)):
        output[place], state1, used1 = _step(table, state1, load_bits(streams, position1))
        output[place + U64(RUN_WORDS)], state2, used2 = _step(table, state2, load_bits(streams, position2))
        output[place + U64(2 * RUN_WORDS)], state3, used3 = _step(table, state3, load_bits(streams, position3))
        output[place + U64(3 * RUN_WORDS)], state4, used4 = _step(table, state4, load_bits(streams, position4))
        position1, position2 = position1 + used1, position2 + used2
        position3, position4 = position3 + used3, position4 + used4


@inlined
def _begin(streams: NDArray[np.uint32], start: int) -> tuple[int, int]:
    """Where a run goes on behind its first state, and that."""
    position = U64(start)
    return position + U64(8), load_bits(streams, position) & U64(255)


@inlined
def _step(table: NDArray[np.uint32], state: int, bits: int) -> tuple[int, int, int]:
    """The exponent in a state, the state behind it, and how many of the bits these took."""
    entry = U64(table[state])
    exponent, used = entry >> U64(16), U64(0)
    if exponent == U64(ESCAPE):
        exponent = bits & U64(255)
        bits >>= U64(8)
        used = U64(8)
    count = entry & U64(255)
    return exponent, (entry >> U64(8) & U64(255)) + (bits & ((U64(1) << count) - U64(1))), used + count
