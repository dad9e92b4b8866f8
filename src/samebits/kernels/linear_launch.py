"""How a launch of the fused linear layer divides its work and its shared memory among blocks and warps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

from samebits.format.geometry import STAGE
from samebits.format.packed import Header
from samebits.kernels import linear_pairs, nvrtc
from samebits.kernels.linear_ahead import ahead
from samebits.kernels.linear_chains import chains
from samebits.kernels.linear_job import (
    ATOM_BYTES,
    CHUNK_STAGES,
    MAP_BYTES,
    MAX_TOKENS,
    Arrangement,
    Boxes,
    Kernel,
    Launch,
    Planner,
)
from samebits.kernels.linear_relay import TILES, relay

_X_STAGES = {16: 8, 32: 8, 64: 6, 128: 4}  # linear_tiles.cu: of x in its ring, by tokens that a kernel is made for
_TILE = 8  # linear_tiles.cu: row groups of a tile
_TILE_WARPS = 20  # linear_tiles.cu: kMaxThreads
_WARPGROUP = 4  # warps
_MAX_DECODERS = 16  # linear_tiles.cu: kMaxDecoders
_MIN_RING = 3  # linear_tiles.cu: pairs of stages that a block keeps decoded
_RANKS = 3  # linear_relay.cuh: tiles of which the fastest is found by trying

MAX_TILE_TOKENS = max(_X_STAGES)
MAX_HOPPER_TOKENS = 16384  # with more, decoding first takes a hundredth of the time


@dataclass(frozen=True)
class Variant:
    """One way to run the fused layer; changes the speed and never the bits.

    Attributes:
        kernel: which.
        warps: of a block, at most (csrc: of the launch bounds).
        shared_x: keep x in shared memory.
        rank: of linear_relay.cuh's tiles, which differ in rows: how many are expected to be faster.
    """

    kernel: Kernel
    warps: int
    shared_x: bool = True
    rank: int = 0

    def __str__(self) -> str:
        place = "" if self.shared_x else ", x in global memory"
        rank = f", tile {self.rank + 1}" if self.kernel is Kernel.RELAY else ""
        return f"{self.kernel.name.lower()}, {self.warps} warps{place}{rank}"


VARIANTS = (
    Variant(Kernel.AHEAD, warps=20),
    Variant(Kernel.AHEAD, warps=18),
    Variant(Kernel.AHEAD, warps=16),
    Variant(Kernel.AHEAD, warps=14),
    Variant(Kernel.CHAINS, warps=20),
    Variant(Kernel.CHAINS, warps=20, shared_x=False),
    Variant(Kernel.CHAINS, warps=16),
    Variant(Kernel.TILES, warps=_TILE_WARPS),
    Variant(Kernel.PAIRS, warps=max(linear_pairs.MULTIPLIERS[2].values())),
    Variant(Kernel.WARPGROUPS, warps=_WARPGROUP),
    Variant(Kernel.WARPGROUPS, warps=2 * _WARPGROUP),
    Variant(Kernel.SINGLES, warps=max(linear_pairs.MULTIPLIERS[1].values())),
    Variant(Kernel.PAIRS, warps=8),
    *(Variant(Kernel.RELAY, max(tile.warps for tile in TILES), rank=rank) for rank in range(_RANKS)),
    Variant(Kernel.CHAINS, warps=12),
)


def max_tokens(device: int) -> int:
    """For how many tokens there are kernels on a device."""
    return MAX_HOPPER_TOKENS if nvrtc.has_wgmma(device) else MAX_TOKENS


@lru_cache(maxsize=65536)
def launch_of(header: Header, m: int, split: int, variant: int, device: int) -> Launch | None:
    """None if it does not fit, or there is no such kernel."""
    kind = VARIANTS[variant]
    if kind.kernel is Kernel.RELAY:
        return relay((header,), m, (split,), device, kind.rank)
    if kind.kernel is Kernel.WARPGROUPS:
        return linear_pairs.warpgroups(header, m, split, device, kind.warps)
    if kind.kernel in (Kernel.SINGLES, Kernel.PAIRS):
        return linear_pairs.pairs((header,), m, (split,), device, kind.kernel, kind.warps)
    if kind.kernel is Kernel.AHEAD:
        return ahead((header,), m, (split,), device, kind.warps)
    if kind.kernel is Kernel.CHAINS:
        return chains((header,), m, (split,), device, kind.warps, shared_x=kind.shared_x)
    blocks = min(nvrtc.multiprocessors(device), header.geometry.row_groups)
    return _Planner(header, m, split, device, blocks).tiles(kind)


def different(launches: Iterable[Launch | None]) -> dict[int, Launch]:
    """Those that there are, by number; of equal ones the first."""
    found: dict[tuple[object, ...], tuple[int, Launch]] = {}
    for number, launch in enumerate(launches):
        if launch:
            found.setdefault(launch.key, (number, launch))
    return dict(found.values())


@lru_cache(maxsize=65536)
def nearest_launch(header: Header, m: int, split: int, variant: int, device: int) -> Launch | None:
    """The variant, or the first that fits instead."""
    others = (launch_of(header, m, split, other, device) for other in range(len(VARIANTS)))
    return launch_of(header, m, split, variant, device) or next(filter(None, others), None)


@lru_cache(maxsize=65536)
def joint_launch(
    headers: tuple[Header, ...], m: int, splits: tuple[int, ...], variant: int, device: int
) -> Launch | None:
    """One launch for two to MAX_TOGETHER tensors of as many columns, each with blocks of its own; None as launch_of.

    Each block has row groups of one tensor, all blocks about as many stages to decode.
    """
    kind = VARIANTS[variant]
    if kind.kernel in (Kernel.SINGLES, Kernel.PAIRS):
        return linear_pairs.pairs(headers, m, splits, device, kind.kernel, kind.warps)
    if kind.kernel is Kernel.AHEAD:
        return ahead(headers, m, splits, device, kind.warps)
    if kind.kernel is Kernel.CHAINS:
        return chains(headers, m, splits, device, kind.warps, shared_x=kind.shared_x)
    if kind.kernel is Kernel.RELAY:
        return relay(headers, m, splits, device, kind.rank)
    return None


class _Planner(Planner):
    """For linear_tiles.cu."""

    def tiles(self, variant: Variant) -> Launch | None:
        """With as few batches as fit, and then as many warps.

        A warp for each row group of a batch keeps the blocks going; more of them decode chunks ahead, as many pairs of
        stages ahead as the ring must then hold. The kernel relies on both.
        """
        if self.m > MAX_TILE_TOKENS or not nvrtc.has_wgmma(self.device):
            return None
        wide = next(wide for wide in _X_STAGES if wide >= self.m)
        barriers = 8 * (_MAX_DECODERS + 2 * _X_STAGES[wide])
        fixed = ATOM_BYTES + MAP_BYTES + barriers + 4 * self.table + _X_STAGES[wide] * wide * 2 * STAGE
        room = 4 * self.room - fixed
        for batches in range(-(-self.own // (2 * _TILE)), self.own + 1):
            slots = -(-self.own // batches)
            tiles, slot_bytes = -(-slots // _TILE), slots * 2 * ATOM_BYTES + 16  # both atoms and both barriers
            others = _WARPGROUP * (tiles if wide == MAX_TILE_TOKENS else 1) + 1  # that multiply, or bring x
            for warps in range(variant.warps - others, slots - 1, -1):
                ring = (room - warps * 8 * self.buffer) // slot_bytes
                chunks_ahead = -(-warps // slots) - 1  # of those that are multiplied
                if ring < _MIN_RING + chunks_ahead * CHUNK_STAGES // 2:
                    continue
                words = (fixed + warps * 8 * self.buffer + ring * slot_bytes) // 4
                job = self.job_fields(slots, batches, warps, ring=ring)
                columns = self.stages * STAGE
                maps = Arrangement(0, columns, wide, 0, (0,), (MAP_BYTES * self.blocks,), 0)
                return Launch("linear_tiles.cu", f"linear_tiles_{wide}_{tiles}", self.blocks, others + warps,
                              4 * words, (job,), maps, Boxes(self.m, columns, wide, STAGE))  # fmt: skip
        return None
