"""The fused linear layer on a CUDA device: csrc/linear_ahead.cu, linear_chains.cu and, on Hopper, linear_tiles.cu.

All give the bits of one order of summation: K is cut into ranges of whole stages, each summed in fp32 by
``mma.m16n8k16`` step after step; the ranges' sums are added in order, then the bias; one rounding. cuBLAS sums in this
order, with a number of ranges that depends on the shape and on much else (see samebits.plans).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from samebits.errors import DeviceError
from samebits.format.geometry import ROW_GROUP, SLAB_BYTES, STAGE, Code, Layout
from samebits.format.packed import Header, PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.linear_launch import CHUNK_STAGES, VARIANTS, launch_of, max_tokens, nearest_launch
from samebits.kernels.overlap import may_start_early
from samebits.kernels.structures import GeometryStructure, JobStructure, PackedStructure
from samebits.kernels.tables import decode_table


@dataclass(frozen=True)
class LinearPlan:
    """How one fused launch is made.

    Attributes:
        split: ranges that K is asked to be cut into; ceil(ceil(K / 64) / split) stages each.
        variant: index into linear_launch.VARIANTS; changes the speed and never the bits.
    """

    split: int
    variant: int = 0


@lru_cache(maxsize=65536)
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
    return [i for i in range(len(VARIANTS)) if launch_of(header, m, split, i, device)]


def is_launchable(header: Header, m: int, plan: LinearPlan, device: int) -> bool:
    """Whether a supported launch can use a plan made for another tensor of its shape, if need be in another variant."""
    return nearest_launch(header, m, plan.split, plan.variant, device) is not None


def fused_linear(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None, plan: LinearPlan) -> torch.Tensor:
    """``x @ W.T + bias`` without ever writing W, on torch's current stream.

    Args:
        x: bfloat16 [..., K], contiguous, 16-byte aligned; m tokens in all.
        packed: W, [N, K], on x's device; is_supported(packed.header, m, its device).
        bias: bfloat16 [N], contiguous, 16-byte aligned, or None.

    Returns:
        bfloat16 [..., N].

    Raises:
        DeviceError: the plan does not fit on the device, or the kernel cannot be built or launched.
    """
    header, device = packed.header, x.device.index or 0
    *outer, columns = x.shape
    launch = nearest_launch(header, x.numel() // columns, plan.split, plan.variant, device)
    if launch is None:
        raise DeviceError(f"{plan} does not fit on this device", mend="ask is_launchable first")
    y = torch.empty(*outer, header.geometry.rows, dtype=torch.bfloat16, device=x.device)
    job = JobStructure(x.data_ptr(), bias.data_ptr() if bias is not None else None, y.data_ptr(), *launch.job)
    with nvrtc.on_device(device):
        function = nvrtc.kernel(launch.file, launch.name, device)
        early = may_start_early(packed.data)
        table = decode_table(packed)
        nvrtc.launch(
            function, launch.grid, 32 * launch.warps, launch.shared_bytes, GeometryStructure.of(header.geometry),
            PackedStructure.of(packed, table), job, early=early,
        )  # fmt: skip
    return y
