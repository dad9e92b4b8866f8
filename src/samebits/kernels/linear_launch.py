"""How a launch of the fused linear layer divides its work and its shared memory among blocks and warps."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from itertools import accumulate

from samebits.format.geometry import SIGN_BYTES, SLAB_BYTES, STAGE, STAGE_WORDS, STEPS
from samebits.format.packed import Header, align
from samebits.kernels import nvrtc
from samebits.kernels.decode import STATIC_SHARED, staging_words
from samebits.kernels.tables import table_words

CHUNK_STAGES = 16  # csrc: kChunkStages
_OCTET = 8  # tokens that one mma instruction takes
_LANES = 32
_MIN_WARPS = 4
_MAX_SLOTS = 64  # linear_ahead.cuh: row groups whose sums a block keeps
_WALK_WORDS = 41  # linear_chains.cuh: Ahead, and a flag, of a warp
_RING_SLABS = 4  # linear_chains.cuh: kRing
_X_STAGES = {16: 8, 32: 8, 64: 6, 128: 4}  # linear_tiles.cu: of x in its ring, by tokens that a kernel is made for
_TILE = 8  # linear_tiles.cu: row groups of a tile
_TILE_WARPS = 20  # linear_tiles.cu: kMaxThreads
_WARPGROUP = 4  # warps
_MAX_DECODERS = 16  # linear_tiles.cu: kMaxDecoders
_ATOM_BYTES = 1024  # hopper.cuh: a stage of a row group, decoded
_MIN_RING = 3  # pairs of stages that a block keeps decoded
_WGMMA_WIDTHS = (64, 128, 256)  # linear_warpgroups.cu: tokens of a tile
# linear_pairs.cuh: multipliers, by row groups of a warp and tokens at once, with mma.
_PAIR_WARPS = {1: {4: 16, 8: 16, 16: 16, 32: 16}, 2: {4: 12, 8: 12, 16: 12, 32: 11, 64: 8}}
_OTHER_WARPS = 4  # linear_pairs.cuh: kOthers
_OPENING_BYTES, _DEALING = (
    _LANES * 16 + 16,
    _LANES * 8,
)  # linear_pairs.cuh: kOpeningBytes, dealing_bytes for a row group
_MIN_PAIRS, _MAX_PAIRS = 2, 4  # linear_pairs.cuh: of stages, in their ring
_MAX_PLAIN_TOKENS = 4  # linear_pairs.cuh: whose x is not arranged in memory
_MAX_X_SLOTS = 8  # linear_pairs.cuh: of the ring of x
_ARRANGE_THREADS = 128
_WARP_COST = 0.4  # linear_pairs.cuh: of another warp in a block, where one takes 1


MAX_TOKENS = 16  # on GPUs other than Hopper
MAX_JOINT_TOKENS = max(_PAIR_WARPS[2])
MAX_TILE_TOKENS = max(_X_STAGES)
MAX_HOPPER_TOKENS = 512  # more take longer than decoding first


class Kernel(Enum):
    """The kernels of csrc/linear_*.cu."""

    AHEAD = "chunks are decoded ahead of few chains"
    CHAINS = "each warp walks chains of its own"
    TILES = "tiles are decoded for warpgroups to multiply"
    SINGLES = "each warp decodes a row group and multiplies it"
    PAIRS = "each warp decodes two row groups and multiplies them"
    WARPGROUPS = "warpgroups decode what they multiply"


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
    Variant(Kernel.AHEAD, warps=16),
    Variant(Kernel.AHEAD, warps=16, shared_x=False),
    Variant(Kernel.AHEAD, warps=12),
    Variant(Kernel.CHAINS, warps=20),
    Variant(Kernel.CHAINS, warps=20, shared_x=False),
    Variant(Kernel.CHAINS, warps=14),
    Variant(Kernel.TILES, warps=_TILE_WARPS),
    Variant(Kernel.PAIRS, warps=max(_PAIR_WARPS[2].values())),
    Variant(Kernel.WARPGROUPS, warps=_WARPGROUP),
    Variant(Kernel.WARPGROUPS, warps=2 * _WARPGROUP),
    Variant(Kernel.SINGLES, warps=max(_PAIR_WARPS[1].values())),
)


def max_tokens(device: int) -> int:
    """For how many tokens there are kernels on a device."""
    return MAX_HOPPER_TOKENS if nvrtc.has_wgmma(device) else MAX_TOKENS


@dataclass(frozen=True, eq=False)
class Arrangement:
    """What is made ready in memory before a launch: x as csrc/arrange.cu writes it, and where sums of ranges meet.

    Attributes:
        tokens, columns: of x; no tokens where the launch takes x as it is.
        wide: tokens of a tile.
        x_bytes: of x, whole tiles; it comes first in that memory.
        meetings: of each tensor, how many are counted; 0 where there is one range.
        parts_bytes: of each tensor, of all ranges' sums.
        part_steps: steps of 16 columns that a matrix of wgmma's has; 0: for mma.
        threads: of a block of the kernel.
    """

    tokens: int
    columns: int
    wide: int
    x_bytes: int
    meetings: tuple[int, ...]
    parts_bytes: tuple[int, ...]
    part_steps: int
    threads: int = _ARRANGE_THREADS

    @property
    def grid(self) -> int:
        """Blocks of the kernel: a thread for each step of 16 columns, and for each meeting."""
        return -(-max(self.tokens * self.columns * STEPS // STAGE, sum(self.meetings)) // self.threads)

    @cached_property
    def parts(self) -> tuple[int, ...]:
        """Where each tensor's are, in bytes."""
        return tuple(accumulate(self.parts_bytes[:-1], initial=self.x_bytes))

    @cached_property
    def done(self) -> tuple[int, ...]:
        """Where each tensor's meetings are counted, in bytes."""
        first = self.x_bytes + sum(self.parts_bytes)
        return tuple(accumulate((4 * number for number in self.meetings[:-1]), initial=first))

    @cached_property
    def total_bytes(self) -> int:
        return self.x_bytes + sum(self.parts_bytes) + 4 * sum(self.meetings)


@dataclass(frozen=True, eq=False)
class Launch:
    """A variant for one tensor, number of tokens and device; or for several tensors of one input. Made once."""

    file: str
    name: str
    grid: int
    warps: int
    shared_bytes: int
    jobs: tuple[tuple[int, ...], ...]  # of each tensor, JobStructure's fields behind the pointers
    arrangement: Arrangement | None = None

    @property
    def threads(self) -> int:
        return _LANES * self.warps


@lru_cache(maxsize=65536)
def launch_of(header: Header, m: int, split: int, variant: int, device: int) -> Launch | None:
    """None if it does not fit, or there is no such kernel."""
    kind = VARIANTS[variant]
    planner = _Planner(header, m, split, device, min(nvrtc.multiprocessors(device), header.geometry.row_groups))
    if kind.kernel is Kernel.TILES:
        return planner.tiles(kind)
    if kind.kernel is Kernel.WARPGROUPS:
        return planner.warpgroups(kind)
    if kind.kernel in (Kernel.SINGLES, Kernel.PAIRS):
        return _pairs((header,), m, (split,), device, kind.kernel)
    block = planner.block(kind)
    warps = _fitting_warps([block]) if block else 0
    return Launch(f"{block.stem}.cu", block.name, planner.blocks, warps, block.bytes(warps),
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
        return _pairs(headers, m, splits, device, kind.kernel)
    if kind.kernel in (Kernel.TILES, Kernel.WARPGROUPS):
        return None
    stages = [_decoded_stages(kind.kernel, header, split) for header, split in zip(headers, splits, strict=True)]
    shares = _shares([header.geometry.row_groups for header in headers], stages, nvrtc.multiprocessors(device))
    if shares is None:
        return None
    planners = [
        _Planner(header, m, split, device, blocks)
        for header, split, blocks in zip(headers, splits, shares, strict=True)
    ]
    blocks = [block for planner in planners if (block := planner.block(kind))]
    if len(blocks) < len(headers) or not (warps := _fitting_warps(blocks)):
        return None
    firsts = accumulate(shares, initial=0)
    jobs = (planner.job(block, warps, first) for planner, block, first in zip(planners, blocks, firsts, strict=False))
    return Launch(f"{blocks[0].stem}_together.cu", f"{blocks[0].name}_together", sum(shares), warps,
                  max(block.bytes(warps) for block in blocks), tuple(jobs))  # fmt: skip


def _decoded_stages(kernel: Kernel, header: Header, split: int) -> int:
    """Of a row group. Where warps own chains, a chunk in which a range ends and another begins is decoded for both."""
    stages = header.geometry.stages
    if kernel is not Kernel.CHAINS:
        return stages
    per_range = -(-stages // split)
    ranges = [(first, min(first + per_range, stages)) for first in range(0, stages, per_range)]
    return sum(min(-(-end // CHUNK_STAGES) * CHUNK_STAGES, stages) - first // CHUNK_STAGES * CHUNK_STAGES
               for first, end in ranges)  # fmt: skip


def _shares(row_groups: Sequence[int], stages: Sequence[int], multiprocessors: int) -> list[int] | None:
    """Blocks of each tensor, so that the most stages of a block are as few as can be; None if there are too few."""
    pairs = list(zip(row_groups, stages, strict=True))

    def blocks(most: int) -> list[int]:
        return [-(-groups // max(1, most // each)) for groups, each in pairs]

    limits = sorted({own * each for groups, each in pairs for own in range(1, groups + 1)})
    limits = limits[bisect_left(limits, max(stages)) :]
    place = bisect_left(limits, True, key=lambda most: sum(blocks(most)) <= multiprocessors)
    return blocks(limits[place]) if place < len(limits) else None


def magic(divisor: int) -> int:
    """For csrc/common.cuh's ``divide``: n // divisor == n * magic >> 32 where n * divisor <= 2**32; 0 for 1."""
    return -(-(1 << 32) // divisor) % (1 << 32)


@dataclass(frozen=True)
class _Way:
    """csrc/linear_pairs.cuh: WithWgmma or WithMma, for so many tokens at once."""

    kernel: Kernel
    tokens: int

    @property
    def stem(self) -> str:
        return f"linear_{self.kernel.name.lower()}"

    @property
    def wide(self) -> int:
        """Tokens of a tile."""
        return max(self.tokens, _OCTET)

    @property
    def wgmma(self) -> bool:
        return self.kernel is Kernel.WARPGROUPS

    @property
    def groups(self) -> int:
        """Row groups of a warp."""
        return 1 if self.kernel is Kernel.SINGLES else 2

    @property
    def pairs(self) -> int:
        """Of stages, in their ring; with mma at most."""
        return _MAX_PAIRS if not self.wgmma or self.wide < 128 else _MIN_PAIRS

    @property
    def x_parts(self) -> int:
        """Slots of the ring of x that a stage takes."""
        return 2 if self.wide == max(_WGMMA_WIDTHS) else 1

    @property
    def cluster(self) -> int:
        """Blocks."""
        return 2 if self.wgmma else 1

    @property
    def arranges(self) -> bool:
        """Whether x is arranged in memory."""
        return self.tokens > _MAX_PLAIN_TOKENS

    @property
    def slot_bytes(self) -> int:
        """Of the ring of x; with mma, of a pair of stages' x."""
        return self.wide * 2 * STAGE // self.x_parts if self.wgmma else 2 * self.wide * 2 * STAGE


@dataclass(frozen=True)
class _PairMemory:
    """A block's memory for linear_pairs.cuh, in bytes, with so many warps that multiply."""

    way: _Way
    fixed: int  # without the ring that is as large as fits: of pairs with mma, else of x
    slot: int  # of that ring
    ring: int  # slots, 0 if there is no room

    @classmethod
    def of(cls, way: _Way, planners: Sequence[_Planner], warps: int) -> _PairMemory:
        """For the largest of several tensors."""
        table, buffer = max(each.table for each in planners), max(each.buffer for each in planners)
        side = warps * way.groups * 4 * buffer
        fixed = _ATOM_BYTES + 4 * table + side + max(side, 4 * max(each.entries for each in planners))
        fixed += warps * 2 * way.groups * _OPENING_BYTES + (_OTHER_WARPS - 1) * way.groups * _DEALING + warps * 4 * 8
        slabs = warps * way.groups * SLAB_BYTES
        if way.wgmma:
            fixed, slot = fixed + way.pairs * (slabs + 16), way.slot_bytes
            least, most = 2 * way.x_parts, _MAX_X_SLOTS
        else:
            slot = way.slot_bytes + slabs
            least, most = _MIN_PAIRS, way.pairs
        ring = (4 * planners[0].room - fixed) // (slot + 16)
        return cls(way, fixed, slot, min(ring, most) if ring >= least else 0)

    @property
    def x_bytes(self) -> int:
        """Of the ring of x."""
        return self.ring * self.slot if self.way.wgmma else 0

    @property
    def total(self) -> int:
        return self.fixed + self.ring * (self.slot + 16)


def _pairs(headers: tuple[Header, ...], m: int, splits: tuple[int, ...], device: int, kernel: Kernel) -> Launch | None:
    """One launch for one tensor or several. Warps, and blocks of each tensor, such that the busiest block ends soon."""
    multiprocessors = nvrtc.multiprocessors(device)
    limits = _PAIR_WARPS[1 if kernel is Kernel.SINGLES else 2]
    if m > max(limits) or not nvrtc.has_wgmma(device) or len(headers) > multiprocessors:
        return None
    way = _Way(kernel, next(tokens for tokens in limits if tokens >= m))
    planners = [_Planner(header, m, split, device, 1) for header, split in zip(headers, splits, strict=True)]
    found: list[tuple[float, int, list[int]]] = []
    for warps in range(1, limits[way.tokens] + 1):
        if _PairMemory.of(way, planners, warps).ring:
            most, shares = _pair_shares(planners, way, warps, multiprocessors)
            found.append((most * (1 + _WARP_COST * (warps - 1)), warps, shares))
    if not found:
        return None
    _, warps, shares = min(found)
    return _pair_launch(way, warps, planners, shares)


def _pair_shares(planners: Sequence[_Planner], way: _Way, warps: int, multiprocessors: int) -> tuple[int, list[int]]:
    """The most stages that a block has to decode, as few as can be; and blocks of each tensor for that."""
    work = [(each.units(way, warps), each.decoded_stages) for each in planners]

    def blocks(most: int) -> list[int]:
        return [-(-units // (most // stages)) for units, stages in work]

    possible = range(max(stages for _, stages in work), sum(units * stages for units, stages in work) + 1)
    most = possible[bisect_left(possible, True, key=lambda most: sum(blocks(most)) <= multiprocessors)]
    return most, blocks(most)


def _pair_launch(way: _Way, warps: int, planners: Sequence[_Planner], shares: Sequence[int]) -> Launch:
    memory = _PairMemory.of(way, planners, warps)
    m, stages = planners[0].m, planners[0].stages
    meetings = tuple(each.meetings(way, warps) for each in planners)
    parts = tuple(number * each.ranges * _LANES * way.wide * 2 for number, each in zip(meetings, planners, strict=True))
    part_steps = STEPS // way.x_parts if way.wgmma else 0
    tokens = m if way.arranges else 0
    x_bytes = -(-tokens // way.wide) * way.wide * 2 * STAGE * stages
    jobs = (
        each.pair_job(way, warps, memory.x_bytes // 4, memory.ring, first, blocks)
        for each, first, blocks in zip(planners, accumulate(shares, initial=0), shares, strict=False)
    )
    together = "_together" if len(planners) > 1 else ""
    return Launch(f"{way.stem}{together}.cu", f"{way.stem}_{way.tokens}{together}", sum(shares), warps + _OTHER_WARPS,
                  memory.total, tuple(jobs),
                  Arrangement(tokens, stages * STAGE, way.wide, x_bytes, meetings, parts, part_steps)
                  if tokens or any(meetings) else None)  # fmt: skip


@dataclass(frozen=True)
class _Block:
    """What a block of a kernel without tiles needs of shared memory, in 32-bit words, and how many warps it can use."""

    stem: str
    name: str
    words: int
    warp_words: int
    wanted: int
    room: int
    slots: int
    batches: int
    x: int

    def bytes(self, warps: int) -> int:
        return 4 * (self.words + warps * self.warp_words)


def _fitting_warps(blocks: Sequence[_Block]) -> int:
    """Warps for blocks of one launch; 0 if these do not fit."""
    wanted = max(block.wanted for block in blocks)
    warps = min(wanted, *((block.room - block.words) // block.warp_words for block in blocks))
    return warps if warps >= min(wanted, _MIN_WARPS) else 0


class _Planner:
    """What the kernels' launches have in common, for a tensor that has ``blocks`` blocks; memory in 32-bit words."""

    def __init__(self, header: Header, m: int, split: int, device: int, blocks: int) -> None:
        geometry = header.geometry
        self.m, self.device, self.stages, self.chunks = m, device, geometry.stages, geometry.chunks_per_row_group
        self.octets = -(-m // _OCTET)
        self.stages_per_range = -(-geometry.stages // split)
        self.ranges = -(-geometry.stages // self.stages_per_range)
        self.decoded_stages = -(-self.stages_per_range // CHUNK_STAGES) * CHUNK_STAGES  # of a range, about
        self.blocks, self.row_groups = blocks, geometry.row_groups
        self.own = -(-self.row_groups // blocks)  # row groups of a block
        self.table, self.entries = table_words(header), align(header.symbol_count, 4)
        self.buffer = staging_words(header)
        self.room = (nvrtc.shared_memory(device) - STATIC_SHARED) // 4

    def block(self, variant: Variant) -> _Block | None:
        """None if there is no such kernel."""
        if self.m > MAX_TOKENS:
            return None
        return self._ahead(variant) if variant.kernel is Kernel.AHEAD else self._chains(variant)

    def _ahead(self, variant: Variant) -> _Block:
        batches = -(-self.own // _MAX_SLOTS)
        slots = -(-self.own // batches)
        kind = ("halves" if self.octets == 1 else "pairs") if variant.shared_x else "global"
        x = {"halves": 32 * self.m, "pairs": 64 * _OCTET, "global": 0}[kind] * self.stages
        x = max(x, self.entries)
        sums = 64 * self.octets * slots * self.ranges
        words = self.table + x + sums + slots * (self.ranges + 2)
        warp_words = self.buffer + CHUNK_STAGES * (STAGE_WORDS + SIGN_BYTES // 2) // 4  # a byte a weight, and signs
        name = f"linear_ahead_{_OCTET * self.octets}_{kind}"
        wanted = min(variant.warps, self.own * self.chunks)
        return _Block("linear_ahead", name, words, warp_words, wanted, self.room, slots, batches, x)

    def _chains(self, variant: Variant) -> _Block | None:
        if self.own * self.stages * max(variant.warps**2, self.stages) >= 1 << 32:  # what `magic` is exact for
            return None
        kind = "shared" if variant.shared_x else "global"
        x = max(32 * self.m * self.stages if variant.shared_x else 0, self.entries)
        sums = 64 * self.octets
        words = self.table + x + self.own
        words += self.own * self.ranges * sums if self.ranges > 1 else 0
        warp_words = 2 * self.buffer + _RING_SLABS * SLAB_BYTES // 4 + sums + _WALK_WORDS
        name = f"linear_chains_{_OCTET * self.octets}_{kind}"
        wanted = min(variant.warps, self.own * self.ranges)  # a warp for each chain is enough
        return _Block("linear_chains", name, words, warp_words, wanted, self.room, self.own, 1, x)

    def tiles(self, variant: Variant) -> Launch | None:
        """With as few batches as fit, and then as many warps.

        A warp for each row group of a batch keeps the blocks going; more of them decode chunks ahead, as many pairs of
        stages ahead as the ring must then hold. The kernel relies on both.
        """
        if self.m > MAX_TILE_TOKENS or not nvrtc.has_wgmma(self.device):
            return None
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
                job = self._job(slots, batches, warps, ring=ring)
                return Launch("linear_tiles.cu", f"linear_tiles_{wide}_{tiles}", self.blocks, multiplying + warps,
                              4 * words, (job,))  # fmt: skip
        return None

    def warpgroups(self, variant: Variant) -> Launch | None:
        """With as much of x in its ring as fits."""
        wide = next((wide for wide in _WGMMA_WIDTHS if wide >= self.m), max(_WGMMA_WIDTHS))
        way = _Way(Kernel.WARPGROUPS, wide)
        if not nvrtc.has_wgmma(self.device) or not _PairMemory.of(way, [self], variant.warps).ring:
            return None
        blocks = nvrtc.multiprocessors(self.device) // way.cluster
        clusters = min(self.units(way, variant.warps), blocks)
        return _pair_launch(way, variant.warps, [self], [way.cluster * clusters])

    def units(self, way: _Way, warps: int) -> int:
        """Of work, for linear_pairs.cuh."""
        return -(-self.row_groups // (way.cluster * way.groups * warps)) * self.ranges * self._token_tiles(way)

    def _token_tiles(self, way: _Way) -> int:
        return -(-self.m // way.wide)

    def pair_job(self, way: _Way, warps: int, x: int, ring: int, first_block: int, blocks: int) -> tuple[int, ...]:
        """For linear_pairs.cuh."""
        return self._job(1, 1, warps, x=x, ring=ring, first_block=first_block, blocks=blocks,
                         token_tiles=self._token_tiles(way), units=self.units(way, warps))  # fmt: skip

    def meetings(self, way: _Way, warps: int) -> int:
        """Of ranges' sums, where there are several: one for each warp's row groups and tile of tokens."""
        return self.units(way, warps) // self.ranges * way.cluster * warps if self.ranges > 1 else 0

    def job(self, block: _Block, warps: int, first_block: int = 0) -> tuple[int, ...]:
        """For a kernel without tiles."""
        return self._job(block.slots, block.batches, warps, x=block.x, first_block=first_block)

    def _job(
        self,
        slots: int,
        batches: int,
        decoders: int,
        *,
        x: int = 0,
        ring: int = 0,
        first_block: int = 0,
        blocks: int | None = None,
        token_tiles: int = 0,
        units: int = 0,
    ) -> tuple[int, ...]:
        own, longer = divmod(self.row_groups, self.blocks)
        by_warps = (magic(min(decoders, groups * self.ranges)) for groups in (own + 1, own))
        return (
            self.m, self.ranges, self.stages_per_range, slots, batches, decoders // slots, decoders % slots,
            first_block, blocks or self.blocks, own, longer,
            token_tiles, units, magic(max(token_tiles, 1)), magic(self.ranges),
            magic(slots), magic(self.stages), magic(self.stages_per_range), *by_warps,
            self.table, x, self.buffer, ring,
        )  # fmt: skip
