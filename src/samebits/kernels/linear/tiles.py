"""Launches of csrc/linear_tiles.cuh; memory in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from samebits.format.geometry import ROW_GROUP, STAGE
from samebits.format.header import align
from samebits.kernels import nvrtc
from samebits.kernels.linear.job import (
    ATOM_BYTES,
    CHUNK_STAGES,
    MAP_BYTES,
    Arrangement,
    Boxes,
    Footprint,
    JobFields,
    Launch,
    TensorPlanner,
    shares,
)

TILE_WARPS = 21  # max_threads, with two warpgroups; with one there is one less
_X_SLOTS = {16: 4, 32: 4, 64: 3, 128: 2}  # of the ring of x, at least, by tokens that a kernel is made for
_MORE_X_SLOTS = 1  # where there is memory for it
_MORE_RING = 1  # pairs of stages that the ring of weights has then, beyond those that it needs
_WHOLE_SLOTS = 32  # tokens, up to which a slot of x is given back as a whole
_IDLE_BYTES = 16  # of a barrier that nobody waits for, and what aligns the next
_TILE = 8  # kTileGroups
_LEFT_TOKENS = 64  # kLeftTokens
_MOST_GROUPS = {1: 16, 2: 12}  # row groups that so many warpgroups multiply at once, at most
_WARPGROUP = 4  # warps
_MAX_DECODERS = 16  # kMaxDecoders
_GROUP_CYCLES = 33 + 8 + 8  # of a row group's stage
_MIN_RING = 3  # pairs of stages that a block keeps decoded
MAX_TILE_TOKENS = max(_X_SLOTS)


def tiles(footprints: tuple[Footprint, ...], m: int, splits: tuple[int, ...], device: int, warps: int) -> Launch | None:
    """One launch for one tensor or several, with as few batches as fit, and then as many warps; None as launch_of.

    Where ranges have blocks of their own, each block copies less of x and multiplies more row groups at once, but what
    two of them share of a chunk is decoded twice.
    """
    if m > MAX_TILE_TOKENS or not nvrtc.has_wgmma(device):
        return None
    ways = (False, True) if max(splits) > 1 else (False,)
    found = filter(None, (_fitting(footprints, m, splits, device, warps, is_cut) for is_cut in ways))
    best = min(found, key=_expected, default=None)
    return _launch(*best) if best else None


def _fitting(
    footprints: tuple[Footprint, ...], m: int, splits: tuple[int, ...], device: int, warps: int, is_cut: bool
) -> _Fitting | None:
    """``is_cut``: every range has blocks of its own."""
    whole = [_Planner(*each, 1, m, device, is_cut) for each in zip(footprints, splits, strict=True)]
    blocks = shares(footprints, [each.decoded for each in whole], device, [each.segments for each in whole])
    if blocks is None:
        return None
    planners = [_Planner(*each, m, device, is_cut) for each in zip(footprints, splits, blocks, strict=True)]
    every = ([each.batch(more) for each in planners] for more in range(max(each.own for each in planners)))
    return next(filter(None, (_with_batches(each, warps) for each in every)), None)


def _expected(fitting: _Fitting) -> int:
    """Cycles of shared memory that the busiest block takes."""
    return max(batch.cycles for batch in fitting.each)


@dataclass(frozen=True)
class _Batch:
    """What a block of one tensor multiplies at once: ``slots`` row groups of a segment, ``batches`` times."""

    planner: _Planner
    batches: int
    slots: int

    def ring(self, decoders: int) -> int:
        """Pairs of stages that it keeps decoded; 0 if memory is not enough, or that many warps decode too far ahead.

        A warp for each row group of a batch keeps the blocks going; more of them decode chunks ahead, as many pairs of
        stages ahead as the ring must then hold. The kernel relies on both.
        """
        ring = (4 * self.planner.room - self._fixed(decoders)) // self.slot_bytes
        return ring if decoders >= self.slots and ring >= self._least_ring(decoders) else 0

    def _least_ring(self, decoders: int) -> int:
        chunks_ahead = -(-decoders // self.slots) - 1  # of those that are multiplied
        return _MIN_RING + chunks_ahead * CHUNK_STAGES // 2

    def x_slots(self, decoders: int) -> int:
        """Of the ring of x."""
        planner, least = self.planner, _X_SLOTS[self.planner.wide]
        ring = (self._least_ring(decoders) + _MORE_RING) * self.slot_bytes
        more = (4 * planner.room - planner.fixed(decoders, least) - ring) // planner.x_slot_bytes
        return least + min(max(more, 0), _MORE_X_SLOTS)

    def _fixed(self, decoders: int) -> int:
        return self.planner.fixed(decoders, self.x_slots(decoders))

    @property
    def slot_bytes(self) -> int:
        return self.slots * 2 * ATOM_BYTES + 16  # both atoms and both barriers

    def shared(self, decoders: int) -> int:
        """Bytes of shared memory."""
        return self._fixed(decoders) + self.ring(decoders) * self.slot_bytes

    @property
    def cycles(self) -> int:
        """Of shared memory: at each stage what is decoded is looked up, written and read, x written and read."""
        return self.batches * self.planner.decoded * (_GROUP_CYCLES * self.slots + 2 * self.planner.wide)

    @property
    def blocks(self) -> int:
        """Of all segments."""
        return self.planner.blocks * self.planner.segments

    def meetings(self, warps: int) -> int:
        """Of ranges' sums, where there are several: one for each batch of each warp that multiplies."""
        return self.planner.blocks * self.batches * warps if self.planner.ranges > 1 else 0

    def counted(self, warps: int) -> int:
        """Meetings of several blocks."""
        return self.meetings(warps) if self.planner.segments > 1 else 0

    def job(self, decoders: int, first_block: int) -> JobFields:
        """JobStructure's fields behind the pointers."""
        return self.planner.job_fields(self.slots, self.batches, decoders, ring=self.ring(decoders),
                                       first_block=first_block, blocks=self.blocks, segments=self.planner.segments,
                                       segment_stages=self.planner.segment_stages,
                                       x_places=self.x_slots(decoders))  # fmt: skip


class _Fitting(NamedTuple):
    """What fits into memory.

    Attributes:
        groups: row groups that a block's matrices have.
        multipliers, decoders: warps.
    """

    each: list[_Batch]
    groups: int
    multipliers: int
    decoders: int


def _with_batches(each: list[_Batch], warps: int) -> _Fitting | None:
    """With as many warps that decode as fit."""
    slots, wide = [batch.slots for batch in each], each[0].planner.wide
    # One warpgroup has no room for the sums of many tokens of more than a tile.
    warpgroups = 2 if wide == MAX_TILE_TOKENS and max(slots) > _TILE else 1
    x_left = wide == _LEFT_TOKENS * warpgroups
    groups = align(max(slots), _TILE // 2 if x_left else _TILE)
    if groups > _MOST_GROUPS[warpgroups]:
        return None
    if not x_left and groups > _TILE and min(slots) <= _TILE // 2:
        return None  # whose rows the kernel places otherwise
    multipliers, most = _WARPGROUP * warpgroups, warps - (warpgroups == 1)
    for decoders in range(most - multipliers - 1, 0, -1):  # another one brings x
        if all(batch.ring(decoders) for batch in each):
            return _Fitting(each, groups, multipliers, decoders)
    return None


def _launch(each: Sequence[_Batch], groups: int, multipliers: int, decoders: int) -> Launch:
    one = each[0].planner
    m, wide, columns = one.m, one.wide, one.stages * STAGE
    blocks = [batch.blocks for batch in each]
    jobs = (batch.job(decoders, first) for batch, first in zip(each, accumulate(blocks, initial=0), strict=False))
    sums = 4 * ROW_GROUP * groups * wide // multipliers  # bytes of a warp's, of one range
    memory = tuple(
        MAP_BYTES * batch.blocks + batch.meetings(multipliers) * batch.planner.ranges * sums for batch in each
    )
    counted = tuple(batch.counted(multipliers) for batch in each)
    together = "_together" if len(each) > 1 else ""
    return Launch("linear_tiles.cu", f"linear_tiles_{wide}_{groups}{together}", sum(blocks),
                  multipliers + 1 + decoders, max(batch.shared(decoders) for batch in each), tuple(jobs),
                  Arrangement(0, columns, wide, 0, counted, memory, 0), Boxes(m, columns, wide, STAGE))  # fmt: skip


class _Planner(TensorPlanner):
    """Of one tensor, of whose segments each has ``blocks`` blocks."""

    def __init__(self, footprint: Footprint, split: int, blocks: int, m: int, device: int, is_cut: bool) -> None:
        super().__init__(footprint, m, split, device, blocks)
        self.wide = next(wide for wide in _X_SLOTS if wide >= m)
        self.segments = self.ranges if is_cut else 1
        self.segment_stages = self.stages_per_range if is_cut else self.stages
        firsts = range(0, self.stages, self.segment_stages)
        ends = [min(first + self.segment_stages, self.stages) for first in firsts]
        whole = [first // CHUNK_STAGES * CHUNK_STAGES for first in firsts]
        self.decoded = max(end - first for first, end in zip(whole, ends, strict=True))  # stages of a segment

    def batch(self, more: int) -> _Batch:
        """With so many batches more than are needed, if there are row groups for them."""
        batches = min(-(-self.own // (2 * _TILE)) + more, self.own)
        return _Batch(self, batches, -(-self.own // batches))

    @property
    def x_parts(self) -> int:
        """csrc: of a slot of x, each with barriers of its own."""
        return 1 if self.wide <= _WHOLE_SLOTS else 2

    @property
    def x_slot_bytes(self) -> int:
        """And its barriers."""
        return 2 * self.wide * 2 * STAGE + 16 * self.x_parts

    def fixed(self, decoders: int, x_slots: int) -> int:
        """Bytes beside the ring of weights."""
        x, barriers = x_slots * self.x_slot_bytes, 8 * _MAX_DECODERS + _IDLE_BYTES
        return ATOM_BYTES + MAP_BYTES + barriers + 4 * self.table + x + decoders * 8 * self.buffer
