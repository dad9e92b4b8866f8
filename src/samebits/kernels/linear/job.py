"""What launches of the fused linear layer have in common: csrc/linear.cuh."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from samebits.cached import cached_property
from samebits.format.geometry import LANES, STAGE, STEPS, Geometry
from samebits.format.header import Header, align
from samebits.kernels import nvrtc
from samebits.kernels.decode import STATIC_SHARED, staging_words
from samebits.kernels.structures import DIVISION_WORDS
from samebits.kernels.tables import table_words

CHUNK_STAGES = 16  # csrc: kChunkStages
OCTET = 8  # tokens that mma's right matrix has
MAX_TOKENS = 16  # of the kernels in which each row group, or two of them, have one mma for all tokens
ATOM_BYTES = 1024  # atoms.cuh: kAtomBytes
MAP_BYTES = 128  # hopper.cuh: kMapBytes
RIGHT, LEFT = 0, 1  # arrange.cu: kRight, kLeft
_ARRANGE_THREADS = 128


JobFields = tuple[int | tuple[int, ...], ...]


class Kernel(Enum):
    """The kernels of csrc/linear_*.cu."""

    AHEAD = "warps decode ahead of others that multiply, one for each row group or for two"
    CHAINS = "each warp walks chains of its own"
    ROUNDS = "warps walk row groups in step, and x comes to all"
    TILES = "tiles are decoded for warpgroups to multiply"
    SINGLES = "each warp decodes a row group and multiplies it"
    PAIRS = "each warp decodes two row groups and multiplies them"
    WARPGROUPS = "warpgroups decode what they multiply"
    RELAY = "some warps decode to memory, whence warpgroups multiply"
    CLUSTERS = "tiles are decoded by two blocks, for warpgroups of both to multiply"


@dataclass(frozen=True, eq=False)
class Arrangement:
    """What is made ready in memory before a launch: x as csrc/arrange.cu writes it, and where sums of ranges meet.

    linear_relay.cuh counts row groups that are decoded instead of meetings, and has what is decoded in place of parts;
    linear_tiles.cuh has each block's tensor map before the parts, linear_clusters.cuh nothing else.

    Attributes:
        tokens, columns: of x; no tokens where the launch takes x as it is.
        wide: tokens of a tile.
        x_bytes: of x, whole tiles; it comes first in that memory.
        meetings: of each tensor, how many are counted; 0 where there is one range.
        parts_bytes: of each tensor, of all ranges' sums.
        part_steps: steps of 16 columns that a matrix of wgmma's has; or RIGHT, LEFT: for mma, as which of its matrices.
        threads: of a block of the kernel.
    """

    tokens: int
    columns: int
    wide: int
    x_bytes: int
    meetings: tuple[int, ...]
    parts_bytes: tuple[int, ...]
    part_steps: int
    threads: int = _ARRANGE_THREADS

    @cached_property
    def done_count(self) -> int:
        """Meetings of all tensors."""
        return sum(self.meetings)

    @cached_property
    def grid(self) -> int:
        """Blocks of the kernel, none without work: a thread for each step of 16 columns, and for each meeting."""
        return -(-max(self.tokens * self.columns * STEPS // STAGE, self.done_count) // self.threads)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Where each tensor's are, in bytes."""
        return tuple(accumulate(self.parts_bytes[:-1], initial=self.x_bytes))

    @cached_property
    def done(self) -> tuple[int, ...]:
        """Where each tensor's meetings are counted, in bytes."""
        first = self.x_bytes + sum(self.parts_bytes)
        return tuple(accumulate((4 * number for number in self.meetings[:-1]), initial=first))

    @cached_property
    def total_bytes(self) -> int:
        return self.x_bytes + sum(self.parts_bytes) + 4 * self.done_count


def arranged_left(
    m: int, stages: int, meetings: Sequence[int], parts_bytes: Sequence[int], wide: int = MAX_TOKENS
) -> Arrangement:
    """For kernels that take x of more than OCTET tokens, ``wide`` at most, as mma's left matrix.

    Blocks of a warp find places beside the launch in front, which may leave each scheduler registers for one.
    """
    return Arrangement(m, stages * STAGE, wide, 2 * wide * stages * STAGE, tuple(meetings), tuple(parts_bytes), LEFT,
                       LANES)  # fmt: skip


class Footprint(NamedTuple):
    """All that launches depend on of a packed tensor, as nearly all layers of a model have it in common.

    Attributes:
        table, entries, buffer: words of shared memory: of the decode table, of what it is made from, of a chunk.
    """

    geometry: Geometry
    table: int
    entries: int
    buffer: int

    @classmethod
    @lru_cache(maxsize=8192)
    def of(cls, header: Header) -> Footprint:
        return cls(header.geometry, table_words(header), align(header.symbol_count, 4), staging_words(header))


class Boxes(NamedTuple):
    """How a kernel copies its input: as boxes of a matrix of bfloat16, box_rows x box_columns each."""

    rows: int
    columns: int
    box_rows: int
    box_columns: int


class Spare(NamedTuple):
    """What is left of a launch for weights of products to come, which it decodes on the way (csrc/linear_relay.cuh).

    Attributes:
        weights: so many are decoded before the launch would end anyway.
        table_words, buffer_words: of shared memory, for a weight's table and chunks.
    """

    weights: int
    table_words: int
    buffer_words: int

    def suits(self, footprint: Footprint) -> bool:
        """Whether the kernel can decode such a weight, however many others there are."""
        return footprint.table <= self.table_words and footprint.buffer <= self.buffer_words


@dataclass(frozen=True, eq=False)
class Launch:
    """A variant for one tensor, number of tokens and device; or for several tensors of one input. Made once."""

    file: str
    name: str
    grid: int
    warps: int
    shared_bytes: int
    jobs: tuple[JobFields, ...]  # of each tensor, JobStructure's fields behind the pointers
    arrangement: Arrangement | None = None
    boxes: Boxes | None = None
    spare: Spare | None = None

    @property
    def threads(self) -> int:
        return LANES * self.warps

    @property
    def sources(self) -> set[nvrtc.Source]:
        """What is compiled for it."""
        arranged = self.arrangement and self.arrangement.grid
        return {nvrtc.Source(self.file, self.name)} | ({nvrtc.Source("arrange.cu", "arrange")} if arranged else set())

    @property
    def key(self) -> tuple[object, ...]:
        """The same for launches that do the same for the same tensors, as variants often do."""
        return self.file, self.name, self.grid, self.warps, self.shared_bytes, self.jobs, self.boxes


def shares(
    footprints: Sequence[Footprint], stages: Sequence[int], device: int, segments: Sequence[int] | None = None
) -> list[int] | None:
    """Blocks of each tensor of one launch, at most one for each multiprocessor; None if these are too few.

    One tensor has all of them; several have theirs so that the most stages of a block are as few as can be.

    Args:
        stages: that are decoded for a row group of each.
        segments: of K, each of which has as many blocks of its own; else there is one.
    """
    segments = segments or [1] * len(footprints)
    row_groups, multiprocessors = [each.geometry.row_groups for each in footprints], nvrtc.multiprocessors(device)
    if len(footprints) == 1:
        return [min(row_groups[0], multiprocessors // segments[0])] if multiprocessors >= segments[0] else None
    pairs = list(zip(row_groups, stages, strict=True))

    def blocks(most: int) -> list[int]:
        return [-(-groups // max(1, most // each)) for groups, each in pairs]

    def fit(most: int) -> bool:
        return sum(own * each for own, each in zip(blocks(most), segments, strict=True)) <= multiprocessors

    limits = sorted({own * each for groups, each in pairs for own in range(1, groups + 1)})
    limits = limits[bisect_left(limits, max(stages)) :]
    place = bisect_left(limits, True, key=fit)
    return blocks(limits[place]) if place < len(limits) else None


def magic(divisor: int) -> int:
    """For csrc/common.cuh's ``divide``: n // divisor == n * magic >> 32 where n * divisor <= 2**32; 0 for 1."""
    return -(-(1 << 32) // divisor) % (1 << 32)


class TensorPlanner:
    """What the kernels' launches have in common, for a tensor that has ``blocks`` blocks; memory in 32-bit words."""

    def __init__(self, footprint: Footprint, m: int, split: int, device: int, blocks: int) -> None:
        geometry = footprint.geometry
        self.m, self.device, self.stages, self.chunks = m, device, geometry.stages, geometry.chunks_per_row_group
        self.octets = -(-m // OCTET)
        self.stages_per_range = -(-geometry.stages // split)
        self.ranges = -(-geometry.stages // self.stages_per_range)
        self.decoded_stages = -(-self.stages_per_range // CHUNK_STAGES) * CHUNK_STAGES  # of a range, about
        self.blocks, self.row_groups = blocks, geometry.row_groups
        self.own = -(-self.row_groups // blocks)  # row groups of a block
        self.table, self.entries, self.buffer = footprint.table, footprint.entries, footprint.buffer
        self.room = (nvrtc.shared_memory(device) - STATIC_SHARED) // 4

    @property
    def kept_tokens(self) -> int:
        """Of x in a block's memory: more than an OCTET come arranged, all of them."""
        return self.m if self.octets == 1 else OCTET * self.octets

    def sums_words(self, row_groups: int) -> int:
        """Of all ranges' sums of so many row groups, in fp32, where ranges meet."""
        return row_groups * self.ranges * 2 * self.octets * LANES if self.ranges > 1 else 0

    def job_fields(
        self,
        slots: int,
        batches: int,
        decoders: int,
        *,
        first_block: int,
        x: int = 0,
        ring: int = 0,
        blocks: int | None = None,
        token_tiles: int = 0,
        units: int = 0,
        segments: int = 1,
        segment_stages: int = 0,
        x_places: int = 0,
        buffer: int | None = None,
        division: Sequence[int] = (),
    ) -> JobFields:
        """JobStructure's fields behind the pointers.

        Args:
            division: walks of linear_chains.cuh, or cuts of linear_pairs.cuh.
        """
        own, longer = divmod(self.row_groups, self.blocks)
        return (
            self.m, self.ranges, self.stages_per_range, slots, batches, decoders // slots, decoders % slots,
            first_block, blocks or self.blocks, own, longer,
            token_tiles, units, magic(max(token_tiles, 1)), magic(self.ranges),
            segments, segment_stages, magic(max(ring, 1)),
            magic(slots), magic(self.stages_per_range), magic(self.chunks),
            self.table, x, buffer or self.buffer, x_places, ring, (*division, *[0] * (DIVISION_WORDS - len(division))),
        )  # fmt: skip
