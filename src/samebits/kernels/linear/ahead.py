"""Launches of csrc/linear_ahead.cuh; memory in 32-bit words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from samebits.cached import cached_property
from samebits.format.geometry import SIGN_BYTES, STAGE, STAGE_WORDS
from samebits.format.header import align
from samebits.kernels import nvrtc
from samebits.kernels.linear.job import (
    CHUNK_STAGES,
    OCTET,
    Footprint,
    JobFields,
    Launch,
    TensorPlanner,
    arranged_left,
    shares,
)

MAX_AHEAD_TOKENS = 48
_MAX_LINES = 11  # of a block; with more, other kernels are faster
_MAX_APART_LINES = {1: 6, 2: 8}  # the same where segments are apart, by lines that a warp multiplies
_SEGMENTED_LINES = 8  # at most, of more than one segment
_RUN_STAGES = 4  # kRun
_RUN_WORDS = _RUN_STAGES * STAGE_WORDS // 4  # kRunBytes: a byte of each weight
_RAW_RUNS = 3  # kRawRuns
_SIGN_WORDS = CHUNK_STAGES // 2 * SIGN_BYTES // 4  # kChunkSigns
_COLUMN_WORDS = 2 * _RUN_STAGES * STAGE // 4  # kColumnBytes
_CHUNK_RUNS = CHUNK_STAGES // _RUN_STAGES
_X_WORDS = 4096  # of a segment, where that is enough
_FEW_OCTETS = 2  # up to which x has a chunk's runs; with more its line's ring has, or warps could wait for each other
_MIN_RUNS = 2  # of the other one, where a line is as long
_MAX_RUNS = 4  # of a line's ring: who decodes farther ahead takes time from who multiplies
_MAX_LEFT_RUNS = 6  # the same with more than an OCTET of tokens
_BARRIER_WORDS = 2
_BESIDE = 3 * 1024  # bytes of shared memory for three blocks of arrange.cu, which begin beside the launch in front
_LINE_CYCLES = 42  # of shared memory, for a line's stage
_OCTET_CYCLES = 8  # and for x of it, in which lines of a warp share
_STAGE_CYCLES = {1: 200, 2: 300}  # that a warp takes to multiply one of its lines
_SKIPPED_CYCLES = 100  # to decode one in front of a segment
_KINDS = {  # by OCTETs of tokens: lines that a warp multiplies, and whether segments are apart
    1: ((1, False), (2, False)),
    2: ((2, False), (1, True)),
    4: ((2, False), (1, True), (2, True)),
    6: ((2, False),),
}


def ahead(
    footprints: tuple[Footprint, ...],
    m: int,
    splits: tuple[int, ...],
    device: int,
    warps: int,
    sharing: int,
    *,
    apart: bool,
) -> Launch | None:
    """One launch for one tensor or several, with as many warps as rings leave memory for; None as launch_of.

    With more than OCTET tokens on Hopper.

    Args:
        sharing: lines that a warp multiplies, 1 or 2.
        apart: a block has one segment of K, and less of x. Of all numbers of segments that with which it ends first.
    """
    if m > MAX_AHEAD_TOKENS or (sharing, apart) not in _KINDS[_octets(m)]:
        return None
    if m > OCTET and not nvrtc.has_wgmma(device):
        return None
    numbers = range(2, max(splits) + 1) if apart else (None,)
    planners = (partial(_Planner, m=m, device=device, sharing=sharing, pieces=number) for number in numbers)
    found = filter(None, (_fitting(footprints, splits, planner, warps) for planner in planners))
    best = min(found, key=lambda way: way.expected, default=None)
    return best.launch if best else None


def _octets(m: int) -> int:
    """More than one are arranged in sixteens."""
    return 1 if m <= OCTET else align(m, 2 * OCTET) // OCTET


def _fitting(
    footprints: tuple[Footprint, ...], splits: tuple[int, ...], planner: Callable[..., _Planner], warps: int
) -> _Way | None:
    """With as many warps as fit.

    Args:
        planner: of a footprint, its split, and blocks.
    """
    whole = [planner(footprint, split, 1) for footprint, split in zip(footprints, splits, strict=True)]
    blocks = shares(footprints, [each.decoded for each in whole], whole[0].device, [each.apart for each in whole])
    if blocks is None:
        return None
    planners = [planner(*each) for each in zip(footprints, splits, blocks, strict=True)]
    if any(each.lines > each.most_lines for each in planners):
        return None
    one = planners[0]
    if one.sharing == 2 and one.octets == 1 and all(each.own == 1 for each in planners):
        return None  # as with 1
    least = max(each.others + min(each.sharing, each.own) for each in planners)  # or a warp's lines wait for each other
    useful = max(each.others + each.tasks for each in planners)
    ways = (_Way(planners, block_warps) for block_warps in range(min(warps, useful), least - 1, -1))
    return next((way for way in ways if way.fits), None)


@dataclass(frozen=True)
class _Way:
    """With so many warps."""

    planners: Sequence[_Planner]
    warps: int

    @cached_property
    def rings(self) -> list[_Rings]:
        return [each.rings(self.warps) for each in self.planners]

    @property
    def fits(self) -> bool:
        return all(rings.line >= each.least.line for rings, each in zip(self.rings, self.planners, strict=True))

    @property
    def expected(self) -> int:
        """Cycles that the busiest block takes."""
        return max(each.cycles for each in self.planners)

    @property
    def launch(self) -> Launch:
        planners, one = self.planners, self.planners[0]
        together = "_together" if len(planners) > 1 else ""
        blocks = [each.blocks * each.apart for each in planners]
        with_rings = list(zip(planners, self.rings, strict=True))
        firsts = accumulate(blocks, initial=0)
        jobs = (each.job(rings, first) for (each, rings), first in zip(with_rings, firsts, strict=False))
        shared_bytes = 4 * max(each.shared(self.warps, rings) for each, rings in with_rings)
        meetings, parts = [each.meetings for each in planners], [each.parts_bytes for each in planners]
        arranged = arranged_left(one.m, one.stages, meetings, parts, OCTET * one.octets) if one.octets > 1 else None
        return Launch(one.file, f"{one.name}{together}", sum(blocks), self.warps, shared_bytes, tuple(jobs), arranged)


class _Rings(NamedTuple):
    """Runs that a line's ring has, and a segment's of x."""

    line: int
    x: int


class _Planner(TensorPlanner):
    """Of one tensor.

    Attributes:
        sharing: lines of a warp that multiplies, at most.
        apart: segments that have ``blocks`` blocks each; 1 where a block has all segments.
        together: segments of a block.
    """

    def __init__(
        self, footprint: Footprint, split: int, blocks: int, *, m: int, device: int, sharing: int, pieces: int | None
    ) -> None:
        super().__init__(footprint, m, split, device, blocks)
        self.octets, self.sharing = _octets(m), sharing
        if self.octets > 1:
            self.room = (nvrtc.shared_memory(device) - _BESIDE) // 4
        most = max(1, _SEGMENTED_LINES // self.own) if pieces is None else pieces
        self.segment_stages = -(-self.ranges // min(most, self.ranges)) * self.stages_per_range
        self.segments = -(-self.stages // self.segment_stages)
        self.apart, self.together = (1, self.segments) if pieces is None else (self.segments, 1)
        self.lines = self.own * self.together
        self.most_lines = _MAX_LINES if pieces is None else _MAX_APART_LINES[sharing]
        self.others = (-(-self.own // sharing) + 1) * self.together  # warps that multiply, or bring x
        self.tasks = self.lines * -(-self.segment_stages // CHUNK_STAGES)
        self.runs = -(-min(self.segment_stages, self.stages) // _RUN_STAGES) + 1  # of a line, at most
        self.run = self.lines * (_RUN_WORDS + 1)  # a run and its flag, of all lines
        self.x_run = self.kept_tokens * _COLUMN_WORDS
        few = _Rings(_MIN_RUNS, max(_CHUNK_RUNS, _X_WORDS // self.x_run))
        line, x = few if self.octets <= _FEW_OCTETS else _Rings(_CHUNK_RUNS, _MIN_RUNS)
        self.least = _Rings(min(line, self.runs), min(x, self.runs))
        self.raw = self.lines * _RAW_RUNS * _RUN_WORDS
        self.file = "linear_ahead.cu" if self.octets == 1 else "linear_ahead_left.cu"
        kind = f"{'_two' if sharing == 2 else ''}{'_apart' if pieces is not None else ''}"
        self.name = f"linear_ahead_{OCTET * self.octets}{kind}"

    @property
    def decoded(self) -> int:
        """Stages of a row group that a block decodes, at most: of a segment that is apart with all of its chunks."""
        if self.apart == 1:
            return self.stages
        return max(self.segment_end(first) - first + self.skipped(first) for first in self.firsts)

    @property
    def cycles(self) -> int:
        """That a block takes: those of shared memory, or those in which the longest segment is added up."""
        chains = (
            _STAGE_CYCLES[self.sharing] * (self.segment_end(first) - first) + _SKIPPED_CYCLES * self.skipped(first)
            for first in self.firsts
        )
        line = _LINE_CYCLES + _OCTET_CYCLES * self.octets // self.sharing
        return max(line * self.lines * self.decoded, *chains)

    @property
    def firsts(self) -> range:
        """Where segments begin."""
        return range(0, self.stages, self.segment_stages)

    def segment_end(self, first: int) -> int:
        return min(first + self.segment_stages, self.stages)

    def skipped(self, first: int) -> int:
        """Stages of a segment's first chunk in front of it."""
        return first % CHUNK_STAGES

    @property
    def meetings(self) -> int:
        """Of ranges' sums, of several blocks."""
        return self.row_groups if self.apart > 1 else 0

    @property
    def parts_bytes(self) -> int:
        return 4 * self.sums_words(self.row_groups) if self.apart > 1 else 0

    def rings(self, warps: int) -> _Rings:
        """As many runs as are of use and fit: of lines first."""
        room = self.room - self.shared(warps, _Rings(0, self.least.x))
        line = min(room // self.run, self.runs, _MAX_RUNS if self.octets == 1 else _MAX_LEFT_RUNS)
        more = (_Rings(line, x) for x in range(min(_CHUNK_RUNS, self.runs), self.least.x, -1))
        return next((rings for rings in more if self.shared(warps, rings) <= self.room), _Rings(line, self.least.x))

    def shared(self, warps: int, rings: _Rings) -> int:
        """What a block needs."""
        parts = self.sums_words(self.own) if self.apart == 1 else 0
        buffers = (warps - self.others) * 2 * (self.buffer + _SIGN_WORDS)
        barriers = self.together * rings.x * _BARRIER_WORDS if self.octets > 1 else 0
        flags = self.lines + self.together + self.own
        x = self.x(rings)
        return self.table + x + buffers + self.raw + parts + barriers + flags + rings.line * self.run

    def x(self, rings: _Rings) -> int:
        """Where the table's entries were before."""
        return max(self.together * rings.x * self.x_run, self.entries)

    def job(self, rings: _Rings, first_block: int) -> JobFields:
        """JobStructure's fields behind the pointers."""
        return self.job_fields(self.own, 1, 1, x=self.x(rings), ring=rings.line, first_block=first_block,
                               segments=self.segments, segment_stages=self.segment_stages,
                               x_places=rings.x)  # fmt: skip
