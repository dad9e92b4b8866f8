"""Launches of csrc/linear_ahead.cuh; memory in 32-bit words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from samebits.format.geometry import LANES, SIGN_BYTES, STAGE, STAGE_WORDS
from samebits.kernels import nvrtc
from samebits.kernels.linear.job import (
    CHUNK_STAGES,
    MAX_TOKENS,
    OCTET,
    Footprint,
    JobFields,
    Launch,
    TensorPlanner,
    arranged_left,
    shares,
)

_MAX_LINES = 11  # of a block; with more, other kernels are faster
_SEGMENTED_LINES = 8  # at most, of more than one segment
_RUN_STAGES = 4  # kRun
_RUN_WORDS = _RUN_STAGES * STAGE_WORDS // 4  # kRunBytes: a byte of each weight
_RAW_RUNS = 3  # kRawRuns
_SIGN_WORDS = CHUNK_STAGES // 2 * SIGN_BYTES // 4  # kChunkSigns
_COLUMN_WORDS = 2 * _RUN_STAGES * STAGE // 4  # kColumnBytes
_MIN_X_RUNS = CHUNK_STAGES // _RUN_STAGES  # or warps could wait for each other
_X_WORDS = 4096  # of a segment, where that is enough
_MIN_RUNS = 2  # of a ring, where its line is as long
_MAX_RUNS = {1: 4, 2: 6}  # by OCTETs of tokens; who decodes farther ahead takes time from who multiplies
_BARRIER_WORDS = 2


def ahead(
    footprints: tuple[Footprint, ...], m: int, splits: tuple[int, ...], device: int, warps: int, sharing: int
) -> Launch | None:
    """One launch for one tensor or several, with as many warps as rings leave memory for; None as launch_of.

    Args:
        sharing: lines that a warp multiplies, 1 or 2; with more than OCTET tokens 2, on Hopper.
    """
    if m > MAX_TOKENS or (m > OCTET and not (sharing == 2 and nvrtc.has_wgmma(device))):
        return None
    stages = [footprint.geometry.stages for footprint in footprints]
    blocks = shares(footprints, stages, device)
    if blocks is None:
        return None
    planners = [_Planner(*each, m, device, sharing) for each in zip(footprints, splits, blocks, strict=True)]
    if max(each.lines for each in planners) > _MAX_LINES:
        return None
    if sharing == 2 and m <= OCTET and all(each.own == 1 for each in planners):
        return None  # as with 1
    least = max(each.others + min(sharing, each.own) for each in planners)  # or lines of one warp wait for each other
    useful = max(each.others + each.tasks for each in planners)
    for block_warps in range(min(warps, useful), least - 1, -1):
        rings = [each.ring(block_warps) for each in planners]
        if all(ring >= min(_MIN_RUNS, each.runs) for ring, each in zip(rings, planners, strict=True)):
            return _launch(planners, blocks, block_warps, rings)
    return None


def _launch(planners: Sequence[_Planner], blocks: Sequence[int], warps: int, rings: Sequence[int]) -> Launch:
    one, together = planners[0], "_together" if len(planners) > 1 else ""
    jobs = (
        each.job(ring, first) for each, ring, first in zip(planners, rings, accumulate(blocks, initial=0), strict=False)
    )
    shared_bytes = 4 * max(each.fixed(warps) + ring * each.run for each, ring in zip(planners, rings, strict=True))
    nothing = [0] * len(planners)
    return Launch(one.file, f"{one.name}{together}", sum(blocks), warps, shared_bytes, tuple(jobs),
                  arranged_left(one.m, one.stages, nothing, nothing) if one.octets > 1 else None)  # fmt: skip


class _Planner(TensorPlanner):
    """Of one tensor."""

    def __init__(self, footprint: Footprint, split: int, blocks: int, m: int, device: int, sharing: int) -> None:
        super().__init__(footprint, m, split, device, blocks)
        ranges = -(-self.ranges // max(1, min(_SEGMENTED_LINES // self.own, self.ranges)))  # of a segment
        self.segment_stages = ranges * self.stages_per_range
        self.segments = -(-self.stages // self.segment_stages)
        self.lines = self.own * self.segments
        self.others = (-(-self.own // sharing) + 1) * self.segments  # warps that multiply, or bring x
        self.tasks = self.lines * -(-self.segment_stages // CHUNK_STAGES)
        self.runs = -(-min(self.segment_stages, self.stages) // _RUN_STAGES) + 1  # of a line, at most
        self.run = self.lines * (_RUN_WORDS + 1)  # a run and its flag, of all lines
        x_run = self.kept_tokens * _COLUMN_WORDS
        self.x_places = min(self.runs, max(_MIN_X_RUNS, _X_WORDS // x_run))
        self.x = max(self.segments * self.x_places * x_run, self.entries)
        self.raw = self.lines * _RAW_RUNS * _RUN_WORDS
        self.file = "linear_ahead.cu" if self.octets == 1 else "linear_ahead_left.cu"
        self.name = f"linear_ahead_{OCTET * self.octets}{'_two' if sharing == 2 and self.octets == 1 else ''}"

    def fixed(self, warps: int) -> int:
        """What a block needs without rings."""
        parts = self.own * self.ranges * 2 * self.octets * LANES if self.ranges > 1 else 0
        buffers = (warps - self.others) * 2 * (self.buffer + _SIGN_WORDS)
        barriers = self.segments * self.x_places * _BARRIER_WORDS if self.octets > 1 else 0
        flags = self.lines + self.segments + self.own
        return self.table + self.x + buffers + self.raw + parts + barriers + flags

    def ring(self, warps: int) -> int:
        """Runs of each, as many as are of use and fit."""
        return min((self.room - self.fixed(warps)) // self.run, self.runs, _MAX_RUNS[self.octets])

    def job(self, ring: int, first_block: int) -> JobFields:
        """JobStructure's fields behind the pointers."""
        return self.job_fields(self.own, 1, 1, x=self.x, ring=ring, first_block=first_block,
                         segments=self.segments, segment_stages=self.segment_stages,
                         x_places=self.x_places)  # fmt: skip
