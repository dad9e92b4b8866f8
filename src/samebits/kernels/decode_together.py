"""Several packed tensors decoded by one launch: csrc/decode_together.cu.

A launch that decodes a small matrix ends before it has filled a GPU: 1.6 million weights take as long as 5 million.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from samebits.format.geometry import Code
from samebits.format.header import Header, align
from samebits.format.packed import PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.decode import ALIGNMENT, ThreadBlock, is_too_large, is_whole
from samebits.kernels.repeat import Patch, Repeat, Step
from samebits.kernels.residents import resident
from samebits.kernels.shares import share_out
from samebits.kernels.structures import (
    DecodedStructure,
    DecodedTogetherStructure,
    GeometryStructure,
    PackedStructure,
)
from samebits.kernels.tables import decode_table

_SOURCE = "decode_together.cu", "decode_together"
_OPENING = 1.5  # stages that a warp decodes while it opens a chunk
_SINGLE = 1.7  # as long as a stage of the quad code


def suits(packed: PackedTensor) -> bool:
    """Whether a tensor can be decoded together with others: rows without padding, of the quad or the single code."""
    header = packed.header
    is_coded = not packed.is_raw and header.code in (Code.QUAD, Code.SINGLE)
    is_usual = is_coded and is_whole(header.geometry) and not is_too_large(header.geometry)
    return is_usual and not packed.data.data_ptr() % ALIGNMENT


def load(device: int) -> None:
    """Have the kernel ready: the first time it is compiled, which may be too late while a graph is captured.

    Raises:
        DeviceError: it cannot be built.
    """
    nvrtc.kernel(*_SOURCE, device)


class DecodeTogether:
    """Decodes the same tensors again and again.

    What the kernel is told of them is made once for a stream: whoever calls it again makes sure that their bytes have
    not changed since, and holds them until it returns.

    Args:
        headers: of two to structures.MAX_DECODED tensors, which ``suits`` says can be.
    """

    def __init__(self, headers: Sequence[Header]) -> None:
        self._headers = tuple(headers)
        self._told: dict[int, _Told] = {}  # by stream

    def __call__(self, *every: torch.Tensor) -> list[torch.Tensor]:
        """The original tensors, bfloat16, computed on torch's current stream.

        Args:
            every: their packed bytes, on one device.

        Raises:
            DeviceError: the kernel cannot be built or launched.
        """
        device = every[0].get_device()
        with nvrtc.on_device(device):
            stream = nvrtc.current_stream(device)
            told = self._told.get(stream)
            early = told is not None
            if told is None:
                told, early = self._tell(every, stream, device)
            made = [torch.empty(each.shape, dtype=torch.bfloat16, device=every[0].device) for each in self._headers]
            arguments = DecodedTogetherStructure.from_buffer_copy(told.arguments)
            for own, output in zip(arguments.tensors, made, strict=False):
                own.output = output.data_ptr()
            block = told.block
            nvrtc.launch(nvrtc.kernel(*_SOURCE, device), told.grid, 32 * block.warps, block.shared_bytes, arguments,
                         block.division, early=early)  # fmt: skip
        return made

    def repeat(self, device: int) -> Repeat | None:
        """The call, to be made again on the current stream; None if it may be another then."""
        told = self._told.get(nvrtc.current_stream(device))
        if told is None:
            return None
        block, size = told.block, ctypes.sizeof(told.arguments)
        sizes, output = tuple(tuple(header.shape) for header in self._headers), DecodedStructure.output.offset
        patches = [Patch(output + i * ctypes.sizeof(DecodedStructure), 1 + i) for i in range(len(sizes))]
        room = bytes(told.arguments) + bytes(block.division)
        step = Step(nvrtc.kernel(*_SOURCE, device), told.grid, 32 * block.warps, block.shared_bytes, (0, size))
        return Repeat(sizes, 0, room.ljust(align(len(room), 8), b"\0"), tuple(patches), (step,))

    def _tell(self, every: Sequence[torch.Tensor], stream: int, device: int) -> tuple[_Told, bool]:
        """And whether the launch may start early; from then on all of it stays, for torch's current stream."""
        kept = [resident(data) for data in every]
        early = [known is not None and known.settle() for known in kept]
        arguments, first_block = DecodedTogetherStructure.of_none(), 0
        each = zip(arguments.tensors, self._headers, every, _shares(self._headers, device), strict=False)
        for own, header, data, blocks in each:
            packed = PackedTensor(header, data)
            own.geometry = GeometryStructure.of(header.geometry)
            own.packed = PackedStructure.of(packed, decode_table(packed))
            own.first_block, own.blocks, own.is_quad = first_block, blocks, header.code is Code.QUAD
            first_block += blocks
        told = _Told(first_block, ThreadBlock.of_any(self._headers, device), arguments)
        if all(early) and all(known and known.has_table for known in kept):
            self._told[stream] = told
        return told, all(early)


class _Told(NamedTuple):
    """A launch, but for the outputs' addresses in ``arguments``."""

    grid: int
    block: ThreadBlock
    arguments: DecodedTogetherStructure


def _shares(headers: Sequence[Header], device: int) -> list[int]:
    """Blocks of each tensor."""
    works, chunks = [_work(header) for header in headers], [header.geometry.chunks for header in headers]
    return share_out(nvrtc.multiprocessors(device) - len(headers), works, [1] * len(headers), chunks)


def _work(header: Header) -> float:
    """In stages of the quad code, that take a warp as long as all of the tensor."""
    geometry = header.geometry
    stages = geometry.row_groups * geometry.stages + _OPENING * geometry.chunks
    return stages if header.code is Code.QUAD else _SINGLE * stages
