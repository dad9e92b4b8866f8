"""Launches of csrc/linear_relay.cu; memory in bytes."""

from __future__ import annotations

from typing import NamedTuple

from samebits.format.geometry import ROW_GROUP, STAGE
from samebits.format.packed import Header
from samebits.kernels import nvrtc
from samebits.kernels.linear_job import ATOM_BYTES, Arrangement, Boxes, Launch, Planner

TILE_TOKENS = 128  # kTileTokens
CLUSTER = 2  # kCluster: blocks
_MULTIPLIERS = 8  # kMultipliers: warps
_SIGNAL = 8  # kSignal: stages
_MAP_BYTES = 128  # kMapBytes
_BARRIER_BYTES = 16  # of a slot of the ring
_MIN_SLOTS, _MAX_SLOTS = 3, 8  # of the ring, for whole stages
_CACHED_BYTES = 16 << 20  # of x, that the second-level cache keeps beside what is decoded


class Tile(NamedTuple):
    """What a kernel is made for.

    Attributes:
        rows: of the weight, that a block multiplies at a time.
        decoders: warps.
        row_groups: that a warp decodes at a time.
    """

    rows: int
    decoders: int
    row_groups: int

    @property
    def warps(self) -> int:
        """Of a block; one of them brings what is multiplied."""
        return _MULTIPLIERS + 1 + self.decoders

    @property
    def parts(self) -> int:
        """Of a stage, each in a slot of the ring."""
        return 2 if self.rows == max(tile.rows for tile in TILES) else 1

    @property
    def slot_bytes(self) -> int:
        return (TILE_TOKENS + self.rows) * 2 * STAGE // self.parts


TILES = (Tile(256, 3, 1), Tile(256, 3, 2), Tile(224, 3, 2), Tile(192, 7, 1), Tile(160, 7, 1), Tile(128, 7, 1))


def relay(header: Header, m: int, split: int, device: int, tile: Tile) -> Launch | None:
    """For more tokens than one tile, and K in one range; None as launch_of."""
    if not nvrtc.has_wgmma(device) or split > 1 or m <= TILE_TOKENS:
        return None
    return _Planner(header, m, split, device, nvrtc.multiprocessors(device)).launch(tile)


class _Planner(Planner):
    def launch(self, tile: Tile) -> Launch | None:
        """With as many slots as fit."""
        staging = tile.decoders * 2 * tile.row_groups * 4 * self.buffer
        fixed = ATOM_BYTES + _MAP_BYTES + 4 * self.table + staging
        slots = min((4 * self.room - fixed) // (tile.slot_bytes + _BARRIER_BYTES), tile.parts * _MAX_SLOTS)
        if slots < tile.parts * _MIN_SLOTS or slots * tile.slot_bytes < 4 * self.entries:
            return None
        columns, groups = self.stages * STAGE, tile.rows // ROW_GROUP
        tiles, pairs = -(-self.row_groups // groups), -(-self.m // (CLUSTER * TILE_TOKENS))
        clusters = min(tiles * pairs, self.blocks // CLUSTER)
        passes = -(-2 * self.m * columns // _CACHED_BYTES)
        pairs_of_pass = -(-pairs // passes)
        side_by_side = min(tiles, -(-clusters // pairs_of_pass))
        job = self.job_fields(groups, side_by_side, tile.decoders, ring=slots, blocks=CLUSTER * clusters,
                              token_tiles=pairs, units=tiles * pairs, segments=pairs_of_pass)  # fmt: skip
        decoded_bytes = tiles * tile.rows * columns * 2
        flags = 1 + tiles * -(-self.stages // _SIGNAL)
        memory = Arrangement(
            0, columns, TILE_TOKENS, 0, (flags,), (decoded_bytes + CLUSTER * clusters * _MAP_BYTES,), 0
        )
        return Launch("linear_relay.cu", f"linear_relay_{tile.rows}_{tile.row_groups}", CLUSTER * clusters, tile.warps,
                      fixed + slots * (tile.slot_bytes + _BARRIER_BYTES), (job,), memory,
                      Boxes(self.m, columns, TILE_TOKENS, STAGE // tile.parts))  # fmt: skip
