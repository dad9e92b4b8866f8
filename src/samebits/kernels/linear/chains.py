"""Launches of csrc/linear_chains.cuh; memory in 32-bit words."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product

from samebits.cached import cached_property
from samebits.kernels import nvrtc
from samebits.kernels.linear.job import CHUNK_STAGES, MAX_TOKENS, OCTET, Footprint, JobFields, Launch, shares
from samebits.kernels.linear.walk import IDLE, MAX_RANGES, OPENING, TURN, WalkPlanner, turns
from samebits.kernels.structures import WALKS

_MAX_WARPS = {1: WALKS, 2: 16}  # kMaxWarps, kFewWarps: by OCTETs of tokens
_WHOLE_CHAINS = 12  # of a block, at most, that are never cut: who goes on with one may have to wait
_MAX_CHUNKS = (1 << 16) - 1  # of a block; csrc: Walk
_SCHEDULERS = 4  # of a multiprocessor
_ALONE = 3.0  # stages of a scheduler, in whose time a warp takes one that waits for nothing but itself
_STEEP = 16  # an exponent: in a sum of powers the longest time counts for almost all


@dataclass(frozen=True)
class Walk:
    """A warp's stages: where it begins, where its whole chains and its last one begin, and where it ends.

    Attributes:
        number: in the order of stages.
    """

    begin: int
    whole: int
    last: int
    end: int
    number: int

    @property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """In the order in which a warp goes through them: the last chain, those in front, what is left of the first."""
        return (self.last, self.end), (self.whole, self.last), (self.begin, self.whole)

    def words(self, place: Callable[[int], tuple[int, int]]) -> tuple[int, ...]:
        """csrc: Walk; ``place`` says in which of a block's chunks a stage is, and where there."""
        parts, edges = [0, 0, 0], self.number << 24
        for i, (begin, end) in enumerate(self.parts):
            if begin < end:
                (first, opening), (last, closing) = place(begin), place(end - 1)
                parts[i] = first | (last + 1 - first) << 16
                edges |= (opening | closing << 4) << 8 * i
        return (*parts, edges)


def chains(
    footprints: tuple[Footprint, ...], m: int, splits: tuple[int, ...], device: int, most_warps: int, *, shared_x: bool
) -> Launch | None:
    """One launch for one tensor or several, with as many warps as have chains and find room; None as launch_of."""
    if m > MAX_TOKENS:
        return None
    stages = [_Planner(footprint, split, 1, m, device, shared_x).stages_of_row_group
              for footprint, split in zip(footprints, splits, strict=True)]  # fmt: skip
    blocks = shares(footprints, stages, device)
    if blocks is None:
        return None
    planners = [_Planner(*each, m, device, shared_x) for each in zip(footprints, splits, blocks, strict=True)]
    if any(each.own * each.chunks > _MAX_CHUNKS or each.ranges > MAX_RANGES for each in planners):
        return None
    room = min(
        most_warps, _MAX_WARPS[planners[0].octets], *((each.room - each.fixed) // each.warp for each in planners)
    )
    if room < min(_SCHEDULERS, max(each.chains for each in planners)):
        return None
    warps = max(each.warps(room) for each in planners)
    with_borders = [each for each in planners if each.has_borders(warps)]
    if not all(each.are_borders_alone for each in with_borders):
        return None
    if with_borders and not shared_x and nvrtc.has_wgmma(device):
        return None  # other kernels take less time there
    kind = "shared" if shared_x else "global"
    if with_borders:
        kind += "_turns" if shared_x and all(each.has_whole_turns for each in planners) else "_borders"
    together = "_together" if len(planners) > 1 else ""
    jobs = (each.job(warps, first) for each, first in zip(planners, accumulate(blocks, initial=0), strict=False))
    name = f"linear_chains_{OCTET * planners[0].octets}_{kind}{together}"
    return Launch("linear_chains.cu", name, sum(blocks), warps,
                  4 * max(each.fixed + warps * each.warp for each in planners), tuple(jobs))  # fmt: skip


def _warps_of(walks: int) -> list[int]:
    """By the numbers of walks; neighbours share a scheduler."""
    return [warp for scheduler in range(_SCHEDULERS) for warp in range(scheduler, walks, _SCHEDULERS)]


class _Planner(WalkPlanner):
    """Of one tensor. A block's stages are numbered row group after row group, as in csrc."""

    def __init__(self, footprint: Footprint, split: int, blocks: int, m: int, device: int, shared_x: bool) -> None:
        super().__init__(footprint, m, split, device, blocks)
        sums = 64 * self.octets
        self.x = max(32 * m * self.stages if shared_x else 0, self.entries)
        self.fixed = self.table + self.x + self.own + (self.own * self.ranges * sums if self.ranges > 1 else 0)
        self.warp = self.walker + sums + 1  # what is handed on, and its flag

    @property
    def chains(self) -> int:
        """Of a block."""
        return self.own * self.ranges

    @cached_property
    def decoded(self) -> list[int]:
        """Of each chunk of a row group, how many stages."""
        return [turns(min(self.stages - first, CHUNK_STAGES)) for first in range(0, self.stages, CHUNK_STAGES)]

    @property
    def stages_of_row_group(self) -> int:
        """That are decoded; more where walks, or their parts, begin inside chunks."""
        return sum(self.decoded)

    def warps(self, most: int) -> int:
        """For a block's chains: one for each, or of each scheduler as many as of any other."""
        even = -(-self.chains // _SCHEDULERS) * _SCHEDULERS
        if self.chains <= most and (self.chains <= _WHOLE_CHAINS or self.chains == even):
            return self.chains
        return max(min(most, even) // _SCHEDULERS * _SCHEDULERS, 1)

    def has_borders(self, most: int) -> bool:
        """Whether ranges begin inside chunks of a walk."""
        return self.ranges > 1 and self.stages_per_range % CHUNK_STAGES > 0 and self.warps(most) != self.chains

    def walks(self, groups: int, most: int) -> list[Walk]:
        """Of a block with so many row groups, by warp, at most that many. All have stages.

        A multiprocessor has four schedulers, which share the warps in turn. Walks are whole chains, or each scheduler
        has as much to do as any other, and so has each of its warps. Neighbours share a scheduler.
        """
        if self.warps(most) == self.chains:
            cuts = [*self._ranges_begun(0, groups * self.stages), groups * self.stages]
        else:
            warps = min(most, groups * self.chunks)
            chunks = self._even_cuts(groups, warps)
            if self.has_borders(most):
                chunks = self._with_fewer_borders(chunks)
            cuts = [self._stage_of(chunk) for chunk in chunks]
        walks = [self._walk(*each, number) for number, each in enumerate(pairwise(cuts))]
        by_warp = dict(zip(_warps_of(len(walks)), walks, strict=True))
        return [by_warp[warp] for warp in range(len(walks))]

    def _walk(self, begin: int, end: int, number: int) -> Walk:
        opened = self._ranges_begun(begin, end)
        whole = opened[0] if opened else begin
        with_chunks = [stage for stage in opened if stage % self.stages % CHUNK_STAGES == 0]
        return Walk(begin, whole, with_chunks[-1] if with_chunks else whole, end, number)

    def _ranges_begun(self, begin: int, end: int) -> list[int]:
        """Where ranges begin in stages [begin, end)."""
        return [stage for slot in range(begin // self.stages, -(-end // self.stages))
                for stage in range(slot * self.stages, (slot + 1) * self.stages, self.stages_per_range)
                if begin <= stage < end]  # fmt: skip

    def _stage_of(self, chunk: int) -> int:
        """The first of one of a block's chunks."""
        slot, inside = divmod(chunk, self.chunks)
        return slot * self.stages + inside * CHUNK_STAGES

    def _place(self, stage: int) -> tuple[int, int]:
        """In which of a block's chunks a stage is, and where there."""
        slot, inside = divmod(stage, self.stages)
        return slot * self.chunks + inside // CHUNK_STAGES, inside % CHUNK_STAGES

    def _even_cuts(self, groups: int, warps: int) -> list[int]:
        """With which chunks walks begin, and the last one ends."""
        count, own = self.chunks, Counter(warp % _SCHEDULERS for warp in range(warps))
        prefix = list(accumulate((stages + OPENING for stages in self.decoded), initial=0))
        total, left, cuts = groups * prefix[-1], warps, [0]
        for scheduler in own:
            for i in range(1, own[scheduler] + 1):
                slot, rest = divmod(total * (scheduler * own[scheduler] + i) // (own[scheduler] * len(own)), prefix[-1])
                place = bisect_right(prefix, rest) - 1
                nearest = slot * count + place
                nearest += place < count and 2 * rest > prefix[place] + prefix[place + 1]
                left -= 1
                cuts.append(min(max(nearest, cuts[-1] + 1), groups * count - left))
        return cuts

    def _with_fewer_borders(self, cuts: list[int]) -> list[int]:
        """The same, moved to where less is decoded twice and waited for, as long as that makes the launch shorter."""
        schedulers = [warp % _SCHEDULERS for warp in _warps_of(len(cuts) - 1)]
        times = [self._times(*each) for each in pairwise(cuts)]
        even = sum(map(sum, times)) / len({*schedulers})

        def total(times: Sequence[tuple[int, int, int]]) -> float:
            """Much like the longest of what schedulers and warps take, but it counts how much less the others do."""
            taken, handed, terms = [0] * _SCHEDULERS, 0, 0.0
            for scheduler, (last, whole, first) in zip(schedulers, times, strict=True):
                taken[scheduler] += last + whole + first
                end = max(last + whole, handed) + first
                handed = last
                terms += (_ALONE * end / even) ** _STEEP
            return terms + sum((each / even) ** _STEEP for each in taken)

        best, moved = total(times), True
        while moved:
            moved = False
            for i, by in product(range(1, len(cuts) - 1), (-3, -2, -1, 1, 2, 3)):
                place = cuts[i] + by
                if not cuts[i - 1] < place < cuts[i + 1]:
                    continue
                both = self._times(cuts[i - 1], place), self._times(place, cuts[i + 1])
                changed = [*times[: i - 1], *both, *times[i + 1 :]]
                if (shorter := total(changed)) < best * (1 - 1e-9):
                    best, moved, times, cuts = shorter, True, changed, [*cuts[:i], place, *cuts[i + 1 :]]
        return cuts

    def _times(self, first: int, behind: int) -> tuple[int, int, int]:
        """A walk's, part by part, about: the stages that are decoded, and as many as opening their chunks takes."""
        times = [0, 0, 0]
        for i, (begin, end) in enumerate(self._walk(self._stage_of(first), self._stage_of(behind), 0).parts):
            if begin < end:
                (first, opening), (last, closing) = self._place(begin), self._place(end - 1)
                times[i] = (last - first) * (CHUNK_STAGES + OPENING) + turns(closing + 1) + OPENING
                times[i] -= IDLE * (opening >= TURN)
        return times[0], times[1], times[2]

    def job(self, warps: int, first_block: int) -> JobFields:
        """JobStructure's fields behind the pointers."""
        longer = self.row_groups % self.blocks
        own = self.row_groups // self.blocks
        walks: list[int] = []
        for groups in (own + 1 if longer else 0, own):
            found = self.walks(groups, warps) if groups else []
            for walk in found + [Walk(0, 0, 0, 0, 0)] * (WALKS - len(found)):
                walks += walk.words(self._place)
        return self.job_fields(self.own, 1, warps, x=self.x, first_block=first_block, division=walks)
