"""The compiled loops of the CPU decoder.

Safe on any contents: a chunk is copied into a buffer with SLACK zero words behind it, stream starts are kept inside the
chunk, and from its start a stream can consume at most 512 codewords of 13 bits (FORMAT.md 6.6), which SLACK covers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from samebits.codecs.loops import HEAD_WORDS, U64, chunk_extent

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Room = tuple[
        NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint16], NDArray[np.uint32], NDArray[np.uint32],
        NDArray[np.int64], NDArray[np.uint64],
    ]  # fmt: skip

SLACK = 512 * 13 // 32 + 4
_FIELDS = U64(0x7F807F807F807F80)
_WRAP = U64(0x8000800080008000)
_EACH = U64(0x0001000100010001)
_SIGNS = np.uint32(0x80808080)
_LOW = U64(1)


@njit(cache=True, nogil=True)
def decode_chunks(
    output: NDArray[np.uint16], rows: int, columns: int, chunk_stages: int, quad: bool, shifts: NDArray[np.int8],
    table: NDArray[np.uint64], width: int, offsets: NDArray[np.uint32], planes: NDArray[np.uint32],
    streams: NDArray[np.uint32], first: int, last: int,
) -> None:  # fmt: skip
    """Decode chunks [first, last) into ``output`` (the tensor's words, row-major)."""
    room = _room(chunk_stages)
    for chunk in range(first, last):
        _decode_chunk(output, 0, chunk, rows, columns, chunk_stages, quad, shifts, table, width, offsets,
                      planes, streams, room)  # fmt: skip


@njit(cache=True, nogil=True)
def decode_entries(
    output: NDArray[np.uint16], entries: NDArray[np.int64], places: NDArray[np.int64], entry_words: int,
    chunks_per_entry: int, rows: int, columns: int, chunk_stages: int, quad: bool, shifts: NDArray[np.int8],
    table: NDArray[np.uint64], width: int, offsets: NDArray[np.uint32], planes: NDArray[np.uint32],
    streams: NDArray[np.uint32], first: int, last: int,
) -> None:  # fmt: skip
    """Decode runs of ``entry_words`` words, number ``entries[i]`` of the tensor to ``output`` from ``places[i]`` on.

    Each run has ``chunks_per_entry`` tasks, as many as it can have chunks; done are tasks [first, last).
    """
    room = _room(chunk_stages)
    stages = (columns + 63) // 64
    for task in range(first, last):
        run = task // chunks_per_entry
        begin = entries[run] * entry_words
        chunk = _chunk_of(begin, columns, stages, chunk_stages) + task % chunks_per_entry
        end = _chunk_of(begin + entry_words - 1, columns, stages, chunk_stages) + max(1, -(-stages // chunk_stages))
        if chunk < end:
            into = output[places[run] : places[run] + entry_words]
            _decode_chunk(into, begin, chunk, rows, columns, chunk_stages, quad, shifts, table, width, offsets,
                          planes, streams, room)  # fmt: skip


@njit(cache=True, nogil=True)
def _chunk_of(word: int, columns: int, stages: int, chunk_stages: int) -> int:
    """The chunk with a word of the tensor; where a row group has several chunks, the first."""
    row_group = word // columns // 8
    if stages > chunk_stages:
        return row_group * ((stages + chunk_stages - 1) // chunk_stages)
    return row_group // (chunk_stages // stages)


@njit(cache=True, nogil=True)
def _room(chunk_stages: int) -> Room:
    """For one chunk: its words; its top7 values or exponents, four bytes per quad; a stage's words, their lower and
    upper bytes; where streams start; what takes the shifts of a row group off."""
    return (
        np.empty(1 + 128 * chunk_stages + SLACK, np.uint32),
        np.empty(chunk_stages * 128, np.uint32),
        np.empty(8 * 64, np.uint16),
        np.empty(128, np.uint32),
        np.empty(128, np.uint32),
        np.empty(64, np.int64),
        np.empty(8, np.uint64),
    )


@njit(cache=True, nogil=True)
def _decode_chunk(
    output: NDArray[np.uint16], begin: int, chunk: int, rows: int, columns: int, chunk_stages: int, quad: bool,
    shifts: NDArray[np.int8], table: NDArray[np.uint64], width: int, offsets: NDArray[np.uint32],
    planes: NDArray[np.uint32], streams: NDArray[np.uint32],
    room: Room,
) -> None:  # fmt: skip
    """Of a chunk what lies in ``output``: the tensor's words from ``begin`` on."""
    buffer, tops, row_words, low, high, starts, changes = room
    row_groups, stages = (rows + 7) // 8, (columns + 63) // 64
    group, groups, stage_from, stage_count = chunk_extent(chunk, row_groups, stages, chunk_stages)
    size = min(np.int64(offsets[chunk + 1]) - np.int64(offsets[chunk]), buffer.size - SLACK)
    start = np.int64(offsets[chunk])
    for i in range(size):  # one array assigned to another takes seconds to compile, for what it says if they differ
        buffer[i] = streams[start + i]
    buffer[size : size + SLACK] = 0
    _decode_tops(buffer, size, groups * stage_count, quad, table, width, tops, starts)
    stage = np.int64(0)  # not a literal, for which _assemble would be compiled once more
    for row_group in range(group, group + groups):
        if 8 * (row_group + 1) * columns <= begin or 8 * row_group * columns >= begin + output.size:
            stage += stage_count
            continue
        for r in range(8):
            shift = np.int64(shifts[min(8 * row_group + r, shifts.size - 1)])
            changes[r] = U64((-shift & 255) << 7) * _EACH
        for s in range(stage_from, stage_from + stage_count):
            _assemble(row_words, tops, stage, planes, row_group, s, stages, quad, changes, low, high)
            _store(output, begin, row_words, rows, columns, 8 * row_group, 64 * s)
            stage += 1


@njit(cache=True, nogil=True)
def _decode_tops(
    buffer: NDArray[np.uint32], size: int, stages: int, quad: bool, table: NDArray[np.uint64], width: int,
    tops: NDArray[np.uint32], starts: NDArray[np.int64],
) -> None:  # fmt: skip
    """FORMAT.md 6.2 to 6.5: one chunk's top7 values (quad) or shifted exponents (single)."""
    head = np.int64(buffer[0])
    if head == 0:
        for i in range(128 * stages):
            tops[i] = buffer[1 + i]
        return
    base, unit, patches = head & 8191, (head >> 13) & 63, head >> 19
    end = 32 * size
    position = 32 * HEAD_WORDS
    for stream in range(64):
        nibble = np.int64(buffer[1 + (stream >> 3)] >> np.uint32(4 * (stream & 7))) & 15
        starts[stream] = min(position, end)
        position += base + unit * nibble
    if quad:
        for stream in range(0, 64, 4):
            _decode_quads(buffer, starts[stream : stream + 4], stages, table, width, tops, 2 * stream)
    else:
        for stream in range(64):
            _decode_singles(buffer, starts[stream], stages, table, width, tops, 2 * stream)
    if quad:
        _apply_patches(buffer, max(size - patches, HEAD_WORDS), size, stages, tops)


@njit(cache=True, nogil=True, inline="always")
def _peek(buffer: NDArray[np.uint32], position: int) -> int:
    """At least 33 bits from ``position`` on."""
    word = position >> 5
    return (U64(buffer[word]) | (U64(buffer[word + 1]) << U64(32))) >> U64(position & 31)


@njit(cache=True, nogil=True)
def _decode_quads(
    buffer: NDArray[np.uint32], starts: NDArray[np.int64], stages: int, table: NDArray[np.uint64], width: int,
    tops: NDArray[np.uint32], place: int,
) -> None:  # fmt: skip
    """Four streams' quads in turns: each waits for its own look-ups, not for the others'."""
    mask = (_LOW << U64(width)) - _LOW
    first, second, third, fourth = starts[0], starts[1], starts[2], starts[3]
    for _ in range(stages):
        first += _decode_two(buffer, first, table, mask, tops, place)
        second += _decode_two(buffer, second, table, mask, tops, place + 2)
        third += _decode_two(buffer, third, table, mask, tops, place + 4)
        fourth += _decode_two(buffer, fourth, table, mask, tops, place + 6)
        place += 128


@njit(cache=True, nogil=True, inline="always")
def _decode_two(
    buffer: NDArray[np.uint32], position: int, table: NDArray[np.uint64], mask: int, tops: NDArray[np.uint32],
    place: int,
) -> int:  # fmt: skip
    """Of a stream a stage's quads, and their bits: two codewords of at most 13 fit one look at the buffer."""
    bits = _peek(buffer, position)
    entry = table[bits & mask]
    length = entry >> U64(32)
    behind = table[(bits >> length) & mask]
    tops[place] = np.uint32(entry & U64(0xFFFFFFFF))
    tops[place + 1] = np.uint32(behind & U64(0xFFFFFFFF))
    return np.int64(length) + np.int64(behind >> U64(32))


@njit(cache=True, nogil=True)
def several_symbols(table: NDArray[np.uint16], width: int) -> NDArray[np.uint64]:
    """What a window of ``width`` bits holds of whole codewords, up to four: ``count << 40 | length << 32 | exponents``.

    Args:
        table: of single codewords, ``length << 12 | exponent``.
    """
    several = np.empty(table.size, np.uint64)
    for window in range(table.size):
        exponents, length, count = 0, 0, 0
        while count < 4:
            entry = np.int64(table[window >> length])
            if count > 0 and length + (entry >> 12) > width:
                break
            exponents |= (entry & 0xFF) << (8 * count)
            length += entry >> 12
            count += 1
        several[window] = count << 40 | length << 32 | exponents
    return several


@njit(cache=True, nogil=True)
def _decode_singles(
    buffer: NDArray[np.uint32], position: int, stages: int, table: NDArray[np.uint64], width: int,
    tops: NDArray[np.uint32], place: int,
) -> None:  # fmt: skip
    """A stream's exponents, two words of four for each stage; words are written until they are full."""
    mask = (_LOW << U64(width)) - _LOW
    exponents, held, word = U64(0), U64(0), 0  # held: exponents that are not in a full word
    while word < 2 * stages:
        bits = _peek(buffer, position)
        for _ in range(2):  # of at most 12 bits
            entry = table[bits & mask]
            length = (entry >> U64(32)) & U64(0xFF)
            exponents |= (entry & U64(0xFFFFFFFF)) << (U64(8) * held)
            held += entry >> U64(40)
            tops[place + 128 * (word >> 1) + (word & 1)] = np.uint32(exponents & U64(0xFFFFFFFF))
            is_full = held >> U64(2)  # at most seven are held
            exponents >>= U64(32) * is_full
            held &= U64(3)
            word += np.int64(is_full)
            bits >>= length
            position += np.int64(length)
            if word >= 2 * stages:
                break


@njit(cache=True, nogil=True)
def _apply_patches(buffer: NDArray[np.uint32], first: int, last: int, stages: int, tops: NDArray[np.uint32]) -> None:
    """FORMAT.md 6.4; patches of stages that the chunk does not have are ignored."""
    for i in range(first, last):
        patch = np.int64(buffer[i])
        stage = patch >> 16
        if stage < stages:
            place = 128 * stage + 4 * (patch >> 9 & 31) + (patch >> 14 & 3)
            tops[place] ^= np.uint32((patch & 127) << (8 * (patch >> 7 & 3)))


@njit(cache=True, nogil=True)
def _assemble(
    row_words: NDArray[np.uint16], tops: NDArray[np.uint32], stage: int, planes: NDArray[np.uint32], row_group: int,
    s: int, stages: int, quad: bool, changes: NDArray[np.uint64], low: NDArray[np.uint32], high: NDArray[np.uint32],
) -> None:  # fmt: skip
    """The words of one stage, 8 rows of 64, from top7 (or exponents), raw bytes and signs (FORMAT.md section 5)."""
    slab = row_group * (stages // 2 * 288 + stages % 2 * 160) + (s >> 1) * 288
    raw = slab + 32 + 128 * (s & 1) if quad else (row_group * stages + s) * 128
    for lane in range(32):
        sign = planes[slab + lane] << np.uint32(4 * (s & 1)) if quad else np.uint32(0)
        for step in range(4):
            place = 16 * (lane >> 2) + 4 * step + (lane & 3)  # in the order of rows and columns
            low[place] = planes[raw + 4 * lane + step]
            high[place] = tops[128 * stage + 4 * lane + step] | (sign << np.uint32(step)) & _SIGNS
    lows, highs = low.view(np.uint8), high.view(np.uint8)
    if quad:
        for i in range(512):  # these loops are for vector units
            row_words[i] = np.uint16(lows[i]) | np.uint16(highs[i]) << 8
    else:
        for i in range(512):
            row_words[i] = np.uint16(lows[i] & 0x7F) | np.uint16(lows[i] & 0x80) << 8 | np.uint16(highs[i]) << 7
    quads = row_words.view(np.uint64)
    for r in range(8):
        change = changes[r]
        for i in range(16 * r, 16 * r + 16):
            quads[i] = _unshift(quads[i], change)


@njit(cache=True, nogil=True)
def _store(
    output: NDArray[np.uint16], begin: int, row_words: NDArray[np.uint16], rows: int, columns: int, row: int,
    column: int,
) -> None:  # fmt: skip
    """Copy what lies inside the tensor and in ``output``."""
    for r in range(min(8, rows - row)):
        start = (row + r) * columns + column - begin
        skipped = max(0, -start)
        count = min(64, columns - column, output.size - start) - skipped
        if count == 64:
            whole, words = output[start : start + 64], row_words[64 * r : 64 * r + 64]
            for i in range(64):  # known to the compiler
                whole[i] = words[i]
        else:
            for i in range(count):
                output[start + skipped + i] = row_words[64 * r + skipped + i]


@njit(cache=True, nogil=True, inline="always")
def _unshift(quad: int, change: int) -> int:
    """FORMAT.md 4.3 for four words: no field carries into the next, whatever the contents.

    Args:
        change: what each exponent that is not zero gets, modulo 256.
    """
    fields = quad & _FIELDS
    nonzero = ((fields + _FIELDS) & _WRAP) >> U64(15)
    moved = (fields + (((nonzero << U64(16)) - nonzero) & change)) & _FIELDS
    return (quad & ~_FIELDS) | moved
