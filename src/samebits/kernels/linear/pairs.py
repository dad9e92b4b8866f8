"""Launches of csrc/linear_pairs.cuh: singles, pairs and warpgroups; memory in bytes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from samebits.format.geometry import LANES, ROW_GROUP, SLAB_BYTES, STAGE, STEPS
from samebits.kernels import nvrtc
from samebits.kernels.linear.cuts import Cut, Tiles, cuts_anywhere, hands_on, words
from samebits.kernels.linear.job import (
    ATOM_BYTES,
    OCTET,
    RIGHT,
    Arrangement,
    Footprint,
    JobFields,
    Kernel,
    Launch,
    TensorPlanner,
)
from samebits.kernels.structures import DIVISION_WORDS

WGMMA_WIDTHS = (64, 128, 256)  # tokens of a tile
MAX_WGMMA_TOKENS = 512  # with more, decoding first or linear_relay.cuh is faster
# Warps that multiply with mma, at most, by row groups of a warp and tokens at once.
MULTIPLIERS = {1: {4: 16, 8: 16, 16: 16, 32: 16}, 2: {4: 12, 8: 12, 16: 12, 32: 11, 64: 8}}
_OTHER_WARPS = 4  # kOthers
_OPENING_BYTES, _DEALING = LANES * 16 + 16, LANES * 8  # kOpeningBytes, dealing_bytes for a row group
_MIN_PAIRS, _MAX_PAIRS = 2, 4  # of stages, in their ring
_MAX_PLAIN_TOKENS = 4  # whose x is not arranged in memory
_MAX_X_SLOTS = 8  # of the ring of x
_WARP_COST = 0.4  # of another warp in a block, where one takes 1


@dataclass(frozen=True)
class _Way:
    """WithWgmma or WithMma, for so many tokens at once."""

    kernel: Kernel
    tokens: int

    @property
    def stem(self) -> str:
        return f"linear_{self.kernel.name.lower()}"

    @property
    def wide(self) -> int:
        """Tokens of a tile."""
        return max(self.tokens, OCTET)

    @property
    def wgmma(self) -> bool:
        return self.kernel is Kernel.WARPGROUPS

    @property
    def groups(self) -> int:
        """Row groups of a warp."""
        return 1 if self.kernel is Kernel.SINGLES else 2

    @property
    def pairs(self) -> int:
        """Of stages, in their ring; with mma at most."""
        return _MAX_PAIRS if not self.wgmma or self.wide <= 64 else _MIN_PAIRS

    @property
    def x_parts(self) -> int:
        """Slots of the ring of x that a stage takes."""
        return 2 if self.wide == max(WGMMA_WIDTHS) else 1

    @property
    def cluster(self) -> int:
        """Blocks."""
        return 2 if self.wgmma else 1

    @property
    def arranges(self) -> bool:
        """Whether x is arranged in memory."""
        return self.tokens > _MAX_PLAIN_TOKENS

    @property
    def slot_bytes(self) -> int:
        """Of the ring of x; with mma, of a pair of stages' x."""
        return self.wide * 2 * STAGE // self.x_parts if self.wgmma else 2 * self.wide * 2 * STAGE


@dataclass(frozen=True)
class _Memory:
    """A block's memory with so many warps that multiply."""

    way: _Way
    fixed: int  # without the ring that is as large as fits: of pairs with mma, else of x
    slot: int  # of that ring
    ring: int  # slots, 0 if there is no room

    @classmethod
    def of(cls, way: _Way, planners: Sequence[_Planner], warps: int) -> _Memory:
        """For the largest of several tensors."""
        table, buffer = max(each.table for each in planners), max(each.buffer for each in planners)
        side = warps * way.groups * 4 * buffer
        fixed = ATOM_BYTES + 4 * table + side + max(side, 4 * max(each.entries for each in planners))
        fixed += warps * 2 * way.groups * _OPENING_BYTES + (_OTHER_WARPS - 1) * way.groups * _DEALING + warps * 4 * 8
        slabs = warps * way.groups * SLAB_BYTES
        if way.wgmma:
            fixed, slot = fixed + way.pairs * (slabs + 16), way.slot_bytes
            least, most = 2 * way.x_parts, _MAX_X_SLOTS
        else:
            slot = way.slot_bytes + slabs
            least, most = _MIN_PAIRS, way.pairs
        ring = (4 * planners[0].room - fixed) // (slot + 16)
        return cls(way, fixed, slot, min(ring, most) if ring >= least else 0)

    @property
    def x_bytes(self) -> int:
        """Of the ring of x."""
        return self.ring * self.slot if self.way.wgmma else 0

    @property
    def total(self) -> int:
        return self.fixed + self.ring * (self.slot + 16)


def pairs(
    footprints: tuple[Footprint, ...],
    m: int,
    splits: tuple[int, ...],
    device: int,
    kernel: Kernel,
    most_warps: int,
    *,
    hand_on: bool,
) -> Launch | None:
    """One launch for one tensor or several. Blocks of each tensor, and warps, such that the busiest block ends soon.

    Args:
        most_warps: of a block that multiply; their registers may allow fewer.
        hand_on: blocks may end inside a range, where others go on with its sums. They have most_warps, if there is
            room. None if nothing is gained by it.
    """
    multiprocessors = nvrtc.multiprocessors(device)
    limits = MULTIPLIERS[1 if kernel is Kernel.SINGLES else 2]
    if m > max(limits) or not nvrtc.has_wgmma(device) or not len(footprints) <= multiprocessors < DIVISION_WORDS:
        return None
    way = _Way(kernel, next(tokens for tokens in limits if tokens >= m))
    planners = [_Planner(footprint, m, split, device) for footprint, split in zip(footprints, splits, strict=True)]
    possible = range(1, min(most_warps, limits[way.tokens]) + 1)
    fitting = [warps for warps in possible if _Memory.of(way, planners, warps).ring]
    if not fitting or not all(each.tiles(way, 1).is_small_enough for each in planners):
        return None
    if hand_on:
        warps = fitting[-1]
        cuts = cuts_anywhere(tuple(each.tiles(way, warps) for each in planners), multiprocessors)
    else:
        found = [(*_shares(planners, way, warps, multiprocessors), warps) for warps in fitting]
        _, shares, warps = min(found, key=lambda each: each[0] * (1 + _WARP_COST * (each[2] - 1)))
        cuts = tuple(each.tiles(way, warps).between_units(n) for each, n in zip(planners, shares, strict=True))
    return _launch(way, warps, planners, [len(each) - 1 for each in cuts], cuts) if cuts else None


def warpgroups(footprint: Footprint, m: int, split: int, device: int, warps: int) -> Launch | None:
    """A launch in which warpgroups multiply, with as much of x in its ring as fits; None as launch_of."""
    planner = _Planner(footprint, m, split, device)
    wide = next((wide for wide in WGMMA_WIDTHS if wide >= m), max(WGMMA_WIDTHS))
    way = _Way(Kernel.WARPGROUPS, wide)
    most = nvrtc.multiprocessors(device) // way.cluster
    if m > MAX_WGMMA_TOKENS or not nvrtc.has_wgmma(device) or not most or not _Memory.of(way, [planner], warps).ring:
        return None
    clusters = min(planner.units(way, warps), most)
    return _launch(way, warps, [planner], [way.cluster * clusters], [()])


class Warpgroups:
    """A launch in which warpgroups multiply, whose units csrc/linear_routed.cuh finds."""

    def __init__(self, footprint: Footprint, tokens: int, warps: int, device: int) -> None:
        self._way, self._warps = _Way(Kernel.WARPGROUPS, tokens), warps
        self._planner = _Planner(footprint, tokens, 1, device)
        self._memory = _Memory.of(self._way, [self._planner], warps)
        self.fits = self._memory.ring > 0
        self.cluster = self._way.cluster
        self.tile_rows = ROW_GROUP * self._way.groups * warps * self.cluster
        self.threads = LANES * (warps + _OTHER_WARPS)
        self.shared_bytes = self._memory.total

    def job(self, blocks: int) -> JobFields:
        """JobStructure's fields behind the pointers."""
        return self._planner.job(self._way, self._warps, self._memory.x_bytes // 4, self._memory.ring, 0, blocks, ())


def _shares(planners: Sequence[_Planner], way: _Way, warps: int, multiprocessors: int) -> tuple[int, list[int]]:
    """The most stages that a block has to decode, as few as can be; and blocks of each tensor for that."""
    work = [(each.units(way, warps), each.decoded_stages) for each in planners]

    def blocks(most: int) -> list[int]:
        return [-(-units // (most // stages)) for units, stages in work]

    possible = range(max(stages for _, stages in work), sum(units * stages for units, stages in work) + 1)
    most = possible[bisect_left(possible, True, key=lambda most: sum(blocks(most)) <= multiprocessors)]
    return most, blocks(most)


def _launch(
    way: _Way, warps: int, planners: Sequence[_Planner], shares: Sequence[int], cuts: Sequence[tuple[Cut, ...]]
) -> Launch:
    memory = _Memory.of(way, planners, warps)
    m, stages = planners[0].m, planners[0].stages
    meetings = [each.meetings(way, warps) for each in planners]
    sums = [number * each.ranges for number, each in zip(meetings, planners, strict=True)]
    for i in range(len(planners)):
        if hands_on(cuts[i]):
            meetings[i] += shares[i] * warps  # of each warp a flag
            sums[i] += shares[i] * warps
    part_steps = STEPS // way.x_parts if way.wgmma else RIGHT
    tokens = m if way.arranges else 0
    x_bytes = -(-tokens // way.wide) * way.wide * 2 * STAGE * stages
    jobs = (
        each.job(way, warps, memory.x_bytes // 4, memory.ring, first, blocks, own)
        for each, first, blocks, own in zip(planners, accumulate(shares, initial=0), shares, cuts, strict=False)
    )
    together = "_together" if len(planners) > 1 else ""
    return Launch(f"{way.stem}.cu", f"{way.stem}_{way.tokens}{together}", sum(shares), warps + _OTHER_WARPS,
                  memory.total, tuple(jobs),
                  Arrangement(tokens, stages * STAGE, way.wide, x_bytes, tuple(meetings),
                              tuple(number * LANES * way.wide * 2 for number in sums), part_steps)
                  if tokens or any(meetings) else None)  # fmt: skip


class _Planner(TensorPlanner):
    """Of one tensor; how many blocks it has is found for all tensors of a launch."""

    def __init__(self, footprint: Footprint, m: int, split: int, device: int) -> None:
        super().__init__(footprint, m, split, device, 1)

    def units(self, way: _Way, warps: int) -> int:
        """Of work."""
        return -(-self.row_groups // (way.cluster * way.groups * warps)) * self.ranges * self.token_tiles(way)

    def tiles(self, way: _Way, warps: int) -> Tiles:
        """Of rows, where warps multiply with mma."""
        return Tiles(-(-self.row_groups // (way.groups * warps)), self.stages, self.stages_per_range)

    def token_tiles(self, way: _Way) -> int:
        return -(-self.m // way.wide)

    def job(
        self, way: _Way, warps: int, x: int, ring: int, first_block: int, blocks: int, cuts: tuple[Cut, ...]
    ) -> JobFields:
        """JobStructure's fields behind the pointers."""
        return self.job_fields(1, 1, warps, x=x, ring=ring, first_block=first_block, blocks=blocks,
                         token_tiles=self.token_tiles(way), units=self.units(way, warps),
                         division=words(cuts))  # fmt: skip

    def meetings(self, way: _Way, warps: int) -> int:
        """Of ranges' sums, where there are several: one for each warp's row groups and tile of tokens."""
        return self.units(way, warps) // self.ranges * way.cluster * warps if self.ranges > 1 else 0
