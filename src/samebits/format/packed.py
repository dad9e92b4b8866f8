"""One packed tensor (FORMAT.md section 2): header, section table and validation."""

from __future__ import annotations

import math
import struct
from dataclasses import astuple, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from samebits.digest import digest
from samebits.errors import DAMAGED, DigestError, DtypeError, FormatError, InputError, VersionError
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
        return f"{list(data.shape)} of {data.dtype} in the place of {self.nbytes} packed bytes"

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
        _need(len(data) >= HEADER_BYTES, f"a packed tensor has at least {HEADER_BYTES} bytes, this has {len(data)}")
        (magic, version, code, layout, ndim, stored, original, columns, chunk_stages, max_length, window, shift,
         rows, symbols, flags, max_chunk_words, stream_words, reserved) = _HEADER.unpack_from(data)  # fmt: skip
        _need(magic == MAGIC, f"magic number {magic:#010x} instead of {MAGIC:#010x}")
        if version != VERSION:
            raise VersionError(f"packed tensor of version {version}", mend=f"this samebits reads version {VERSION}")
        _need(code in (Code.QUAD, Code.SINGLE, Code.COMPACT), f"unknown code {code}")
        _need(layout in (Layout.FLAT, Layout.MATRIX), f"unknown layout {layout}")
        _need(ndim <= MAX_DIMENSIONS, f"{ndim} dimensions, at most {MAX_DIMENSIONS} are allowed")
        _need(len(data) >= HEADER_BYTES + 8 * ndim, "the shape is cut off")
        _need(flags in (0, _HAS_ROW_SHIFTS) and reserved == 0, "unknown flags")
        shape = struct.unpack_from(f"<{ndim}Q", data, HEADER_BYTES)
        header = cls(Code(code), Layout(layout), tuple(shape), chunk_stages, max_length, window, shift, symbols,
                     flags == _HAS_ROW_SHIFTS, max_chunk_words, stream_words, original, stored)  # fmt: skip
        header._check(rows, columns)
        return header

    def _check(self, rows: int, columns: int) -> None:
        _need(0 < self.words <= _MAX_WORDS, f"impossible shape {self.shape}")
        if self.code is Code.COMPACT:
            self._check_compact()
        else:
            self._check_geometry()
            self._check_code()
        fits = (rows, columns) == self._rows_and_columns()
        _need(fits, f"{rows} x {columns} does not fit shape {self.shape}")
        _need(self.stream_words < 1 << 32, "more than 2^32 stream words")

    def _check_compact(self) -> None:
        expected = Header.of_compact(self.shape, self.symbol_count, self.stream_words, self.original_digest)
        _need(replace(expected, stored_digest=self.stored_digest) == self, "fields that the compact code does not have")
        _need(self.words <= MAX_COMPACT_WORDS, f"{self.words} words in the compact code")
        _need(self.stream_words >= 1, "no streams")

    def _check_geometry(self) -> None:
        _need(self.layout is Layout.FLAT or len(self.shape) >= 2, f"matrix layout with shape {self.shape}")
        _need(1 <= self.chunk_stages <= MAX_CHUNK_STAGES, f"chunks of {self.chunk_stages} stages")
        _need(self.geometry.stages * 16 < 1 << 32, f"{self.geometry.columns} columns are too many")
        _need(self.max_chunk_words <= 1 + STREAMS * 2 * self.chunk_stages, f"chunks of {self.max_chunk_words} words")

    def _check_code(self) -> None:
        quad = self.code is Code.QUAD
        limit, symbols = (MAX_CODE_LENGTH, QUAD_SYMBOLS) if quad else (MAX_SINGLE_CODE_LENGTH, EXPONENTS)
        _need(1 <= self.max_code_length <= limit, f"code length {self.max_code_length} is beyond {limit}")
        _need(1 <= self.symbol_count <= symbols, f"{self.symbol_count} symbols")
        legal = self.window <= MAX_WINDOW and self.window % 16 <= 8 if quad else self.window == 0
        _need(legal, f"window {self.window}")
        _need(not (self.has_row_shifts and self.shift), "both a shift and row shifts")
        _need(abs(self.shift) <= MAX_SHIFT, f"a shift of {self.shift}")


def _places(sizes: list[tuple[Section, int, int]]) -> dict[Section, slice]:
    """Sections of the given bytes and alignments, one after the other."""
    table: dict[Section, slice] = {}
    end = 0
    for name, size, alignment in sizes:
        start = align(end, alignment)
        end = start + size
        table[name] = slice(start, end)
    return table


@dataclass(frozen=True, eq=False)  # a tensor's bytes are no truth value
class PackedTensor:
    """A BF16 tensor in packed form, or (code RAW) its original words where packing gains nothing.

    Attributes:
        header: what FORMAT.md 2.2 stores; for RAW only code, shape and original_digest mean something.
        data: uint8, one-dimensional: the packed tensor's bytes (RAW: the BF16 bytes), on any device.
    """

    header: Header
    data: torch.Tensor

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.header.shape)

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def code(self) -> Code:
        return self.header.code

    @property
    def is_raw(self) -> bool:
        """True if the tensor did not gain and holds its original words."""
        return self.header.code is Code.RAW

    @property
    def nbytes(self) -> int:
        """Bytes held, everything counted: nothing else stays in memory for this tensor."""
        return self.data.numel()

    @property
    def words(self) -> int:
        """Number of BF16 values."""
        return self.header.words

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.words if self.words else 0.0

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedTensor:
        """The same packed tensor on another device."""
        return replace(self, data=self.data.to(device, non_blocking=non_blocking))

    def section(self, name: Section) -> torch.Tensor:
        """A section's bytes (uint8 view)."""
        return self.data[self.header.sections[name]]

    def array(self, name: Section, dtype: str) -> NDArray[Any]:
        """A section as a NumPy view (CPU only)."""
        [array] = self.arrays((name, dtype))
        return array

    def check_not_freed(self) -> None:
        """
        Raises:
            InputError: the bytes are no longer there, as behind a forward pass under torch's fully_shard.
        """
        if not self.data.data_ptr():
            check_in_memory(self.data)

    def arrays(self, *sections: tuple[Section, str]) -> list[NDArray[Any]]:
        """Sections as NumPy views (CPU only), each of the dtype beside its name.

        By DLPack: behind Tensor.numpy() the memory can never be resized again, as torch's fully_shard does with what it
        gathers. NumPy before 2.1 lets nobody write to such views.

        Raises:
            InputError: the memory was freed.
        """
        self.check_not_freed()
        view: NDArray[Any] = np.from_dlpack(self.data)
        whole = view if view.flags.writeable else self.data.numpy()
        return [whole[self.header.sections[name]].view(np.dtype(dtype)) for name, dtype in sections]

    @classmethod
    def raw(cls, tensor: torch.Tensor, original_digest: int) -> PackedTensor:
        """Wrap a contiguous BF16 tensor that is not worth packing."""
        header = Header(Code.RAW, Layout.FLAT, tuple(tensor.shape), 1, 1, 0, 0, 0, False, 0, 0, original_digest)
        words = tensor.contiguous().as_strided((tensor.numel(),), (1,))  # reshape leaves one word's stride at 0
        return cls(header, words.view(torch.uint8))

    @classmethod
    def from_data(cls, data: torch.Tensor, *, header: Header | None = None) -> PackedTensor:
        """Wrap and validate the bytes of a packed tensor.

        Args:
            data: uint8, one-dimensional, contiguous, any device. What is on a GPU is read back.
            header: of them, where their digest was compared, or will be; less is read back then.

        Raises:
            InputError, DtypeError: not a one-dimensional uint8 tensor whose values are in memory.
            FormatError: not a valid packed tensor.
            DigestError: one whose bytes are not those that its digest was made of.
        """
        if not isinstance(data, torch.Tensor):
            raise InputError(f"{type(data).__name__} is no tensor", mend="torch.frombuffer makes one of bytes")
        if data.dtype != torch.uint8 or data.dim() != 1:
            raise DtypeError(f"a packed tensor is one-dimensional uint8, not {tuple(data.shape)} of {data.dtype}")
        check_in_memory(data)
        known = header or Header.of(data)
        packed = cls(known, data.contiguous())
        packed.validate()
        if header is None and digest(packed.data[STORED_DIGEST_END:].cpu()) != known.stored_digest:
            raise DigestError("the bytes differ from their digest", mend="they are damaged: fetch or make them again")
        return packed

    def validate(self) -> None:
        """Bound everything a decoder will trust: length, code tables, offsets, shifts.

        These are FORMAT.md 2.2, 3.2, 3.6, 4.3, 6.1 and 6.7.

        Raises:
            FormatError: the first clause that is violated.
        """
        if self.is_raw:
            _need(self.nbytes == 2 * self.words, "raw words do not fill the shape")
            return
        header = self.header
        _need(self.nbytes == header.nbytes, f"{self.nbytes} bytes where the header asks for {header.nbytes}")
        if header.code is Code.COMPACT:
            frequencies_of(self.section("code").cpu().numpy())
            self._validate_runs()
            return
        self._validate_code()
        self._validate_offsets()
        shifts = self.section("row_shifts").view(torch.int8)
        _need(not len(shifts) or int(shifts.to(torch.int16).abs().max()) <= MAX_SHIFT, "a row shift out of range")

    def _validate_code(self) -> None:
        header = self.header
        section = self.section("code").cpu().numpy().view("<u2")
        counts, symbols = section[:COUNTS].astype(np.int64), section[COUNTS:]
        lengths = np.arange(COUNTS)
        _need(int(counts.sum()) == header.symbol_count, "the code's counts do not add up")
        _need(not counts[lengths > header.max_code_length].any() and counts[0] == 0, "a code length out of range")
        kraft = int((counts << (COUNTS - lengths)).sum())
        single = header.symbol_count == 1 and counts[1] == 1
        _need(kraft == 1 << COUNTS or single, "an incomplete or impossible code")
        limit = QUAD_SYMBOLS if header.code is Code.QUAD else EXPONENTS
        distinct = int(symbols.max()) < limit and len(np.unique(symbols)) == len(symbols)
        _need(distinct, "a code's symbols out of range or twice")
        ascending = np.diff(symbols.astype(np.int64)) > 0
        next_length = np.cumsum(counts)[:-1]  # where a symbol may be smaller than the one before
        ascending[next_length[(next_length > 0) & (next_length < len(symbols))] - 1] = True
        _need(bool(ascending.all()), "a code's symbols out of order")

    def _validate_offsets(self) -> None:
        header = self.header
        offsets = self.section("offsets")
        offsets = offsets.clone() if offsets.storage_offset() % 4 else offsets
        values = offsets.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        steps = values[1:] - values[:-1]
        ends = values[[0, -1]].tolist()
        smallest, largest = (int(steps.min()), int(steps.max())) if len(steps) else (0, 0)
        _need(ends == [0, header.stream_words], "chunk offsets do not cover the streams")
        _need(smallest >= 1 and largest <= header.max_chunk_words, "a chunk offset out of range")

    def _validate_runs(self) -> None:
        lengths = self.section("offsets").cpu().numpy().view("<u2").astype(np.int64)
        words = np.full(lengths.size, RUN_WORDS)
        words[-1] = self.words - RUN_WORDS * (lengths.size - 1)
        _need(bool(((lengths >= 8) & (lengths <= 8 + 16 * words)).all()), "a run's length out of range")
        _need(-(-int(lengths.sum()) // 32) == self.header.stream_words, "the runs do not fill the streams")


def check_in_memory(tensor: torch.Tensor) -> None:
    """
    Raises:
        InputError: the values of ``tensor`` are not all in memory, one after the other.
    """
    if tensor.layout is not torch.strided or tensor.is_meta:
        what, mend = (
            ("is on the meta device", "load it") if tensor.is_meta else (f"is {tensor.layout}", "call to_dense()")
        )
        raise InputError(f"a tensor {what}, so its values are not all in memory", mend=f"{mend} first")
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    ends = (tensor.storage_offset() + last + 1) * tensor.element_size()
    if tensor.numel() and ends > tensor.untyped_storage().nbytes():  # as sharding leaves parameters
        raise InputError("a tensor's memory was freed, so its values are not there", mend="gather or load it first")


def frequencies_of(section: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The compact code's frequencies as its code section stores them: int64 [257], the escape's last (FORMAT.md 3.6).

    Raises:
        FormatError: more exponents or states than there are, or the section ends within a skip.
    """
    frequencies = np.zeros(EXPONENTS + 1, np.int64)
    exponent, content = 0, iter(section.tolist())
    for byte in content:
        skipped = 0 if byte else next(content, 0)
        _need(byte > 0 or skipped > 0, "a skip of no exponents")
        _need(exponent + max(1, skipped) <= EXPONENTS, "frequencies of more than 256 exponents")
        frequencies[exponent] = byte
        exponent += max(1, skipped)
    frequencies[ESCAPE] = STATES - frequencies.sum()
    _need(int(frequencies[ESCAPE]) >= 0, "the frequencies add up to more than 256")
    return frequencies


def _need(condition: bool, what: str) -> None:
    if not condition:
        raise FormatError(what, mend=DAMAGED)
