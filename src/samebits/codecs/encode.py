"""Encoding on the CPU: count, plan, streams, planes.

Two passes write the output. The first makes the streams, whose sizes are unknown before; of a small tensor also those
in the compact code, and the smaller ones are taken. Then the one output buffer is allocated, and the second pass writes
the planes, whose places are known, straight into it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from samebits.bf16 import histogram_of_words, words_of
from samebits.cached import cached_property
from samebits.codecs import loops
from samebits.codecs.compact import CompactWords
from samebits.codecs.plan import Plan, can_be_packed, make_plan, wants_compact
from samebits.codecs.row_statistics import ALIGNED, FRACTIONS, RowStatistics
from samebits.digest import digest, digest_of_sums
from samebits.format.geometry import ROW_GROUP, Code, Geometry, Layout
from samebits.format.header import EXPONENTS, STORED_DIGEST_END, Header
from samebits.format.packed import PackedTensor
from samebits.parallel import grain_of, run_ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray

Allocate = Callable[[int], torch.Tensor]


def allocate_memory(nbytes: int) -> torch.Tensor:
    """The default output buffer: uint8 [nbytes], not initialised."""
    # NumPy asks for huge pages, which halves the cost of page faults.
    return torch.from_numpy(np.empty(nbytes, np.uint8))


def encode_cpu(tensor: torch.Tensor, allocate: Allocate = allocate_memory) -> PackedTensor:
    """Pack a BF16 CPU tensor of any shape.

    Args:
        tensor: bfloat16; may be a view of a memory-mapped file.
        allocate: makes the output buffer, uint8 of the given length, for example in a mapped file.

    Returns:
        The packed tensor; RAW where packing gains nothing.
    """
    words = words_of(tensor)
    shape = tuple(tensor.shape)
    counter = CpuCounter(words, shape)
    is_packable = can_be_packed(shape)
    plan = make_plan(shape, counter) if is_packable else None
    original = counter.digest()
    ways: list[ChunkedWords | CompactWords] = [ChunkedWords.of(words, shape, plan, original)] if plan else []
    if is_packable and wants_compact(words.size, plan):
        ways.append(CompactWords.of(words, shape, original))
    best = min(ways, key=lambda way: way.header.nbytes, default=None)
    if best is None or not gains(best.header):
        return PackedTensor.raw(tensor, original)
    packed = PackedTensor(best.header, allocate(best.header.nbytes))
    best.write(packed)
    return seal(packed)


class CpuCounter:
    """Counts of a tensor in memory; see codecs.plan.Counter."""

    def __init__(self, words: NDArray[np.uint16], shape: tuple[int, ...]) -> None:
        self.words = words
        self.layout, self.geometry = Geometry.of_shape(shape, 1)
        self._digest: int | None = None

    def digest(self) -> int:
        """Of the words: known once the rows of a matrix are counted."""
        return digest(self.words) if self._digest is None else self._digest

    @cached_property
    def _summary(self) -> NDArray[np.int32]:
        """Of each row of a matrix centre, lowest and highest (RowStatistics), and whether it has subnormals."""
        rows, columns = self.geometry.rows, self.geometry.columns
        summary = np.empty((4, rows), np.int32)
        grain = -(-grain_of(rows * columns, columns) // 4) * 4
        sums = run_ranges(loops.summarize_rows, rows, grain, self.words, columns, *summary)
        self._digest = digest_of_sums(self.words, sums)
        return summary

    def rows(self, stride: int) -> RowStatistics:
        if self.layout is Layout.FLAT:
            return RowStatistics.of_flat(histogram_of_words(self.words), self._has_subnormals())
        rows, columns = self.geometry.rows, self.geometry.columns
        centers, lowest, highest, subnormal = self._summary

        def count(first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
            histogram, pinned = np.zeros((2, EXPONENTS), np.int64)
            aligned = np.zeros((FRACTIONS, ALIGNED), np.int64)
            loops.count_rows(self.words, columns, centers, stride, histogram, aligned, pinned, first, last)
            return histogram, aligned, pinned

        sampled = -(-rows // stride)
        parts = run_ranges(count, sampled, grain_of(sampled * columns, columns))
        histogram, aligned, pinned = (_total([part[i] for part in parts]) for i in range(3))
        return RowStatistics(histogram, centers, lowest, highest, bool(subnormal.any()), aligned, pinned)

    def quads(self, shifts: NDArray[np.int32], window: int, stride: int) -> NDArray[np.int64]:
        columns, changes = self.geometry.columns, changes_of(shifts)

        def count(first: int, last: int) -> NDArray[np.int64]:
            counts = np.zeros(loops.OUTSIDE + 1, np.int64)
            loops.count_quads(self.words, columns, changes, window, stride, counts, first, last)
            return counts

        sampled = -(-self.geometry.rows // stride)
        return _total(run_ranges(count, sampled, grain_of(sampled * columns, columns)))

    def _has_subnormals(self) -> bool:
        return any(run_ranges(loops.any_subnormal, self.words.size, grain_of(self.words.size), self.words))


def changes_of(shifts: NDArray[np.int32]) -> NDArray[np.uint16]:
    """Shifts where words have their exponents, modulo 2^16."""
    return (shifts << 7).astype(np.uint16)


def _total(parts: list[NDArray[np.int64]]) -> NDArray[np.int64]:
    total: NDArray[np.int64] = np.sum(parts, axis=0)
    return total


@dataclass(frozen=True)
class ChunkedWords:
    """The words of a tensor in the quad or the single code, not yet put together.

    Attributes:
        words: uint16, the tensor's.
        offsets: int64 [chunks + 1], in 32-bit words.
        parts: the chunks' contents, uint32 each.
    """

    words: NDArray[np.uint16]
    plan: Plan
    offsets: NDArray[np.int64]
    parts: list[NDArray[np.uint32]]
    header: Header

    @classmethod
    def of(cls, words: NDArray[np.uint16], shape: tuple[int, ...], plan: Plan, original: int) -> ChunkedWords:
        offsets, parts = _encode_chunks(words, plan)
        header = header_of(plan, shape, int(np.diff(offsets).max()), int(offsets[-1]), original)
        return cls(words, plan, offsets, parts, header)

    def write(self, packed: PackedTensor) -> None:
        """Fill the bytes of ``packed``, whose header is ``self.header``."""
        write_tables(packed.data, self.plan, self.header)
        packed.array("offsets", "<u4")[:] = self.offsets
        np.concatenate(self.parts, out=packed.array("streams", "<u4"))
        _write_planes(self.words, self.plan, packed)


def _encode_chunks(words: NDArray[np.uint16], plan: Plan) -> tuple[NDArray[np.int64], list[NDArray[np.uint32]]]:
    """All chunks: their offsets (32-bit words, [chunks + 1]), and their contents in consecutive pieces."""
    geometry = plan.geometry
    quad = plan.code is Code.QUAD
    table = plan.table.encode_table(loops.OUTSIDE + 1 if quad else EXPONENTS)
    nearest = loops.nearest_quads(plan.table.symbols) if quad else np.zeros(1, np.int16)
    first_symbol, changes = int(plan.table.symbols[0]), changes_of(plan.shifts)

    def encode(first: int, last: int) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        sizes = np.empty(last - first, np.int64)
        streams = loops.encode_chunks(words, geometry.rows, geometry.columns, geometry.chunk_stages, quad, changes,
                                      plan.window, table, nearest, first_symbol, sizes, first, last)  # fmt: skip
        return sizes, streams

    results = run_ranges(encode, geometry.chunks, grain_of(words.size, 512 * geometry.chunk_stages))
    sizes = np.concatenate([sizes for sizes, _ in results])
    return np.concatenate([[0], np.cumsum(sizes)]), [streams for _, streams in results]


def _write_planes(words: NDArray[np.uint16], plan: Plan, packed: PackedTensor) -> None:
    geometry = plan.geometry
    grain = grain_of(words.size, ROW_GROUP * geometry.columns)
    run_ranges(loops.write_planes, geometry.row_groups, grain, words, geometry.rows, geometry.columns,
               plan.code is Code.QUAD, changes_of(plan.shifts), packed.array("planes", "<u4"))  # fmt: skip


def header_of(plan: Plan, shape: tuple[int, ...], max_chunk_words: int, stream_words: int, original: int) -> Header:
    """The header of what ``plan`` makes of a tensor."""
    shift = 0 if plan.has_row_shifts else int(plan.shifts[0])
    return Header(plan.code, plan.layout, shape, plan.geometry.chunk_stages, plan.table.max_length, plan.window, shift,
                  plan.table.symbols.size, plan.has_row_shifts, max_chunk_words, stream_words, original)  # fmt: skip


def gains(header: Header) -> bool:
    """Whether what is packed is smaller than the words, and its offsets count its streams in 32 bits."""
    return header.nbytes < 2 * header.words and header.stream_words < 1 << 32


def write_tables(data: torch.Tensor, plan: Plan, header: Header) -> None:
    """Write header, shape, code and row shifts, and zeros between the sections.

    Args:
        data: uint8 on the CPU: all of the packed tensor, or what comes before its offsets.
    """
    header.write(data)
    content = data.numpy()
    content[header.sections["code"]] = plan.table.to_section().astype("<u2").view(np.uint8)
    if plan.has_row_shifts:
        content[header.sections["row_shifts"]] = plan.shifts.astype(np.int8).view(np.uint8)


def seal(packed: PackedTensor) -> PackedTensor:
    """Compute and store the digest of the finished bytes."""
    stored = digest(packed.data[STORED_DIGEST_END:])
    packed.data[8:STORED_DIGEST_END] = torch.frombuffer(bytearray(struct.pack("<Q", stored)), dtype=torch.uint8)
    return replace(packed, header=replace(packed.header, stored_digest=stored))
