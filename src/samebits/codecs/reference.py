"""A slow, plain decoder: FORMAT.md read aloud, clause by clause.

The oracle of all other decoders, with which it shares no code. What FORMAT.md asks of a writer only (4.3, 5.4, 6.5) is
not refused here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from samebits.cached import cached_property
from samebits.codecs.reference_compact import CompactReading, must

if TYPE_CHECKING:
    from numpy.typing import NDArray

# fmt: off
_HEADER = np.dtype([  # 2.2
    ("magic", "<u4"), ("version", "u1"), ("code", "u1"), ("layout", "u1"), ("ndim", "u1"),
    ("stored_digest", "<u8"), ("original_digest", "<u8"),
    ("columns", "<u4"), ("chunk_stages", "u1"), ("max_code_length", "u1"), ("window", "u1"), ("shift", "i1"),
    ("rows", "<u8"), ("symbol_count", "<u2"), ("flags", "<u2"),
    ("max_chunk_words", "<u4"), ("stream_words", "<u8"), ("reserved", "<u8"),
])
# fmt: on
_QUAD, _SINGLE, _COMPACT = 1, 2, 3
_FLAT, _MATRIX = 0, 1
_ALL64 = 0xFFFFFFFFFFFFFFFF

Codewords = dict[tuple[int, int], int]
Sizes = dict[str, tuple[int, int]]


def decode_reference(data: bytes) -> NDArray[np.uint16]:
    """The original words of a packed tensor, in its shape.

    Raises:
        FormatError: the bytes break a clause of FORMAT.md, which the error names. Digests are not compared.
    """
    return Reading(data).words


def digest_reference(data: bytes) -> int:
    """The 64-bit digest of 2.3."""
    padded = data + bytes(-len(data) % 8)
    total = 0
    for i in range(len(padded) // 8):
        z = int.from_bytes(padded[8 * i : 8 * i + 8], "little") + (i + 1) * 0x9E3779B97F4A7C15 & _ALL64
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & _ALL64
        z = (z ^ z >> 27) * 0x94D049BB133111EB & _ALL64
        total += z ^ z >> 31
    return total & _ALL64


@dataclass(frozen=True)
class Chunk:
    """One chunk as stored.

    Attributes:
        stages: (row group, stage) in the order of 1.4.
        stored: its 32-bit words.
    """

    stages: list[tuple[int, int]]
    stored: NDArray[np.uint32]

    @property
    def is_raw(self) -> bool:
        return int(self.stored[0]) == 0  # 6.5

    @property
    def patch_count(self) -> int:
        return int(self.stored[0]) >> 19  # 6.2

    def stream_lengths(self) -> list[int]:
        """6.2, 6.3: the length in bits of each of the 64 streams of a coded chunk."""
        base, unit = int(self.stored[0]) & 0x1FFF, int(self.stored[0]) >> 13 & 0x3F
        must(unit >= 1, "6.5", "a chunk that is neither raw nor coded")
        must(self.stored.size >= 9, "6.3", "a chunk ends before its streams")
        nibbles = [nibble for byte in self.stored[1:9].tobytes() for nibble in (byte & 15, byte >> 4)]
        return [base + unit * nibble for nibble in nibbles]


class Reading:
    """Everything a packed tensor says. Arrays over words have the planes' order [row group, stage, lane, step, i].

    Of the compact code only header, shape, sections, ``compact`` and words.
    """

    def __init__(self, data: bytes) -> None:
        self.data = data
        must(len(data) >= _HEADER.itemsize, "2.2", "shorter than a header")
        fields = np.frombuffer(data, _HEADER, 1)[0]
        self.header = {name: int(fields[name]) for name in _HEADER.names or ()}
        self._check_header()
        self.shape = self._read_shape()
        if self.is_compact:
            self.sections = self._find_sections(self._compact_sizes())
            self.compact = CompactReading(self.sections, math.prod(self.shape))
            return
        self.rows, self.columns = self._read_geometry()
        self.row_groups, self.stages = -(-self.rows // 8), -(-self.columns // 64)  # 1.2
        self.sections = self._find_sections(self._sizes())
        self.symbols = self._read_symbols()
        self.codewords = self._read_code()

    def _check_header(self) -> None:
        """2.2, and the ranges that other clauses give for single fields."""
        header = self.header
        must(header["magic"] == 0x54494253, "2.2", "another magic number")
        must(header["version"] == 1, "2.2", "another version")
        must(header["code"] in (_QUAD, _SINGLE, _COMPACT), "2.2", "another code")
        must(header["layout"] in (_FLAT, _MATRIX), "2.2", "another layout")
        must(header["ndim"] <= 8, "2.2", "more than 8 dimensions")
        must(header["flags"] in (0, 1) and header["reserved"] == 0, "2.2", "another flag")
        if self.is_compact:
            nothing = ("layout", "columns", "chunk_stages", "max_code_length", "window", "shift", "rows", "flags")
            must(not any(header[name] for name in (*nothing, "max_chunk_words")), "2.2", "a field that is not 0")
            return
        must(1 <= header["chunk_stages"] <= 64, "2.2", "chunk_stages out of range")
        must(1 <= header["max_code_length"] <= 13, "2.2", "max_code_length out of range")
        if self.is_quad:
            must(header["window"] <= 120 and header["window"] & 15 <= 8, "3.4", "window out of range")
        else:
            must(header["window"] == 0, "3.5", "a window in the single code")
            must(header["max_code_length"] <= 12, "3.5", "max_code_length out of range")
        must(header["flags"] == 0 or header["shift"] == 0, "4.2", "both a shift and row_shifts")
        must(header["max_chunk_words"] <= 1 + 128 * header["chunk_stages"], "6.1", "max_chunk_words out of range")

    @property
    def is_quad(self) -> bool:
        return self.header["code"] == _QUAD

    @property
    def is_compact(self) -> bool:
        return self.header["code"] == _COMPACT

    def _read_shape(self) -> tuple[int, ...]:
        ndim = self.header["ndim"]
        must(len(self.data) >= 64 + 8 * ndim, "2.1", "the shape is cut off")
        shape = tuple(np.frombuffer(self.data, "<u8", ndim, 64).tolist())
        most = 1 << (20 if self.is_compact else 48)
        must(1 <= math.prod(shape) <= most, "2.2", f"no words, or more than {most}")
        return shape

    def _read_geometry(self) -> tuple[int, int]:
        """1.1: rows and columns, which the header repeats."""
        rows, columns = -(-math.prod(self.shape) // 128), 128
        if self.header["layout"] == _MATRIX:
            must(len(self.shape) >= 2, "1.1", "matrix layout of fewer than two dimensions")
            rows, columns = math.prod(self.shape[:-1]), self.shape[-1]
        stored = self.header["rows"], self.header["columns"]
        must(stored == (rows, columns), "2.2", "rows x columns contradict the shape")
        return rows, columns

    @property
    def chunk_count(self) -> int:
        """1.4"""
        chunk_stages = self.header["chunk_stages"]
        if self.stages >= chunk_stages:
            return self.row_groups * -(-self.stages // chunk_stages)
        return -(-self.row_groups // (chunk_stages // self.stages))

    def _sizes(self) -> Sizes:
        """2.1: each section's bytes, and what its start is a multiple of."""
        rows, header = self.rows, self.header
        slab_bytes = self.stages // 2 * 1152 + self.stages % 2 * 640 if self.is_quad else self.stages * 512  # 5.3
        return {
            "header": (64, 16),
            "shape": (8 * header["ndim"], 16),
            "code": (32 + 2 * header["symbol_count"], 16),
            "row_shifts": (rows if header["flags"] & 1 else 0, 16),
            "offsets": (4 * (self.chunk_count + 1), 16),
            "planes": (self.row_groups * slab_bytes, 128 if rows * self.columns >= 65536 else 16),
            "streams": (4 * header["stream_words"], 16),
        }

    def _compact_sizes(self) -> Sizes:
        """2.1, 1.6"""
        words, header = math.prod(self.shape), self.header
        sizes = [
            64,
            8 * header["ndim"],
            header["symbol_count"],
            0,
            2 * -(-words // 256),
            words,
            4 * header["stream_words"],
        ]
        names = ("header", "shape", "code", "row_shifts", "offsets", "planes", "streams")
        return {name: (size, 4) for name, size in zip(names, sizes, strict=True)}

    def _find_sections(self, sizes: Sizes) -> dict[str, bytes]:
        """2.1: the bytes of each section; between them only zeros."""
        places, end = {}, 0
        for name, (size, multiple) in sizes.items():
            start = -(-end // multiple) * multiple
            places[name] = slice(start, start + size)
            end = start + size
        self.places = places
        must(len(self.data) == -(-end // 16) * 16, "2.2", "another length than the header's fields imply")
        starts = [*(place.start for place in places.values()), len(self.data)]
        gaps = [self.data[place.stop : start] for place, start in zip(places.values(), starts[1:], strict=True)]
        must(not any(map(any, gaps)), "2.1", "not zero between the sections")
        return {name: self.data[place] for name, place in places.items()}

    def _read_symbols(self) -> list[int]:
        """3.1: the code section's symbols."""
        symbols: list[int] = np.frombuffer(self.sections["code"], "<u2", offset=32).tolist()
        must(len(symbols) >= 1 and len(set(symbols)) == len(symbols), "3.2", "no symbols, or one twice")
        must(max(symbols) < (4096 if self.is_quad else 256), "3.4" if self.is_quad else "3.5", "a symbol out of range")
        return symbols

    def _read_code(self) -> Codewords:
        """3.1, 3.2: (length, code) -> symbol."""
        counts = np.frombuffer(self.sections["code"], "<u2", 16).tolist()
        longest = self.header["max_code_length"]
        must(counts[0] == 0 and not any(counts[longest + 1 :]), "3.1", "a code length out of range")
        must(sum(counts) == len(self.symbols), "3.2", "the counts do not sum to symbol_count")
        kraft = sum(count << 15 - length for length, count in enumerate(counts))
        must(kraft == 1 << 15 or counts == [0, 1] + 14 * [0], "3.2", "the code is not complete")
        codewords: Codewords = {}
        code = 0
        for length in range(1, 16):
            code *= 2
            of_length = self.symbols[len(codewords) : len(codewords) + counts[length]]
            must(of_length == sorted(of_length), "3.1", "symbols of one length are not sorted")
            for symbol in of_length:
                codewords[length, code] = symbol
                code += 1
        return codewords

    @cached_property
    def chunks(self) -> list[Chunk]:
        """1.4, 6.1"""
        offsets = np.frombuffer(self.sections["offsets"], "<u4").tolist()
        must(offsets[0] == 0 and offsets[-1] == self.header["stream_words"], "6.1", "offsets do not cover the streams")
        lengths = [after - before for before, after in itertools.pairwise(offsets)]
        must(min(lengths) >= 1, "6.1", "offsets do not increase")
        must(max(lengths) <= self.header["max_chunk_words"], "6.1", "a chunk longer than max_chunk_words")
        streams = np.frombuffer(self.sections["streams"], "<u4")
        return [
            Chunk(stages, streams[offset : offset + length])
            for stages, offset, length in zip(self._stages_of_chunks(), offsets[:-1], lengths, strict=True)
        ]

    def _stages_of_chunks(self) -> Iterator[list[tuple[int, int]]]:
        """1.4: the stages of every chunk."""
        chunk_stages = self.header["chunk_stages"]
        if self.stages >= chunk_stages:
            for r in range(self.row_groups):
                for first in range(0, self.stages, chunk_stages):
                    yield [(r, s) for s in range(first, min(self.stages, first + chunk_stages))]
            return
        groups = chunk_stages // self.stages
        for first in range(0, self.row_groups, groups):
            yield [(r, s) for r in range(first, min(self.row_groups, first + groups)) for s in range(self.stages)]

    @cached_property
    def coded(self) -> NDArray[np.uint8]:
        """What the streams hold: top7 (quad code, 3.4) or the shifted exponent (single code, 3.5) of each word."""
        coded = np.zeros((self.row_groups, self.stages, 32, 4, 4), np.uint8)
        for chunk in self.chunks:
            values = self._read_raw(chunk) if chunk.is_raw else self._read_coded(chunk)
            for place, (r, s) in enumerate(chunk.stages):
                coded[r, s] = values[place]
        return coded

    def _read_raw(self, chunk: Chunk) -> NDArray[np.uint8]:
        """6.5"""
        must(chunk.stored.size == 1 + 128 * len(chunk.stages), "6.5", "a raw chunk of another length")
        values = np.frombuffer(chunk.stored[1:].tobytes(), np.uint8).reshape(-1, 32, 4, 4)
        must(not self.is_quad or int(values.max()) < 128, "6.5", "a top7 of more than seven bits")
        return values

    def _read_coded(self, chunk: Chunk) -> NDArray[np.uint8]:
        """6.3: 64 streams, then patches."""
        lengths = chunk.stream_lengths()
        patches_at = 9 + -(-sum(lengths) // 32)
        must(
            chunk.stored.size == patches_at + chunk.patch_count,
            "6.3",
            "a chunk of another length than its streams and patches",
        )
        bits = np.unpackbits(chunk.stored[9:patches_at].view(np.uint8), bitorder="little").tobytes()  # 3.3
        values = np.zeros((len(chunk.stages), 32, 4, 4), np.uint8)
        start = 0
        for stream, length in enumerate(lengths):
            quads = self._read_stream(bits[start : start + length], 2 * len(chunk.stages))
            lane, first_step = stream // 2, 2 * (stream % 2)  # 1.5
            values[:, lane, first_step : first_step + 2] = np.array(quads, np.uint8).reshape(-1, 2, 4)
            start += length
        must(not any(bits[start:]), "6.3", "not zero after the last stream")
        self._apply_patches(chunk.stored[patches_at:].tolist(), values)
        return values

    def _read_stream(self, bits: bytes, quads: int) -> list[list[int]]:
        """A stream's quads; ``bits`` has one bit per byte."""
        if not self.is_quad:  # 3.5
            exponents = self._read_codewords(bits, 4 * quads)
            return [exponents[4 * quad : 4 * quad + 4] for quad in range(quads)]
        window = self.header["window"]  # 3.4
        return [[window + (symbol >> 3 * i & 7) for i in range(4)] for symbol in self._read_codewords(bits, quads)]

    def _read_codewords(self, bits: bytes, count: int) -> list[int]:
        """3.3: ``count`` symbols, then only zeros (6.3)."""
        symbols: list[int] = []
        position = 0
        while len(symbols) < count:
            length, code = 0, 0
            while (length, code) not in self.codewords:
                must(length < self.header["max_code_length"], "3.2", "bits that start no codeword")
                must(position < len(bits), "6.6", "a stream passes its end")
                length, code = length + 1, 2 * code + bits[position]
                position += 1
            symbols.append(self.codewords[length, code])
        must(not any(bits[position:]), "6.3", "not zero after a stream's last codeword")
        return symbols

    def _apply_patches(self, patches: list[int], values: NDArray[np.uint8]) -> None:
        """6.4"""
        must(self.is_quad or not patches, "6.4", "patches in the single code")
        must(all(a < b for a, b in itertools.pairwise(patches)), "6.4", "patches are not sorted")
        for patch in patches:
            stage, step, lane, i, x = patch >> 16, patch >> 14 & 3, patch >> 9 & 31, patch >> 7 & 3, patch & 127
            must(stage < len(values), "6.6", "a patch beyond its chunk")
            values[stage, lane, step, i] ^= x

    @cached_property
    def planes(self) -> tuple[NDArray[np.uint8], NDArray[np.uint32]]:
        """5.3: raw bytes, and sign words [row group, pair of stages, lane] (none in the single code)."""
        raw = np.zeros((self.row_groups, self.stages, 32, 4, 4), np.uint8)
        signs = np.zeros((self.row_groups, -(-self.stages // 2), 32), np.uint32)
        planes, position = self.sections["planes"], 0
        for r in range(self.row_groups):
            for s in range(self.stages):
                if self.is_quad and s % 2 == 0:
                    signs[r, s // 2] = np.frombuffer(planes, "<u4", 32, position)
                    position += 128
                raw[r, s] = np.frombuffer(planes, np.uint8, 512, position).reshape(32, 4, 4)
                position += 512
        missing = signs[:, -1] & 0x0F0F0F0F if self.stages % 2 else signs[:0]
        must(not missing.any(), "5.2", "signs of a missing stage")
        return raw, signs

    @cached_property
    def shifted(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """Sign, shifted exponent e' and mantissa of each word."""
        coded, raw, sign_words = (values.astype(np.int64) for values in (self.coded, *self.planes))
        if not self.is_quad:
            return raw >> 7, coded, raw & 0x7F  # 5.1
        stage, step, i = (np.arange(size) for size in (self.stages, 4, 4))
        place = 8 * i + 7 - (4 * (stage[:, None, None, None] & 1) + step[:, None])  # 5.2: [stage, 1, step, i]
        sign = sign_words.repeat(2, axis=1)[:, : self.stages, :, None, None] >> place & 1
        return sign, coded << 1 | raw >> 7, raw & 0x7F  # 4.1, 5.1

    @cached_property
    def shifts(self) -> NDArray[np.int64]:
        """4.2: d of each row."""
        shifts = np.full(self.rows, self.header["shift"], np.int64)
        if self.header["flags"] & 1:
            shifts = np.frombuffer(self.sections["row_shifts"], np.int8).astype(np.int64)
        must(bool((abs(shifts) <= 126).all()), "4.3", "a shift out of range")
        return shifts

    def in_rows(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """1.3: [row group, stage, lane, step, i] as [rows, columns], without the padding rows and columns."""
        lanes = values.reshape(self.row_groups, self.stages, 8, 4, 4, 4)  # l >> 2 and l & 3
        matrix = lanes.transpose(0, 2, 1, 4, 3, 5).reshape(8 * self.row_groups, 64 * self.stages)
        return matrix[: self.rows, : self.columns]

    @cached_property
    def words(self) -> NDArray[np.uint16]:
        """4.3, 5.5: the original words, in the tensor's shape."""
        if self.is_compact:
            return self.compact.words.reshape(self.shape)
        sign, exponent, mantissa = (self.in_rows(part) for part in self.shifted)
        shift = self.shifts[:, None]
        exponent = np.where((shift != 0) & (exponent != 0), exponent - shift & 0xFF, exponent)
        words = (sign << 15 | exponent << 7 | mantissa).astype(np.uint16)
        return words.reshape(-1)[: math.prod(self.shape)].reshape(self.shape)
