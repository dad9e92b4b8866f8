"""Packed tensors taken apart, damaged and put together again, with digests that hide the damage."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np

from samebits.codecs.reference import Reading
from tests.codecs.slow_compact import COMPACT
from tests.codecs.slow_encoder import join_sections, seal

FIELDS = {
    "magic": (0, "<I"),
    "version": (4, "<B"),
    "code": (5, "<B"),
    "layout": (6, "<B"),
    "ndim": (7, "<B"),
    "stored_digest": (8, "<Q"),
    "original_digest": (16, "<Q"),
    "columns": (24, "<I"),
    "chunk_stages": (28, "<B"),
    "max_code_length": (29, "<B"),
    "window": (30, "<B"),
    "shift": (31, "<b"),
    "rows": (32, "<Q"),
    "symbol_count": (40, "<H"),
    "flags": (42, "<H"),
    "max_chunk_words": (44, "<I"),
    "stream_words": (48, "<Q"),
    "reserved": (56, "<Q"),
}


@dataclass
class Parts:
    """The sections of a packed tensor, to be changed in place."""

    header: bytearray
    shape: bytearray
    code: bytearray
    row_shifts: bytearray
    offsets: bytearray
    planes: bytearray
    streams: bytearray

    @classmethod
    def of(cls, data: bytes) -> Parts:
        return cls(*map(bytearray, Reading(data).sections.values()))

    def __getitem__(self, field: str) -> int:
        offset, layout = FIELDS[field]
        return int(struct.unpack_from(layout, self.header, offset)[0])

    def __setitem__(self, field: str, value: int) -> None:
        offset, layout = FIELDS[field]
        struct.pack_into(layout, self.header, offset, value)

    def joined(self) -> bytes:
        wide = self["rows"] * self["columns"] >= 65536
        sections = [self.header, self.shape, self.code, self.row_shifts, self.offsets, self.planes, self.streams]
        return seal(join_sections(sections, multiple=4 if self["code"] == COMPACT else 16, wide=wide))


def hostile_runs(data: bytes, rng: np.random.Generator, random_code: bool, short: bool) -> bytes:
    """A packed tensor in the compact code with random streams; its runs as short as may be, or of any length."""
    parts = Parts.of(data)
    words = len(parts.planes)
    most = [8 if short else 8 + 16 * min(256, words - first) for first in range(0, words, 256)]
    lengths = rng.integers(8, np.array(most) + 1)
    parts.offsets[:] = lengths.astype("<u2").tobytes()
    parts["stream_words"] = -(-int(lengths.sum()) // 32)
    parts.streams[:] = rng.bytes(4 * parts["stream_words"])
    if random_code:
        parts.code[:] = rng.permutation(np.diff(np.sort(rng.integers(0, 128, 61))) + 1).astype(np.uint8).tobytes()
        parts["symbol_count"] = 60
    return parts.joined()


def get(section: bytearray, index: int, layout: str = "<I") -> int:
    """Entry ``index`` of a section of numbers."""
    return int(struct.unpack_from(layout, section, index * struct.calcsize(layout))[0])


def put(section: bytearray, index: int, value: int, layout: str = "<I") -> None:
    struct.pack_into(layout, section, index * struct.calcsize(layout), value)
