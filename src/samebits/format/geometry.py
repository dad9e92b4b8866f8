"""FORMAT.md section 1: rows, row groups, stages, chunks, lanes and runs. Pure arithmetic, no I/O."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum

from samebits.cached import cached_property

ROW_GROUP = 8  # rows of a row group
STAGE = 64  # columns of a stage
STEPS = 4  # steps of 16 columns in a stage
LANES = 32
STREAMS = 2 * LANES  # streams of a chunk
STAGE_WORDS = ROW_GROUP * STAGE
SIGN_BYTES = 4 * LANES  # sign words of a pair of stages
SLAB_BYTES = SIGN_BYTES + 2 * STAGE_WORDS
FLAT_COLUMNS = 128
MAX_CHUNK_STAGES = 64
RUN_WORDS = 256  # words of a run, the compact code's unit; it has no other geometry
EXPERTS_DIMENSIONS = 3  # of a tensor that has a matrix for each expert
MATRIX_PADDING_LIMIT = 0.005  # share of padding up to which the matrix layout is chosen


class Layout(IntEnum):
    """FORMAT.md 1.1."""

    FLAT = 0
    MATRIX = 1


class Code(IntEnum):
    """FORMAT.md section 3. RAW exists in memory only: the original words, not coded."""

    RAW = 0
    QUAD = 1
    SINGLE = 2
    COMPACT = 3


@dataclass(frozen=True)
class Geometry:
    """Where each word of a ``rows`` x ``columns`` matrix of ``words`` words lies in a packed tensor."""

    rows: int
    columns: int
    words: int
    chunk_stages: int

    @classmethod
    def of_shape(cls, shape: tuple[int, ...], chunk_stages: int) -> tuple[Layout, Geometry]:
        """The layout FORMAT.md 1.1 recommends for ``shape``, and its geometry."""
        layout = choose_layout(shape)
        return layout, cls.of_layout(shape, layout, chunk_stages)

    @classmethod
    def of_layout(cls, shape: tuple[int, ...], layout: Layout, chunk_stages: int) -> Geometry:
        """The geometry of ``shape`` in ``layout``."""
        words = math.prod(shape)
        if layout is Layout.MATRIX:
            return cls(math.prod(shape[:-1]), shape[-1], words, chunk_stages)
        return cls(-(-words // FLAT_COLUMNS), FLAT_COLUMNS, words, chunk_stages)

    @cached_property
    def row_groups(self) -> int:
        return -(-self.rows // ROW_GROUP)

    @cached_property
    def stages(self) -> int:
        """Stages of one row group."""
        return -(-self.columns // STAGE)

    @cached_property
    def chunks_per_row_group(self) -> int:
        """Chunks of a row group; 1 where a chunk covers several row groups."""
        return max(1, -(-self.stages // self.chunk_stages))

    @cached_property
    def row_groups_per_chunk(self) -> int:
        return max(1, self.chunk_stages // self.stages) if self.stages else 1

    @cached_property
    def chunks(self) -> int:
        if self.chunks_per_row_group > 1:
            return self.row_groups * self.chunks_per_row_group
        return -(-self.row_groups // self.row_groups_per_chunk)

    def chunks_of_runs(self, words: int) -> int:
        """The most chunks that ``words`` consecutive words lie in, if they start at a multiple of ``words``."""
        unit = ROW_GROUP * self.columns * self.row_groups_per_chunk
        latest = unit - math.gcd(words, unit)  # where in its first unit of row groups such a run may start
        return -(-(latest + words) // unit) * self.chunks_per_row_group

    @cached_property
    def quad_plane_bytes(self) -> int:
        """Bytes of one row group's planes in the quad code (FORMAT.md 5.3)."""
        pairs, odd = divmod(self.stages, 2)
        return pairs * SLAB_BYTES + odd * (SIGN_BYTES + STAGE_WORDS)

    def plane_bytes(self, code: Code) -> int:
        """Bytes of the *planes* section."""
        per_group = self.quad_plane_bytes if code is Code.QUAD else self.stages * STAGE_WORDS
        return self.row_groups * per_group

    def chunk(self, index: int) -> tuple[int, int, int, int]:
        """Chunk ``index`` as (first row group, row groups, first stage, stages in each row group)."""
        if self.chunks_per_row_group > 1:
            group, part = divmod(index, self.chunks_per_row_group)
            first = part * self.chunk_stages
            return group, 1, first, min(self.chunk_stages, self.stages - first)
        first_group = index * self.row_groups_per_chunk
        return first_group, min(self.row_groups_per_chunk, self.row_groups - first_group), 0, self.stages


def choose_layout(shape: tuple[int, ...]) -> Layout:
    """*matrix* where padding costs at most MATRIX_PADDING_LIMIT, else *flat* (FORMAT.md 1.1)."""
    words = math.prod(shape)
    if len(shape) < 2 or words == 0:
        return Layout.FLAT
    rows, columns = words // shape[-1], shape[-1]
    stages = -(-columns // STAGE)
    sign_waste = (stages % 2) * STAGE / 16  # half a slab's signs, in words of 16 bits
    padded = -(-rows // ROW_GROUP) * ROW_GROUP * (stages * STAGE + sign_waste)
    return Layout.MATRIX if padded <= words * (1 + MATRIX_PADDING_LIMIT) else Layout.FLAT
