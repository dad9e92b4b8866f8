"""Decoding on a CUDA device: csrc/decode.cu and compact.cu, and how kernels built on decoder.cuh are launched."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from samebits.errors import DeviceError, InputError
from samebits.format.geometry import LANES, ROW_GROUP, STAGE, Code, Geometry
from samebits.format.header import Header, align
from samebits.format.packed import PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.repeat import Patch, Repeat, Step
from samebits.kernels.residents import resident
from samebits.kernels.structures import CompactStructure, DivisionStructure, GeometryStructure, PackedStructure
from samebits.kernels.tables import decode_table, table_words

if TYPE_CHECKING:
    from cuda.core import Kernel

MAX_WARPS = 16  # csrc/decoder.cuh: kMaxThreads
_MIN_WARPS = 12  # fewer keep less of the memory busy
_SHARING = 2  # csrc/decode.cu: warps that share a chunk where there are few
_TURN = 4  # stages that a warp loads at once
ALIGNMENT = 16  # bytes; what the kernel's loads need
STATIC_SHARED = 256  # bytes; room for a kernel's own variables


def decode_cuda(packed: PackedTensor) -> torch.Tensor:
    """The original tensor, on the same device, computed on torch's current stream.

    Raises:
        InputError: it lies in main memory, as where a module is there and its input is not.
        DeviceError: the kernels cannot be built or launched, or the tensor is too large for them.
    """
    if not packed.data.is_cuda:
        what = "packed bytes in main memory, and what is to be computed with them on a GPU"
        raise InputError(what, mend="move the module or its input to the other's device")
    output = torch.empty(packed.shape, dtype=torch.bfloat16, device=packed.device)
    if packed.is_raw:
        return output.copy_(packed.data.view(torch.bfloat16).view(packed.shape))
    if packed.code is Code.COMPACT:
        _decode_compact(packed, output)
    else:
        launch("decode.cu", "decode", packed, output, None, is_whole(packed.header.geometry))
    return output


def repeat(packed: PackedTensor) -> Repeat | None:
    """``decode_cuda``'s launch, to be made again as long as the bytes are the same; None if it may be another then."""
    if packed.is_raw or packed.code is Code.COMPACT or packed.data.data_ptr() % ALIGNMENT:
        return None
    kept, stream = resident(packed.data), nvrtc.current_stream(packed.data.get_device())
    key = "decode", is_whole(packed.header.geometry), stream
    prepared: _Prepared | None = kept.decoders.get(key) if kept and kept.is_settled else None
    if prepared is None:
        return None
    structures = (prepared.geometry, prepared.packed, ctypes.c_void_p(), prepared.division)
    starts = tuple(accumulate((align(ctypes.sizeof(each), 8) for each in structures), initial=0))
    room = b"".join(bytes(each).ljust(align(ctypes.sizeof(each), 8), b"\0") for each in structures)
    step = Step(prepared.function, prepared.grid, 32 * prepared.warps, prepared.shared_bytes, starts[:-1])
    return Repeat((tuple(packed.shape),), 0, room, (Patch(starts[2], 1),), (step,))


def _decode_compact(packed: PackedTensor, output: torch.Tensor) -> None:
    if packed.data.data_ptr() % ALIGNMENT:
        packed = PackedTensor(packed.header, packed.data.clone())
    device = packed.device.index or 0
    with nvrtc.on_device(device):
        function = nvrtc.kernel("compact.cu", "decode_compact", device)
        nvrtc.launch(function, -(-packed.header.runs // LANES), LANES, 0, CompactStructure.of(packed),
                     ctypes.c_void_p(output.data_ptr()))  # fmt: skip


def is_whole(geometry: Geometry) -> bool:
    """Whether nothing is padding."""
    padded = geometry.columns % STAGE or geometry.rows % ROW_GROUP
    return not padded and geometry.words == geometry.rows * geometry.columns


def is_too_large(geometry: Geometry) -> bool:
    """For kernels, which count in 32 bits."""
    return max(geometry.rows, geometry.columns, geometry.chunks) >= 1 << 31


def launch(
    file: str, kernel: str, packed: PackedTensor, output: torch.Tensor, tasks: int | None, whole: bool,
    *arguments: ctypes.Structure,
) -> None:  # fmt: skip
    """Launch a kernel that is built on csrc/decoder.cuh.

    Args:
        kernel: its name without code and variant.
        tasks: how many it has, at least one, some of which may turn out not to be wanted; None: all of the tensor.
        whole: for the variant without a check of each word, where nothing is padding.
        arguments: what it takes beyond the usual.

    Raises:
        InputError: the packed bytes' memory was freed.
        DeviceError: as decode_cuda.
    """
    if packed.data.data_ptr() % ALIGNMENT:
        packed = PackedTensor(packed.header, packed.data.clone())
    device = packed.data.get_device()
    with nvrtc.on_device(device):
        kept, key = resident(packed.data), (kernel, whole, nvrtc.current_stream(device))  # by stream: see decode_table
        early = kept is not None and kept.settle()
        prepared: _Prepared | None = kept.decoders.get(key) if kept else None
        if prepared is None:
            prepared = _Prepared.of(file, kernel, packed, whole, everything=tasks is None)
            if kept and kept.has_table:
                kept.decoders[key] = prepared
        function, grid, warps, shared, geometry, structure, division = prepared
        if tasks is not None:
            grid = min(grid, tasks)
        nvrtc.launch(function, grid, 32 * warps, shared, geometry, structure,
                     ctypes.c_void_p(output.data_ptr()), division, *arguments, early=early)  # fmt: skip


class _Prepared(NamedTuple):
    """A launch as far as it is always the same for a tensor's bytes and a stream; with fewer tasks, of fewer blocks."""

    function: Kernel
    grid: int
    warps: int
    shared_bytes: int
    geometry: GeometryStructure
    packed: PackedStructure
    division: DivisionStructure

    @classmethod
    def of(cls, file: str, kernel: str, packed: PackedTensor, whole: bool, *, everything: bool) -> _Prepared:
        header, geometry, device = packed.header, packed.header.geometry, packed.data.get_device()
        if is_too_large(geometry):
            what = f"a tensor of shape {tuple(packed.shape)} is too large for the CUDA kernels"
            raise DeviceError(what, mend="decode it on the CPU")
        block = ThreadBlock.of_any([header], device)
        structure = PackedStructure.of(packed, decode_table(packed))
        grid, warps, parts = nvrtc.multiprocessors(device), block.warps, 1
        if everything:
            parts = _parts(header, device)
            tasks = parts * geometry.chunks
            grid, warps = min(grid, tasks), even_warps(-(-tasks // grid), warps)
        function = nvrtc.kernel(file, _name(kernel, header, whole, parts), device)
        return cls(function, grid, warps, block.shared_bytes, GeometryStructure.of(geometry), structure,
                   block.division)  # fmt: skip


def decode_source(header: Header, device: int) -> nvrtc.Source:
    """What is compiled for ``decode_cuda``, of the quad or the single code."""
    return nvrtc.Source("decode.cu", _name("decode", header, is_whole(header.geometry), _parts(header, device)))


def _name(kernel: str, header: Header, whole: bool, parts: int) -> str:
    shared = "_shared" if parts > 1 else ""
    return f"{kernel}_{header.code.name.lower()}_{'whole' if whole else 'clipped'}{shared}"


def _parts(header: Header, device: int) -> int:
    """How many warps share a chunk: two where chunks are so few that half of the warps would have none.

    The second goes past the stages of the first, which takes it half the time of decoding them to memory, or less.
    """
    geometry = header.geometry
    are_alike = geometry.stages % geometry.chunk_stages == 0 and geometry.chunk_stages % (_SHARING * _TURN) == 0
    if header.code is not Code.QUAD or not is_whole(geometry) or not are_alike:
        return 1
    return _SHARING if _SHARING * geometry.chunks <= nvrtc.multiprocessors(device) * MAX_WARPS else 1


def even_warps(tasks: int, most: int) -> int:
    """Of a block that has so many tasks: such that the last round is as full as the others, or nearly so.

    A chunk takes a warp as long when few others are at work, so a round that is nearly empty costs as much as any.
    """
    return min(range(most, min(_MIN_WARPS, most) - 1, -1), key=lambda warps: -(-tasks // warps) * warps)


def staging_words(header: Header) -> int:
    """32-bit words of the buffer in shared memory that a warp decodes a chunk from.

    It holds the longest chunk, up to three words before it (copies are 16 bytes wide), and behind it what a stream can
    read beyond the chunk's end whatever its contents (FORMAT.md 6.6): its codewords, and three words ahead.
    """
    codeword_bits = 2 * 13 if header.code is Code.QUAD else 8 * 12
    slack = -(-(header.chunk_stages + 8) * codeword_bits // 32) + 4
    return align(3 + header.max_chunk_words + slack, 4)


@dataclass(frozen=True)
class ThreadBlock:
    """The blocks in which tensors are decoded."""

    warps: int
    division: DivisionStructure

    @classmethod
    def of_any(cls, headers: Sequence[Header], device: int) -> ThreadBlock:
        """For each of several, with as many warps as fit.

        Raises:
            DeviceError: none do.
        """
        buffer_words = max(map(staging_words, headers))
        words = max(map(table_words, headers))
        entry_words = max(align(header.symbol_count, 4) for header in headers)
        available = nvrtc.shared_memory(device) - STATIC_SHARED - 4 * (words + entry_words)
        warps = min(MAX_WARPS, available // (8 * buffer_words))
        if warps < 1:
            what = "the device has too little shared memory for chunks of this size"
            raise DeviceError(what, mend="decode on the CPU")
        return cls(warps, DivisionStructure(words, entry_words, buffer_words))

    @property
    def shared_bytes(self) -> int:
        division = self.division
        words: int = division.table_words + division.entry_words + 2 * self.warps * division.buffer_words
        return 4 * words
