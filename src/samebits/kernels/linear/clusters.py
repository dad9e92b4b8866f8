"""Launches of csrc/linear_clusters.cuh; memory in bytes, times in a multiprocessor's cycles."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from samebits.format.geometry import ROW_GROUP, STAGE
from samebits.kernels import nvrtc
from samebits.kernels.linear.job import ATOM_BYTES, MAP_BYTES, Arrangement, Boxes, Footprint, JobFields, Launch
from samebits.kernels.linear.ranked import CLUSTER, Ranked, TilePlanner, ranked

MAX_CLUSTER_TOKENS = 1024  # with more, a weight is decoded too often
WARPS = 16  # kWarps
_MIN_TOKENS = 128  # as many as linear_tiles.cuh takes
_BARRIER_BYTES, _BARRIERS = 8, 3  # of a slot of the ring
_COPIED_BYTES = 8 * 8 + 16  # barriers of staging buffers, and what aligns the table
_MIN_SLOTS, _MAX_SLOTS = 3, 8  # of the ring
_START = 8000  # until the first product
_FINISH = 3500  # from a tile's last product to the first of the next
_DECODED = 650  # a stage of a row group, by a warp
_GROUP_CYCLES, _GROUP_BYTES = 33, 689  # of shared memory, to decode it; that it is packed in
_CACHE_RATE = 33  # bytes that the second-level cache gives in a cycle


class Tile(NamedTuple):
    """What a kernel is made for.

    Attributes:
        tokens: of a block.
        rows: of a cluster, each of whose blocks decodes half of them.
    """

    tokens: int
    rows: int

    @property
    def own_groups(self) -> int:
        """Row groups that a block decodes, each by a warp."""
        return self.rows // ROW_GROUP // CLUSTER

    @property
    def slot_bytes(self) -> int:
        return (self.tokens + self.rows) * 2 * STAGE

    @property
    def stage(self) -> float:
        """How long a stage takes: what of tensor cores, shared memory, decoding warps and the cache takes longest.

        Shared memory takes x in, gives it once, and the weights once for each 64 tokens; what is decoded it takes in,
        of both blocks, and gives away to the other one.
        """
        tokens, rows = self
        shared = tokens + tokens // 64 * (64 + rows) + _GROUP_CYCLES * self.own_groups + rows + rows // 2
        cached = (tokens * 2 * STAGE + _GROUP_BYTES * self.own_groups) / _CACHE_RATE
        return max(tokens * rows / 32, shared, _DECODED, cached)


TILES = tuple(Tile(*each) for each in product((128, 256), (112, 96, 64)))


def clusters(
    footprints: tuple[Footprint, ...], m: int, splits: tuple[int, ...], device: int, rank: int
) -> Launch | None:
    """The launch that is expected to be the fastest but ``rank``, for some hundred tokens and K in one range.

    Of one tensor or several of as many columns, each with blocks of its own. None as launch_of.
    """
    if not nvrtc.has_wgmma(device) or max(splits) > 1 or not _MIN_TOKENS < m <= MAX_CLUSTER_TOKENS:
        return None
    planners = [_Planner(footprint, m, device) for footprint in footprints]
    found = ranked(planners, TILES, device, rank)
    return _launch(planners, found) if found else None


def _launch(planners: Sequence[_Planner], found: Ranked[Tile]) -> Launch:
    m, columns, tile = planners[0].m, planners[0].stages * STAGE, found.tile
    maps = tuple(CLUSTER * own * MAP_BYTES for own in found.clusters)
    memory = Arrangement(0, columns, tile.tokens, 0, (0,) * len(planners), maps, 0)
    together = "_together" if len(planners) > 1 else ""
    return Launch("linear_clusters.cu", f"linear_clusters_{tile.tokens}_{tile.rows}{together}",
                  CLUSTER * sum(found.clusters), WARPS, max(each.shared(tile) for each in planners), found.jobs, memory,
                  Boxes(m, columns, tile.tokens, STAGE))  # fmt: skip


class _Planner(TilePlanner[Tile]):
    def pairs(self, tile: Tile) -> int:
        """Of tiles of tokens, of which each block of a cluster multiplies one."""
        return -(-self.m // (CLUSTER * tile.tokens))

    def units(self, tile: Tile) -> int:
        return -(-self.row_groups * ROW_GROUP // tile.rows) * self.pairs(tile)

    def fixed(self, tile: Tile) -> int:
        """Bytes of shared memory beside the ring."""
        return ATOM_BYTES + MAP_BYTES + _COPIED_BYTES + 4 * self.table + tile.own_groups * 2 * 4 * self.buffer

    def slots(self, tile: Tile) -> int:
        fitting = (4 * self.room - self.fixed(tile)) // (tile.slot_bytes + _BARRIERS * _BARRIER_BYTES)
        enough = fitting >= _MIN_SLOTS and fitting * tile.slot_bytes >= 4 * self.entries
        return min(fitting, _MAX_SLOTS) if enough else 0

    def shared(self, tile: Tile) -> int:
        """Bytes of shared memory."""
        return self.fixed(tile) + self.slots(tile) * (tile.slot_bytes + _BARRIERS * _BARRIER_BYTES)

    def expected(self, tile: Tile, clusters: int) -> float:
        return _START + -(-self.units(tile) // clusters) * (self.stages * tile.stage + _FINISH)

    def job(self, tile: Tile, clusters: int, first_block: int) -> JobFields:
        return self.job_fields(tile.rows // ROW_GROUP, 1, tile.own_groups, ring=self.slots(tile),
                               first_block=first_block, blocks=CLUSTER * clusters, token_tiles=self.pairs(tile),
                               units=self.units(tile))  # fmt: skip
