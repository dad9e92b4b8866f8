"""What launches of csrc/walk.cuh's kernels, chains and rounds, have in common; memory in 32-bit words."""

from __future__ import annotations

from samebits.format.geometry import SLAB_BYTES
from samebits.kernels.linear.job import CHUNK_STAGES, Footprint, TensorPlanner

MAX_RANGES = 255  # csrc: kRangeBit
OPENING = 4  # stages in whose time a chunk is opened, about
IDLE = 4  # and that a turn takes less in which nothing is multiplied
_RING_SLABS = 4  # kRing
_LIST_WORDS = 100  # kListBytes
TURN = 2 * _RING_SLABS  # kTurn: stages that are decoded at once


def turns(stages: int) -> int:
    """Stages of whole turns, for so many from a chunk's first."""
    return -(-stages // TURN) * TURN


class WalkPlanner(TensorPlanner):
    """Of one tensor, whose K is cut into so many segments, if it has as many ranges.

    Attributes:
        segment_stages: of whole ranges, that a block's warps walk.
        walker: words of a warp that walks: staging buffers, ring of slabs, list.
    """

    def __init__(self, footprint: Footprint, m: int, split: int, device: int, blocks: int, segments: int = 1) -> None:
        super().__init__(footprint, m, split, device, blocks)
        self.segment_stages = -(-self.ranges // min(segments, self.ranges)) * self.stages_per_range
        self.walker = 2 * self.buffer + _RING_SLABS * SLAB_BYTES // 4 + _LIST_WORDS

    @property
    def segments(self) -> range:
        """Where they begin."""
        return range(0, self.stages, self.segment_stages)

    @property
    def are_borders_alone(self) -> bool:
        """Whether a chunk has one border at most, and no segment's last range begins and ends in the same turn."""
        ends = [min(first + self.segment_stages, self.stages) for first in self.segments]
        lasts = [(end - 1) // self.stages_per_range * self.stages_per_range for end in ends]
        return self.stages_per_range >= CHUNK_STAGES and all(
            (last - 1) // TURN < (end - 1) // TURN for last, end in zip(lasts, ends, strict=True)
        )

    @property
    def has_whole_turns(self) -> bool:
        """Whether all chains begin and end with one."""
        return self.stages_per_range % TURN == 0 and self.stages % TURN == 0
