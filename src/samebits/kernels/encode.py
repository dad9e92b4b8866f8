"""Encoding on a CUDA device: csrc/encode.cu counts, measures and writes; the host plans.

The bytes are those of codecs/encode.py, which encodes itself what may take the compact code: tensors so small that they
gain little from a GPU.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from samebits.codecs import loops
from samebits.codecs.encode import encode_cpu, header_of, write_tables
from samebits.codecs.plan import ALIGNED, FRACTIONS, Plan, RowStatistics, is_small, make_plan, wants_compact
from samebits.errors import DeviceError
from samebits.format.geometry import Code, Geometry, Layout
from samebits.format.packed import EXPONENTS, QUAD_SYMBOLS, STORED_DIGEST_END, PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.structures import BookStructure, GeometryStructure, SourceStructure

_WARPS = 8  # csrc/encode.cu: kWarps
_BLOCKS = 8  # resident blocks to aim for on each multiprocessor
_MASK = 0xFFFFFFFFFFFFFFFF


def encode_cuda(tensor: torch.Tensor) -> PackedTensor:
    """Pack a BF16 tensor that is on a CUDA device, there.

    Raises:
        DeviceError: the kernels cannot be built or launched, or the tensor is too large for them.
    """
    tensor = tensor.detach().contiguous()
    if tensor.data_ptr() % 8:
        tensor = tensor.clone()
    shape = tuple(tensor.shape)
    layout, geometry = Geometry.of_shape(shape, 1)
    if max(geometry.rows, geometry.columns, geometry.row_groups * geometry.stages) >= 1 << 31:
        raise DeviceError(f"a tensor of shape {shape} is too large for the CUDA kernels", mend="encode it on the CPU")
    with torch.cuda.device(tensor.device):
        needs_plan = tensor.numel() and not is_small(tensor.numel())
        plan = make_plan(shape, CudaCounter(tensor, layout, geometry)) if needs_plan else None
        if tensor.numel() and wants_compact(tensor.numel(), plan):
            return encode_cpu(tensor.cpu()).to(tensor.device)
        original = digest_cuda(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8))
        packed = _pack(tensor, plan, original) if plan else None
    return packed or PackedTensor.raw(tensor, original)


def digest_cuda(data: torch.Tensor) -> int:
    """FORMAT.md 2.3 of contiguous uint8 data on a CUDA device, starting at a multiple of 8 bytes in memory."""
    total = torch.zeros(1, dtype=torch.int64, device=data.device)
    whole = data.numel() // 8
    tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
    tail[: data.numel() - 8 * whole] = data[8 * whole :]
    for part, count, first in ((data, whole, 0), (tail, int(data.numel() > 8 * whole), whole)):
        if count:
            _launch("digest", count // 256, part, ctypes.c_int64(count), ctypes.c_int64(first), total)
    return int(total.item()) & _MASK


class CudaCounter:
    """Counts of a tensor on a GPU; see codecs.plan.Counter."""

    def __init__(self, tensor: torch.Tensor, layout: Layout, geometry: Geometry) -> None:
        self.tensor, self.layout, self.geometry = tensor, layout, geometry

    def rows(self, stride: int) -> RowStatistics:
        geometry = GeometryStructure.of(self.geometry)
        subnormal = self._zeros(1, torch.int32)
        counts = self._zeros(2 * EXPONENTS + FRACTIONS * ALIGNED, torch.int64)
        histogram, pinned, aligned = counts[:EXPONENTS], counts[EXPONENTS : 2 * EXPONENTS], counts[2 * EXPONENTS :]
        if self.layout is Layout.FLAT:
            _launch("histogram", self.geometry.words // 4096, geometry, self.tensor, histogram, subnormal)
            return RowStatistics.of_flat(histogram.cpu().numpy(), bool(subnormal.item()))
        rows = self._zeros(3 * self.geometry.rows, torch.int32).view(3, -1)
        _launch("row_statistics", self.geometry.rows // _WARPS, geometry, self.tensor, *rows, histogram, aligned,
                pinned, subnormal, ctypes.c_int32(stride))  # fmt: skip
        host = counts.cpu().numpy()
        centers, lowest, highest = rows.cpu().numpy()
        return RowStatistics(host[:EXPONENTS], centers, lowest, highest, bool(subnormal.item()),
                             host[2 * EXPONENTS :].reshape(FRACTIONS, ALIGNED),
                             host[EXPONENTS : 2 * EXPONENTS])  # fmt: skip

    def quads(self, shifts: NDArray[np.int32], window: int, stride: int) -> NDArray[np.int64]:
        counts = self._zeros(QUAD_SYMBOLS + 1, torch.int64)
        row_shifts, source = _source(self.tensor, shifts, window)
        sampled = -(-self.geometry.rows // stride)
        _launch("quad_counts", sampled // _WARPS, GeometryStructure.of(self.geometry), source, ctypes.c_int32(stride),
                counts, blocks=2)  # fmt: skip
        del row_shifts
        return counts.cpu().numpy()

    def _zeros(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=self.tensor.device)


def _pack(tensor: torch.Tensor, plan: Plan, original: int) -> PackedTensor | None:
    """Measure and write; None if the result is not smaller than the words."""
    geometry = GeometryStructure.of(plan.geometry)
    kept, source, book = _book(tensor, plan)
    quad = plan.code is Code.QUAD
    name, shared = plan.code.name.lower(), 4 * (QUAD_SYMBOLS if quad else EXPONENTS)
    sizes = torch.empty(plan.geometry.chunks, dtype=torch.int32, device=tensor.device)
    blocks = plan.geometry.chunks // _WARPS
    _launch(f"measure_{name}", blocks, geometry, source, book, sizes, shared=shared)
    ends = torch.cumsum(sizes, 0, dtype=torch.int64)
    longest, stream_words = (int(value) for value in torch.stack([sizes.max().to(torch.int64), ends[-1]]).tolist())
    header = header_of(plan, tuple(tensor.shape), longest, stream_words, original)
    if header.nbytes >= 2 * tensor.numel():
        return None
    data = torch.zeros(header.nbytes, dtype=torch.uint8, device=tensor.device)
    write_tables(data, plan, header)
    offsets = data[header.sections["offsets"]].view(torch.int32)
    offsets[1:] = torch.where(ends >= 1 << 31, ends - (1 << 32), ends).to(torch.int32)
    planes, streams = data[header.sections["planes"]], data[header.sections["streams"]]
    _launch(f"write_{name}", blocks, geometry, source, book, offsets, streams, planes, shared=shared)
    stored = digest_cuda(data[STORED_DIGEST_END:])
    stored_bytes = torch.frombuffer(bytearray(struct.pack("<Q", stored)), dtype=torch.uint8)
    data[8:STORED_DIGEST_END] = stored_bytes.to(data.device)
    del kept
    return PackedTensor(replace(header, stored_digest=stored), data)


def _source(
    tensor: torch.Tensor, shifts: NDArray[np.int32], window: int
) -> tuple[torch.Tensor | None, SourceStructure]:
    """The kernels' view of the words; the tensor of row shifts it points to must outlive the launch."""
    if shifts.size == 1:
        return None, SourceStructure(tensor.data_ptr(), None, int(shifts[0]), window)
    rows = torch.from_numpy(shifts).to(tensor.device)
    return rows, SourceStructure(tensor.data_ptr(), rows.data_ptr(), 0, window)


def _book(tensor: torch.Tensor, plan: Plan) -> tuple[list[Any], SourceStructure, BookStructure]:
    """What the chunk kernels look codewords up in, and the tensors that must outlive the launches."""
    quad = plan.code is Code.QUAD
    table = plan.table.encode_table(QUAD_SYMBOLS if quad else EXPONENTS)
    nearest = loops.nearest_quads(plan.table.symbols) if quad else np.zeros(1, np.int16)
    common = int(loops.common_class(table)) if quad else 0
    padding = int(loops.padding_quad(quad, plan.window, int(plan.table.symbols[0]))) & _MASK
    rows, source = _source(tensor, plan.shifts, plan.window)
    device_table = torch.from_numpy(table.view(np.int32)).to(tensor.device)
    device_nearest = torch.from_numpy(nearest).to(tensor.device)
    book = BookStructure(device_table.data_ptr(), device_nearest.data_ptr(), padding, common)
    return [rows, device_table, device_nearest], source, book


def _launch(name: str, blocks_wanted: int, *arguments: Any, shared: int = 0, blocks: int = _BLOCKS) -> None:
    """Launch a kernel of encode.cu on the current device.

    With as many blocks as there is work for, up to ``blocks`` on each multiprocessor.
    """
    device = torch.cuda.current_device()
    grid = max(1, min(blocks_wanted + 1, blocks * nvrtc.multiprocessors(device)))
    values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
    nvrtc.launch(nvrtc.kernel("encode.cu", name, device), grid, 32 * _WARPS, shared, *values)
