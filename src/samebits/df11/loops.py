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
BLOCK_WINDOWS = BLOCK_BITS // WINDOW_BITS
U64 = np.uint64


@njit(cache=True, nogil=True)
def write_codes(
    words: NDArray[np.uint16], codes: NDArray[np.uint64], lengths: NDArray[np.uint64], start: int, index: int,
    windows: NDArray[np.uint64], sign_mantissa: NDArray[np.uint8], gaps: NDArray[np.uint8],
    positions: NDArray[np.uint32],
) -> None:  # fmt: skip
    """Write the codes of words behind each other, their other bits, and the gaps and positions of what comes next.

    Args:
        codes: of each exponent, on top of 64 bits.
        start: bit of the whole stream at which the first one starts.
        index: of the first one in the unit.
        windows: of the stream, from that of ``start`` to that of the end. What does not belong to the words is left 0.
        sign_mantissa: uint8 [words].
        gaps, positions: written where a code is the last one of a window or block: the next one's are those of another.
    """
    for i in range(words.size):
        sign_mantissa[i] = words[i] >> 8 & 0x80 | words[i] & 0x7F
    window, used, held = start // WINDOW_BITS, U64(start % WINDOW_BITS), U64(0)  # `used` bits of the window are held
    place = 0
    for i in range(words.size):
        exponent = words[i] >> 7 & 0xFF
        held |= codes[exponent] >> used
        used += lengths[exponent]
        if used >= U64(WINDOW_BITS):
            used -= U64(WINDOW_BITS)
            windows[place] = byte_swapped(held)
            held = codes[exponent] << (lengths[exponent] - used)
            place += 1
            window += 1
            gaps[window] = used
            if window % BLOCK_WINDOWS == 0:
                positions[window // BLOCK_WINDOWS] = index + i + 1
    windows[place] = byte_swapped(held)


@njit(cache=True, nogil=True)
def byte_swapped(value: int) -> int:
    """The bytes of 64 bits in the other order."""
    value = (value & U64(0x00FF00FF00FF00FF)) << U64(8) | value >> U64(8) & U64(0x00FF00FF00FF00FF)
    value = (value & U64(0x0000FFFF0000FFFF)) << U64(16) | value >> U64(16) & U64(0x0000FFFF0000FFFF)
    return value << U64(32) | value >> U64(32)


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
