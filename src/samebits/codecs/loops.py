"""The compiled loops of the CPU codec. They hold no state, release the GIL and never leave the ranges they are given.

Four words are handled at once in the 16-bit fields of one 64-bit integer ("a quad"): field i is the quad's word i.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from samebits.bf16 import count_exponents
from samebits.compiled import compiled, inlined
from samebits.digest import sum_words
from samebits.format.header import QUAD_SYMBOLS
from samebits.vectors import exponents_of_row, load64, quad_symbols_of_row, split_quad_row, split_single_row, store64

if TYPE_CHECKING:
    from numpy.typing import NDArray

U64 = np.uint64
_LOW_BYTES = U64(0x00FF00FF00FF00FF)
_TOP7 = U64(0x007F007F007F007F)
_ZERO, _WIDTH = np.int64(0), np.int64(64)  # for a literal what takes it would be compiled once more
_ONES = U64(0x0001000100010001)
_NO_CLASS = U64(0xFFF8FFF8FFF8FFF8)
_INSIDE = U64(0x0080008000800080)  # where a class of 0 to 7 lands once the window is taken off
COMMON_LOW, COMMON_HIGH = 64, 191  # exponents of ordinary weights: rows within need no closer look
OUTSIDE = QUAD_SYMBOLS  # where a quad's symbol stands: one of its words has no class
MAX_UNIT = 63
MAX_BASE = 8191
MAX_PATCHES = 8191
HEAD_WORDS = 9  # a coded chunk's first word and its 32 length bytes


@inlined
def classify(quad: int, window: int) -> int:
    """The quad's classes in bits 0-2 of each field; other bits are set in fields that lie outside the window."""
    return (((quad >> U64(8)) & _TOP7) + (_INSIDE - U64(window) * _ONES)) ^ _INSIDE


@inlined
def quad_symbol(classes: int) -> int:
    """FORMAT.md 3.4: four classes as one symbol; OUTSIDE if one of them is none."""
    symbol = classes | (classes >> U64(13)) | (classes >> U64(26)) | (classes >> U64(39))
    return U64(OUTSIDE) if (classes & _NO_CLASS) != 0 else symbol & U64(0xFFF)


@compiled
def summarize_rows(
    words: NDArray[np.uint16], columns: int, centers: NDArray[np.int32], lowest: NDArray[np.int32],
    highest: NDArray[np.int32], subnormal: NDArray[np.int32], first: int, last: int,
) -> np.uint64:  # fmt: skip
    """Fill centre, bounds and the subnormal flag (codecs.row_statistics) of rows [first, last).

    Returns:
        What these rows add to the digest, if ``first`` is a multiple of four, and ``last`` too or the last row.
    """
    digest = U64(0)
    quads = words[: words.size // 4 * 4].view(np.uint64)
    for four in range(first, last, 4):  # rows, which are whole quads: read once, for both purposes
        end = min(four + 4, last)
        digest += sum_words(quads, four * columns // 4, end * columns // 4)
        for row in range(four, end):
            start, stop = row * columns, (row + 1) * columns
            total, common = (0, False) if columns % 4 else _sum_exponents(quads, start // 4, stop // 4)
            if common:
                centers[row], subnormal[row] = 16 * total // columns, 0
                lowest[row], highest[row] = COMMON_LOW, COMMON_HIGH
            else:
                _summarize_row(words, start, stop, row, centers, lowest, highest, subnormal)
    return digest


@compiled
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


@compiled
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


@compiled
def count_rows(
    words: NDArray[np.uint16], columns: int, centers: NDArray[np.int32], stride: int, histogram: NDArray[np.int64],
    aligned: NDArray[np.int64], pinned: NDArray[np.int64], first: int, last: int,
) -> None:  # fmt: skip
    """Add exponents of the sampled rows ``stride * [first, last)`` to the histograms of codecs.row_statistics."""
    counts, total = np.zeros((4, 256), np.int64), np.empty(256, np.int64)
    for sample in range(first, last):
        row = sample * stride
        counts[:] = 0
        count_exponents(words, row * columns, (row + 1) * columns, counts)
        for e in range(256):  # these loops are for vector units
            total[e] = counts[0, e] + counts[1, e] + counts[2, e] + counts[3, e]
        for e in range(256):
            histogram[e] += total[e]
        center = centers[row]
        if center < 0:
            for e in range(256):
                pinned[e] += total[e]
        else:
            pinned[0] += total[0]
            zero = 256 - center // 16
            relative = aligned[center % 16, zero + 1 : zero + 256]
            for e in range(255):
                relative[e] += total[e + 1]


@compiled
def any_subnormal(words: NDArray[np.uint16], first: int, last: int) -> bool:
    """Whether words[first:last] hold an exponent of 0 with a mantissa."""
    part, found = words[first:last], np.uint16(0)
    for i in range(part.size):  # for vector units
        is_low = np.uint16((part[i] & np.uint16(0x7F80)) == 0)
        found |= is_low & np.uint16((part[i] & np.uint16(0x7F)) != 0)
    return found > 0


@compiled
def count_quads(
    words: NDArray[np.uint16], columns: int, changes: NDArray[np.uint16], window: int, stride: int,
    counts: NDArray[np.int64], first: int, last: int,
) -> None:  # fmt: skip
    """Add the whole quads of the sampled rows ``stride * [first, last)`` to ``counts``."""
    values, symbols = np.empty(512, np.uint16), np.empty(128, np.uint16)
    quads = values.view(np.uint64)
    for sample in range(first, last):
        row = sample * stride
        stop = min((row + 1) * columns, words.size)
        change = changes[min(row, changes.size - 1)]
        for start in range(row * columns, stop - 3, 512):
            number = min(512, stop - start) // 4
            shift_words(values, words[start : start + 4 * number], change)
            for i in range(number):  # for vector units
                symbols[i] = quad_symbol(classify(quads[i], window))
            for i in range(number):
                counts[symbols[i]] += 1


@inlined
def shift_words(into: NDArray[np.uint16], words: NDArray[np.uint16], change: int) -> None:
    """FORMAT.md 4.1: add a shift, which stands where a word has its exponent, to every word but zeros."""
    for i in range(words.size):  # for vector units
        into[i] = words[i] + (change if words[i] & np.uint16(0x7FFF) else np.uint16(0))


@compiled
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


@inlined
def chunk_extent(chunk: int, row_groups: int, stages: int, chunk_stages: int) -> tuple[int, int, int, int]:
    """Geometry.chunk: (first row group, row groups, first stage, stages in each)."""
    if stages > chunk_stages:
        parts = (stages + chunk_stages - 1) // chunk_stages
        first = chunk % parts * chunk_stages
        return chunk // parts, 1, first, min(chunk_stages, stages - first)
    groups = chunk_stages // stages
    first = chunk * groups
    return first, min(groups, row_groups - first), 0, stages


@compiled
def padding_quad(quad: bool, window: int, symbol: int) -> int:
    """FORMAT.md 5.4: four padding words."""
    result = U64(0)
    for i in range(4):
        exponent = 2 * (window + (symbol >> (3 * i) & 7)) if quad else symbol
        result |= U64(exponent) << U64(16 * i + 7)
    return result


@compiled
def encode_chunks(
    words: NDArray[np.uint16], rows: int, columns: int, chunk_stages: int, quad: bool, changes: NDArray[np.uint16],
    window: int, table: NDArray[np.uint32], nearest: NDArray[np.int16], first_symbol: int, sizes: NDArray[np.int64],
    first: int, last: int,
) -> NDArray[np.uint32]:  # fmt: skip
    """Encode chunks [first, last) (FORMAT.md section 6): their words one after the other, and ``sizes`` of each.

    Args:
        changes: of each row or of all: its shift where a word has the exponent, modulo 2^16.
    """
    row_groups, stages = (rows + 7) // 8, (columns + 63) // 64
    output = np.empty((last - first) * (1 + 128 * chunk_stages) + 2, np.uint32)
    pairs = np.empty((chunk_stages, 64 if quad else 256), np.uint32)
    bits = np.empty(64, np.int64)
    patches = np.empty(chunk_stages * 512, np.uint32)
    padding = padding_quad(quad, window, first_symbol)
    common = common_class(table) if quad else 0
    values, symbols, codes = np.empty(512, np.uint16), np.empty(256, np.uint16), np.empty(512, np.uint32)
    no_change = np.zeros(1, np.uint16)
    end = _ZERO
    for chunk in range(first, last):
        group, groups, stage_from, stage_count = chunk_extent(chunk, row_groups, stages, chunk_stages)
        bits[:] = 0
        patched = stage = _ZERO
        for row_group in range(group, group + groups):
            for s in range(stage_from, stage_from + stage_count):
                row, column = 8 * row_group, 64 * s
                if is_whole(row, column, rows, columns, words):
                    start = row * columns + column
                    patched = _encode_stage(words, start, columns, changes, row, quad, window, table, nearest, common,
                                            stage, symbols, codes, pairs, bits, patches, patched)  # fmt: skip
                else:
                    load_stage(values, words, row, column, rows, columns, changes, padding)
                    patched = _encode_stage(values, _ZERO, _WIDTH, no_change, _ZERO, quad, window, table, nearest,
                                            common, stage, symbols, codes, pairs, bits, patches, patched)  # fmt: skip
                stage += 1
        size = _write_coded(output, end, pairs, stage, bits, patches, patched)
        if size == 0:
            size = 1 + 128 * stage
            output[end] = 0
            _write_raw(output, end + 1, words, group, groups, stage_from, stage_count, rows, columns, quad, changes,
                       padding)  # fmt: skip
        sizes[chunk - first] = size
        end += size
    return output[:end].copy()


@inlined
def is_whole(row: int, column: int, rows: int, columns: int, words: NDArray[np.uint16]) -> bool:
    """Whether the stage whose corner is (row, column) has no padding."""
    return row + 8 <= rows and column + 64 <= columns and (row + 7) * columns + column + 64 <= words.size


@compiled
def load_stage(
    values: NDArray[np.uint16], words: NDArray[np.uint16], row: int, column: int, rows: int, columns: int,
    changes: NDArray[np.uint16], padding: int,
) -> None:  # fmt: skip
    """The shifted words of the stage whose corner is (row, column): uint16 [512], row-major (64 a row).

    Args:
        padding: four words, of which those outside the tensor are made (FORMAT.md 5.4).
    """
    for r in range(8):
        start = (row + r) * columns + column
        change = changes[min(row + r, changes.size - 1)]
        inside = max(0, min(64, columns - column, words.size - start)) if row + r < rows else 0
        shift_words(values[64 * r :], words[start : start + inside], change)
        for i in range(inside, 64):
            values[64 * r + i] = padding >> U64(16 * (i & 3)) & U64(0xFFFF)


@compiled
def _encode_stage(
    words: NDArray[np.uint16], start: int, pitch: int, changes: NDArray[np.uint16], row: int, quad: bool, window: int,
    table: NDArray[np.uint32], nearest: NDArray[np.int16], common: int, stage: int, symbols: NDArray[np.uint16],
    codes: NDArray[np.uint32], pairs: NDArray[np.uint32], bits: NDArray[np.int64], patches: NDArray[np.uint32],
    patched: int,
) -> int:  # fmt: skip
    """The codewords of a stage whose rows begin at word ``start``, ``pitch`` apart; the number of patches.

    Args:
        table: ``length << 16 | bits``; 0 where there is no codeword; of OUTSIDE, too.
        stage: its number in the chunk.
        symbols: room for those of its quads, uint16 [128], or its exponents, uint8 [512], in the order of the streams:
            ``4 lane + step``.
        codes: room for all codewords.
        pairs: get a stage's codewords in pairs, ``length << 26 | bits``, stream by stream.
        bits: the streams' lengths so far.
    """
    for r in range(8):
        word, change = U64(2 * (start + r * pitch)), changes[min(row + r, changes.size - 1)]
        if quad:
            quad_symbols_of_row(symbols, U64(32 * r), words, word, change, np.uint16(window), np.uint16(OUTSIDE))
        else:
            exponents_of_row(symbols, U64(64 * r), words, word, change)
    if not quad:
        exponents = symbols.view(np.uint8)
        for i in range(512):
            codes[i] = table[exponents[i]]
        _join(codes, pairs[stage])
        for stream in range(64):  # for vector units
            total = U64(0)
            for pair in range(4 * stream, 4 * stream + 4):
                total += pairs[stage, pair] >> np.uint32(26)
            bits[stream] += total
        return patched
    for i in range(128):
        codes[i] = table[symbols[i]]
    missing = np.uint32(0)
    for i in range(128):  # for vector units
        missing |= np.uint32(codes[i] == 0)
    if missing:
        for i in range(128):
            if codes[i] == 0:
                lane, step = i >> 2, i & 3
                r = lane >> 2
                value = load64(words, U64(2 * (start + r * pitch + 16 * step + 4 * (lane & 3))))
                value = _shifted(value, changes[min(row + r, changes.size - 1)])
                coded = _substitute(classify(value, window), nearest, common)
                where = (stage << 16) | (step << 14) | (lane << 9)
                patched = _patch(value, coded, window, where, patches, patched)
                codes[i] = table[coded]
    _join(codes, pairs[stage])
    for stream in range(64):
        bits[stream] += pairs[stage, stream] >> np.uint32(26)
    return patched


@compiled
def _shifted(quad: int, change: int) -> int:
    """As shift_words, of four words."""
    result = U64(0)
    for i in range(0, 64, 16):
        word = quad >> U64(i) & U64(0xFFFF)
        moved = word + (U64(change) if word & U64(0x7FFF) else U64(0))
        result |= (moved & U64(0xFFFF)) << U64(i)
    return result


@compiled
def _join(codes: NDArray[np.uint32], pairs: NDArray[np.uint32]) -> None:
    """Two codewords after the other as a pair."""
    two = codes.view(np.uint64)
    for i in range(pairs.size):  # for vector units
        both = two[i]
        low, high = np.uint32(both & U64(0xFFFFFFFF)), np.uint32(both >> U64(32))
        length = low >> np.uint32(16)
        total = length + (high >> np.uint32(16))
        pairs[i] = (total << np.uint32(26)) | ((high & np.uint32(0xFFFF)) << length) | (low & np.uint32(0xFFFF))


@compiled
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


@compiled
def _substitute(classes: int, nearest: NDArray[np.int16], common: int) -> int:
    """The codeword to write for a quad that has none."""
    for i in range(4):
        field = classes >> U64(16 * i) & U64(0xFFFF)
        if field > 7:
            classes = (classes & ~(U64(0xFFFF) << U64(16 * i))) | U64(common) << U64(16 * i)
    return nearest[quad_symbol(classes)]


@compiled
def _patch(value: int, coded: int, window: int, where: int, patches: NDArray[np.uint32], count: int) -> int:
    """Append the patches that turn ``coded`` into the quad's own top7 values (FORMAT.md 6.4)."""
    for i in range(4):
        actual = (value >> U64(16 * i + 8)) & U64(0x7F)
        difference = actual ^ U64(window + (coded >> (3 * i) & 7))
        if difference != 0:
            patches[count] = where | (i << 7) | difference
            count += 1
    return count


@compiled
def _write_coded(
    output: NDArray[np.uint32], start: int, pairs: NDArray[np.uint32], stages: int, bits: NDArray[np.int64],
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
        _write_stream(output, position, pairs, stages, stream)
        position += base + steps * unit
    _write_patches(output, start + size - patched, patches, patched)
    return size


@compiled
def _write_patches(output: NDArray[np.uint32], start: int, patches: NDArray[np.uint32], count: int) -> None:
    """In their order, by insertion: only those of one stage may stand in another one."""
    for i in range(count):
        place = start + i
        while place > start and output[place - 1] > patches[i]:
            output[place] = output[place - 1]
            place -= 1
        output[place] = patches[i]


@compiled
def _write_stream(
    output: NDArray[np.uint32], position: int, pairs: NDArray[np.uint32], stages: int, stream: int
) -> None:
    """Write a stream from bit ``position`` on; the bits from there on are still zero.

    Two pairs, 52 bits at most, are written at a time, with the bits before them in their byte, to eight bytes.
    """
    byte, used = U64(position >> 3), U64(position & 7)
    pending = load64(output, byte)
    each = U64(pairs.shape[1] // 64)  # pairs of a stream in a stage
    for stage in range(U64(0), U64(stages), U64(1) if each > U64(1) else U64(2)):
        for pair in range(each * U64(stream), each * U64(stream + 1), U64(2)):
            first, second = U64(pairs[stage, pair]), U64(0)
            if each > U64(1):
                second = U64(pairs[stage, pair + U64(1)])
            elif stage + U64(1) < U64(stages):
                second = U64(pairs[stage + U64(1), pair])
            length = first >> U64(26)
            both = (first & U64(0x3FFFFFF)) | ((second & U64(0x3FFFFFF)) << length)
            pending |= both << used
            store64(output, byte, pending)
            used += length + (second >> U64(26))
            pending >>= used & U64(56)
            byte += used >> U64(3)
            used &= U64(7)


@compiled
def _write_raw(
    output: NDArray[np.uint32], start: int, words: NDArray[np.uint16], group: int, groups: int, stage_from: int,
    stage_count: int, rows: int, columns: int, quad: bool, changes: NDArray[np.uint16], padding: int,
) -> None:  # fmt: skip
    """Write a raw chunk's top7 values or shifted exponents (FORMAT.md 6.5)."""
    values, tops = np.empty(512, np.uint16), np.empty(512, np.uint8)
    for row_group in range(group, group + groups):
        for s in range(stage_from, stage_from + stage_count):
            load_stage(values, words, 8 * row_group, 64 * s, rows, columns, changes, padding)
            for i in range(512):
                tops[i] = (values[i] >> 8) & 0x7F if quad else (values[i] >> 7) & 0xFF
            _write_by_lanes(output[start : start + 128], tops.view(np.uint32))
            start += 128


@compiled
def _write_by_lanes(target: NDArray[np.uint32], bytes_of_quads: NDArray[np.uint32]) -> None:
    """A stage's quads, in the order of rows and columns, to where lanes have them: ``4 * lane + step``."""
    for r in range(8):
        for t in range(4):
            for step in range(4):
                target[16 * r + 4 * t + step] = bytes_of_quads[16 * r + 4 * step + t]


@compiled
def write_planes(
    words: NDArray[np.uint16], rows: int, columns: int, quad: bool, changes: NDArray[np.uint16],
    planes: NDArray[np.uint32], first: int, last: int,
) -> None:  # fmt: skip
    """Write the planes (FORMAT.md section 5) of row groups [first, last)."""
    stages = (columns + 63) // 64
    values, no_change = np.empty(512, np.uint16), np.zeros(1, np.uint16)
    for row_group in range(first, last):
        for s in range(stages):
            row, column = 8 * row_group, 64 * s
            if is_whole(row, column, rows, columns, words):
                start = row * columns + column
                _split_stage(words, start, columns, changes, row, planes, row_group, s, stages, quad)
            else:
                load_stage(values, words, row, column, rows, columns, changes, U64(0))
                _split_stage(values, _ZERO, _WIDTH, no_change, _ZERO, planes, row_group, s, stages, quad)


@compiled
def _split_stage(
    words: NDArray[np.uint16], start: int, pitch: int, changes: NDArray[np.uint16], row: int,
    planes: NDArray[np.uint32], row_group: int, s: int, stages: int, quad: bool,
) -> None:  # fmt: skip
    """Of a stage whose rows begin at word ``start``, ``pitch`` apart, what the planes have."""
    raw, signs = plane_places(row_group, s, stages, quad)
    for r in range(8):
        word, change = U64(2 * (start + r * pitch)), changes[min(row + r, changes.size - 1)]
        of_row, sign = raw + U64(64 * r), signs + U64(16 * r)
        if quad:
            split_quad_row(planes, of_row, sign, np.uint32(4 * (s & 1)), words, word, change)
        else:
            split_single_row(planes, of_row, words, word, change)


@inlined
def plane_places(row_group: int, s: int, stages: int, quad: bool) -> tuple[int, int]:
    """Where a stage's raw bytes begin in the planes, and its sign words (FORMAT.md 5.3)."""
    slab = 4 * (row_group * (stages // 2 * 288 + stages % 2 * 160) + (s >> 1) * 288)
    raw = slab + 128 + 512 * (s & 1) if quad else 512 * (row_group * stages + s)
    return U64(raw), U64(slab)
