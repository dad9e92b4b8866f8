"""Launches of csrc/linear_relay.cuh; memory in bytes, times in a multiprocessor's cycles."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from samebits.format.geometry import LANES, ROW_GROUP, STAGE
from samebits.kernels import nvrtc
from samebits.kernels.linear.job import ATOM_BYTES, MAP_BYTES, Arrangement, Boxes, Footprint, JobFields, Launch, Spare
from samebits.kernels.linear.ranked import CLUSTER, Ranked, TilePlanner, ranked
from samebits.kernels.structures import MAX_PREFETCHED

TILE_TOKENS = 128  # kTileTokens
_MULTIPLIERS = 8  # kMultipliers: warps
_SIGNAL = 8  # kSignal: stages
_BARRIER_BYTES = 16  # of a slot of the ring
_UNIT_BYTES = 16  # of what is copied
_MIN_SLOTS, _MAX_SLOTS = 3, 8  # of the ring, for whole stages
_CACHED_BYTES = 16 << 20  # of x, that the second-level cache keeps beside what is decoded
_FINISH = 3500  # from a tile's last product to the first of the next
_START = 15000  # until the first product
_HAND_ON = 6000  # to leave sums, and to take them over
_MAX_PARTS = 8  # of a shared item
_DECODE = 1300  # a stage of a warp's row groups
_SPARE = 0.8  # of the time that a launch takes, in which it may decode
_SPARE_WEIGHTS = 1 << 27  # that it decodes for others at most, as they take memory;
_SPARE_TIMES = 2.5  # or, where that is more, so many times the weights that it multiplies,
_MOST_WEIGHTS = 1 << 28  # at most so many, or as many as it multiplies
_MIN_WHOLE = 2  # items that each cluster has beside; with fewer, all waits for decoding, and shares want more at once


class Tile(NamedTuple):
    """What a kernel is made for.

    Attributes:
        rows: of the weight, that a block multiplies at a time.
    """

    rows: int

    @property
    def is_large(self) -> bool:
        """Whether sums take so many registers that few warps are left, each of which decodes two row groups at once."""
        return self.rows > 192

    @property
    def decoders(self) -> int:
        """Warps."""
        return 3 if self.is_large else 7

    @property
    def row_groups(self) -> int:
        """That a warp decodes at a time."""
        return 2 if self.is_large else 1

    @property
    def at_once(self) -> int:
        """Row groups that a block decodes at a time."""
        return self.decoders * self.row_groups

    @property
    def buffers(self) -> int:
        """For staging: of each of these, one for the chunk at hand and one for the next."""
        return 2 * self.at_once

    @property
    def warps(self) -> int:
        """Of a block; one of them brings what is multiplied."""
        return _MULTIPLIERS + 1 + self.decoders

    @property
    def parts(self) -> int:
        """Of a stage, each in a slot of the ring."""
        return 2 if self.rows >= 224 else 1

    @property
    def bias_bytes(self) -> int:
        return 2 * self.rows

    @property
    def slot_bytes(self) -> int:
        return (TILE_TOKENS + self.rows) * 2 * STAGE // self.parts


TILES = tuple(Tile(rows) for rows in range(256, TILE_TOKENS - 1, -16))


def relay(footprints: tuple[Footprint, ...], m: int, splits: tuple[int, ...], device: int, rank: int) -> Launch | None:
    """The launch that is expected to be the fastest but ``rank``, for more tokens than one tile and K in one range.

    Of one tensor or several of as many columns, each with blocks of its own. None as launch_of.
    """
    if not nvrtc.has_wgmma(device) or max(splits) > 1 or m <= TILE_TOKENS:
        return None
    planners = [_Planner(footprint, m, device) for footprint in footprints]
    found = ranked(planners, TILES, device, rank)
    return _launch(planners, found) if found else None


def _launch(planners: Sequence[_Planner], found: Ranked[Tile]) -> Launch:
    m, columns, tile = planners[0].m, planners[0].stages * STAGE, found.tile
    each_own = list(zip(planners, found.clusters, strict=True))
    decoded = tuple(each.memory(tile, own) for each, own in each_own)
    spare, flags = _spare(planners, found), [each.flags(tile, own) for each, own in each_own]
    if spare:
        flags[0] += MAX_PREFETCHED
    memory = Arrangement(0, columns, TILE_TOKENS, 0, tuple(flags), decoded, 0)
    together = "_together" if len(planners) > 1 else ""
    return Launch("linear_relay.cu", f"linear_relay_{tile.rows}{together}", CLUSTER * sum(found.clusters),
                  tile.warps, max(each.shared_bytes(tile) for each in planners), found.jobs, memory,
                  Boxes(m, columns, TILE_TOKENS, STAGE // tile.parts), spare)  # fmt: skip


def _spare(planners: Sequence[_Planner], found: Ranked[Tile]) -> Spare | None:
    tile, multiplied = found.tile, sum(each.row_groups for each in planners) * ROW_GROUP * planners[0].stages * STAGE
    weights = int(sum(each.spare(tile, clusters) for each, clusters in zip(planners, found.clusters, strict=True)))
    words = min(each.table for each in planners), min(each.buffer_words(tile) for each in planners)
    most = max(_SPARE_WEIGHTS, min(int(_SPARE_TIMES * multiplied), max(_MOST_WEIGHTS, multiplied)))
    return Spare(min(weights, most), *words) if weights > 0 else None


class _Planner(TilePlanner[Tile]):
    @property
    def pairs(self) -> int:
        """Of tiles of tokens, of which each block of a cluster multiplies one."""
        return -(-self.m // (CLUSTER * TILE_TOKENS))

    def tiles(self, tile: Tile) -> int:
        """Of rows."""
        return -(-self.row_groups * ROW_GROUP // tile.rows)

    def units(self, tile: Tile) -> int:
        return self.tiles(tile) * self.pairs

    def fixed(self, tile: Tile) -> int:
        """Bytes of shared memory beside the ring."""
        return ATOM_BYTES + MAP_BYTES + _MULTIPLIERS * tile.bias_bytes + 4 * (self.table + tile.buffers * self.buffer)

    def slots(self, tile: Tile) -> int:
        fitting = (4 * self.room - self.fixed(tile)) // (tile.slot_bytes + _BARRIER_BYTES)
        enough = fitting >= tile.parts * _MIN_SLOTS and fitting * tile.slot_bytes >= 4 * self.entries
        return min(fitting, tile.parts * _MAX_SLOTS) if enough else 0

    def buffer_words(self, tile: Tile) -> int:
        """Of a staging buffer: this tensor's chunks fit, and others' in what the ring leaves."""
        left = 4 * self.room - self.fixed(tile) - self.slots(tile) * (tile.slot_bytes + _BARRIER_BYTES)
        return self.buffer + left // (tile.buffers * _UNIT_BYTES) * _UNIT_BYTES // 4

    def shared_bytes(self, tile: Tile) -> int:
        more = 4 * tile.buffers * (self.buffer_words(tile) - self.buffer)
        return self.fixed(tile) + more + self.slots(tile) * (tile.slot_bytes + _BARRIER_BYTES)

    def part(self, tile: Tile, clusters: int) -> int:
        """Stages of a part of the items that are left over when all clusters have as many; 0 where these are whole too.

        The first part is multiplied before all whole items, the last one behind them, if there are enough of these.
        """
        whole, items = divmod(self.units(tile), clusters)
        parts = min(whole + 1, clusters // items, _MAX_PARTS) if items and whole >= _MIN_WHOLE else 1
        part = -(-self.stages // parts)
        return part if (self.stages - part) * self.stage(tile) > _HAND_ON else 0

    def leaving(self, tile: Tile, clusters: int) -> int:
        """Warps that have room to leave sums."""
        return CLUSTER * clusters * _MULTIPLIERS if self.part(tile, clusters) else 0

    def flags(self, tile: Tile, clusters: int) -> int:
        """And what is claimed."""
        return 1 + self.tiles(tile) * -(-self.stages // _SIGNAL) + self.leaving(tile, clusters)

    def memory(self, tile: Tile, clusters: int) -> int:
        """Bytes, of what is decoded, the tensor maps and sums that are left."""
        decoded = self.tiles(tile) * tile.rows * self.stages * STAGE * 2
        return decoded + CLUSTER * clusters * MAP_BYTES + self.leaving(tile, clusters) * tile.rows * 2 * LANES

    @staticmethod
    def stage(tile: Tile) -> int:
        """How long wgmma, or shared memory, takes for one."""
        return max(4 * tile.rows, 3 * tile.rows + 2 * TILE_TOKENS)

    def expected(self, tile: Tile, clusters: int) -> float:
        """How long it takes: its blocks multiply as often as the one with the most units, and all decode.

        A stage takes wgmma 4 cycles a row; shared memory takes x and weights in (one cycle for each 128 bytes) and
        gives x once to each of two warpgroups, weights to both. Decoding takes shared memory 33 cycles for each stage
        of a row group; and a warp about 1,300 for one or two of them, which counts if it is not done before the last
        tiles are multiplied.
        """
        decoded = self.row_groups * self.stages / (CLUSTER * clusters)
        decode = decoded * _DECODE / tile.at_once
        last = (self.stages * self.stage(tile) + _FINISH) / 2
        return _START + max(self.multiplied(tile, clusters) + 33 * decoded, decode + last)

    def multiplied(self, tile: Tile, clusters: int) -> float:
        """How long the blocks with the most units multiply."""
        whole, items = divmod(self.units(tile), clusters)
        part, stage = self.part(tile, clusters), self.stage(tile)
        multiply = self.stages * stage + _FINISH
        return whole * multiply + (part * stage + _FINISH + _HAND_ON if part else multiply * (items > 0))

    def spare(self, tile: Tile, clusters: int) -> float:
        """Weights that its blocks can decode beside its own, while they multiply."""
        at_once = CLUSTER * clusters * tile.at_once
        stages = _SPARE * self.multiplied(tile, clusters) / _DECODE * at_once - self.row_groups * self.stages
        return stages * ROW_GROUP * STAGE

    def job(self, tile: Tile, clusters: int, first_block: int) -> JobFields:
        passes = -(-2 * self.m * self.stages * STAGE // _CACHED_BYTES)
        pairs_of_pass = -(-self.pairs // passes)
        part = self.part(tile, clusters)
        at_first = clusters + (self.units(tile) % clusters if part else 0)  # items, at most
        side_by_side = min(self.tiles(tile), -(-at_first // pairs_of_pass))
        return self.job_fields(tile.rows // ROW_GROUP, side_by_side, tile.decoders, ring=self.slots(tile),
                               first_block=first_block, blocks=CLUSTER * clusters, token_tiles=self.pairs,
                               units=self.units(tile), segments=pairs_of_pass, segment_stages=part,
                               buffer=self.buffer_words(tile))  # fmt: skip
