"""The fused linear layer on a CUDA device: csrc/linear.cu, csrc/linear_ahead.cu and, on Hopper, csrc/linear_tiles.cu.

All give the bits of one order of summation: K is cut into ranges of whole stages, each summed in fp32 by
``mma.m16n8k16`` step after step; the ranges' sums are added in order, then the bias; one rounding. cuBLAS sums in this
order, with a number of ranges that depends on the shape and on much else (see samebits.plans).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from samebits.errors import DeviceError
from samebits.format.geometry import ROW_GROUP, SIGN_BYTES, SLAB_BYTES, STAGE, STAGE_WORDS, Code, Geometry, Layout
from samebits.format.packed import Header, PackedTensor, align
from samebits.kernels import nvrtc
from samebits.kernels.decode import STATIC_SHARED, staging_words
from samebits.kernels.overlap import may_start_early
from samebits.kernels.structures import GeometryStructure, JobStructure, PackedStructure

MAX_TOKENS = 16  # without tiles
MAX_SLOTS = 64  # row groups whose sums a block keeps
CHUNK_STAGES = 16  # csrc: kChunkStages
_MIN_WARPS = 4
_OCTET = 8  # tokens that one mma instruction takes in half of its A operand
_X_STAGES = {16: 8, 32: 8, 64: 6, 128: 4}  # linear_tiles.cu: of x in its ring, by tokens that a kernel is made for
_TILE = 8  # linear_tiles.cu: row groups of a tile
_TILE_WARPS = 20  # linear_tiles.cu: kMaxThreads
_WARPGROUP = 4  # warps
_MAX_DECODERS = 16  # linear_tiles.cu: kMaxDecoders
_ATOM_BYTES = 1024  # hopper.cuh: a stage of a row group, decoded
_MIN_RING = 3  # pairs of stages that a block keeps decoded


@dataclass(frozen=True)
class LinearPlan:
    """How one fused launch is made.

    Attributes:
        split: ranges that K is asked to be cut into; ceil(ceil(K / 64) / split) stages each.
        variant: index into VARIANTS; changes the speed and never the bits.
    """

    split: int
    variant: int = 0


@dataclass(frozen=True)
class Variant:
    """One way to run the fused kernel.

    Attributes:
        ahead: decode chunks ahead of their chains (csrc/linear_ahead.cu).
        shared_x: keep x in shared memory.
        warps: of a block, at most (csrc: kMaxWarps).
        tiles: decode tiles that warpgroups multiply (csrc/linear_tiles.cu); x passes through shared memory.
    """

    ahead: bool
    shared_x: bool
    warps: int
    tiles: bool = False


VARIANTS = (
    Variant(ahead=True, shared_x=True, warps=16),
    Variant(ahead=True, shared_x=False, warps=16),
    Variant(ahead=False, shared_x=True, warps=12),
    Variant(ahead=False, shared_x=False, warps=12),
    Variant(ahead=False, shared_x=True, warps=8),
    Variant(ahead=True, shared_x=True, warps=10),
    Variant(ahead=True, shared_x=True, warps=_TILE_WARPS, tiles=True),
)


def max_tokens(device: int) -> int:
    """For how many tokens there are kernels on a device."""
    return max(_X_STAGES) if nvrtc.has_wgmma(device) else MAX_TOKENS


def is_supported(header: Header, m: int, device: int) -> bool:
    """Whether there is a fused kernel for ``m`` tokens: quad code, matrix layout, whole row groups and stages."""
    if header.code is not Code.QUAD or header.layout is not Layout.MATRIX or not 1 <= m <= max_tokens(device):
        return False
    geometry = header.geometry
    return (
        header.chunk_stages == CHUNK_STAGES
        and geometry.stages >= CHUNK_STAGES
        and geometry.rows % ROW_GROUP == 0
        and geometry.columns % STAGE == 0
        and 4 * header.stream_words >= CHUNK_STAGES // 2 * SLAB_BYTES  # loads ahead may pass the planes' end by a chunk
        and geometry.rows * geometry.columns < 1 << 40
    )


def variants(header: Header, m: int, split: int) -> list[int]:
    """The variants of a supported launch that fit on the current device, as LinearPlan counts them."""
    device = torch.cuda.current_device()
    return [i for i in range(len(VARIANTS)) if _Launch.of(header, m, LinearPlan(split, i), device)]


def is_launchable(header: Header, m: int, plan: LinearPlan, device: int) -> bool:
    """Whether a supported launch can use a plan made for another tensor of its shape, if need be in another variant."""
    return _Launch.nearest(header, m, plan, device) is not None


def fused_linear(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None, plan: LinearPlan) -> torch.Tensor:
    """``x @ W.T + bias`` without ever writing W, on torch's current stream.

    Args:
        x: bfloat16 [m, K], contiguous, 16-byte aligned.
        packed: W, [N, K], on x's device; is_supported(packed.header, m, its device).
        bias: bfloat16 [N], contiguous, 16-byte aligned, or None.

    Returns:
        bfloat16 [m, N].

    Raises:
        DeviceError: the plan does not fit on the device, or the kernel cannot be built or launched.
    """
    header, device = packed.header, x.device.index or 0
    launch = _Launch.nearest(header, x.shape[0], plan, device)
    if launch is None:
        raise DeviceError(f"{plan} does not fit on this device", mend="ask is_launchable first")
    y = torch.empty(x.shape[0], header.geometry.rows, dtype=torch.bfloat16, device=x.device)
    job = JobStructure(x.data_ptr(), bias.data_ptr() if bias is not None else None, y.data_ptr(), *launch.job)
    with torch.cuda.device(device):
        function = nvrtc.kernel(launch.file, launch.name, device)
        nvrtc.launch(
            function, launch.grid, 32 * launch.warps, launch.shared_bytes, GeometryStructure.of(header.geometry),
            PackedStructure.of(packed), job, early=may_start_early(packed.data),
        )  # fmt: skip
    return y


@dataclass(frozen=True)
class _Launch:
    """A plan for one device: how a kernel divides its work and its shared memory."""

    file: str
    name: str
    grid: int
    warps: int
    shared_bytes: int
    job: tuple[int, ...]  # JobStructure's fields behind the pointers

    @classmethod
    @lru_cache(maxsize=65536)
    def nearest(cls, header: Header, m: int, plan: LinearPlan, device: int) -> _Launch | None:
        """The plan's variant, or the first that fits instead."""
        candidates = (cls.of(header, m, LinearPlan(plan.split, i), device) for i in range(len(VARIANTS)))
        return cls.of(header, m, plan, device) or next(filter(None, candidates), None)

    @classmethod
    @lru_cache(maxsize=65536)
    def of(cls, header: Header, m: int, plan: LinearPlan, device: int) -> _Launch | None:
        """None if it does not fit."""
        variant, geometry = VARIANTS[plan.variant], header.geometry
        if m > (max(_X_STAGES) if variant.tiles else MAX_TOKENS):
            return None
        stages_per_range = -(-geometry.stages // plan.split)
        ranges = -(-geometry.stages // stages_per_range)
        octets = -(-m // _OCTET)
        grid = min(nvrtc.multiprocessors(device), geometry.row_groups)
        own = -(-geometry.row_groups // grid)  # row groups of a block
        batches = -(-own // MAX_SLOTS) if variant.ahead else 1
        slots = -(-own // batches)
        buffer_words = staging_words(header)
        table_words, entry_words = max(4, 1 << header.max_code_length), align(header.symbol_count, 4)
        if variant.tiles:
            sizes = table_words, entry_words, buffer_words
            return cls._of_tiles(geometry, (m, ranges, stages_per_range), sizes, variant.warps, device)
        decoded = CHUNK_STAGES * (STAGE_WORDS + SIGN_BYTES // 2) // 4  # a byte a weight, and the sign words
        warp_words = buffer_words + decoded if variant.ahead else 2 * buffer_words
        chains = slots * ranges if variant.ahead or ranges > 1 else 0
        words = table_words + entry_words + 64 * octets * chains + slots * (ranges + 2) + 32
        kind = ("halves" if octets == 1 else "pairs") if variant.shared_x else "global"
        words += {"halves": 32 * m, "pairs": 64 * _OCTET, "global": 0}[kind] * geometry.stages
        room = (nvrtc.shared_memory(device) - STATIC_SHARED) // 4 - words
        warps = min(variant.warps, room // warp_words)
        if warps < _MIN_WARPS or (own > MAX_SLOTS and not variant.ahead and ranges > 1):
            return None
        words += warps * warp_words
        job = (m, ranges, stages_per_range, slots, batches, warps // slots, warps % slots,
               table_words, entry_words, buffer_words, 0)  # fmt: skip
        stem = "linear_ahead" if variant.ahead else "linear"
        return cls(f"{stem}.cu", f"{stem}_{_OCTET * octets}_{kind}", grid, warps, 4 * words, job)

    @classmethod
    def _of_tiles(
        cls, geometry: Geometry, sums: tuple[int, int, int], memory: tuple[int, int, int], max_warps: int, device: int
    ) -> _Launch | None:
        """With as few batches as fit, and then as many warps.

        A warp for each row group of a batch keeps the blocks going; more of them decode chunks ahead, as many pairs of
        stages ahead as the ring must then hold. The kernel relies on both.

        Args:
            sums: tokens, ranges and stages of a range.
            memory: 32-bit words of the decode table, its entries, and a staging buffer.
        """
        if not nvrtc.has_wgmma(device):
            return None
        wide = next(wide for wide in _X_STAGES if wide >= sums[0])
        fixed = _ATOM_BYTES + 8 * _MAX_DECODERS + 4 * memory[0] + _X_STAGES[wide] * wide * 2 * STAGE
        room = nvrtc.shared_memory(device) - STATIC_SHARED - fixed
        grid = min(nvrtc.multiprocessors(device), geometry.row_groups)
        own = -(-geometry.row_groups // grid)
        for batches in range(-(-own // (2 * _TILE)), own + 1):
            slots = -(-own // batches)
            tiles, slot_bytes = -(-slots // _TILE), slots * 2 * _ATOM_BYTES + 16  # both atoms and both barriers
            multiplying = _WARPGROUP * (tiles if wide == max(_X_STAGES) else 1)
            for warps in range(max_warps - multiplying, slots - 1, -1):
                ring = (room - warps * 8 * memory[2]) // slot_bytes
                chunks_ahead = -(-warps // slots) - 1  # of those that are multiplied
                if ring < _MIN_RING + chunks_ahead * CHUNK_STAGES // 2:
                    continue
                shared_bytes = fixed + warps * 8 * memory[2] + ring * slot_bytes
                job = (*sums, slots, batches, warps // slots, warps % slots, *memory, ring)
                name = f"linear_tiles_{wide}_{tiles}"
                return cls("linear_tiles.cu", name, grid, multiplying + warps, shared_bytes, job)
        return None
