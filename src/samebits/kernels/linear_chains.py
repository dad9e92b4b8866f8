"""Launches of csrc/linear_chains.cuh; memory in 32-bit words."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, pairwise

from samebits.format.geometry import SLAB_BYTES
from samebits.format.packed import Header
from samebits.kernels.linear_job import CHUNK_STAGES, MAX_TOKENS, OCTET, JobFields, Launch, Planner, shares
from samebits.kernels.structures import WALKS

_MAX_WARPS = {1: WALKS, 2: 16}  # kMaxWarps, kFewWarps: by OCTETs of tokens
_WHOLE_CHAINS = 12  # of a block, at most, that are never cut: who goes on with one may have to wait
_RING_SLABS = 4  # kRing
_TURN = 2 * _RING_SLABS  # kTurn: stages that are decoded at once
_OPENING = 4  # stages in whose time a chunk is opened, about
_LIST_WORDS = 101  # kListBytes, and a flag, of a warp
_MAX_PIECES = (1 << 16) - 1  # of a block; csrc: Walk
_SCHEDULERS = 4  # of a multiprocessor


@dataclass(frozen=True)
class Walk:
    """A warp's pieces: where it begins, where its whole chains and its last one begin, and where it ends.

    Attributes:
        number: in the order of pieces.
    """

    begin: int
    whole: int
    last: int
    end: int
    number: int


def chains(
    headers: tuple[Header, ...], m: int, splits: tuple[int, ...], device: int, most_warps: int, *, shared_x: bool
) -> Launch | None:
    """One launch for one tensor or several, with as many warps as have chains and find room; None as launch_of."""
    if m > MAX_TOKENS:
        return None
    stages = [_Planner(header, split, 1, m, device, shared_x).stages_of_row_group
              for header, split in zip(headers, splits, strict=True)]  # fmt: skip
    blocks = shares(headers, stages, device)
    if blocks is None:
        return None
    planners = [_Planner(*each, m, device, shared_x) for each in zip(headers, splits, blocks, strict=True)]
    if any(each.own * len(each.pieces) > _MAX_PIECES for each in planners):
        return None
    room = min(
        most_warps, _MAX_WARPS[planners[0].octets], *((each.room - each.fixed) // each.warp for each in planners)
    )
    if room < min(_SCHEDULERS, max(each.chains for each in planners)):
        return None
    warps = max(each.warps(room) for each in planners)
    together = "_together" if len(planners) > 1 else ""
    jobs = (each.job(warps, first) for each, first in zip(planners, accumulate(blocks, initial=0), strict=False))
    return Launch(f"linear_chains{together}.cu", f"{planners[0].name}{together}", sum(blocks), warps,
                  4 * max(each.fixed + warps * each.warp for each in planners), tuple(jobs))  # fmt: skip


class _Planner(Planner):
    """Of one tensor. Its pieces are those of csrc: of each range of a row group its chunks, one after the other."""

    def __init__(self, header: Header, split: int, blocks: int, m: int, device: int, shared_x: bool) -> None:
        super().__init__(header, m, split, device, blocks)
        sums = 64 * self.octets
        self.x = max(32 * m * self.stages if shared_x else 0, self.entries)
        self.fixed = self.table + self.x + self.own + (self.own * self.ranges * sums if self.ranges > 1 else 0)
        self.warp = 2 * self.buffer + _RING_SLABS * SLAB_BYTES // 4 + sums + _LIST_WORDS
        self.chains = self.own * self.ranges  # of a block
        self.name = f"linear_chains_{OCTET * self.octets}_{'shared' if shared_x else 'global'}"

    @cached_property
    def pieces(self) -> list[tuple[int, int]]:
        """Of a row group: in which range each is, and how many stages are decoded for it."""
        found = []
        for number in range(self.ranges):
            first = number * self.stages_per_range
            end = min(first + self.stages_per_range, self.stages)
            for chunk in range(first // CHUNK_STAGES, -(-end // CHUNK_STAGES)):
                found.append((number, -(-min(end - chunk * CHUNK_STAGES, CHUNK_STAGES) // _TURN) * _TURN))
        return found

    @property
    def stages_of_row_group(self) -> int:
        """That are decoded: a chunk in which a range ends and another begins is decoded for both."""
        return sum(stages for _, stages in self.pieces)

    def warps(self, most: int) -> int:
        """For a block's chains: one for each, or of each scheduler as many as of any other."""
        even = -(-self.chains // _SCHEDULERS) * _SCHEDULERS
        if self.chains <= most and (self.chains <= _WHOLE_CHAINS or self.chains == even):
            return self.chains
        return max(min(most, even) // _SCHEDULERS * _SCHEDULERS, 1)

    def walks(self, groups: int, most: int) -> list[Walk]:
        """Of a block with so many row groups, by warp, at most that many. All have pieces.

        A multiprocessor has four schedulers, which share the warps in turn. Walks are whole chains, or each scheduler
        has as much to do as any other, and so has each of its warps.
        """
        count, ranges = len(self.pieces), [number for number, _ in self.pieces]
        whole = self.warps(most) == self.chains
        warps = groups * self.ranges if whole else min(most, groups * count)
        by_scheduler = [range(first, warps, _SCHEDULERS) for first in range(min(_SCHEDULERS, warps))]
        if whole:
            firsts = [ranges.index(number) for number in range(self.ranges)]
            cuts = [slot * count + first for slot in range(groups) for first in firsts] + [groups * count]
        else:
            cuts = self._even_cuts(groups, [len(own) for own in by_scheduler])

        def chain_of(piece: int) -> tuple[int, int]:
            slot, place = divmod(piece, count)
            first = ranges.index(ranges[place])
            return slot * count + first, slot * count + first + ranges.count(ranges[place])

        found: dict[int, Walk] = {}
        for number, (warp, (begin, end)) in enumerate(zip(chain(*by_scheduler), pairwise(cuts), strict=True)):
            last = max(begin, chain_of(end - 1)[0])
            found[warp] = Walk(begin, min(chain_of(begin)[1], last), last, end, number)
        return [found[warp] for warp in range(warps)]

    def _even_cuts(self, groups: int, warps: Sequence[int]) -> list[int]:
        """Where walks begin, and the last one ends; so many warps has each scheduler."""
        count = len(self.pieces)
        prefix = list(accumulate((stages + _OPENING for _, stages in self.pieces), initial=0))
        total, left, cuts = groups * prefix[-1], sum(warps), [0]
        for scheduler, own in enumerate(warps):
            for i in range(1, own + 1):
                slot, rest = divmod(total * (scheduler * own + i) // (own * len(warps)), prefix[-1])
                place = bisect_right(prefix, rest) - 1
                nearest = slot * count + place
                nearest += place < count and 2 * rest > prefix[place] + prefix[place + 1]
                left -= 1
                cuts.append(min(max(nearest, cuts[-1] + 1), groups * count - left))
        return cuts

    def job(self, warps: int, first_block: int) -> JobFields:
        """JobStructure's fields behind the pointers."""
        longer = self.row_groups % self.blocks
        own = self.row_groups // self.blocks
        walks: list[int] = []
        for groups in (own + 1 if longer else 0, own):
            found = self.walks(groups, warps) if groups else []
            for walk in found + [Walk(0, 0, 0, 0, 0)] * (WALKS - len(found)):
                walks += walk.begin | walk.whole << 16, walk.last | walk.end << 16, walk.number
        odd = self.stages_per_range & -self.stages_per_range  # the power of two in it
        return self.job_fields(self.own, 1, warps, x=self.x, first_block=first_block, pieces=len(self.pieces),
                               whole_ranges=max(CHUNK_STAGES // odd, 1).bit_length() - 1, walks=walks)  # fmt: skip
