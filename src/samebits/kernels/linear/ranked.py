"""Launches of linear_relay.cuh and linear_clusters.cuh: clusters multiply tiles, whose sizes are ranked."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Generic, NamedTuple, TypeVar

from samebits.kernels import nvrtc
from samebits.kernels.linear.job import Footprint, JobFields, TensorPlanner
from samebits.kernels.shares import share_out

CLUSTER = 2  # kCluster: blocks

TileT = TypeVar("TileT")


class TilePlanner(TensorPlanner, ABC, Generic[TileT]):
    """Of one tensor; how many clusters it has is found for all tensors of a launch."""

    def __init__(self, footprint: Footprint, m: int, device: int) -> None:
        super().__init__(footprint, m, 1, device, 1)

    @abstractmethod
    def units(self, tile: TileT) -> int:
        """That clusters multiply, one at a time."""

    @abstractmethod
    def slots(self, tile: TileT) -> int:
        """Of the ring, as many as fit; 0 if these are too few."""

    @abstractmethod
    def expected(self, tile: TileT, clusters: int) -> float:
        """How long it takes: as long as the clusters with the most units."""

    @abstractmethod
    def job(self, tile: TileT, clusters: int, first_block: int) -> JobFields:
        """JobStructure's fields behind the pointers."""


class Ranked(NamedTuple, Generic[TileT]):
    """A launch's tile.

    Attributes:
        clusters: of each tensor.
        jobs: JobStructure's fields of each.
    """

    tile: TileT
    clusters: tuple[int, ...]
    jobs: tuple[JobFields, ...]


def ranked(
    planners: Sequence[TilePlanner[TileT]], tiles: Iterable[TileT], device: int, rank: int
) -> Ranked[TileT] | None:
    """The tile that is expected to be the fastest but ``rank``; None if there are no more that fit."""
    clusters = nvrtc.multiprocessors(device) // CLUSTER
    if clusters < len(planners):
        return None
    fitting = [tile for tile in tiles if all(each.slots(tile) for each in planners)]

    def expected(tile: TileT, shares: Sequence[int]) -> float:
        return max(each.expected(tile, own) for each, own in zip(planners, shares, strict=True))

    def best_shares(tile: TileT) -> list[int]:
        units = [each.units(tile) for each in planners]
        possible = (_shares(units, clusters, whole_rounds=whole_rounds) for whole_rounds in (True, False))
        return min(possible, key=partial(expected, tile))

    if rank >= len(fitting):
        return None
    shares = {tile: best_shares(tile) for tile in fitting}
    tile = sorted(fitting, key=lambda tile: expected(tile, shares[tile]))[rank]
    firsts = accumulate((CLUSTER * own for own in shares[tile][:-1]), initial=0)
    jobs = (each.job(tile, own, first) for each, own, first in zip(planners, shares[tile], firsts, strict=True))
    return Ranked(tile, tuple(shares[tile]), tuple(jobs))


def _shares(units: Sequence[int], clusters: int, *, whole_rounds: bool) -> list[int]:
    """Clusters of each tensor, such that the one with the most units for each of its clusters has few.

    Args:
        whole_rounds: clusters do not share units, so first of all these are few rounds.
    """
    shares = [1] * len(units)
    if whole_rounds:
        rounds = range(1, sum(units) + 1)
        least = rounds[bisect_left(rounds, True, key=lambda most: sum(-(-each // most) for each in units) <= clusters)]
        shares = [-(-each // least) for each in units]
    return share_out(clusters - sum(shares), units, shares, units)  # in the last round they may help to decode
