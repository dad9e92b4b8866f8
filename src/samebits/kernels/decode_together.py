"""Several packed tensors decoded by one launch: csrc/decode_together.cu.

A launch that decodes a small matrix ends before it has filled a GPU: 1.6 million weights take as long as 5 million.
"""

from __future__ import annotations

import ctypes
import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from samebits.format.geometry import Code
from samebits.format.packed import Header, PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.decode import ALIGNMENT, ThreadBlock, is_whole
from samebits.kernels.repeat import Patch, Repeat, Step
from samebits.kernels.residents import resident
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
_MAX_CHUNKS = 1 << 24  # of a tensor: kernels count them in 32 bits


def suits(packed: PackedTensor) -> bool:
    """Whether a tensor can be decoded together with others: rows without padding, of the quad or the single code."""
    header = packed.header
    is_coded = not packed.is_raw and header.code in (Code.QUAD, Code.SINGLE)
    return (
        is_coded
        and is_whole(header.geometry)
        and header.geometry.chunks < _MAX_CHUNKS
        and not packed.data.data_ptr() % ALIGNMENT
    )


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
        self._headers, self._shapes = tuple(headers), [header.shape for header in headers]
        self._told: dict[int, DecodedTogetherStructure] = {}  # by stream, without the outputs' addresses

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
            launch = _launch_of(self._headers, device)
            made = [torch.empty(shape, dtype=torch.bfloat16, device=every[0].device) for shape in self._shapes]
            arguments = DecodedTogetherStructure.from_buffer_copy(told)
            for own, output in zip(arguments.tensors, made, strict=False):
                own.output = output.data_ptr()
            nvrtc.launch(nvrtc.kernel(*_SOURCE, device), launch.grid, launch.threads, launch.shared_bytes, arguments,
                         launch.block.division, early=early)  # fmt: skip
        return made

    def repeat(self, device: int) -> Repeat | None:
        """The call, to be made again on the current stream; None if it may be another then."""
        told = self._told.get(nvrtc.current_stream(device))
        if told is None:
            return None
        launch, size = _launch_of(self._headers, device), ctypes.sizeof(DecodedTogetherStructure)
        outputs = DecodedTogetherStructure.tensors.offset + DecodedStructure.output.offset
        patches = [Patch(outputs + i * ctypes.sizeof(DecodedStructure), 1 + i) for i in range(len(self._shapes))]
        room = bytes(told) + bytes(launch.block.division)
        step = Step(nvrtc.kernel(*_SOURCE, device), launch.grid, launch.threads, launch.shared_bytes, (0, size))
        sizes = tuple(map(tuple, self._shapes))
        return Repeat(sizes, 0, room.ljust(-(-len(room) // 8) * 8, b"\0"), tuple(patches), (step,))

    def _tell(self, every: Sequence[torch.Tensor], stream: int, device: int) -> tuple[DecodedTogetherStructure, bool]:
        """And whether the launch may start early; from then on all of it stays, for torch's current stream."""
        kept = [resident(data) for data in every]
        early = [each is not None and each.settle() for each in kept]
        launch, told = _launch_of(self._headers, device), DecodedTogetherStructure.of_none()
        first_block = 0
        for own, header, data, blocks in zip(told.tensors, self._headers, every, launch.blocks, strict=False):
            packed = PackedTensor(header, data)
            own.geometry = GeometryStructure.of(header.geometry)
            own.packed = PackedStructure.of(packed, decode_table(packed))
            own.first_block, own.blocks, own.is_quad = first_block, blocks, header.code is Code.QUAD
            first_block += blocks
        if all(early) and all(each and each.has_table for each in kept):
            self._told[stream] = told
        return told, all(early)


class _Launch(NamedTuple):
    """Attributes:
    blocks: of each tensor.
    """

    block: ThreadBlock
    blocks: tuple[int, ...]

    @property
    def grid(self) -> int:
        return sum(self.blocks)

    @property
    def threads(self) -> int:
        return 32 * self.block.warps

    @property
    def shared_bytes(self) -> int:
        return self.block.shared_bytes


@lru_cache(maxsize=8192)
def _launch_of(headers: tuple[Header, ...], device: int) -> _Launch:
    block = ThreadBlock.of_any(headers, device)
    most, works = zip(*((header.geometry.chunks, _work(header)) for header in headers), strict=True)
    return _Launch(block, divided(nvrtc.multiprocessors(device), most, works))


def _work(header: Header) -> float:
    """In stages of the quad code, that take a warp as long as all of the tensor."""
    geometry = header.geometry
    stages = geometry.row_groups * geometry.stages + _OPENING * geometry.chunks
    return stages if header.code is Code.QUAD else _SINGLE * stages


def divided(blocks: int, most: Sequence[int], works: Sequence[float]) -> tuple[int, ...]:
    """Of so many blocks some for each tensor, such that the most work of a block is as little as can be.

    Args:
        blocks: one for each tensor at least.
        most: for each tensor.
    """
    own = [1] * len(works)
    left = [(-work, i) for i, work in enumerate(works) if most[i] > 1]
    heapq.heapify(left)
    for _ in range(blocks - len(works)):
        if not left:
            break
        _, i = left[0]
        own[i] += 1
        if own[i] < most[i]:
            heapq.heapreplace(left, (-works[i] / own[i], i))
        else:
            heapq.heappop(left)
    return tuple(own)
