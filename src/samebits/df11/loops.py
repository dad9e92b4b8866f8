"""The compiled loops of the DFloat11 codec, over ranges that threads share. Streams are most significant bit first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from samebits.df11.code import FIRST_POINTER, MAX_LEVELS

if TYPE_CHECKING:
    from numpy.typing import NDArray

WINDOW_BITS = 64  # of the stream to a gap: the first code that starts in a window
BLOCK_BITS = 8 * 4096  # of the stream to a position


@njit(cache=True, nogil=True)
def write_codes(
    words: NDArray[np.uint16], codes: NDArray[np.uint32], lengths: NDArray[np.uint8], start: int, before: int,
    index: int, stream: NDArray[np.uint8], sign_mantissa: NDArray[np.uint8], gaps: NDArray[np.uint8],
    positions: NDArray[np.uint32],
) -> int:  # fmt: skip
    """Write the codes of words behind each other, their other bits, and the gaps and positions of what starts there.

    Args:
        start: bit of the whole stream at which the first one starts.
        before: at which the one before it starts, -1 if there is none.
        index: of the first one in the unit.
        stream: from the byte of that bit on. What precedes the first one in that byte is left 0 here.
        sign_mantissa: uint8 [words].

    Returns:
        The byte at which they end, if it is not full: it is not written, because another range goes on with it.
    """
    bit, byte = start, 0
    held, count = np.uint64(0), start & 7  # bits not written yet
    for i in range(words.size):
        note_start(bit, before, index + i, gaps, positions)
        sign_mantissa[i] = words[i] >> 8 & 0x80 | words[i] & 0x7F
        exponent = words[i] >> 7 & 0xFF
        length = int(lengths[exponent])
        held = held << np.uint64(length) | np.uint64(codes[exponent])
        count += length
        before = bit
        bit += length
        if count >= 32:
            count -= 32
            whole = held >> np.uint64(count)
            for part in range(4):
                stream[byte + part] = np.uint8(whole >> np.uint64(24 - 8 * part) & np.uint64(0xFF))
            byte += 4
    while count >= 8:
        count -= 8
        stream[byte] = np.uint8(held >> np.uint64(count) & np.uint64(0xFF))
        byte += 1
    return int(held << np.uint64(8 - count) & np.uint64(0xFF))


@njit(cache=True, nogil=True)
def note_start(bit: int, before: int, index: int, gaps: NDArray[np.uint8], positions: NDArray[np.uint32]) -> None:
    """Code ``index`` starts at ``bit``; the one before it at ``before`` (-1: it is the first)."""
    if before < 0 or before // WINDOW_BITS != bit // WINDOW_BITS:
        gaps[bit // WINDOW_BITS] = bit % WINDOW_BITS
    if before < 0 or before // BLOCK_BITS != bit // BLOCK_BITS:
        positions[bit // BLOCK_BITS] = index


@njit(cache=True, nogil=True)
def pack_gaps(gaps: NDArray[np.uint8], packed: NDArray[np.uint8], first: int, last: int) -> None:
    """Pack groups [first, last) of eight gaps, 5 bits each, into 5 bytes each, most significant bit first."""
    for group in range(first, last):
        held = np.uint64(0)
        for i in range(8 * group, 8 * group + 8):
            held = held << np.uint64(5) | np.uint64(gaps[i])
        for part in range(5):
            packed[5 * group + part] = np.uint8(held >> np.uint64(32 - 8 * part) & np.uint64(0xFF))


@njit(cache=True, nogil=True)
def unpack_gaps(packed: NDArray[np.uint8], gaps: NDArray[np.uint8], first: int, last: int) -> None:
    """Unpack groups [first, last): the reverse."""
    for group in range(first, last):
        held = np.uint64(0)
        for part in range(5 * group, 5 * group + 5):
            held = held << np.uint64(8) | np.uint64(packed[part])
        for i in range(8):
            gaps[8 * group + i] = np.uint8(held >> np.uint64(35 - 5 * i) & np.uint64(31))


@njit(cache=True, nogil=True)
def decode_blocks(
    stream: NDArray[np.uint8], sign_mantissa: NDArray[np.uint8], luts: NDArray[np.uint8], gaps: NDArray[np.uint8],
    positions: NDArray[np.int64], output: NDArray[np.uint16], first: int, last: int,
) -> int:  # fmt: skip
    """Decode the words whose codes start in blocks [first, last) of the stream.

    Returns:
        -1, or the first word whose code does not fit the tables, the stream or the positions.
    """
    lengths = luts[luts.shape[0] - 1]
    for block in range(first, last):
        bit = block * BLOCK_BITS + gaps[block * (BLOCK_BITS // WINDOW_BITS)]
        end = min((block + 1) * BLOCK_BITS, 8 * stream.size)  # no code of this block starts behind it
        byte, window, held = bit >> 3, np.uint64(0), -(bit & 7)  # `held` bits of the stream on top of `window`
        for i in range(positions[block], positions[block + 1]):
            while held <= 56:
                if byte < stream.size:
                    ahead = np.uint64(stream[byte])
                    window |= ahead << np.uint64(56 - held)
                byte += 1
                held += 8
            table, entry = 0, luts[0, window >> np.uint64(56)]
            for level in range(1, MAX_LEVELS):
                if entry < FIRST_POINTER:
                    break
                table = 256 - entry
                entry = luts[table, window >> np.uint64(56 - 8 * level) & np.uint64(0xFF)]
            length = int(lengths[entry]) if entry < FIRST_POINTER else 0
            if length == 0 or bit >= end:
                return i
            bit += length
            held -= length
            window <<= np.uint64(length)
            rest = np.uint16(sign_mantissa[i])
            output[i] = (rest & 0x80) << 8 | np.uint16(entry) << 7 | rest & 0x7F
        if bit > 8 * stream.size:
            return positions[block + 1] - 1
    return -1
