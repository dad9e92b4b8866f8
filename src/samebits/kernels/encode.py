"""Encoding on a CUDA device: csrc/encode.cu counts, measures and writes; the host plans.

The bytes are those of codecs/encode.py, which encodes itself what may take the compact code: tensors so small that they
gain little from a GPU. The host waits four times: for the counts of the rows and of the quads, for the chunks' lengths,
and for the digest of what was written. All copies go through pinned memory, so nothing else waits.
"""

from __future__ import annotations

import ctypes
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from samebits.codecs import loops
from samebits.codecs.encode import encode_cpu, gains, header_of, write_tables
from samebits.codecs.plan import Plan, can_be_packed, is_small, make_plan, wants_compact
from samebits.codecs.row_statistics import ALIGNED, FRACTIONS, RowStatistics
from samebits.errors import DeviceError
from samebits.format.geometry import STAGE, Code, Geometry, Layout
from samebits.format.header import EXPONENTS, QUAD_SYMBOLS, STORED_DIGEST_END
from samebits.format.packed import PackedTensor
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
    columns = geometry.columns + STAGE  # kernels count on behind the last one
    if max(geometry.rows, columns, geometry.row_groups * geometry.stages) >= 1 << 31:
        raise DeviceError(f"a tensor of shape {shape} is too large for the CUDA kernels", mend="encode it on the CPU")
    with torch.cuda.device(tensor.device):
        is_packable = can_be_packed(shape)
        if is_packable and is_small(tensor.numel()):
            return encode_cpu(tensor.cpu()).to(tensor.device)
        original = _digest(tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8))
        counter = CudaCounter(tensor, layout, geometry)
        plan = make_plan(shape, counter) if is_packable else None
        if is_packable and wants_compact(tensor.numel(), plan):
            return encode_cpu(tensor.cpu()).to(tensor.device)
        packed = _pack(counter, plan, original) if plan else None
        return packed or PackedTensor.raw(tensor, _value(original))


def _digest(data: torch.Tensor) -> torch.Tensor:
    """FORMAT.md 2.3 of contiguous uint8 data that starts at a multiple of 8 bytes: int64 [1], on its way."""
    total = torch.zeros(1, dtype=torch.int64, device=data.device)
    whole, rest = divmod(data.numel(), 8)
    if whole:
        _launch("digest", whole // 256, data, ctypes.c_int64(whole), ctypes.c_int64(0), total)
    if rest:
        tail = torch.zeros(8, dtype=torch.uint8, device=data.device)
        tail[:rest] = data[8 * whole :]
        _launch("digest", 0, tail, ctypes.c_int64(1), ctypes.c_int64(whole), total)
    return total


def _value(digest: torch.Tensor) -> int:
    return int(digest.item()) & _MASK


class CudaCounter:
    """Counts of a tensor on a GPU; see codecs.plan.Counter."""

    def __init__(self, tensor: torch.Tensor, layout: Layout, geometry: Geometry) -> None:
        self.tensor, self.layout, self.geometry = tensor, layout, geometry
        self._shifts: tuple[NDArray[np.int32], torch.Tensor] | None = None

    def rows(self, stride: int) -> RowStatistics:
        rows = self.geometry.rows if self.layout is Layout.MATRIX else 0
        ends = list(accumulate((EXPONENTS, EXPONENTS, FRACTIONS * ALIGNED, 1, -(-3 * rows // 2))))
        counts = self._zeros(ends[-1])
        histogram, pinned, aligned, subnormal, by_row = counts.tensor_split(ends[:-1])
        geometry = GeometryStructure.of(self.geometry)
        if rows:
            by_row = by_row.view(torch.int32)[: 3 * rows].view(3, rows)
            _launch("row_statistics", rows // _WARPS, geometry, self.tensor, *by_row, histogram, aligned, pinned,
                    subnormal, ctypes.c_int32(stride))  # fmt: skip
        else:
            _launch("histogram", self.geometry.words // 4096, geometry, self.tensor, histogram, subnormal)
        host = _to_host(counts)[0].numpy()
        numbers, has_subnormals = host[: ends[0]], bool(host[ends[2]])
        if not rows:
            return RowStatistics.of_flat(numbers, has_subnormals)
        centers, lowest, highest = host[ends[3] :].view(np.int32)[: 3 * rows].reshape(3, rows)
        return RowStatistics(numbers, centers, lowest, highest, has_subnormals,
                             host[ends[1] : ends[2]].reshape(FRACTIONS, ALIGNED), host[ends[0] : ends[1]])  # fmt: skip

    def quads(self, shifts: NDArray[np.int32], window: int, stride: int) -> NDArray[np.int64]:
        counts = self._zeros(QUAD_SYMBOLS + 1)
        sampled = -(-self.geometry.rows // stride)
        _launch("quad_counts", sampled // _WARPS, GeometryStructure.of(self.geometry), self.source(shifts, window),
                ctypes.c_int32(stride), counts, blocks=2)  # fmt: skip
        host: NDArray[np.int64] = _to_host(counts)[0].numpy()
        return host

    def source(self, shifts: NDArray[np.int32], window: int) -> SourceStructure:
        """The kernels' view of the words. It points to row shifts that last until others are asked for."""
        if shifts.size == 1:
            return SourceStructure(self.tensor.data_ptr(), None, int(shifts[0]), window)
        if self._shifts is None or self._shifts[0] is not shifts:
            self._shifts = shifts, _to_device(shifts, self.tensor.device)
        return SourceStructure(self.tensor.data_ptr(), self._shifts[1].data_ptr(), 0, window)

    def _zeros(self, size: int) -> torch.Tensor:
        return torch.zeros(size, dtype=torch.int64, device=self.tensor.device)


def _pack(counter: CudaCounter, plan: Plan, original: torch.Tensor) -> PackedTensor | None:
    """Measure and write; None if nothing is gained."""
    tensor, device, chunks = counter.tensor, counter.tensor.device, plan.geometry.chunks
    geometry, source = GeometryStructure.of(plan.geometry), counter.source(plan.shifts, plan.window)
    tables, book = _book(plan, device)
    quad = plan.code is Code.QUAD
    name, shared = plan.code.name.lower(), 4 * (QUAD_SYMBOLS if quad else EXPONENTS)
    sizes = torch.empty(chunks, dtype=torch.int32, device=device)
    _launch(f"measure_{name}", chunks // _WARPS, geometry, source, book, sizes, shared=shared)
    ends = torch.zeros(chunks + 1, dtype=torch.int64, device=device)
    torch.cumsum(sizes, 0, dtype=torch.int64, out=ends[1:])
    longest, stream_words, digest = (int(value) for value in _to_host(sizes.max(), ends[-1], original[0]))
    header = header_of(plan, tuple(tensor.shape), longest, stream_words, digest & _MASK)
    if not gains(header):
        return None
    data = torch.zeros(header.nbytes, dtype=torch.uint8, device=device)
    front = torch.empty(header.sections["offsets"].start, dtype=torch.uint8, device="cpu", pin_memory=True)
    write_tables(front, plan, header)
    data[: front.numel()].copy_(front, non_blocking=True)
    offsets, planes, streams = (data[header.sections[part]] for part in ("offsets", "planes", "streams"))
    offsets.view(torch.int32).copy_(ends.view(torch.int32)[::2])  # modulo 2^32
    _launch(f"write_{name}", chunks // _WARPS, geometry, source, book, offsets, streams, planes, shared=shared)
    stored = _digest(data[STORED_DIGEST_END:])
    data[8:STORED_DIGEST_END] = stored.view(torch.uint8)
    packed = PackedTensor(replace(header, stored_digest=_value(stored)), data)
    del tables  # outlived the launches
    return packed


def _book(plan: Plan, device: torch.device) -> tuple[torch.Tensor, BookStructure]:
    """What the chunk kernels look codewords up in, and the tensor it points to, which must outlive their launches."""
    quad = plan.code is Code.QUAD
    table = plan.table.encode_table(QUAD_SYMBOLS if quad else EXPONENTS)
    nearest = loops.nearest_quads(plan.table.symbols) if quad else np.zeros(1, np.int16)
    common = int(loops.common_class(table)) if quad else 0
    padding = int(loops.padding_quad(quad, plan.window, int(plan.table.symbols[0]))) & _MASK
    tables = _to_device(np.concatenate([table.view(np.uint8), nearest.view(np.uint8)]), device)
    return tables, BookStructure(tables.data_ptr(), tables.data_ptr() + table.nbytes, padding, common)


def _to_host(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copies in memory, once the current stream has got so far."""
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # to pinned memory
    torch.cuda.current_stream().synchronize()
    return copies


def _to_device(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(array).pin_memory().to(device, non_blocking=True)


def _launch(name: str, blocks_wanted: int, *arguments: Any, shared: int = 0, blocks: int = _BLOCKS) -> None:
    """Launch a kernel of encode.cu on the current device.

    With as many blocks as there is work for, up to ``blocks`` on each multiprocessor.
    """
    device = torch.cuda.current_device()
    grid = max(1, min(blocks_wanted + 1, blocks * nvrtc.multiprocessors(device)))
    values = [ctypes.c_void_p(a.data_ptr()) if isinstance(a, torch.Tensor) else a for a in arguments]
    nvrtc.launch(nvrtc.kernel("encode.cu", name, device), grid, 32 * _WARPS, shared, *values)
