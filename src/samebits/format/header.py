"""The header of a packed tensor and where its sections lie (FORMAT.md section 2)."""

from __future__ import annotations

import math
import struct
from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from samebits.cached import cached_property
from samebits.errors import DAMAGED, FormatError, VersionError
from samebits.format.geometry import MAX_CHUNK_STAGES, RUN_WORDS, STREAMS, Code, Geometry, Layout

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAGIC = 0x54494253
VERSION = 1
HEADER_BYTES = 64
MAX_DIMENSIONS = 8
MAX_CODE_LENGTH = 13
MAX_SINGLE_CODE_LENGTH = 12
MAX_WINDOW = 120
MAX_SHIFT = 126
QUAD_SYMBOLS = 4096
EXPONENTS = 256
COUNTS = 16  # entries of the code section's count array
MAX_COMPACT_WORDS = 1 << 20
STATES = 256  # of the compact code
ESCAPE = EXPONENTS  # the compact code's symbol for exponents without a frequency of their own
WIDE_ALIGNMENT_WORDS = 65536  # from this many words on, planes start at a multiple of 128 bytes
STORED_DIGEST_END = 16  # the stored digest covers the bytes from here on
_HEADER = struct.Struct("<IBBBB QQ IBBBb QHHI QQ")
_DIGESTS = slice(8, 24)
_HAS_ROW_SHIFTS = 1
_MAX_WORDS = 1 << 48

Section = Literal["header", "shape", "code", "row_shifts", "offsets", "planes", "streams"]


def align(offset: int, multiple: int) -> int:
    """``offset`` rounded up to ``multiple``."""
    return -(-offset // multiple) * multiple


@dataclass(frozen=True)
class Header:
    """The header and shape of a packed tensor, in the order of FORMAT.md 2.2.

    The compact code has no geometry: of the fields from layout to max_chunk_words it uses shape and symbol_count alone,
    the others are 0 (see ``of_compact``).
    """

    code: Code
    layout: Layout
    shape: tuple[int, ...]
    chunk_stages: int
    max_code_length: int
    window: int
    shift: int
    symbol_count: int
    has_row_shifts: bool
    max_chunk_words: int
    stream_words: int
    original_digest: int = 0
    stored_digest: int = 0

    def __hash__(self) -> int:
        """As dataclass makes it, but only once: headers are looked up at every launch."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash(astuple(self))

    @classmethod
    def of_compact(cls, shape: tuple[int, ...], code_bytes: int, stream_words: int, original_digest: int) -> Header:
        """The header of a packed tensor in the compact code."""
        return cls(Code.COMPACT, Layout.FLAT, shape, 0, 0, 0, 0, code_bytes, False, 0, stream_words, original_digest)

    @property
    def is_chunked(self) -> bool:
        """Whether the words lie in row groups and chunks, so that some of them can be decoded alone."""
        return self.code in (Code.QUAD, Code.SINGLE)

    @cached_property
    def geometry(self) -> Geometry:
        """Of the quad and the single code."""
        return Geometry.of_layout(self.shape, self.layout, self.chunk_stages)

    @property
    def words(self) -> int:
        return math.prod(self.shape)

    @property
    def runs(self) -> int:
        """Of the compact code (FORMAT.md 1.6)."""
        return -(-self.words // RUN_WORDS)

    @cached_property
    def entry_words(self) -> int:
        """Words of an entry: of what one index along the first dimension gives."""
        return math.prod(self.shape[1:])

    @cached_property
    def sections(self) -> dict[Section, slice]:
        """Where each section lies in the packed tensor, in bytes."""
        return _places(self._compact_sizes() if self.code is Code.COMPACT else self._sizes())

    def _sizes(self) -> list[tuple[Section, int, int]]:
        """Each section's bytes and alignment."""
        geometry = self.geometry
        wide = geometry.rows * geometry.columns >= WIDE_ALIGNMENT_WORDS
        return [
            ("header", HEADER_BYTES, 16),
            ("shape", 8 * len(self.shape), 16),
            ("code", 2 * COUNTS + 2 * self.symbol_count, 16),
            ("row_shifts", geometry.rows if self.has_row_shifts else 0, 16),
            ("offsets", 4 * (geometry.chunks + 1), 16),
            ("planes", geometry.plane_bytes(self.code), 128 if wide else 16),
            ("streams", 4 * self.stream_words, 16),
        ]

    def _compact_sizes(self) -> list[tuple[Section, int, int]]:
        return [
            ("header", HEADER_BYTES, 4),
            ("shape", 8 * len(self.shape), 4),
            ("code", self.symbol_count, 4),
            ("row_shifts", 0, 4),
            ("offsets", 2 * self.runs, 4),
            ("planes", self.words, 4),
            ("streams", 4 * self.stream_words, 4),
        ]

    @cached_property
    def nbytes(self) -> int:
        """Length of the whole packed tensor; RAW: of its words."""
        return 2 * self.words if self.code is Code.RAW else align(self.sections["streams"].stop, 16)

    def fits(self, data: torch.Tensor) -> bool:
        """Whether a tensor can be the packed bytes: so many, one after another."""
        return data.shape == (self.nbytes,) and data.dtype is torch.uint8 and data.is_contiguous()

    def misfit(self, data: torch.Tensor) -> str:
        """What an error says of a tensor that cannot."""
        gaps = "" if data.is_contiguous() else " with gaps"
        return f"{list(data.shape)} of {data.dtype}{gaps} in the place of {self.nbytes} packed bytes"

    def to_bytes(self) -> bytes:
        """The header and shape sections."""
        rows, columns = self._rows_and_columns()
        head = _HEADER.pack(
            MAGIC, VERSION, self.code, self.layout, len(self.shape),
            self.stored_digest, self.original_digest,
            columns, self.chunk_stages, self.max_code_length, self.window, self.shift,
            rows, self.symbol_count, _HAS_ROW_SHIFTS if self.has_row_shifts else 0, self.max_chunk_words,
            self.stream_words, 0,
        )  # fmt: skip
        return head + struct.pack(f"<{len(self.shape)}Q", *self.shape)

    @cached_property
    def _form(self) -> tuple[bytes, bytes]:
        """``to_bytes`` in front of the digests and behind them: all that a decoder asks of it."""
        head = self.to_bytes()
        return head[: _DIGESTS.start], head[_DIGESTS.stop :]

    def has_form_of(self, other: Header) -> bool:
        """Whether a decoder would take either's packed bytes as it takes the other's."""
        return self._form == other._form

    def begins(self, content: NDArray[np.uint8]) -> bool:
        """Whether packed bytes begin with this header, whatever digests it has there."""
        before, behind = self._form
        head = content[: _DIGESTS.stop + len(behind)].tobytes()
        return head[: _DIGESTS.start] == before and head[_DIGESTS.stop :] == behind

    def write(self, data: torch.Tensor) -> None:
        """Write header and shape into a packed tensor's bytes on the CPU, and zeros between its sections.

        Args:
            data: the bytes, or as many of the first ones as are wanted.
        """
        content = data.numpy()
        ends = [0, *(section.stop for section in self.sections.values())]
        starts = [*(section.start for section in self.sections.values()), self.nbytes]
        for end, start in zip(ends, starts, strict=True):
            content[end:start] = 0
        head = self.to_bytes()
        content[: len(head)] = np.frombuffer(head, np.uint8)

    def _rows_and_columns(self) -> tuple[int, int]:
        return (0, 0) if self.code is Code.COMPACT else (self.geometry.rows, self.geometry.columns)

    @classmethod
    def of(cls, data: torch.Tensor) -> Header:
        """Of packed bytes, uint8 [bytes], any device.

        Raises:
            FormatError, VersionError: as parse.
        """
        return cls.parse(bytes(data[: HEADER_BYTES + 8 * MAX_DIMENSIONS].tolist()))

    @classmethod
    def parse(cls, data: bytes) -> Header:
        """Read a header from the first bytes (at least HEADER_BYTES + 8 * MAX_DIMENSIONS of them, or all there are).

        Raises:
            FormatError: the bytes are no header, or one that contradicts itself.
            VersionError: a version this release does not know.
        """
        need(len(data) >= HEADER_BYTES, f"a packed tensor has at least {HEADER_BYTES} bytes, this has {len(data)}")
        (magic, version, code, layout, ndim, stored, original, columns, chunk_stages, max_length, window, shift,
         rows, symbols, flags, max_chunk_words, stream_words, reserved) = _HEADER.unpack_from(data)  # fmt: skip
        need(magic == MAGIC, f"magic number {magic:#010x} instead of {MAGIC:#010x}")
        if version != VERSION:
            raise VersionError(f"packed tensor of version {version}", mend=f"this samebits reads version {VERSION}")
        need(code in (Code.QUAD, Code.SINGLE, Code.COMPACT), f"unknown code {code}")
        need(layout in (Layout.FLAT, Layout.MATRIX), f"unknown layout {layout}")
        need(ndim <= MAX_DIMENSIONS, f"{ndim} dimensions, at most {MAX_DIMENSIONS} are allowed")
        need(len(data) >= HEADER_BYTES + 8 * ndim, "the shape is cut off")
        need(flags in (0, _HAS_ROW_SHIFTS) and reserved == 0, "unknown flags")
        shape = struct.unpack_from(f"<{ndim}Q", data, HEADER_BYTES)
        header = cls(Code(code), Layout(layout), tuple(shape), chunk_stages, max_length, window, shift, symbols,
                     flags == _HAS_ROW_SHIFTS, max_chunk_words, stream_words, original, stored)  # fmt: skip
        header._check(rows, columns)
        return header

    def _check(self, rows: int, columns: int) -> None:
        need(0 < self.words <= _MAX_WORDS, f"impossible shape {self.shape}")
        if self.code is Code.COMPACT:
            self._check_compact()
        else:
            self._check_geometry()
            self._check_code()
        fits = (rows, columns) == self._rows_and_columns()
        need(fits, f"{rows} x {columns} does not fit shape {self.shape}")
        need(self.stream_words < 1 << 32, "more than 2^32 stream words")

    def _check_compact(self) -> None:
        expected = Header.of_compact(self.shape, self.symbol_count, self.stream_words, self.original_digest)
        need(replace(expected, stored_digest=self.stored_digest) == self, "fields that the compact code does not have")
        need(self.words <= MAX_COMPACT_WORDS, f"{self.words} words in the compact code")
        need(self.stream_words >= 1, "no streams")

    def _check_geometry(self) -> None:
        need(self.layout is Layout.FLAT or len(self.shape) >= 2, f"matrix layout with shape {self.shape}")
        need(1 <= self.chunk_stages <= MAX_CHUNK_STAGES, f"chunks of {self.chunk_stages} stages")
        need(self.geometry.stages * 16 < 1 << 32, f"{self.geometry.columns} columns are too many")
        need(self.max_chunk_words <= 1 + STREAMS * 2 * self.chunk_stages, f"chunks of {self.max_chunk_words} words")

    def _check_code(self) -> None:
        quad = self.code is Code.QUAD
        limit, symbols = (MAX_CODE_LENGTH, QUAD_SYMBOLS) if quad else (MAX_SINGLE_CODE_LENGTH, EXPONENTS)
        need(1 <= self.max_code_length <= limit, f"code length {self.max_code_length} is beyond {limit}")
        need(1 <= self.symbol_count <= symbols, f"{self.symbol_count} symbols")
        legal = self.window <= MAX_WINDOW and self.window % 16 <= 8 if quad else self.window == 0
        need(legal, f"window {self.window}")
        need(not (self.has_row_shifts and self.shift), "both a shift and row shifts")
        need(abs(self.shift) <= MAX_SHIFT, f"a shift of {self.shift}")


def _places(sizes: list[tuple[Section, int, int]]) -> dict[Section, slice]:
    """Sections of the given bytes and alignments, one after the other."""
    table: dict[Section, slice] = {}
    end = 0
    for name, size, alignment in sizes:
        start = align(end, alignment)
        end = start + size
        table[name] = slice(start, end)
    return table


def need(condition: bool, what: str) -> None:
    if not condition:
        raise FormatError(what, mend=DAMAGED)
