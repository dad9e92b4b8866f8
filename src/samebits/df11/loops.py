"""The compiled loops of the DFloat11 codec, over ranges that threads share. Streams are most significant bit first."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from samebits.compiled import compiled, inlined
from samebits.df11.code import FIRST_POINTER, MAX_LEVELS, SHORT_BITS, SHORT_CODES

if TYPE_CHECKING:
    from numpy.typing import NDArray

WINDOW_BITS = 64  # of the stream to a gap: the first code that starts in a window
BLOCK_BITS = 8 * 4096  # of the stream to a position
BLOCK_WINDOWS = BLOCK_BITS // WINDOW_BITS
U64 = np.uint64
_LOOK_UPS = WINDOW_BITS // SHORT_BITS  # without another peek at the stream
_PART = 4096  # words whose exponents are decoded before they are combined with the rest


@compiled
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


@compiled
def byte_swapped(value: int) -> int:
    """The bytes of 64 bits in the other order."""
    value = (value & U64(0x00FF00FF00FF00FF)) << U64(8) | value >> U64(8) & U64(0x00FF00FF00FF00FF)
    value = (value & U64(0x0000FFFF0000FFFF)) << U64(16) | value >> U64(16) & U64(0x0000FFFF0000FFFF)
    return value << U64(32) | value >> U64(32)


@compiled
def pack_gaps(gaps: NDArray[np.uint8], packed: NDArray[np.uint8], first: int, last: int) -> None:
    """Pack groups [first, last) of eight gaps, 5 bits each, into 5 bytes each, most significant bit first."""
    for group in range(first, last):
        held = U64(0)
        for i in range(8 * group, 8 * group + 8):
            held = held << U64(5) | U64(gaps[i])
        for part in range(5):
            packed[5 * group + part] = np.uint8(held >> U64(32 - 8 * part) & U64(0xFF))


@compiled
def unpack_gaps(packed: NDArray[np.uint8], gaps: NDArray[np.uint8], first: int, last: int) -> None:
    """Unpack groups [first, last): the reverse."""
    for group in range(first, last):
        held = U64(0)
        for part in range(5 * group, 5 * group + 5):
            held = held << U64(8) | U64(packed[part])
        for i in range(8):
            gaps[8 * group + i] = np.uint8(held >> U64(35 - 5 * i) & U64(31))


@compiled
def decode_blocks(
    stream: NDArray[np.uint8], sign_mantissa: NDArray[np.uint8], luts: NDArray[np.uint8], short: NDArray[np.uint64],
    gaps: NDArray[np.uint8], positions: NDArray[np.int64], output: NDArray[np.uint16], before: int, first: int,
    last: int,
) -> int:  # fmt: skip
    """Decode the words whose codes start in blocks [first, last) of the stream; the first ``before`` are not put out.

    As long as neither the block nor the words end soon, several codes are looked up at a time.

    Args:
        short: what code.short_codes makes of ``luts``.

    Returns:
        -1, or the first word whose code does not fit the tables, the stream or the positions.
    """
    windows = np.empty(BLOCK_WINDOWS + 1, np.uint64)  # of a block, and what its last code may need of the next one
    exponents = np.empty(_PART + 8, np.uint8)
    for block in range(first, last):
        _load_windows(stream[block * (BLOCK_BITS // 8) :], windows)
        bit = U64(gaps[block * BLOCK_WINDOWS])
        end = U64(min(BLOCK_BITS, 8 * stream.size - block * BLOCK_BITS))  # no code of this block starts behind it
        begin, stop = positions[block], positions[block + 1]
        while begin < stop:
            count, done = U64(min(stop - begin, _PART)), U64(0)
            while done < count:
                entry = U64(0)
                if done + U64(_LOOK_UPS * SHORT_CODES) <= count and bit + U64(WINDOW_BITS) <= end:
                    ahead = _peek(windows, bit)
                    for _ in range(_LOOK_UPS):
                        entry = short[ahead >> U64(WINDOW_BITS - SHORT_BITS)]
                        for i in range(8):  # compiled to one store; only the first ones are exponents
                            exponents[done + U64(i)] = np.uint8(entry >> U64(8 * i) & U64(0xFF))
                        done += entry >> U64(48) & U64(0xFF)
                        bit += entry >> U64(56)
                        ahead <<= entry >> U64(56)
                if entry == U64(0):
                    if bit >= end:
                        return begin + np.int64(done)
                    exponent, length = _look_up(_peek(windows, bit), luts)
                    if length == 0:
                        return begin + np.int64(done)
                    exponents[done] = exponent
                    done += U64(1)
                    bit += U64(length)
            after = begin + np.int64(count)
            wanted, unwanted = max(begin, before), min(after, before + output.size)
            if wanted < unwanted:
                words = output[wanted - before : unwanted - before]
                _combine(exponents[wanted - begin :], sign_mantissa[wanted:unwanted], words)
            begin = after
        if block * BLOCK_BITS + np.int64(bit) > 8 * stream.size:
            return stop - 1
    return -1


@compiled
def _load_windows(stream: NDArray[np.uint8], windows: NDArray[np.uint64]) -> None:
    """The windows at the front of a stream, as numbers; zeros where it ends."""
    content = windows.view(np.uint8)
    size = min(stream.size, content.size)
    for i in range(content.size):  # assigning slices takes longer to compile
        content[i] = stream[i] if i < size else 0
    for i in range(windows.size):
        windows[i] = byte_swapped(windows[i])


@inlined
def _peek(windows: NDArray[np.uint64], bit: int) -> int:
    """64 bits from ``bit`` on."""
    window, inside = bit >> U64(6), bit & U64(63)
    return windows[window] << inside | windows[window + U64(1)] >> U64(1) >> (U64(63) - inside)


@inlined
def _look_up(ahead: int, luts: NDArray[np.uint8]) -> tuple[int, int]:
    """The exponent whose code is on top of 64 bits, and its length; 0 if there is none."""
    table, entry = 0, luts[0, ahead >> U64(56)]
    for level in range(1, MAX_LEVELS):
        if entry < FIRST_POINTER:
            break
        table = 256 - entry
        entry = luts[table, ahead >> U64(56 - 8 * level) & U64(0xFF)]
    return entry, int(luts[luts.shape[0] - 1, entry]) if entry < FIRST_POINTER else 0


@compiled
def _combine(exponents: NDArray[np.uint8], sign_mantissa: NDArray[np.uint8], words: NDArray[np.uint16]) -> None:
    for i in range(words.size):
        rest = np.uint16(sign_mantissa[i])
        words[i] = (rest & 0x80) << 8 | np.uint16(exponents[i]) << 7 | rest & 0x7F
