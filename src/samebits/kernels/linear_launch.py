"""How a launch of the fused linear layer divides its work and its shared memory among blocks and warps."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from samebits.format.geometry import SIGN_BYTES, SLAB_BYTES, STAGE, STAGE_WORDS
from samebits.format.packed import Header, align
from samebits.kernels import nvrtc
from samebits.kernels.decode import STATIC_SHARED, staging_words
from samebits.kernels.tables import table_words

CHUNK_STAGES = 16  # csrc: kChunkStages
_OCTET = 8  # tokens that one mma instruction takes
_LANES = 32
_MIN_WARPS = 4
_MAX_SLOTS = 64  # linear_ahead.cu: row groups whose sums a block keeps
_WALK_WORDS = 44  # linear_chains.cu: Ahead, and a flag, of a warp
_RING_SLABS = 4  # linear_chains.cu: kRing
_X_STAGES = {16: 8, 32: 8, 64: 6, 128: 4}  # linear_tiles.cu: of x in its ring, by tokens that a kernel is made for
_TILE = 8  # linear_tiles.cu: row groups of a tile
_TILE_WARPS = 20  # linear_tiles.cu: kMaxThreads
_WARPGROUP = 4  # warps
_MAX_DECODERS = 16  # linear_tiles.cu: kMaxDecoders
_ATOM_BYTES = 1024  # hopper.cuh: a stage of a row group, decoded
_MIN_RING = 3  # pairs of stages that a block keeps decoded

MAX_TOKENS = 16  # without tiles
MAX_TILE_TOKENS = max(_X_STAGES)


class Kernel(Enum):
    """The kernels of csrc/linear_*.cu."""

    AHEAD = "chunks are decoded ahead of few chains"
    CHAINS = "each warp walks chains of its own"
    TILES = "tiles are decoded for warpgroups to multiply"


@dataclass(frozen=True)
class Variant:
    """One way to run the fused layer; changes the speed and never the bits.

    Attributes:
        kernel: which.
        warps: of a block, at most (csrc: of the launch bounds).
        shared_x: keep x in shared memory.
    """

    kernel: Kernel
    warps: int
    shared_x: bool = True


VARIANTS = (
    Variant(Kernel.AHEAD, warps=16),
    Variant(Kernel.AHEAD, warps=16, shared_x=False),
    Variant(Kernel.AHEAD, warps=12),
    Variant(Kernel.CHAINS, warps=20),
    Variant(Kernel.CHAINS, warps=20, shared_x=False),
    Variant(Kernel.CHAINS, warps=14),
    Variant(Kernel.TILES, warps=_TILE_WARPS),
)


def max_tokens(device: int) -> int:
    """For how many tokens there are kernels on a device."""
    return MAX_TILE_TOKENS if nvrtc.has_wgmma(device) else MAX_TOKENS


@dataclass(frozen=True)
class Launch:
    """A variant for one tensor, number of tokens and device."""

    file: str
    name: str
    grid: int
    warps: int
    shared_bytes: int
    job: tuple[int, ...]  # JobStructure's fields behind the pointers


@lru_cache(maxsize=65536)
def launch_of(header: Header, m: int, split: int, variant: int, device: int) -> Launch | None:
    """None if it does not fit, or there is no such kernel."""
    return _Planner(header, m, split, device).plan(VARIANTS[variant])


@lru_cache(maxsize=65536)
def nearest_launch(header: Header, m: int, split: int, variant: int, device: int) -> Launch | None:
    """The variant, or the first that fits instead."""
    others = (launch_of(header, m, split, other, device) for other in range(len(VARIANTS)))
    return launch_of(header, m, split, variant, device) or next(filter(None, others), None)


class _Planner:
    """What the kernels' launches have in common; sizes of shared memory are in 32-bit words."""

    def __init__(self, header: Header, m: int, split: int, device: int) -> None:
        geometry = header.geometry
        self.m, self.device, self.stages, self.chunks = m, device, geometry.stages, geometry.chunks_per_row_group
        self.octets = -(-m // _OCTET)
        self.stages_per_range = -(-geometry.stages // split)
        self.ranges = -(-geometry.stages // self.stages_per_range)
        self.grid = min(nvrtc.multiprocessors(device), geometry.row_groups)
        self.own = -(-geometry.row_groups // self.grid)  # row groups of a block
        self.table, self.entries = table_words(header), align(header.symbol_count, 4)
        self.buffer = staging_words(header)
        self.room = (nvrtc.shared_memory(device) - STATIC_SHARED) // 4

    def plan(self, variant: Variant) -> Launch | None:
        if variant.kernel is Kernel.TILES:
            return self._tiles(variant) if self.m <= MAX_TILE_TOKENS and nvrtc.has_wgmma(self.device) else None
        if self.m > MAX_TOKENS:
            return None
        return self._ahead(variant) if variant.kernel is Kernel.AHEAD else self._chains(variant)

    def _ahead(self, variant: Variant) -> Launch | None:
        batches = -(-self.own // _MAX_SLOTS)
        slots = -(-self.own // batches)
        kind = ("halves" if self.octets == 1 else "pairs") if variant.shared_x else "global"
        x = {"halves": 32 * self.m, "pairs": 64 * _OCTET, "global": 0}[kind] * self.stages
        x = max(x, self.entries)
        sums = 64 * self.octets * slots * self.ranges
        words = self.table + x + sums + slots * (self.ranges + 2)
        warp_words = self.buffer + CHUNK_STAGES * (STAGE_WORDS + SIGN_BYTES // 2) // 4  # a byte a weight, and signs
        wanted = min(variant.warps, self.own * self.chunks)
        warps = min(wanted, (self.room - words) // warp_words)
        if warps < min(wanted, _MIN_WARPS):
            return None
        name = f"linear_ahead_{_OCTET * self.octets}_{kind}"
        return self._launch("linear_ahead", name, warps, words + warps * warp_words, slots, batches, warps, x=x)

    def _chains(self, variant: Variant) -> Launch | None:
        kind = "shared" if variant.shared_x else "global"
        x = max(32 * self.m * self.stages if variant.shared_x else 0, self.entries)
        sums = 64 * self.octets
        words = self.table + x + self.own
        words += self.own * self.ranges * sums if self.ranges > 1 else 0
        warp_words = 2 * self.buffer + _RING_SLABS * SLAB_BYTES // 4 + sums + _WALK_WORDS
        wanted = min(variant.warps, self.own * self.ranges)  # a warp for each chain is enough
        warps = min(wanted, (self.room - words) // warp_words)
        if warps < min(wanted, _MIN_WARPS):
            return None
        name = f"linear_chains_{_OCTET * self.octets}_{kind}"
        return self._launch("linear_chains", name, warps, words + warps * warp_words, self.own, 1, warps, x=x)

    def _tiles(self, variant: Variant) -> Launch | None:
        """With as few batches as fit, and then as many warps.

        A warp for each row group of a batch keeps the blocks going; more of them decode chunks ahead, as many pairs of
        stages ahead as the ring must then hold. The kernel relies on both.
        """
        wide = next(wide for wide in _X_STAGES if wide >= self.m)
        fixed = _ATOM_BYTES + 8 * _MAX_DECODERS + 4 * self.table + _X_STAGES[wide] * wide * 2 * STAGE
        room = 4 * self.room - fixed
        for batches in range(-(-self.own // (2 * _TILE)), self.own + 1):
            slots = -(-self.own // batches)
            tiles, slot_bytes = -(-slots // _TILE), slots * 2 * _ATOM_BYTES + 16  # both atoms and both barriers
            multiplying = _WARPGROUP * (tiles if wide == MAX_TILE_TOKENS else 1)
            for warps in range(variant.warps - multiplying, slots - 1, -1):
                ring = (room - warps * 8 * self.buffer) // slot_bytes
                chunks_ahead = -(-warps // slots) - 1  # of those that are multiplied
                if ring < _MIN_RING + chunks_ahead * CHUNK_STAGES // 2:
                    continue
                words = (fixed + warps * 8 * self.buffer + ring * slot_bytes) // 4
                name = f"linear_tiles_{wide}_{tiles}"
                return self._launch("linear_tiles", name, multiplying + warps, words, slots, batches, warps, ring=ring)
        return None

    def _launch(
        self, stem: str, name: str, warps: int, words: int, slots: int, batches: int, decoders: int, *, x: int = 0,
        ring: int = 0,
    ) -> Launch:  # fmt: skip
        job = (self.m, self.ranges, self.stages_per_range, slots, batches, decoders // slots, decoders % slots,
               self.table, x, self.buffer, ring)  # fmt: skip
        return Launch(f"{stem}.cu", name, self.grid, warps, 4 * words, job)
