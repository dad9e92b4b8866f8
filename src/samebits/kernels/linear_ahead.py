"""Launches of csrc/linear_ahead.cuh; memory in 32-bit words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from samebits.format.geometry import SIGN_BYTES, STAGE, STAGE_WORDS
from samebits.format.packed import Header
from samebits.kernels.linear_job import CHUNK_STAGES, LANES, MAX_TOKENS, OCTET, JobFields, Launch, Planner, shares

_MAX_LINES = 11  # of a block; with more, other kernels are faster
_SEGMENTED_LINES = 8  # at most, of more than one segment
_RUN_STAGES = 4  # kRun
_RUN_WORDS = _RUN_STAGES * STAGE_WORDS // 4  # kRunBytes: a byte of each weight
_SIGN_WORDS = CHUNK_STAGES // 2 * SIGN_BYTES // 4  # kChunkSigns
_COLUMN_WORDS = 2 * _RUN_STAGES * STAGE // 4  # kColumnBytes
_MIN_X_RUNS = CHUNK_STAGES // _RUN_STAGES  # or warps could wait for each other
_MAX_WARPS = 20  # kMaxWarps: with more, the kernel for kManyWarps
_MANY_LINES = 8  # of a block, at least, for which that many warps are of use
_MIN_RUNS = 2  # of a ring, where its line is as long


class _Kept(NamedTuple):
    """What a kernel keeps in shared memory of what is multiplied.

    Attributes:
        name: the end of the kernel's.
        raw_runs: of a line (csrc: kRawRuns, kFewRawRuns).
        x_words: of a segment, where that is enough.
    """

    name: str
    raw_runs: int
    x_words: int


_FEW = _Kept("", 3, 4096)  # by warps
_MANY = _Kept("_many", 2, 1536)


def ahead(headers: tuple[Header, ...], m: int, splits: tuple[int, ...], device: int, warps: int) -> Launch | None:
    """One launch for one tensor or several, with as many warps as rings leave memory for; None as launch_of."""
    if m > MAX_TOKENS:
        return None
    stages = [header.geometry.stages for header in headers]
    blocks = shares(headers, stages, device)
    if blocks is None:
        return None
    kept = _MANY if warps > _MAX_WARPS else _FEW
    planners = [_Planner(*each, m, device, kept) for each in zip(headers, splits, blocks, strict=True)]
    lines = max(each.lines for each in planners)
    if lines > _MAX_LINES or (kept is _MANY and lines < _MANY_LINES):
        return None
    others = max(each.lines + each.segments for each in planners)
    useful = max(each.lines + each.segments + each.tasks for each in planners)
    for block_warps in range(min(warps, useful), others, -1):
        rings = [each.ring(block_warps) for each in planners]
        if all(ring >= min(_MIN_RUNS, each.runs) for ring, each in zip(rings, planners, strict=True)):
            return _launch(planners, blocks, block_warps, rings)
    return None


def _launch(planners: Sequence[_Planner], blocks: Sequence[int], warps: int, rings: Sequence[int]) -> Launch:
    together = "_together" if len(planners) > 1 else ""
    jobs = (
        each.job(ring, first) for each, ring, first in zip(planners, rings, accumulate(blocks, initial=0), strict=False)
    )
    shared_bytes = 4 * max(each.fixed(warps) + ring * each.run for each, ring in zip(planners, rings, strict=True))
    return Launch("linear_ahead.cu", f"{planners[0].name}{together}", sum(blocks), warps, shared_bytes,
                  tuple(jobs))  # fmt: skip


class _Planner(Planner):
    """Of one tensor."""

    def __init__(self, header: Header, split: int, blocks: int, m: int, device: int, kept: _Kept) -> None:
        super().__init__(header, m, split, device, blocks)
        ranges = -(-self.ranges // max(1, min(_SEGMENTED_LINES // self.own, self.ranges)))  # of a segment
        self.segment_stages = ranges * self.stages_per_range
        self.segments = -(-self.stages // self.segment_stages)
        self.lines = self.own * self.segments  # as many warps multiply
        self.tasks = self.lines * -(-self.segment_stages // CHUNK_STAGES)
        self.runs = -(-min(self.segment_stages, self.stages) // _RUN_STAGES) + 1  # of a line, at most
        self.run = self.lines * (_RUN_WORDS + 1)  # a run and its flag, of all lines
        x_run = m * _COLUMN_WORDS
        self.x_places = min(self.runs, max(_MIN_X_RUNS, kept.x_words // x_run))
        self.x = max(self.segments * self.x_places * x_run, self.entries)
        self.name = f"linear_ahead_{OCTET * self.octets}{kept.name}"
        self.raw = self.lines * kept.raw_runs * _RUN_WORDS

    def fixed(self, warps: int) -> int:
        """What a block needs without rings."""
        parts = self.own * self.ranges * 2 * self.octets * LANES if self.ranges > 1 else 0
        buffers = (warps - self.lines - self.segments) * 2 * (self.buffer + _SIGN_WORDS)
        return self.table + self.x + buffers + self.raw + parts + self.lines + self.segments + self.own

    def ring(self, warps: int) -> int:
        """Runs of each, as many as are of use and fit."""
        return min((self.room - self.fixed(warps)) // self.run, self.runs)

    def job(self, ring: int, first_block: int) -> JobFields:
        """JobStructure's fields behind the pointers."""
        return self.job_fields(self.own, 1, 1, x=self.x, ring=ring, first_block=first_block,
                         segments=self.segments, segment_stages=self.segment_stages,
                         x_places=self.x_places)  # fmt: skip
