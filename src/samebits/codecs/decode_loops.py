"""The compiled loops of the CPU decoder.

Safe on any contents, also on such as were written behind validation: a chunk, kept inside the streams, is copied into a
buffer with SLACK zero words behind it, stream starts are kept inside the chunk, and from its start a stream can consume
at most 512 codewords of 13 bits (FORMAT.md 6.6), which SLACK covers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import carray

from samebits.codecs.loops import HEAD_WORDS, U64, chunk_extent, plane_places
from samebits.codecs.openmp import COUNT, DONE, FIELDS, GRAIN, NEXT, fetch_add, pointer
from samebits.compiled import callback, compiled
from samebits.vectors import join_quad_row, join_single_row, load64, load_bits, store32

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Room = tuple[
        NDArray[np.uint32], NDArray[np.uint32], NDArray[np.uint16], NDArray[np.uint16], NDArray[np.uint64],
        NDArray[np.uint16],
    ]  # fmt: skip

SLACK = 512 * 13 // 32 + 4
_EACH = np.uint32(0x01010101)
_NUMBERS = FIELDS + 2 * 8  # behind the arrays of a task
_TASK_FIELDS = _NUMBERS + 8
_BEYOND = 24  # bytes behind a stream's exponents that look-ups may write


@compiled
def decode_entries(
    output: NDArray[np.uint16], entries: NDArray[np.int64], places: NDArray[np.int64], entry_words: int,
    chunks_per_entry: int, rows: int, columns: int, chunk_stages: int, quad: bool, window: int,
    shifts: NDArray[np.int8], table: NDArray[np.uint16], width: int, offsets: NDArray[np.uint32],
    planes: NDArray[np.uint32], streams: NDArray[np.uint32], first: int, last: int,
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
            _decode_chunk(into, begin, chunk, rows, columns, chunk_stages, quad, window, shifts, table, width, offsets,
                          planes, streams, room)  # fmt: skip


@callback
def decode_task(address: int) -> None:
    """``decode_entries`` as openmp.run takes it: its arrays, then its other arguments but the last two."""
    task = carray(pointer(address), _TASK_FIELDS, np.int64)
    output = carray(pointer(task[FIELDS]), (task[FIELDS + 1],), np.uint16)
    entries = carray(pointer(task[FIELDS + 2]), (task[FIELDS + 3],), np.int64)
    places = carray(pointer(task[FIELDS + 4]), (task[FIELDS + 5],), np.int64)
    shifts = carray(pointer(task[FIELDS + 6]), (task[FIELDS + 7],), np.int8)
    table = carray(pointer(task[FIELDS + 8]), (task[FIELDS + 9],), np.uint16)
    offsets = carray(pointer(task[FIELDS + 10]), (task[FIELDS + 11],), np.uint32)
    planes = carray(pointer(task[FIELDS + 12]), (task[FIELDS + 13],), np.uint32)
    streams = carray(pointer(task[FIELDS + 14]), (task[FIELDS + 15],), np.uint32)
    entry_words, chunks_per_entry, rows, columns = (
        task[_NUMBERS],
        task[_NUMBERS + 1],
        task[_NUMBERS + 2],
        task[_NUMBERS + 3],
    )
    chunk_stages, quad, window, width = (
        task[_NUMBERS + 4],
        task[_NUMBERS + 5] != 0,
        task[_NUMBERS + 6],
        task[_NUMBERS + 7],
    )
    count, grain = task[COUNT], task[GRAIN]
    while True:
        first = fetch_add(address + 8 * NEXT, grain)
        if first >= count:
            return
        last = min(first + grain, count)
        try:
            decode_entries(output, entries, places, entry_words, chunks_per_entry, rows, columns, chunk_stages, quad,
                           window, shifts, table, width, offsets, planes, streams, first, last)  # fmt: skip
        except Exception:  # no memory, which the caller says: from here it would be printed
            return
        fetch_add(address + 8 * DONE, last - first)


@compiled
def _chunk_of(word: int, columns: int, stages: int, chunk_stages: int) -> int:
    """The chunk with a word of the tensor; where a row group has several chunks, the first."""
    row_group = word // columns // 8
    if stages > chunk_stages:
        return row_group * ((stages + chunk_stages - 1) // chunk_stages)
    return row_group // (chunk_stages // stages)


@compiled
def _room(chunk_stages: int) -> Room:
    """For one chunk: its words; its top7 values or exponents, four bytes per quad; its quads' entries of the table, or
    its exponents stream by stream; a stage's words; where streams start; what takes the shifts of a row group off."""
    return (
        np.empty(1 + 128 * chunk_stages + SLACK, np.uint32),
        np.empty(128 * chunk_stages, np.uint32),
        np.empty(32 * (8 * chunk_stages + _BEYOND), np.uint16),
        np.empty(8 * 64, np.uint16),
        np.empty(64, np.uint64),
        np.empty(8, np.uint16),
    )


@compiled
def _decode_chunk(
    output: NDArray[np.uint16], begin: int, chunk: int, rows: int, columns: int, chunk_stages: int, quad: bool,
    window: int, shifts: NDArray[np.int8], table: NDArray[np.uint16], width: int, offsets: NDArray[np.uint32],
    planes: NDArray[np.uint32], streams: NDArray[np.uint32], room: Room,
) -> None:  # fmt: skip
    """Of a chunk what lies in ``output``: the tensor's words from ``begin`` on."""
    buffer, tops, found, row_words, starts, changes = room
    row_groups, stages = (rows + 7) // 8, (columns + 63) // 64
    group, groups, stage_from, stage_count = chunk_extent(chunk, row_groups, stages, chunk_stages)
    start = min(np.int64(offsets[chunk]), streams.size)
    size = max(0, min(np.int64(offsets[chunk + 1]) - start, streams.size - start, buffer.size - SLACK))
    for i in range(size):  # one array assigned to another takes seconds to compile, for what it says if they differ
        buffer[i] = streams[start + i]
    buffer[size : size + SLACK] = 0
    _decode_tops(buffer, size, groups * stage_count, quad, window, table, width, tops, found, starts)
    stage = np.int64(0)  # not a literal, for which _join would be compiled once more
    for row_group in range(group, group + groups):
        row = 8 * row_group
        if (row + 8) * columns <= begin or row * columns >= begin + output.size:
            stage += stage_count
            continue
        for r in range(8):
            shift = np.int64(shifts[min(row + r, shifts.size - 1)])
            changes[r] = (-shift & 255) << 7
        for s in range(stage_from, stage_from + stage_count):
            first = row * columns + 64 * s - begin
            inside = first >= 0 and first + 7 * columns + 64 <= output.size
            if inside and row + 8 <= rows and 64 * s + 64 <= columns:
                _join(output, first, columns, tops, stage, planes, row_group, s, stages, quad, changes)
            else:
                _join(row_words, np.int64(0), np.int64(64), tops, stage, planes, row_group, s, stages, quad, changes)
                _store(output, begin, row_words, rows, columns, row, 64 * s)
            stage += 1


@compiled
def _decode_tops(
    buffer: NDArray[np.uint32], size: int, stages: int, quad: bool, window: int, table: NDArray[np.uint16], width: int,
    tops: NDArray[np.uint32], found: NDArray[np.uint16], starts: NDArray[np.uint64],
) -> None:  # fmt: skip
    """FORMAT.md 6.2 to 6.5: one chunk's top7 values (quad) or shifted exponents (single)."""
    head = np.int64(buffer[0])
    if head == 0 and size >= 1 + 128 * stages:
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
    mask = (U64(1) << U64(width)) - U64(1)
    if quad:
        _decode_quads(buffer, starts, stages, table, mask, found)
        for i in range(128 * stages):  # a loop for vector units
            classes = np.uint32(found[i])
            low = (classes & np.uint32(0o7)) | ((classes & np.uint32(0o70)) << np.uint32(5))
            high = ((classes & np.uint32(0o700)) << np.uint32(10)) | ((classes & np.uint32(0o7000)) << np.uint32(15))
            tops[i] = (low | high) + np.uint32(window) * _EACH
        _apply_patches(buffer, max(size - patches, HEAD_WORDS), size, stages, tops)
    else:
        _decode_singles(buffer, starts, stages, table, mask, found, tops)


@compiled
def _decode_quads(
    buffer: NDArray[np.uint32], starts: NDArray[np.uint64], stages: int, table: NDArray[np.uint16], mask: int,
    found: NDArray[np.uint16],
) -> None:  # fmt: skip
    """Every quad's entry of the table. Four streams in turns: each waits for its own look-ups, not for the others'."""
    for stream in range(0, 64, 4):
        start1, start2, start3, start4 = starts[stream], starts[stream + 1], starts[stream + 2], starts[stream + 3]
        place, left = U64(2 * stream), stages
        while left > 0:
            bits1, bits2 = load_bits(buffer, start1), load_bits(buffer, start2)
            bits3, bits4 = load_bits(buffer, start3), load_bits(buffer, start4)
            for _ in range(min(left, 2)):  # stages: their four codewords of at most 13 bits fit a look
                for i in range(2):
                    entry1, entry2 = table[bits1 & mask], table[bits2 & mask]
                    entry3, entry4 = table[bits3 & mask], table[bits4 & mask]
                    found[place + U64(i)], found[place + U64(i + 2)] = entry1, entry2
                    found[place + U64(i + 4)], found[place + U64(i + 6)] = entry3, entry4
                    length1, length2 = U64(entry1) >> U64(12), U64(entry2) >> U64(12)
                    length3, length4 = U64(entry3) >> U64(12), U64(entry4) >> U64(12)
                    bits1, bits2, bits3, bits4 = bits1 >> length1, bits2 >> length2, bits3 >> length3, bits4 >> length4
                    start1, start2 = start1 + length1, start2 + length2
                    start3, start4 = start3 + length3, start4 + length4
                place += U64(128)
                left -= 1


@compiled
def several_symbols(table: NDArray[np.uint16], width: int) -> NDArray[np.uint64]:
    """What a window of ``width`` bits holds of whole codewords, up to four: ``count << 38 | length << 32 | exponents``.

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
        several[window] = count << 38 | length << 32 | exponents
    return several


@compiled
def _decode_singles(
    buffer: NDArray[np.uint32], starts: NDArray[np.uint64], stages: int, table: NDArray[np.uint16], mask: int,
    found: NDArray[np.uint16], tops: NDArray[np.uint32],
) -> None:  # fmt: skip
    """Four streams in turns, each to a range of its own, in which four exponents are written wherever one is due.

    Four look-ups of at most 12 bits fit a look at the buffer. They find four exponents at least and 16 at most, so a
    stream takes no more than 2 stages looks, as many as it would need of codewords of 12 bits. One that is
    complete goes on behind its last exponent until the others are.
    """
    several, size = table.view(np.uint64), U64(8 * stages)
    pitch = size + U64(_BEYOND)
    for stream in range(0, 64, 4):
        start1, start2, start3, start4 = starts[stream], starts[stream + 1], starts[stream + 2], starts[stream + 3]
        range1 = U64(stream) * pitch
        range2, range3, range4 = range1 + pitch, range1 + U64(2) * pitch, range1 + U64(3) * pitch
        done1, done2, done3, done4 = U64(0), U64(0), U64(0), U64(0)
        while min(min(done1, done2), min(done3, done4)) < size:
            bits1, bits2 = load_bits(buffer, start1), load_bits(buffer, start2)
            bits3, bits4 = load_bits(buffer, start3), load_bits(buffer, start4)
            sum1, sum2, sum3, sum4 = U64(0), U64(0), U64(0), U64(0)  # lengths below, counts above
            place1, place2, place3, place4 = range1 + done1, range2 + done2, range3 + done3, range4 + done4
            for _ in range(4):
                entry1, entry2 = several[bits1 & mask], several[bits2 & mask]
                entry3, entry4 = several[bits3 & mask], several[bits4 & mask]
                store32(found, place1 + (sum1 >> U64(6)), entry1)
                store32(found, place2 + (sum2 >> U64(6)), entry2)
                store32(found, place3 + (sum3 >> U64(6)), entry3)
                store32(found, place4 + (sum4 >> U64(6)), entry4)
                entry1, entry2, entry3, entry4 = (
                    entry1 >> U64(32),
                    entry2 >> U64(32),
                    entry3 >> U64(32),
                    entry4 >> U64(32),
                )
                bits1, bits2 = bits1 >> (entry1 & U64(63)), bits2 >> (entry2 & U64(63))
                bits3, bits4 = bits3 >> (entry3 & U64(63)), bits4 >> (entry4 & U64(63))
                sum1, sum2, sum3, sum4 = sum1 + entry1, sum2 + entry2, sum3 + entry3, sum4 + entry4
            start1, start2 = start1 + (sum1 & U64(63)), start2 + (sum2 & U64(63))
            start3, start4 = start3 + (sum3 & U64(63)), start4 + (sum4 & U64(63))
            done1, done2 = min(done1 + (sum1 >> U64(6)), size), min(done2 + (sum2 >> U64(6)), size)
            done3, done4 = min(done3 + (sum3 >> U64(6)), size), min(done4 + (sum4 >> U64(6)), size)
    pairs = tops.view(np.uint64)
    for stage in range(stages):
        for stream in range(64):
            pairs[64 * stage + stream] = load64(found, U64(stream) * pitch + U64(8 * stage))


@compiled
def _apply_patches(buffer: NDArray[np.uint32], first: int, last: int, stages: int, tops: NDArray[np.uint32]) -> None:
    """FORMAT.md 6.4; patches of stages that the chunk does not have are ignored."""
    for i in range(first, last):
        patch = np.int64(buffer[i])
        stage = patch >> 16
        if stage < stages:
            place = 128 * stage + 4 * (patch >> 9 & 31) + (patch >> 14 & 3)
            tops[place] ^= np.uint32((patch & 127) << (8 * (patch >> 7 & 3)))


@compiled
def _join(
    output: NDArray[np.uint16], first: int, pitch: int, tops: NDArray[np.uint32], stage: int,
    planes: NDArray[np.uint32], row_group: int, s: int, stages: int, quad: bool, changes: NDArray[np.uint16],
) -> None:  # fmt: skip
    """The words of one stage, 8 rows of 64, from top7 (or exponents), raw bytes and signs (FORMAT.md section 5).

    Args:
        first, pitch: where the rows begin in ``output``, and how far apart, in words.
    """
    raw, signs = plane_places(row_group, s, stages, quad)
    for r in range(8):
        out, of_row, change = U64(2 * (first + r * pitch)), U64(64 * r), changes[r]
        top = U64(512 * stage) + of_row
        if quad:
            sign = signs + U64(16 * r)
            join_quad_row(output, out, tops, top, planes, raw + of_row, sign, np.uint32(4 * (s & 1)), change)
        else:
            join_single_row(output, out, tops, top, planes, raw + of_row, change)


@compiled
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
