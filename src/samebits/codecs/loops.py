"""The compiled loops of the CPU codec. They hold no state, release the GIL and never leave the ranges they are given.

Four words are handled at once in the 16-bit fields of one 64-bit integer ("a quad"): field i is the quad's word i.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from samebits.bf16 import count_exponents
from samebits.format.packed import QUAD_SYMBOLS

if TYPE_CHECKING:
    from numpy.typing import NDArray

U64 = np.uint64
_SIGNS = U64(0x8000800080008000)
_MAGNITUDES = U64(0x7FFF7FFF7FFF7FFF)
_EXPONENTS = U64(0x7F807F807F807F80)
_LOW_BYTES = U64(0x00FF00FF00FF00FF)
_TOP7 = U64(0x007F007F007F007F)
_ZERO = np.int64(0)  # where a count begins; for a literal 0 what takes it would be compiled once more
_ONES = U64(0x0001000100010001)
_CLASSES = U64(0x0007000700070007)
_NO_CLASS = U64(0xFFF8FFF8FFF8FFF8)
_INSIDE = U64(0x0080008000800080)  # where a class of 0 to 7 lands once the window is taken off
COMMON_LOW, COMMON_HIGH = 64, 191  # exponents of ordinary weights: rows within need no closer look
MAX_UNIT = 63
MAX_BASE = 8191
MAX_PATCHES = 8191
HEAD_WORDS = 9  # a coded chunk's first word and its 32 length bytes


@njit(cache=True, nogil=True, inline="always")
def load_quad(words: NDArray[np.uint16], position: int) -> int:
    """Four words as one integer."""
    return (
        U64(words[position])
        | (U64(words[position + 1]) << U64(16))
        | (U64(words[position + 2]) << U64(32))
        | (U64(words[position + 3]) << U64(48))
    )


@njit(cache=True, nogil=True, inline="always")
def shift_quad(quad: int, shift: int) -> int:
    """FORMAT.md 4.1: add ``shift`` to every exponent but 0. No field overflows, by 4.3."""
    nonzero = ((quad & _MAGNITUDES) + _MAGNITUDES) & _SIGNS
    return quad + (nonzero >> U64(8)) * U64(shift)


@njit(cache=True, nogil=True, inline="always")
def pack_bytes(fields: int) -> int:
    """The low bytes of four fields as 32 bits."""
    low = fields & _LOW_BYTES
    low = (low | (low >> U64(8))) & U64(0x0000FFFF0000FFFF)
    return (low | (low >> U64(16))) & U64(0xFFFFFFFF)


@njit(cache=True, nogil=True, inline="always")
def classify(quad: int, window: int) -> int:
    """The quad's classes in bits 0-2 of each field; other bits are set in fields that lie outside the window."""
    return (((quad >> U64(8)) & _TOP7) + (_INSIDE - U64(window) * _ONES)) ^ _INSIDE


@njit(cache=True, nogil=True, inline="always")
def quad_symbol(classes: int) -> int:
    """FORMAT.md 3.4: four classes as one symbol."""
    z = classes & _CLASSES
    return (z | (z >> U64(13)) | (z >> U64(26)) | (z >> U64(39))) & U64(0xFFF)


@njit(cache=True, nogil=True)
def summarize_rows(
    words: NDArray[np.uint16], columns: int, centers: NDArray[np.int32], lowest: NDArray[np.int32],
    highest: NDArray[np.int32], subnormal: NDArray[np.int32], first: int, last: int,
) -> None:  # fmt: skip
    """Fill centre, bounds and the subnormal flag (codecs.row_statistics) of rows [first, last)."""
    quads = words[: words.size // 4 * 4].view(np.uint64)
    for row in range(first, last):
        start, stop = row * columns, (row + 1) * columns
        total, common = (0, False) if columns % 4 else _sum_exponents(quads, start // 4, stop // 4)
        if common:
            centers[row], lowest[row], highest[row], subnormal[row] = 16 * total // columns, COMMON_LOW, COMMON_HIGH, 0
        else:
            _summarize_row(words, start, stop, row, centers, lowest, highest, subnormal)


@njit(cache=True, nogil=True)
def _sum_exponents(quads: NDArray[np.uint64], first: int, last: int) -> tuple[int, bool]:
    """The sum of the exponents, and whether all lie in [COMMON_LOW, COMMON_HIGH]."""
    total, strange = U64(0), U64(0)
    for block in range(first, last, 256):  # a field holds 256 sums of exponents
        fields = U64(0)
        for i in range(block, min(block + 256, last)):
            exponents = (quads[i] >> U64(7)) & _LOW_BYTES
            fields += exponents
            # The sum is 128 to 255 where common: bit 7 cleared, bit 8 not set.
            strange |= (exponents + U64(COMMON_LOW) * _ONES) ^ _INSIDE
        total += (fields & U64(0xFFFF)) + (fields >> U64(16) & U64(0xFFFF))
        total += (fields >> U64(32) & U64(0xFFFF)) + (fields >> U64(48))
    return np.int64(total), (strange & U64(0x0180018001800180)) == 0


@njit(cache=True, nogil=True)
def _summarize_row(
    words: NDArray[np.uint16], start: int, stop: int, row: int, centers: NDArray[np.int32], lowest: NDArray[np.int32],
    highest: NDArray[np.int32], subnormal: NDArray[np.int32],
) -> None:  # fmt: skip
    """A row with exponents outside the common range."""
    nonzero, total, low, high = 0, 0, 255, 0
    for i in range(start, stop):
        exponent = np.int64((words[i] >> 7) & 255)
        if exponent > 0:
            nonzero += 1
            total += exponent
            low, high = min(low, exponent), max(high, exponent)
    subnormal[row] = any_subnormal(words, start, stop)
    lowest[row], highest[row] = min(low, COMMON_LOW), max(high, COMMON_HIGH)
    fixed = nonzero == 0 or high == 255 or subnormal[row] != 0
    centers[row] = -1 if fixed else 16 * total // nonzero


@njit(cache=True, nogil=True)
def count_rows(
    words: NDArray[np.uint16], columns: int, centers: NDArray[np.int32], stride: int, histogram: NDArray[np.int64],
    aligned: NDArray[np.int64], pinned: NDArray[np.int64], first: int, last: int,
) -> None:  # fmt: skip
    """Add exponents of the sampled rows ``stride * [first, last)`` to the histograms of codecs.row_statistics."""
    counts = np.zeros((4, 256), np.int64)
    for sample in range(first, last):
        row = sample * stride
        counts[:] = 0
        count_exponents(words, row * columns, (row + 1) * columns, counts)
        center = centers[row]
        for e in range(256):
            number = counts[0, e] + counts[1, e] + counts[2, e] + counts[3, e]
            histogram[e] += number
            if center < 0 or e == 0:
                pinned[e] += number
            else:
                aligned[center % 16, e - center // 16 + 256] += number


@njit(cache=True, nogil=True)
def any_subnormal(words: NDArray[np.uint16], first: int, last: int) -> bool:
    """Whether words[first:last] hold an exponent of 0 with a mantissa."""
    found = 0
    for i in range(first, last):
        magnitude = words[i] & 0x7FFF
        found += (magnitude < 0x80) & (magnitude > 0)
    return found > 0


@njit(cache=True, nogil=True)
def count_quads(
    words: NDArray[np.uint16], columns: int, shifts: NDArray[np.int32], window: int, stride: int,
    counts: NDArray[np.int64], first: int, last: int,
) -> None:  # fmt: skip
    """Add the whole quads of the sampled rows ``stride * [first, last)`` to ``counts``."""
    for sample in range(first, last):
        row = sample * stride
        start = row * columns
        stop = min(start + columns, words.size)
        shift = shifts[row] if shifts.size > 1 else shifts[0]
        for position in range(start, stop - 3, 4):
            classes = classify(shift_quad(load_quad(words, position), shift), window)
            outside = (classes & _NO_CLASS) != 0
            counts[QUAD_SYMBOLS if outside else np.int64(quad_symbol(classes))] += 1


@njit(cache=True, nogil=True)
def nearest_quads(symbols: NDArray[np.uint16]) -> NDArray[np.int16]:
    """For each quad the coded one that differs in the fewest words, then comes first in the code section.

    Args:
        symbols: of the code section, in its order.

    Returns:
        int16 [4096].
    """
    ranks = np.full(QUAD_SYMBOLS, 5 * QUAD_SYMBOLS, np.int32)  # of the best quad so far, + 4096 for each word changed
    for rank in range(symbols.size):
        ranks[symbols[rank]] = rank
    for step in (1, 8, 64, 512):  # from one value of a quad's word to the next
        for block in range(0, QUAD_SYMBOLS, 8 * step):
            for first in range(block, block + step):
                best = ranks[first]
                for other in range(first + step, first + 8 * step, step):
                    best = min(best, ranks[other])
                for quad in range(first, first + 8 * step, step):
                    ranks[quad] = min(ranks[quad], best + QUAD_SYMBOLS)
    nearest = np.empty(QUAD_SYMBOLS, np.int16)
    for quad in range(QUAD_SYMBOLS):
        nearest[quad] = symbols[ranks[quad] % QUAD_SYMBOLS]
    return nearest


@njit(cache=True, nogil=True, inline="always")
def chunk_extent(chunk: int, row_groups: int, stages: int, chunk_stages: int) -> tuple[int, int, int, int]:
    """Geometry.chunk: (first row group, row groups, first stage, stages in each)."""
    if stages > chunk_stages:
        parts = (stages + chunk_stages - 1) // chunk_stages
        first = chunk % parts * chunk_stages
        return chunk // parts, 1, first, min(chunk_stages, stages - first)
    groups = chunk_stages // stages
    first = chunk * groups
    return first, min(groups, row_groups - first), 0, stages


@njit(cache=True, nogil=True)
def _padded_quad(
    words: NDArray[np.uint16], row: int, column: int, rows: int, columns: int, shift: int, padding: int
) -> int:
    """A quad with some words outside the tensor, shifted; ``padding`` is what stands there (FORMAT.md 5.4)."""
    result = U64(0)
    for i in range(4):
        position = row * columns + column + i
        field = padding >> U64(16 * i) & U64(0xFFFF)
        if row < rows and column + i < columns and position < words.size:
            field = shift_quad(U64(words[position]), shift)
        result |= field << U64(16 * i)
    return result


@njit(cache=True, nogil=True, inline="always")
def shifted_quad_at(
    words: NDArray[np.uint16], row: int, column: int, rows: int, columns: int, shifts: NDArray[np.int32], padding: int
) -> int:
    """The shifted quad at (row, column), padding filled in."""
    position = row * columns + column
    if row < rows:
        shift = shifts[row] if shifts.size > 1 else shifts[0]
        if column + 4 <= columns and position + 4 <= words.size:
            return shift_quad(load_quad(words, position), shift)
        return _padded_quad(words, row, column, rows, columns, shift, padding)
    return padding


@njit(cache=True, nogil=True)
def padding_quad(quad: bool, window: int, symbol: int) -> int:
    """FORMAT.md 5.4: four padding words."""
    result = U64(0)
    for i in range(4):
        exponent = 2 * (window + (symbol >> (3 * i) & 7)) if quad else symbol
        result |= U64(exponent) << U64(16 * i + 7)
    return result


@njit(cache=True, nogil=True)
def encode_chunks(
    words: NDArray[np.uint16], rows: int, columns: int, chunk_stages: int, quad: bool, shifts: NDArray[np.int32],
    window: int, table: NDArray[np.uint32], nearest: NDArray[np.int16], first_symbol: int, sizes: NDArray[np.int64],
    first: int, last: int,
) -> NDArray[np.uint32]:  # fmt: skip
    """Encode chunks [first, last) (FORMAT.md section 6): their words one after the other, and ``sizes`` of each."""
    row_groups, stages = (rows + 7) // 8, (columns + 63) // 64
    output = np.empty((last - first) * (1 + 128 * chunk_stages) + 2, np.uint32)
    pairs = np.empty((64, chunk_stages * (1 if quad else 4)), np.uint32)
    bits = np.empty(64, np.int64)
    patches = np.empty(chunk_stages * 512, np.uint32)
    padding = padding_quad(quad, window, first_symbol)
    common = common_class(table) if quad else 0
    values = np.empty(128, np.uint64)
    end = _ZERO
    for chunk in range(first, last):
        group, groups, stage_from, stage_count = chunk_extent(chunk, row_groups, stages, chunk_stages)
        bits[:] = 0
        patched = stage = _ZERO
        for row_group in range(group, group + groups):
            for s in range(stage_from, stage_from + stage_count):
                load_stage(values, words, 8 * row_group, 64 * s, rows, columns, shifts, padding)
                if quad:
                    patched = _encode_quads(values, stage, window, table, nearest, common, pairs, bits, patches,
                                            patched)  # fmt: skip
                else:
                    _encode_singles(values, stage, table, pairs, bits)
                stage += 1
        size = _write_coded(output, end, pairs, stage * (1 if quad else 4), bits, stage, patches, patched)
        if size == 0:
            size = 1 + 128 * stage
            output[end] = 0
            _write_raw(output, end + 1, words, group, groups, stage_from, stage_count, rows, columns, quad, shifts,
                       padding)  # fmt: skip
        sizes[chunk - first] = size
        end += size
    return output[:end].copy()


@njit(cache=True, nogil=True)
def load_stage(
    values: NDArray[np.uint64], words: NDArray[np.uint16], row: int, column: int, rows: int, columns: int,
    shifts: NDArray[np.int32], padding: int,
) -> None:  # fmt: skip
    """The shifted quads of the stage whose corner is (row, column): uint64 [128], row-major (16 quads a row)."""
    aligned = columns % 4 == 0
    quads = words[: words.size // 4 * 4].view(np.uint64)
    for r in range(8):
        place = 16 * r
        start = (row + r) * columns + column
        if not (aligned and row + r < rows and column + 64 <= columns and start + 64 <= words.size):
            for quad in range(16):
                start_column = column + 4 * quad
                values[place + quad] = shifted_quad_at(words, row + r, start_column, rows, columns, shifts, padding)
            continue
        shift = U64(shifts[row + r] if shifts.size > 1 else shifts[0])
        first = start >> 2
        for quad in range(16):
            value = quads[first + quad]
            nonzero = ((value & _MAGNITUDES) + _MAGNITUDES) & _SIGNS
            values[place + quad] = value + (nonzero >> U64(8)) * shift


@njit(cache=True, nogil=True)
def _encode_quads(
    values: NDArray[np.uint64], stage: int, window: int, table: NDArray[np.uint32], nearest: NDArray[np.int16],
    common: int, pairs: NDArray[np.uint32], bits: NDArray[np.int64], patches: NDArray[np.uint32], patched: int,
) -> int:  # fmt: skip
    """One stage: the two codewords of each stream as one pair ``length << 26 | bits``; the number of patches."""
    symbols, outside = np.empty((2, 128), np.uint64)
    for place in range(128):
        classes = classify(values[place], window)
        symbols[place] = quad_symbol(classes)
        outside[place] = classes & _NO_CLASS
    for stream in range(64):
        place = quad_place(stream)
        first, second = table[symbols[place]], table[symbols[place + 4]]
        if (outside[place] | outside[place + 4]) != 0 or first == 0 or second == 0:
            for half in range(2):
                value = values[place + 4 * half]
                code = second if half else first
                if code == 0 or outside[place + 4 * half] != 0:
                    coded = _substitute(classify(value, window), nearest, common)
                    where = (stage << 16) | ((2 * (stream & 1) + half) << 14) | ((stream >> 1) << 9)
                    patched = _patch(value, coded, window, where, patches, patched)
                    code = table[coded]
                if half:
                    second = code
                else:
                    first = code
        length = first >> np.uint32(16)
        total = length + (second >> np.uint32(16))
        joined = (total << np.uint32(26)) | ((second & np.uint32(0xFFFF)) << length) | (first & np.uint32(0xFFFF))
        pairs[stream, stage] = joined
        bits[stream] += total
    return patched


@njit(cache=True, nogil=True, inline="always")
def quad_place(stream: int) -> int:
    """Where in load_stage's order a stream's first quad of a stage is; its second is 4 further on."""
    lane = stream >> 1
    return 16 * (lane >> 2) + 8 * (stream & 1) + (lane & 3)


@njit(cache=True, nogil=True, inline="always")
def raw_place(place: int) -> int:
    """Where a quad in load_stage's order has its raw bytes: ``4 * lane + step``."""
    return (place & 0x70) | (place & 3) << 2 | (place >> 2 & 3)


@njit(cache=True, nogil=True)
def _encode_singles(
    values: NDArray[np.uint64], stage: int, table: NDArray[np.uint32], pairs: NDArray[np.uint32],
    bits: NDArray[np.int64],
) -> None:  # fmt: skip
    """One stage: the eight codewords of each stream as four pairs."""
    for stream in range(64):
        for pair in range(4):
            value = values[quad_place(stream) + 4 * (pair >> 1)] >> U64(32 * (pair & 1))
            first, second = table[(value >> U64(7)) & U64(0xFF)], table[(value >> U64(23)) & U64(0xFF)]
            length = first >> np.uint32(16)
            total = length + (second >> np.uint32(16))
            joined = (total << np.uint32(26)) | ((second & np.uint32(0xFFFF)) << length) | (first & np.uint32(0xFFFF))
            pairs[stream, 4 * stage + pair] = joined
            bits[stream] += total


@njit(cache=True, nogil=True)
def common_class(table: NDArray[np.uint32]) -> int:
    """The class that stands in for words outside the window.

    It is the one with the shortest codeword when alone in a quad.
    """
    best, shortest = -1, 99
    for c in range(8):
        length = table[c * 0o1111] >> 16
        if 0 < length < shortest:
            best, shortest = c, length
    return max(best, 0)


@njit(cache=True, nogil=True)
def _substitute(classes: int, nearest: NDArray[np.int16], common: int) -> int:
    """The codeword to write for a quad that has none."""
    for i in range(4):
        field = classes >> U64(16 * i) & U64(0xFFFF)
        if field > 7:
            classes = (classes & ~(U64(0xFFFF) << U64(16 * i))) | U64(common) << U64(16 * i)
    return nearest[quad_symbol(classes)]


@njit(cache=True, nogil=True)
def _patch(value: int, coded: int, window: int, where: int, patches: NDArray[np.uint32], count: int) -> int:
    """Append the patches that turn ``coded`` into the quad's own top7 values (FORMAT.md 6.4)."""
    for i in range(4):
        actual = (value >> U64(16 * i + 8)) & U64(0x7F)
        difference = actual ^ U64(window + (coded >> (3 * i) & 7))
        if difference != 0:
            patches[count] = where | (i << 7) | difference
            count += 1
    return count


@njit(cache=True, nogil=True)
def _write_coded(
    output: NDArray[np.uint32], start: int, pairs: NDArray[np.uint32], count: int, bits: NDArray[np.int64], stages: int,
    patches: NDArray[np.uint32], patched: int,
) -> int:  # fmt: skip
    """Write a coded chunk at ``start`` (FORMAT.md 6.2 to 6.4): its length in words, or 0 if it must be a raw one."""
    base = bits.min()
    unit = max(1, (bits.max() - base + 14) // 15)
    total = 0
    for stream in range(64):
        total += base + (bits[stream] - base + unit - 1) // unit * unit
    size = HEAD_WORDS + (total + 31) // 32 + patched
    if size >= 1 + 128 * stages or base > MAX_BASE or unit > MAX_UNIT or patched > MAX_PATCHES:
        return 0
    output[start] = base | (unit << 13) | (patched << 19)
    output[start + 1 : start + size + 1] = 0
    position = 32 * (start + HEAD_WORDS)
    for stream in range(64):
        steps = (bits[stream] - base + unit - 1) // unit
        output[start + 1 + (stream >> 3)] |= np.uint32(steps << (4 * (stream & 7)))
        _write_stream(output, position, pairs[stream], count)
        position += base + steps * unit
    _write_patches(output, start + size - patched, patches, patched)
    return size


@njit(cache=True, nogil=True)
def _write_patches(output: NDArray[np.uint32], start: int, patches: NDArray[np.uint32], count: int) -> None:
    """In their order, by insertion: only those of one stage may stand in another one."""
    for i in range(count):
        place = start + i
        while place > start and output[place - 1] > patches[i]:
            output[place] = output[place - 1]
            place -= 1
        output[place] = patches[i]


@njit(cache=True, nogil=True)
def _write_stream(output: NDArray[np.uint32], position: int, pairs: NDArray[np.uint32], count: int) -> None:
    """Write ``count`` pairs of codewords from bit ``position`` on; the bits from there on are still zero."""
    word, offset = position >> 5, U64(position & 31)
    pending = U64(output[word])
    for i in range(count):
        pending |= U64(pairs[i] & np.uint32(0x3FFFFFF)) << offset
        offset += U64(pairs[i] >> np.uint32(26))
        output[word] = np.uint32(pending & U64(0xFFFFFFFF))
        full = offset >> U64(5)
        pending >>= full << U64(5)
        word += np.int64(full)
        offset &= U64(31)
    output[word] = np.uint32(pending)


@njit(cache=True, nogil=True)
def _write_raw(
    output: NDArray[np.uint32], start: int, words: NDArray[np.uint16], group: int, groups: int, stage_from: int,
    stage_count: int, rows: int, columns: int, quad: bool, shifts: NDArray[np.int32], padding: int,
) -> None:  # fmt: skip
    """Write a raw chunk's top7 values or shifted exponents (FORMAT.md 6.5)."""
    values = np.empty(128, np.uint64)
    for row_group in range(group, group + groups):
        for s in range(stage_from, stage_from + stage_count):
            load_stage(values, words, 8 * row_group, 64 * s, rows, columns, shifts, padding)
            for place in range(128):
                value = values[place]
                top = (value >> U64(8)) & _TOP7 if quad else (value >> U64(7)) & _LOW_BYTES
                output[start + raw_place(place)] = pack_bytes(top)
            start += 128


@njit(cache=True, nogil=True)
def write_planes(
    words: NDArray[np.uint16], rows: int, columns: int, quad: bool, shifts: NDArray[np.int32],
    planes: NDArray[np.uint32], first: int, last: int,
) -> None:  # fmt: skip
    """Write the planes (FORMAT.md section 5) of row groups [first, last) as 32-bit words."""
    stages = (columns + 63) // 64
    group_words = (stages // 2 * 288 + stages % 2 * 160) if quad else stages * 128
    values = np.empty(128, np.uint64)
    for row_group in range(first, last):
        for s in range(stages):
            load_stage(values, words, 8 * row_group, 64 * s, rows, columns, shifts, U64(0))
            slab = row_group * group_words + (s >> 1) * 288 if quad else 0
            raw = slab + 32 + 128 * (s & 1) if quad else row_group * group_words + 128 * s
            for place in range(128):
                value = values[place]
                low = pack_bytes(value)
                sign = pack_bytes((value & _SIGNS) >> U64(8))
                planes[raw + raw_place(place)] = low if quad else (low & U64(0x7F7F7F7F)) | sign
            if quad:
                _write_signs(planes, slab, values, s & 1)


@njit(cache=True, nogil=True)
def _write_signs(planes: NDArray[np.uint32], slab: int, values: NDArray[np.uint64], odd: int) -> None:
    """One stage's half of a slab's sign words (FORMAT.md 5.2)."""
    for lane in range(32):
        place = quad_place(2 * lane)
        signs = U64(0)
        for step in range(4):
            signs |= pack_bytes((values[place + 4 * step] & _SIGNS) >> U64(8)) >> U64(step)
        if odd:
            planes[slab + lane] |= np.uint32(signs >> U64(4))
        else:
            planes[slab + lane] = np.uint32(signs)
