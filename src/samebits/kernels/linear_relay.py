"""Launches of csrc/linear_relay.cu; memory in bytes, times in a multiprocessor's cycles."""

from __future__ import annotations

from typing import NamedTuple

from samebits.format.geometry import ROW_GROUP, STAGE
from samebits.format.packed import Header
from samebits.kernels import nvrtc
from samebits.kernels.linear_job import ATOM_BYTES, MAP_BYTES, Arrangement, Boxes, Launch, Planner

TILE_TOKENS = 128  # kTileTokens
CLUSTER = 2  # kCluster: blocks
_MULTIPLIERS = 8  # kMultipliers: warps
_SIGNAL = 8  # kSignal: stages
_BARRIER_BYTES = 16  # of a slot of the ring
_MIN_SLOTS, _MAX_SLOTS = 3, 8  # of the ring, for whole stages
_CACHED_BYTES = 16 << 20  # of x, that the second-level cache keeps beside what is decoded
_FINISH = 3500  # from a tile's last product to the first of the next
_START = 15000  # until the first product


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
    def warps(self) -> int:
        """Of a block; one of them brings what is multiplied."""
        return _MULTIPLIERS + 1 + self.decoders

    @property
    def parts(self) -> int:
        """Of a stage, each in a slot of the ring."""
        return 2 if self.rows >= 224 else 1

    @property
    def slot_bytes(self) -> int:
        return (TILE_TOKENS + self.rows) * 2 * STAGE // self.parts


TILES = tuple(Tile(rows) for rows in range(256, TILE_TOKENS - 1, -16))


def relay(header: Header, m: int, split: int, device: int, rank: int) -> Launch | None:
    """The launch that is expected to be the fastest but ``rank``, for more tokens than one tile and K in one range.

    None as launch_of.
    """
    multiprocessors = nvrtc.multiprocessors(device)
    if not nvrtc.has_wgmma(device) or multiprocessors < CLUSTER or split > 1 or m <= TILE_TOKENS:
        return None
    planner = _Planner(header, m, split, device, multiprocessors)
    fitting = sorted((tile for tile in TILES if planner.slots(tile)), key=planner.expected)
    return planner.launch(fitting[rank]) if rank < len(fitting) else None


class _Planner(Planner):
    @property
    def pairs(self) -> int:
        """Of tiles of tokens, of which each block of a cluster multiplies one."""
        return -(-self.m // (CLUSTER * TILE_TOKENS))

    def tiles(self, tile: Tile) -> int:
        """Of rows."""
        return -(-self.row_groups * ROW_GROUP // tile.rows)

    def fixed(self, tile: Tile) -> int:
        """Bytes beside the ring."""
        return ATOM_BYTES + MAP_BYTES + 4 * self.table + tile.decoders * 2 * tile.row_groups * 4 * self.buffer

    def slots(self, tile: Tile) -> int:
        """Of the ring, as many as fit; 0 if these are too few."""
        fitting = (4 * self.room - self.fixed(tile)) // (tile.slot_bytes + _BARRIER_BYTES)
        enough = fitting >= tile.parts * _MIN_SLOTS and fitting * tile.slot_bytes >= 4 * self.entries
        return min(fitting, tile.parts * _MAX_SLOTS) if enough else 0

    def expected(self, tile: Tile) -> float:
        """How long a launch takes: its blocks multiply as often as the one with the most tiles, and all decode.

        A stage takes wgmma 4 cycles a row; shared memory takes x and weights in (one cycle for each 128 bytes) and
        gives x once to each of two warpgroups, weights to both. Decoding takes shared memory 33 cycles for each stage
        of a row group; and a warp about 1,300 for one or two of them, which counts if it is not done before the last
        tiles are multiplied.
        """
        waves = -(-self.tiles(tile) * self.pairs // (self.blocks // CLUSTER))
        stage = max(4 * tile.rows, 3 * tile.rows + 2 * TILE_TOKENS)
        multiply = self.stages * stage + _FINISH
        decoded = self.row_groups * self.stages / self.blocks
        decode = decoded * 1300 / (tile.decoders * tile.row_groups)
        return _START + max(waves * multiply + 33 * decoded, decode + multiply / 2)

    def launch(self, tile: Tile) -> Launch:
        columns, tiles, pairs, slots = self.stages * STAGE, self.tiles(tile), self.pairs, self.slots(tile)
        clusters = min(tiles * pairs, self.blocks // CLUSTER)
        passes = -(-2 * self.m * columns // _CACHED_BYTES)
        pairs_of_pass = -(-pairs // passes)
        side_by_side = min(tiles, -(-clusters // pairs_of_pass))
        job = self.job_fields(tile.rows // ROW_GROUP, side_by_side, tile.decoders, ring=slots,
                              blocks=CLUSTER * clusters, token_tiles=pairs, units=tiles * pairs,
                              segments=pairs_of_pass)  # fmt: skip
        decoded_bytes = tiles * tile.rows * columns * 2
        flags = 1 + tiles * -(-self.stages // _SIGNAL)
        maps_bytes = CLUSTER * clusters * MAP_BYTES
        memory = Arrangement(0, columns, TILE_TOKENS, 0, (flags,), (decoded_bytes + maps_bytes,), 0)
        return Launch("linear_relay.cu", f"linear_relay_{tile.rows}", CLUSTER * clusters, tile.warps,
                      self.fixed(tile) + slots * (tile.slot_bytes + _BARRIER_BYTES), (job,), memory,
                      Boxes(self.m, columns, TILE_TOKENS, STAGE // tile.parts))  # fmt: skip
