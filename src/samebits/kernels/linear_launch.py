"""How a launch of the fused linear layer divides its work and its shared memory among blocks and warps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from samebits.format.geometry import SLAB_BYTES, STAGE
from samebits.format.packed import Header
from samebits.kernels import linear_pairs, nvrtc
from samebits.kernels.linear_ahead import MAX_TOKENS, ahead
from samebits.kernels.linear_job import ATOM_BYTES, CHUNK_STAGES, OCTET, Kernel, Launch, Planner, shares

_MIN_WARPS = 4
_WALK_WORDS = 41  # linear_chains.cuh: Ahead, and a flag, of a warp
_RING_SLABS = 4  # linear_chains.cuh: kRing
_X_STAGES = {16: 8, 32: 8, 64: 6, 128: 4}  # linear_tiles.cu: of x in its ring, by tokens that a kernel is made for
_TILE = 8  # linear_tiles.cu: row groups of a tile
_TILE_WARPS = 20  # linear_tiles.cu: kMaxThreads
_WARPGROUP = 4  # warps
_MAX_DECODERS = 16  # linear_tiles.cu: kMaxDecoders
_MIN_RING = 3  # linear_tiles.cu: pairs of stages that a block keeps decoded

MAX_JOINT_TOKENS = max(linear_pairs.MULTIPLIERS[2])
MAX_TILE_TOKENS = max(_X_STAGES)
MAX_HOPPER_TOKENS = 512  # more take longer than decoding first


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

    def __str__(self) -> str:
        place = "" if self.shared_x else ", x in global memory"
        return f"{self.kernel.name.lower()}, {self.warps} warps{place}"


VARIANTS = (
    Variant(Kernel.AHEAD, warps=20),
    Variant(Kernel.AHEAD, warps=18),
    Variant(Kernel.AHEAD, warps=16),
    Variant(Kernel.AHEAD, warps=14),
    Variant(Kernel.CHAINS, warps=20),
    Variant(Kernel.CHAINS, warps=20, shared_x=False),
    Variant(Kernel.CHAINS, warps=14),
    Variant(Kernel.TILES, warps=_TILE_WARPS),
    Variant(Kernel.PAIRS, warps=max(linear_pairs.MULTIPLIERS[2].values())),
    Variant(Kernel.WARPGROUPS, warps=_WARPGROUP),
    Variant(Kernel.WARPGROUPS, warps=2 * _WARPGROUP),
    Variant(Kernel.SINGLES, warps=max(linear_pairs.MULTIPLIERS[1].values())),
    Variant(Kernel.PAIRS, warps=8),
)


def max_tokens(device: int) -> int:
    """For how many tokens there are kernels on a device."""
    return MAX_HOPPER_TOKENS if nvrtc.has_wgmma(device) else MAX_TOKENS


@lru_cache(maxsize=65536)
def launch_of(header: Header, m: int, split: int, variant: int, device: int) -> Launch | None:
    """None if it does not fit, or there is no such kernel."""
    kind = VARIANTS[variant]
    if kind.kernel is Kernel.WARPGROUPS:
        return linear_pairs.warpgroups(header, m, split, device, kind.warps)
    if kind.kernel in (Kernel.SINGLES, Kernel.PAIRS):
        return linear_pairs.pairs((header,), m, (split,), device, kind.kernel, kind.warps)
    if kind.kernel is Kernel.AHEAD:
        return ahead((header,), m, (split,), device, kind.warps)
    planner = _Planner(header, m, split, device, min(nvrtc.multiprocessors(device), header.geometry.row_groups))
    if kind.kernel is Kernel.TILES:
        return planner.tiles(kind)
    block = planner.block(kind)
    warps = _fitting_warps([block]) if block else 0
    return Launch("linear_chains.cu", block.name, planner.blocks, warps, block.bytes(warps),
                  (planner.job(block, warps),)) if block and warps else None  # fmt: skip


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
    if kind.kernel in (Kernel.TILES, Kernel.WARPGROUPS):
        return None
    stages = [_decoded_stages(header, split) for header, split in zip(headers, splits, strict=True)]
    grids = shares([header.geometry.row_groups for header in headers], stages, nvrtc.multiprocessors(device))
    if grids is None:
        return None
    planners = [
        _Planner(header, m, split, device, grid) for header, split, grid in zip(headers, splits, grids, strict=True)
    ]
    blocks = [block for planner in planners if (block := planner.block(kind))]
    if len(blocks) < len(headers) or not (warps := _fitting_warps(blocks)):
        return None
    firsts = accumulate(grids, initial=0)
    jobs = (planner.job(block, warps, first) for planner, block, first in zip(planners, blocks, firsts, strict=False))
    return Launch("linear_chains_together.cu", f"{blocks[0].name}_together", sum(grids), warps,
                  max(block.bytes(warps) for block in blocks), tuple(jobs))  # fmt: skip


def _decoded_stages(header: Header, split: int) -> int:
    """Of a row group by linear_chains.cuh: a chunk in which a range ends and another begins is decoded for both."""
    stages = header.geometry.stages
    per_range = -(-stages // split)
    ranges = [(first, min(first + per_range, stages)) for first in range(0, stages, per_range)]
    return sum(min(-(-end // CHUNK_STAGES) * CHUNK_STAGES, stages) - first // CHUNK_STAGES * CHUNK_STAGES
               for first, end in ranges)  # fmt: skip


@dataclass(frozen=True)
class _Block:
    """What a block of linear_chains.cuh needs of shared memory, in 32-bit words, and how many warps it can use."""

    name: str
    words: int
    warp_words: int
    wanted: int
    room: int
    x: int

    def bytes(self, warps: int) -> int:
        return 4 * (self.words + warps * self.warp_words)


def _fitting_warps(blocks: Sequence[_Block]) -> int:
    """Warps for blocks of one launch; 0 if these do not fit."""
    wanted = max(block.wanted for block in blocks)
    warps = min(wanted, *((block.room - block.words) // block.warp_words for block in blocks))
    return warps if warps >= min(wanted, _MIN_WARPS) else 0


class _Planner(Planner):
    """For linear_chains.cuh and linear_tiles.cu; memory in 32-bit words."""

    def block(self, variant: Variant) -> _Block | None:
        """None if there is no such kernel."""
        if self.m > MAX_TOKENS:
            return None
        if self.own * self.stages * max(variant.warps**2, self.stages) >= 1 << 32:  # what `magic` is exact for
            return None
        kind = "shared" if variant.shared_x else "global"
        x = max(32 * self.m * self.stages if variant.shared_x else 0, self.entries)
        sums = 64 * self.octets
        words = self.table + x + self.own
        words += self.own * self.ranges * sums if self.ranges > 1 else 0
        warp_words = 2 * self.buffer + _RING_SLABS * SLAB_BYTES // 4 + sums + _WALK_WORDS
        name = f"linear_chains_{OCTET * self.octets}_{kind}"
        wanted = min(variant.warps, self.own * self.ranges)  # a warp for each chain is enough
        return _Block(name, words, warp_words, wanted, self.room, x)

    def tiles(self, variant: Variant) -> Launch | None:
        """With as few batches as fit, and then as many warps.

        A warp for each row group of a batch keeps the blocks going; more of them decode chunks ahead, as many pairs of
        stages ahead as the ring must then hold. The kernel relies on both.
        """
        if self.m > MAX_TILE_TOKENS or not nvrtc.has_wgmma(self.device):
            return None
        wide = next(wide for wide in _X_STAGES if wide >= self.m)
        fixed = ATOM_BYTES + 8 * _MAX_DECODERS + 4 * self.table + _X_STAGES[wide] * wide * 2 * STAGE
        room = 4 * self.room - fixed
        for batches in range(-(-self.own // (2 * _TILE)), self.own + 1):
            slots = -(-self.own // batches)
            tiles, slot_bytes = -(-slots // _TILE), slots * 2 * ATOM_BYTES + 16  # both atoms and both barriers
            multiplying = _WARPGROUP * (tiles if wide == MAX_TILE_TOKENS else 1)
            for warps in range(variant.warps - multiplying, slots - 1, -1):
                ring = (room - warps * 8 * self.buffer) // slot_bytes
                chunks_ahead = -(-warps // slots) - 1  # of those that are multiplied
                if ring < _MIN_RING + chunks_ahead * CHUNK_STAGES // 2:
                    continue
                words = (fixed + warps * 8 * self.buffer + ring * slot_bytes) // 4
                job = self.job_fields(slots, batches, warps, ring=ring)
                return Launch("linear_tiles.cu", f"linear_tiles_{wide}_{tiles}", self.blocks, multiplying + warps,
                              4 * words, (job,))  # fmt: skip
        return None

    def job(self, block: _Block, warps: int, first_block: int = 0) -> tuple[int, ...]:
        """For linear_chains.cuh."""
        return self.job_fields(self.own, 1, warps, x=block.x, first_block=first_block)
