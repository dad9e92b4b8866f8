"""Launches of csrc/linear_rounds.cuh; memory in 32-bit words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from samebits.cached import cached_property
from samebits.format.geometry import STAGE
from samebits.kernels import nvrtc
from samebits.kernels.linear.job import (
    CHUNK_STAGES,
    MAX_TOKENS,
    OCTET,
    RIGHT,
    Arrangement,
    Footprint,
    JobFields,
    Launch,
    arranged_left,
    shares,
)
from samebits.kernels.linear.walk import IDLE, MAX_RANGES, OPENING, TURN, WalkPlanner, turns

_MAX_WARPS = {1: 19, 2: 14}  # kMaxWarps, kFewWarps: by OCTETs of tokens
_COLUMN_WORDS = 2 * TURN * STAGE // 4  # kColumnBytes
_MAX_OWN = (1 << 16) - 1  # row groups of a block; csrc: Piece
_PLACES = 2  # turns of x, at least
_MORE_PLACES = 4  # where there is room
_BARRIER_WORDS = 4  # of a place
_WAITING = 4  # warps that would take as long as each of them waits for itself


def rounds(footprints: tuple[Footprint, ...], m: int, splits: tuple[int, ...], device: int) -> Launch | None:
    """One launch for one tensor or several, whose busiest block ends soonest; None as launch_of."""
    if m > MAX_TOKENS or not nvrtc.has_wgmma(device):
        return None
    whole = [_Planner(footprint, split, 1, m, device, 1) for footprint, split in zip(footprints, splits, strict=True)]
    if any(each.ranges > MAX_RANGES for each in whole):
        return None
    found = [way for pieces in range(1, max(each.ranges for each in whole) + 1)
             for way in _ways(footprints, m, splits, device, pieces)]  # fmt: skip
    return min(found, key=lambda way: way.expected).launch if found else None


def _ways(
    footprints: tuple[Footprint, ...], m: int, splits: tuple[int, ...], device: int, pieces: int
) -> Iterator[_Way]:
    """With so many segments of each tensor, if it has ranges for them, and any number of warps that fits."""
    whole = [_Planner(footprint, split, 1, m, device, pieces)
             for footprint, split in zip(footprints, splits, strict=True)]  # fmt: skip
    blocks = shares(footprints, [each.decoded for each in whole], device, [len(each.segments) for each in whole])
    if blocks is None:
        return
    planners = [_Planner(footprint, split, number, m, device, pieces)
                for footprint, split, number in zip(footprints, splits, blocks, strict=True)]  # fmt: skip
    if not all(each.own <= _MAX_OWN and (each.is_one_range or each.are_borders_alone) for each in planners):
        return
    for own_warps in range(1, _MAX_WARPS[planners[0].octets] + 1):
        way = _Way(planners, own_warps)
        if way.places:
            yield way


@dataclass(frozen=True)
class _Way:
    """With so many warps that walk."""

    planners: Sequence[_Planner]
    warps: int

    @cached_property
    def places(self) -> int:
        """Turns of x that are in memory or on their way there; 0 if there is no room."""
        room = min(each.room - each.fixed(self.warps) - each.entries for each in self.planners)
        places = room // (self.planners[0].place + _BARRIER_WORDS)
        return min(places, _PLACES + _MORE_PLACES) if places >= _PLACES else 0

    @property
    def expected(self) -> float:
        """What the busiest block takes, in stages of one warp among many."""
        return max(-(-each.own // self.warps) * (self.warps + _WAITING) * each.decoded for each in self.planners)

    @property
    def launch(self) -> Launch:
        planners, one = self.planners, self.planners[0]
        kind = ""
        if not all(each.is_one_range for each in planners):
            kind = "_turns" if all(each.has_whole_turns for each in planners) else "_borders"
        together = "_together" if len(planners) > 1 else ""
        blocks = [each.blocks * len(each.segments) for each in planners]
        jobs = (each.job(self, first) for each, first in zip(planners, accumulate(blocks, initial=0), strict=False))
        meetings = tuple(each.meetings for each in planners)
        parts = tuple(each.parts_bytes for each in planners)
        arrangement = None
        if one.octets > 1:
            arrangement = arranged_left(one.m, one.stages, meetings, parts)
        elif any(parts):
            arrangement = Arrangement(0, one.stages * STAGE, OCTET, 0, meetings, parts, RIGHT)
        return Launch("linear_rounds.cu", f"linear_rounds_{OCTET * one.octets}{kind}{together}", sum(blocks),
                      self.warps + 1, 4 * max(each.total(self) for each in planners), tuple(jobs),
                      arrangement)  # fmt: skip


class _Planner(WalkPlanner):
    """Of one tensor, each of whose segments has ``blocks`` blocks; ``pieces`` segments, if it has as many ranges."""

    def __init__(self, footprint: Footprint, split: int, blocks: int, m: int, device: int, pieces: int) -> None:
        super().__init__(footprint, m, split, device, blocks, pieces)
        self.place = self.kept_tokens * _COLUMN_WORDS

    @property
    def is_one_range(self) -> bool:
        return self.segment_stages == self.stages_per_range

    @cached_property
    def decoded(self) -> int:
        """The time that the longest segment of a row group takes, in stages."""
        times = []
        for first in self.segments:
            begin, end = first // CHUNK_STAGES * CHUNK_STAGES, min(first + self.segment_stages, self.stages)
            chunks = -(-(end - begin) // CHUNK_STAGES)
            times.append(turns(end - begin) + chunks * OPENING - IDLE * (first - begin >= TURN))
        return max(times)

    @property
    def meetings(self) -> int:
        """Of ranges' sums, of several blocks."""
        return self.row_groups if len(self.segments) > 1 else 0

    @property
    def parts_bytes(self) -> int:
        return 4 * self.sums_words(self.row_groups)

    def fixed(self, warps: int) -> int:
        """What a block needs without the ring of x."""
        return self.table + warps * self.walker

    def x(self, way: _Way) -> int:
        """Of the ring of x, where the table's entries were before."""
        return max(way.places * self.place, self.entries)

    def total(self, way: _Way) -> int:
        return self.fixed(way.warps) + self.x(way) + way.places * _BARRIER_WORDS

    def job(self, way: _Way, first_block: int) -> JobFields:
        """JobStructure's fields behind the pointers."""
        return self.job_fields(way.warps, -(-self.own // way.warps), way.warps, x=self.x(way), first_block=first_block,
                               segments=len(self.segments), segment_stages=self.segment_stages,
                               x_places=way.places)  # fmt: skip
