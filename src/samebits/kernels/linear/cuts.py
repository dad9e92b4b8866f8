"""Where all stages of a tensor are cut into shares of blocks, for csrc/linear_pairs.cuh.

The row groups that a block's warps have at once are a tile. A unit is a tile's range of K, through which an accumulator
goes stage by stage; units are numbered tile after tile.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

from samebits.kernels.linear.job import CHUNK_STAGES

_IN_RANGE_BITS = 12  # csrc: kInRangeBits
_UNIT_COST = 2.0  # of a unit's start and end, where a stage costs 1
_SKIPPED_COST = 0.7  # of a stage of a unit's first chunk in front of the unit, which is decoded alone
_LEAST = 8  # stages of a unit that a block begins or ends
_STEP = 2  # stages; planes come in pairs of them

Cut = tuple[int, int]  # a unit, and how many of its stages lie in front


@dataclass(frozen=True)
class Tiles:
    """Of a tensor: so many, of so many stages."""

    tiles: int
    stages: int
    stages_per_range: int

    @property
    def ranges(self) -> int:
        return -(-self.stages // self.stages_per_range)

    @property
    def units(self) -> int:
        return self.tiles * self.ranges

    @property
    def is_small_enough(self) -> bool:
        """For csrc's cuts, from which it makes signed numbers."""
        return not (self.units >> 31 - _IN_RANGE_BITS or self.stages_per_range >> _IN_RANGE_BITS)

    def between_units(self, blocks: int) -> tuple[Cut, ...]:
        """Cuts of shares that differ by one unit at most."""
        return tuple((number * self.units // blocks, 0) for number in range(blocks + 1))

    def anywhere(self, most: float) -> tuple[Cut, ...]:
        """Cuts of shares that cost so much at most, which is enough for any unit.

        So a block that takes sums over goes through the whole rest of their range, and nobody waits for who waits.
        """
        cuts: list[Cut] = [(0, 0)]
        while cuts[-1][0] < self.units:
            cuts.append(self._behind(cuts[-1], most))
        return tuple(cuts)

    def cost(self, unit: int, begin: int = 0) -> float:
        """Of a unit from one of its stages on."""
        return self._cost_in_front(unit, begin) + self._length(unit) - begin

    def _behind(self, first: Cut, most: float) -> Cut:
        """The end of a share."""
        unit, begin = first
        while unit < self.units and (cost := self.cost(unit, begin)) <= most:
            most -= cost
            unit, begin = unit + 1, 0
        if unit == self.units:
            return unit, 0
        start, most_stages = self._start(unit), min(most - self._cost_in_front(unit, 0), self._length(unit) - _LEAST)
        stages = int(start + most_stages) // _STEP * _STEP - start
        return unit, stages if stages >= _LEAST else 0

    def _start(self, unit: int) -> int:
        return unit % self.ranges * self.stages_per_range

    def _length(self, unit: int) -> int:
        return min(self.stages_per_range, self.stages - self._start(unit))

    def _cost_in_front(self, unit: int, begin: int) -> float:
        return _UNIT_COST + _SKIPPED_COST * ((self._start(unit) + begin) % CHUNK_STAGES)


@lru_cache(maxsize=4096)
def cuts_anywhere(tensors: tuple[Tiles, ...], blocks: int) -> tuple[tuple[Cut, ...], ...] | None:
    """Of several tensors that share a launch's blocks, such that the busiest block ends soon.

    None if nothing is gained, since there is a block for each unit or all cuts lie between them, or if they are too
    few.
    """
    if sum(each.units for each in tensors) <= blocks:
        return None

    def fits(most: int) -> bool:
        return sum(len(each.anywhere(most)) - 1 for each in tensors) <= blocks

    largest = ceil(max(each.cost(unit) for each in tensors for unit in range(each.ranges)))
    all_costs = ceil(sum(each.tiles * sum(map(each.cost, range(each.ranges))) for each in tensors))
    possible = range(largest, max(largest, all_costs) + 1)
    place = bisect_left(possible, True, key=fits)
    if place == len(possible):
        return None
    found = tuple(each.anywhere(possible[place]) for each in tensors)
    return found if any(map(hands_on, found)) else None


def hands_on(cuts: tuple[Cut, ...]) -> bool:
    """Whether some lie inside units, so that blocks hand sums on."""
    return any(stage for _, stage in cuts)


def words(cuts: tuple[Cut, ...]) -> tuple[int, ...]:
    """As csrc has them."""
    return tuple(unit << _IN_RANGE_BITS | stage for unit, stage in cuts)
