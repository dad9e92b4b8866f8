"""Decoding on a CUDA device: csrc/decode.cu, and csrc/compact.cu for the compact code."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache

import torch

from samebits.errors import DeviceError
from samebits.format.geometry import LANES, ROW_GROUP, STAGE, Code, Geometry
from samebits.format.packed import Header, PackedTensor, align
from samebits.kernels import nvrtc
from samebits.kernels.structures import CompactStructure, GeometryStructure, PackedStructure

MAX_WARPS = 16  # csrc/decode.cu: kMaxThreads
_ALIGNMENT = 16  # bytes; what the kernel's loads need
_STATIC_SHARED = 1024  # room for the kernel's own variables


def decode_cuda(packed: PackedTensor) -> torch.Tensor:
    """The original tensor, on the same device, computed on torch's current stream.

    Raises:
        DeviceError: the kernels cannot be built or launched, or the tensor is too large for them.
    """
    output = torch.empty(packed.shape, dtype=torch.bfloat16, device=packed.device)
    if packed.is_raw:
        return output.copy_(packed.data.view(torch.bfloat16).view(packed.shape))
    if packed.data.data_ptr() % _ALIGNMENT:
        packed = PackedTensor(packed.header, packed.data.clone())
    with torch.cuda.device(packed.device):
        if packed.code is Code.COMPACT:
            _decode_compact(packed, output)
        else:
            _decode_chunks(packed, output)
    return output


def _decode_compact(packed: PackedTensor, output: torch.Tensor) -> None:
    function = nvrtc.kernel("compact.cu", "decode_compact", packed.device.index or 0)
    nvrtc.launch(function, -(-packed.header.runs // LANES), LANES, 0, CompactStructure.of(packed),
                 ctypes.c_void_p(output.data_ptr()))  # fmt: skip


def _decode_chunks(packed: PackedTensor, output: torch.Tensor) -> None:
    geometry = packed.header.geometry
    if max(geometry.rows, geometry.columns, geometry.chunks) >= 1 << 31:
        what = f"a tensor of shape {tuple(packed.shape)} is too large for the CUDA kernels"
        raise DeviceError(what, mend="decode it on the CPU")
    device = packed.device.index or 0
    block = _Block.of(packed.header, device)
    function = nvrtc.kernel("decode.cu", _kernel_name(packed.header.code, geometry), device)
    nvrtc.launch(function, block.grid, 32 * block.warps, block.shared_bytes, GeometryStructure.of(geometry),
                 PackedStructure.of(packed), ctypes.c_void_p(output.data_ptr()), ctypes.c_int32(block.table_words),
                 ctypes.c_int32(block.symbol_words), ctypes.c_int32(block.buffer_words))  # fmt: skip


def _kernel_name(code: Code, geometry: Geometry) -> str:
    """The variant without bounds checks where nothing is padding."""
    whole = (
        geometry.columns % STAGE == 0
        and geometry.rows % ROW_GROUP == 0
        and geometry.words == geometry.rows * geometry.columns
    )
    return f"decode_{code.name.lower()}_{'whole' if whole else 'clipped'}"


@dataclass(frozen=True)
class _Block:
    """How decode.cu is launched, and how it divides its shared memory (in 32-bit words)."""

    grid: int
    warps: int
    table_words: int
    symbol_words: int
    buffer_words: int  # of each of a warp's two staging buffers

    @classmethod
    @cache
    def of(cls, header: Header, device: int) -> _Block:
        """As many warps as fit.

        A staging buffer holds the longest chunk, up to three words before it (copies are 16 bytes wide), and behind it
        what a stream can read beyond the chunk's end whatever its contents (FORMAT.md 6.6): its codewords, and three
        words ahead.
        """
        codeword_bits = 2 * 13 if header.code is Code.QUAD else 8 * 12
        slack = -(-header.chunk_stages * codeword_bits // 32) + 4
        buffer_words = align(3 + header.max_chunk_words + slack, 4)
        table_words = max(4, 1 << header.max_code_length)
        symbol_words = align(header.symbol_count, 4)
        available = nvrtc.shared_memory(device) - _STATIC_SHARED - 4 * (table_words + symbol_words)
        warps = min(MAX_WARPS, available // (8 * buffer_words))
        if warps < 1:
            what = "the device has too little shared memory for chunks of this size"
            raise DeviceError(what, mend="decode on the CPU")
        grid = min(nvrtc.multiprocessors(device), header.geometry.chunks)
        return cls(grid, warps, table_words, symbol_words, buffer_words)

    @property
    def shared_bytes(self) -> int:
        return 4 * (self.table_words + self.symbol_words + 2 * self.warps * self.buffer_words)
