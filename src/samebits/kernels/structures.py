"""The structures that kernels take by value; fields and order as in csrc."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import lru_cache

import torch

from samebits.format.geometry import Geometry
from samebits.format.header import Header
from samebits.format.packed import PackedTensor

MAX_TOGETHER = 4  # csrc/linear.cuh: kMaxTogether
WALKS = 20  # csrc/linear.cuh: kWalks
WALK_WORDS = 4  # csrc: Walk
DIVISION_WORDS = 2 * WALKS * WALK_WORDS  # csrc: kCuts
MAX_PREFETCHED = 8  # csrc/linear.cuh: kMaxPrefetched
MAX_DECODED = 1 + MAX_PREFETCHED  # csrc/decode_together.cu: kMaxDecoded
_MAP_WORDS = 32  # of a tensor map
_BEHIND_ANY_GRID = (1 << 31) - 1


class GeometryStructure(ctypes.Structure):
    """csrc/common.cuh: Geometry."""

    _fields_ = (
        ("words", ctypes.c_int64), ("rows", ctypes.c_int32), ("columns", ctypes.c_int32), ("stages", ctypes.c_int32),
        ("chunk_stages", ctypes.c_int32), ("chunks", ctypes.c_int32), ("chunks_per_row_group", ctypes.c_int32),
        ("row_groups_per_chunk", ctypes.c_int32), ("row_groups", ctypes.c_int32),
    )  # fmt: skip

    @classmethod
    @lru_cache(maxsize=8192)
    def of(cls, geometry: Geometry) -> GeometryStructure:
        """Kept, and not to be changed."""
        return cls(geometry.words, geometry.rows, geometry.columns, geometry.stages, geometry.chunk_stages,
                   geometry.chunks, geometry.chunks_per_row_group, geometry.row_groups_per_chunk,
                   geometry.row_groups)  # fmt: skip


class PackedStructure(ctypes.Structure):
    """csrc/decoder.cuh: Packed."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("table", ctypes.c_void_p), ("code", ctypes.c_uint64),
        ("row_shifts", ctypes.c_uint64), ("offsets", ctypes.c_uint64), ("planes", ctypes.c_uint64),
        ("streams", ctypes.c_uint64),
        ("stream_words", ctypes.c_uint32), ("max_chunk_words", ctypes.c_int32), ("width", ctypes.c_int32),
        ("symbols", ctypes.c_int32), ("window", ctypes.c_int32), ("shift", ctypes.c_int32),
        ("has_row_shifts", ctypes.c_int32),
    )  # fmt: skip

    @classmethod
    def of(cls, packed: PackedTensor, table: torch.Tensor | None = None) -> PackedStructure:
        packed.check_not_freed()
        structure = cls.from_buffer_copy(cls._without_data(packed.header))
        structure.data = packed.data.data_ptr()
        structure.table = table.data_ptr() if table is not None else None
        return structure

    @classmethod
    @lru_cache(maxsize=8192)
    def _without_data(cls, header: Header) -> PackedStructure:
        starts = [header.sections[name].start for name in ("code", "row_shifts", "offsets", "planes", "streams")]
        return cls(None, None, *starts, header.stream_words, header.max_chunk_words, header.max_code_length,
                   header.symbol_count, header.window, header.shift, header.has_row_shifts)  # fmt: skip


class CompactStructure(ctypes.Structure):
    """csrc/compact.cu: Compact."""

    _fields_ = (
        ("data", ctypes.c_void_p), ("code", ctypes.c_uint64), ("lengths", ctypes.c_uint64), ("raw", ctypes.c_uint64),
        ("streams", ctypes.c_uint64), ("words", ctypes.c_int32), ("code_bytes", ctypes.c_int32),
        ("runs", ctypes.c_int32), ("stream_words", ctypes.c_int32),
    )  # fmt: skip

    @classmethod
    def of(cls, packed: PackedTensor) -> CompactStructure:
        packed.check_not_freed()
        header = packed.header
        starts = [header.sections[name].start for name in ("code", "offsets", "planes", "streams")]
        return cls(packed.data.data_ptr(), *starts, header.words, header.symbol_count, header.runs,
                   header.stream_words)  # fmt: skip


class UnitStructure(ctypes.Structure):
    """csrc/df11.cu: Unit."""

    _fields_ = (
        ("stream", ctypes.c_void_p), ("rest", ctypes.c_void_p), ("positions", ctypes.c_void_p),
        ("gaps", ctypes.c_void_p), ("tables", ctypes.c_void_p), ("output", ctypes.c_void_p),
        ("malformed", ctypes.c_void_p), ("words", ctypes.c_int64), ("stream_bytes", ctypes.c_uint32),
        ("position_count", ctypes.c_int32), ("table_count", ctypes.c_int32),
    )  # fmt: skip


class DivisionStructure(ctypes.Structure):
    """csrc/decoder.cuh: Division."""

    _fields_ = (("table_words", ctypes.c_int32), ("entry_words", ctypes.c_int32), ("buffer_words", ctypes.c_int32))


class DecodedStructure(ctypes.Structure):
    """csrc/decode_together.cu: Decoded."""

    _fields_ = (
        ("geometry", GeometryStructure), ("packed", PackedStructure), ("output", ctypes.c_void_p),
        ("first_block", ctypes.c_int32), ("blocks", ctypes.c_int32), ("is_quad", ctypes.c_int32),
    )  # fmt: skip


class DecodedTogetherStructure(ctypes.Structure):
    """csrc/decode_together.cu: DecodedTogether."""

    _fields_ = (("tensors", DecodedStructure * MAX_DECODED),)

    @classmethod
    def of_none(cls) -> DecodedTogetherStructure:
        """Without a tensor."""
        structure = cls()
        for own in structure.tensors:
            own.first_block = _BEHIND_ANY_GRID
        return structure


class GatherStructure(ctypes.Structure):
    """csrc/rows.cu: Gather."""

    _fields_ = (
        ("ids", ctypes.c_void_p), ("entries", ctypes.c_int64), ("entry_words", ctypes.c_int64),
        ("wide", ctypes.c_int32), ("id_count", ctypes.c_int32), ("chunks_per_entry", ctypes.c_int32),
    )  # fmt: skip


class RoutedStructure(ctypes.Structure):
    """csrc/rows.cu: Routed."""

    _fields_ = (("flags", ctypes.c_void_p), ("entry_words", ctypes.c_int64))


class PieceStructure(ctypes.Structure):
    """csrc/pieces.cu: Piece."""

    _fields_ = (
        ("geometry", GeometryStructure), ("packed", PackedStructure), ("first_chunk", ctypes.c_int64),
        ("start", ctypes.c_int64), ("words", ctypes.c_int64), ("rows", ctypes.c_int32),
    )  # fmt: skip


class SourceStructure(ctypes.Structure):
    """csrc/encode.cu: Source."""

    _fields_ = (
        ("words", ctypes.c_void_p), ("shifts", ctypes.c_void_p), ("shift", ctypes.c_int32), ("window", ctypes.c_int32),
    )  # fmt: skip


class BookStructure(ctypes.Structure):
    """csrc/encode.cu: Book."""

    _fields_ = (
        ("table", ctypes.c_void_p), ("nearest", ctypes.c_void_p), ("padding", ctypes.c_uint64),
        ("common", ctypes.c_int32),
    )  # fmt: skip


class PrefetchedStructure(ctypes.Structure):
    """csrc/linear.cuh: Prefetched; an array of them in place of JobStructure's division."""

    _fields_ = (
        ("packed", PackedStructure), ("output", ctypes.c_void_p), ("claimed", ctypes.c_void_p),
        ("row_groups", ctypes.c_int32), ("stages", ctypes.c_int32),
    )  # fmt: skip


class JobStructure(ctypes.Structure):
    """csrc/linear.cuh: Job; ``division`` is its union."""

    _fields_ = (
        ("x", ctypes.c_void_p), ("bias", ctypes.c_void_p), ("y", ctypes.c_void_p), ("parts", ctypes.c_void_p),
        ("done", ctypes.c_void_p), ("tokens", ctypes.c_int32),
        ("ranges", ctypes.c_int32), ("stages_per_range", ctypes.c_int32), ("slots", ctypes.c_int32),
        ("batches", ctypes.c_int32), ("chunk_step", ctypes.c_int32), ("slot_step", ctypes.c_int32),
        ("first_block", ctypes.c_int32), ("blocks", ctypes.c_int32), ("own", ctypes.c_int32),
        ("longer", ctypes.c_int32), ("token_tiles", ctypes.c_int32), ("units", ctypes.c_int32),
        ("by_token_tiles", ctypes.c_uint32), ("by_ranges", ctypes.c_uint32),
        ("segments", ctypes.c_int32), ("segment_stages", ctypes.c_int32), ("by_ring", ctypes.c_uint32),
        ("by_slots", ctypes.c_uint32), ("by_range", ctypes.c_uint32), ("by_chunks", ctypes.c_uint32),
        ("table_words", ctypes.c_int32), ("x_words", ctypes.c_int32), ("buffer_words", ctypes.c_int32),
        ("x_places", ctypes.c_int32), ("ring", ctypes.c_int32),
        ("division", ctypes.c_uint32 * max(DIVISION_WORDS, MAX_PREFETCHED * ctypes.sizeof(PrefetchedStructure) // 4)),
        ("x_map", ctypes.c_uint32 * _MAP_WORDS),
    )  # fmt: skip


class RoutingStructure(ctypes.Structure):
    """csrc/routing.cuh: Routing."""

    _fields_ = (
        ("ids", ctypes.c_void_p), ("scales", ctypes.c_void_p), ("wide", ctypes.c_int32), ("pairs", ctypes.c_int32),
        ("experts", ctypes.c_int32), ("groups", ctypes.c_int32), ("sharing", ctypes.c_int32),
        ("units", ctypes.c_int32), ("unit_pairs", ctypes.c_int32),
        ("by_groups", ctypes.c_uint32), ("by_sharing", ctypes.c_uint32), ("by_unit_pairs", ctypes.c_uint32),
        ("by_tiles", ctypes.c_uint32), ("tiles", ctypes.c_int32),
    )  # fmt: skip


class ArrangementStructure(ctypes.Structure):
    """csrc/arrange.cu: Arrangement."""

    _fields_ = (
        ("x", ctypes.c_void_p), ("arranged", ctypes.c_void_p), ("done", ctypes.c_void_p),
        ("done_count", ctypes.c_int32), ("tokens", ctypes.c_int32), ("columns", ctypes.c_int32),
        ("wide", ctypes.c_int32), ("part_steps", ctypes.c_int32),
    )  # fmt: skip


class ProductStructure(ctypes.Structure):
    """csrc/linear.cuh: Product."""

    _fields_ = (("geometry", GeometryStructure), ("packed", PackedStructure), ("job", JobStructure))


class TogetherStructure(ctypes.Structure):
    """csrc/linear.cuh: Together."""

    _fields_ = (("products", ProductStructure * MAX_TOGETHER),)

    @classmethod
    def of(cls, products: Sequence[ProductStructure]) -> TogetherStructure:
        """With copies of these."""
        structure = cls(tuple(products))
        for missing in range(len(products), MAX_TOGETHER):
            structure.products[missing].job.first_block = _BEHIND_ANY_GRID
        return structure
