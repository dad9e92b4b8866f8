"""One packed tensor for each way to break a clause of FORMAT.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from samebits.codecs.reference import Reading
from tests.codecs import zoo
from tests.codecs.slow_compact import CompactChoices, compact_choices
from tests.codecs.slow_encoder import Choices
from tests.codecs.surgery import Parts, get, put


def packed(words: zoo.Words, choose: Callable[[zoo.Words], Choices | CompactChoices], **changes: Any) -> bytes:
    return zoo.case("", words, choose, **changes).packed


QUAD = packed(zoo.scattered((9, 200), 1), zoo.quad_matrix)
SINGLE = packed(zoo.normal((600,), 2), zoo.single_flat)
COMPACT = packed(zoo.normal((600,), 3), compact_choices)
ONE_SYMBOL = packed(np.full(600, 0x3F80, np.uint16), zoo.one_quad)
ROW_SHIFTS = packed(zoo.scaled_rows((8, 64)), zoo.quad_with_row_shifts)
CHUNKS = packed(zoo.normal((8, 320)), zoo.quad_matrix, chunk_stages=1)
LOOSE = packed(zoo.normal((8, 256)), zoo.quad_matrix, spare_base=40)
RAW = packed(zoo.normal((8, 64)), zoo.quad_matrix, raw_chunks=frozenset({0}))


@dataclass(frozen=True)
class Malformed:
    """``data`` breaks ``clause``; ``refused``: already the tables show it, so that no decoder may start."""

    name: str
    clause: str
    data: bytes
    refused: bool

    def __str__(self) -> str:
        return f"{self.clause} {self.name}"


def field(clause: str, name: str, value: int, base: bytes = QUAD) -> Malformed:
    """A header field with another value."""
    parts = Parts.of(base)
    parts[name] = value
    return Malformed(f"{name}={value}", clause, parts.joined(), True)


def table(clause: str, damage: Callable[[Parts], None], base: bytes = QUAD) -> Malformed:
    return Malformed(damage.__name__, clause, _damaged(base, damage), True)


def stream(clause: str, damage: Callable[[Parts], None], base: bytes = QUAD) -> Malformed:
    return Malformed(damage.__name__, clause, _damaged(base, damage), False)


def _damaged(base: bytes, damage: Callable[[Parts], None]) -> bytes:
    parts = Parts.of(base)
    damage(parts)
    return parts.joined()


def no_words(parts: Parts) -> None:
    parts.shape[:8] = bytes(8)
    parts["rows"] = 0


def too_many_words(parts: Parts) -> None:
    parts.shape[:8] = (1 << 42).to_bytes(8, "little")
    parts["rows"] = 1 << 42


def other_shape(parts: Parts) -> None:
    put(parts.shape, 0, 10, "<Q")


def codeword_of_length_0(parts: Parts) -> None:
    put(parts.code, 0, 1, "<H")


def codeword_beyond_the_longest(parts: Parts) -> None:
    put(parts.code, 15, 1, "<H")


def unsorted_symbols(parts: Parts) -> None:
    last = parts["symbol_count"] + 15
    a, b = get(parts.code, last - 1, "<H"), get(parts.code, last, "<H")
    put(parts.code, last - 1, b, "<H")
    put(parts.code, last, a, "<H")


def counts_with_another_sum(parts: Parts) -> None:
    longest = parts["max_code_length"]
    put(parts.code, longest, get(parts.code, longest, "<H") - 1, "<H")


def incomplete_code(parts: Parts) -> None:
    move_codeword(parts, parts["max_code_length"] - 1, parts["max_code_length"])


def overfull_code(parts: Parts) -> None:
    move_codeword(parts, parts["max_code_length"], parts["max_code_length"] - 1)


def move_codeword(parts: Parts, source: int, target: int) -> None:
    """Change one codeword's length; the symbols stay sorted."""
    put(parts.code, source, get(parts.code, source, "<H") - 1, "<H")
    put(parts.code, target, get(parts.code, target, "<H") + 1, "<H")
    start = 32
    for length in range(16):
        symbols = np.frombuffer(parts.code, "<u2", get(parts.code, length, "<H"), start)
        parts.code[start : start + symbols.nbytes] = np.sort(symbols).tobytes()
        start += symbols.nbytes


def symbol_twice(parts: Parts) -> None:
    put(parts.code, 17, get(parts.code, 16, "<H"), "<H")


def symbol_out_of_range(parts: Parts) -> None:
    put(parts.code, parts["symbol_count"] + 15, 4096 if parts["code"] == 1 else 256, "<H")


def row_shift_out_of_range(parts: Parts) -> None:
    put(parts.row_shifts, 0, -127, "<b")


def offsets_from_1(parts: Parts) -> None:
    put(parts.offsets, 0, 1)


def offsets_to_elsewhere(parts: Parts) -> None:
    put(parts.offsets, len(parts.offsets) // 4 - 1, parts["stream_words"] - 1)


def offsets_that_stand_still(parts: Parts) -> None:
    parts["max_chunk_words"] = 1 + 128 * parts["chunk_stages"]
    put(parts.offsets, 2, get(parts.offsets, 1))


def offsets_that_turn_back(parts: Parts) -> None:
    parts["max_chunk_words"] = 1 + 128 * parts["chunk_stages"]
    put(parts.offsets, 2, get(parts.offsets, 1) - 1)


def offsets_beyond_the_streams(parts: Parts) -> None:
    put(parts.offsets, 2, 0xFFFFFFFF)


def chunk_longer_than_max(parts: Parts) -> None:
    parts["max_chunk_words"] = parts["max_chunk_words"] - 1


def sign_of_missing_stage(parts: Parts) -> None:
    parts.planes[127] |= 1


def other_bit_than_the_only_codeword(parts: Parts) -> None:
    parts.streams[36] |= 1


def no_unit(parts: Parts) -> None:
    put(parts.streams, 0, get(parts.streams, 0) & ~(0x3F << 13))


def streams_beyond_the_chunk(parts: Parts) -> None:
    put(parts.streams, 0, get(parts.streams, 0) | 0x1FFF)


def more_patches_than_words(parts: Parts) -> None:
    put(parts.streams, 0, get(parts.streams, 0) | 0x1FFF << 19)


def longest_streams(parts: Parts) -> None:
    put(parts.streams, 0, 0xFFFFFFFF)


def only_ones(parts: Parts) -> None:
    parts.streams[36:] = b"\xff" * (len(parts.streams) - 36)


def bit_after_a_streams_last_codeword(parts: Parts) -> None:
    set_bit(parts.streams, 9 * 32 + (get(parts.streams, 0) & 0x1FFF) - 1)


def bit_after_the_last_stream(parts: Parts) -> None:
    first = get(parts.streams, 0)
    base, unit = first & 0x1FFF, first >> 13 & 0x3F
    bits = sum(base + unit * nibble for byte in parts.streams[4:36] for nibble in (byte & 15, byte >> 4))
    assert bits % 32, "choose a tensor whose streams end within a word"
    set_bit(parts.streams, 9 * 32 + bits)


def set_bit(section: bytearray, bit: int) -> None:
    section[bit >> 3] |= 1 << (bit & 7)


def patches_in_the_single_code(parts: Parts) -> None:
    put(parts.streams, 0, get(parts.streams, 0) + (1 << 19))
    parts.streams += bytes(4)
    parts["stream_words"] = len(parts.streams) // 4
    parts["max_chunk_words"] = len(parts.streams) // 4
    put(parts.offsets, 1, len(parts.streams) // 4)


def unsorted_patches(parts: Parts) -> None:
    last = get(parts.offsets, 1) - 1
    a, b = get(parts.streams, last - 1), get(parts.streams, last)
    put(parts.streams, last - 1, b)
    put(parts.streams, last, a)


def patch_twice(parts: Parts) -> None:
    last = get(parts.offsets, 1) - 1
    put(parts.streams, last - 1, get(parts.streams, last))


def patch_beyond_the_chunk(parts: Parts) -> None:
    last = get(parts.offsets, 1) - 1
    put(parts.streams, last, get(parts.streams, last) | 0xFFFF << 16)


def eight_bits_of_top7(parts: Parts) -> None:
    parts.streams[4] |= 0x80


def raw_chunk_too_short(parts: Parts) -> None:
    put(parts.streams, 0, 0)


def gap_not_zero(data: bytes) -> bytes:
    places = Reading(data).places
    end = places["code"].stop
    assert end < places["row_shifts"].start, "choose a tensor with a gap after the code"
    return data[:end] + b"\1" + data[end + 1 :]


def too_many_words_for_the_compact_code(parts: Parts) -> None:
    put(parts.shape, 0, (1 << 20) + 1, "<Q")


def skip_of_no_exponents(parts: Parts) -> None:
    parts.code[1] = 0


def skip_beyond_the_last_exponent(parts: Parts) -> None:
    parts.code[1] = 250


def code_that_ends_in_a_skip(parts: Parts) -> None:
    parts.code[-1] = 0


def more_states_than_there_are(parts: Parts) -> None:
    parts.code[-1] = 255


def run_too_short(parts: Parts) -> None:
    put(parts.offsets, 0, 7, "<H")


def run_too_long(parts: Parts) -> None:
    put(parts.offsets, 2, 8 + 16 * 88 + 1, "<H")


def runs_longer_than_the_streams(parts: Parts) -> None:
    put(parts.offsets, 0, get(parts.offsets, 0, "<H") + 32, "<H")


def runs_shorter_than_the_streams(parts: Parts) -> None:
    put(parts.offsets, 0, get(parts.offsets, 0, "<H") - 32, "<H")


def bit_after_the_last_run(parts: Parts) -> None:
    bits = sum(get(parts.offsets, run, "<H") for run in range(3))
    assert bits % 32, "choose a tensor whose runs end within a word"
    set_bit(parts.streams, bits)


def run_that_ends_late(parts: Parts) -> None:
    put(parts.offsets, 0, get(parts.offsets, 0, "<H") + 1, "<H")
    put(parts.offsets, 1, get(parts.offsets, 1, "<H") - 1, "<H")


def run_that_ends_early(parts: Parts) -> None:
    put(parts.offsets, 0, get(parts.offsets, 0, "<H") - 1, "<H")
    put(parts.offsets, 1, get(parts.offsets, 1, "<H") + 1, "<H")


def runs_of_other_bits(parts: Parts) -> None:
    parts.streams[:] = bytes(byte ^ 0x5A for byte in parts.streams[:-4]) + parts.streams[-4:]


def only_ones_in_runs(parts: Parts) -> None:
    bits = sum(get(parts.offsets, run, "<H") for run in range(3))
    parts.streams[:] = ((1 << bits) - 1).to_bytes(len(parts.streams), "little")


def last_state_not_0(parts: Parts) -> None:
    """The last bit read goes into the last state as it is."""
    parts.streams[(get(parts.offsets, 0, "<H") - 1) >> 3] ^= 1 << (get(parts.offsets, 0, "<H") - 1 & 7)


MALFORMED = [
    field("2.2", "magic", 0x54494252),
    field("2.2", "version", 0),
    field("2.2", "version", 2),
    field("2.2", "code", 0),
    field("2.2", "code", 3),
    field("2.2", "code", 4),
    field("2.2", "layout", 2),
    field("2.2", "ndim", 9),
    field("1.1", "ndim", 1),
    field("2.2", "columns", 201),
    field("2.2", "columns", 0),
    field("2.2", "rows", 8),
    field("2.2", "rows", 1 << 63),
    field("2.2", "layout", 0),
    field("2.2", "chunk_stages", 0),
    field("2.2", "chunk_stages", 65),
    field("6.1", "chunk_stages", 1),
    field("2.2", "max_code_length", 0),
    field("2.2", "max_code_length", 14),
    field("2.2", "flags", 2),
    field("2.2", "flags", 0x8001),
    field("2.2", "reserved", 1),
    field("2.2", "symbol_count", 4095),
    field("2.2", "stream_words", 0),
    field("2.2", "stream_words", 1 << 40),
    field("2.2", "stream_words", (1 << 64) - 1),
    *(field("2.2", name, 1, COMPACT) for name in ("layout", "columns", "chunk_stages", "max_code_length", "window")),
    *(field("2.2", name, 1, COMPACT) for name in ("shift", "rows", "flags", "max_chunk_words", "stream_words")),
    field("2.2", "symbol_count", 512, COMPACT),
    field("1.1", "layout", 1, SINGLE),
    field("3.1", "max_code_length", 2),
    field("3.4", "window", 121),
    field("3.4", "window", 57 | 15),
    field("3.5", "window", 16, SINGLE),
    field("3.5", "max_code_length", 13, SINGLE),
    field("6.1", "max_chunk_words", 1 + 128 * 16 + 1),
    table("2.2", no_words),
    table("2.2", too_many_words, SINGLE),
    table("2.2", other_shape),
    table("2.2", too_many_words_for_the_compact_code, COMPACT),
    table("2.2", no_words, COMPACT),
    Malformed("cut in the header", "2.2", QUAD[:63], True),
    Malformed("cut in the shape", "2.1", QUAD[:79], True),
    Malformed("cut at its end", "2.2", QUAD[:-16], True),
    Malformed("too long", "2.2", QUAD + bytes(16), True),
    Malformed("empty", "2.2", b"", True),
    Malformed("gap_not_zero", "2.1", gap_not_zero(SINGLE), False),
    Malformed("gap_not_zero", "2.1", gap_not_zero(COMPACT), False),
    Malformed("cut at its end", "2.2", COMPACT[:-16], True),
    table("3.1", codeword_of_length_0),
    table("3.1", codeword_beyond_the_longest),
    table("3.1", unsorted_symbols),
    table("3.1", unsorted_symbols, SINGLE),
    table("3.2", counts_with_another_sum),
    table("3.2", incomplete_code),
    table("3.2", overfull_code),
    table("3.2", incomplete_code, SINGLE),
    table("3.2", overfull_code, SINGLE),
    table("3.2", symbol_twice),
    table("3.4", symbol_out_of_range),
    table("3.5", symbol_out_of_range, SINGLE),
    table("3.6", skip_of_no_exponents, COMPACT),
    table("3.6", skip_beyond_the_last_exponent, COMPACT),
    table("3.6", code_that_ends_in_a_skip, COMPACT),
    table("3.6", more_states_than_there_are, COMPACT),
    stream("3.2", other_bit_than_the_only_codeword, ONE_SYMBOL),
    field("4.2", "shift", 1, ROW_SHIFTS),
    field("4.3", "shift", 127),
    field("4.3", "shift", -128),
    table("4.3", row_shift_out_of_range, ROW_SHIFTS),
    table("6.1", offsets_from_1),
    table("6.1", offsets_to_elsewhere),
    table("6.1", offsets_that_stand_still, CHUNKS),
    table("6.1", offsets_that_turn_back, CHUNKS),
    table("6.1", offsets_beyond_the_streams, CHUNKS),
    table("6.1", chunk_longer_than_max),
    table("3.2", counts_with_another_sum, RAW),
    stream("5.2", sign_of_missing_stage, RAW),
    stream("6.5", no_unit),
    stream("6.3", streams_beyond_the_chunk),
    stream("6.3", more_patches_than_words),
    stream("6.3", longest_streams),
    stream("6.3", longest_streams, SINGLE),
    stream("6.3", bit_after_a_streams_last_codeword, LOOSE),
    stream("6.3", bit_after_the_last_stream),
    stream("6.6", only_ones, SINGLE),
    stream("6.4", patches_in_the_single_code, SINGLE),
    stream("6.4", unsorted_patches),
    stream("6.4", patch_twice),
    stream("6.6", patch_beyond_the_chunk),
    stream("6.5", eight_bits_of_top7, RAW),
    stream("6.5", raw_chunk_too_short),
    table("6.7", run_too_short, COMPACT),
    table("6.7", run_too_long, COMPACT),
    table("6.7", runs_longer_than_the_streams, COMPACT),
    table("6.7", runs_shorter_than_the_streams, COMPACT),
    stream("6.7", bit_after_the_last_run, COMPACT),
    stream("6.8", run_that_ends_late, COMPACT),
    stream("6.8", run_that_ends_early, COMPACT),
    stream("6.8", runs_of_other_bits, COMPACT),
    stream("6.8", only_ones_in_runs, COMPACT),
    stream("6.8", last_state_not_0, COMPACT),
]
