"""Several packed tensors decoded into one tensor on a CUDA device, by one launch: csrc/pieces.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from samebits.format.geometry import Code
from samebits.format.packed import PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.decode import ALIGNMENT, ThreadBlock, is_whole
from samebits.kernels.structures import GeometryStructure, PackedStructure, PieceStructure

STORED = 4  # words that a lane stores at once


class Piece(NamedTuple):
    """A packed tensor, and where its words belong: ``words`` of each entry of the output, from ``start`` on."""

    packed: PackedTensor
    start: int
    words: int

    @property
    def rows(self) -> int:
        """Of the packed tensor, in each entry."""
        return self.words // self.packed.header.geometry.columns


def can_be_piece(piece: Piece) -> bool:
    """Whether the kernel can decode it on a GPU: the quad code without padding, with whole rows in each entry."""
    header = piece.packed.header
    return (
        header.code is Code.QUAD
        and is_whole(header.geometry)
        and piece.words % header.geometry.columns == 0
        and piece.start % STORED == 0
        and piece.packed.data.data_ptr() % ALIGNMENT == 0
    )


class Pieces:
    """What a launch is told of its pieces, copied to their device on the stream that decodes them.

    Args:
        pieces: at least one, each of which ``can_be_piece``, all on one CUDA device. They must not change.

    Raises:
        DeviceError: the kernel cannot be built.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._pieces = tuple(pieces)  # their bytes must stay
        self._device = pieces[0].packed.data.get_device()
        headers = [piece.packed.header for piece in pieces]
        ends = [0, *accumulate(header.geometry.chunks for header in headers)]
        block = ThreadBlock.of_any(headers, self._device)
        structures = (PieceStructure * len(pieces))(*map(_structure, pieces, ends))
        told = torch.frombuffer(bytearray(structures), dtype=torch.uint8)
        with nvrtc.on_device(self._device):
            self._pinned = told.pin_memory()
            self._function = nvrtc.kernel("pieces.cu", "decode_pieces", self._device)
        grid = min(nvrtc.multiprocessors(self._device), ends[-1])
        self._shape = grid, 32 * block.warps, block.shared_bytes
        self._told: dict[int, torch.Tensor] = {}  # on the device, by the stream that copied it there
        self._address, self._output, self._words = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int64()
        self._arguments = (self._address, ctypes.c_int32(len(pieces)),
                           ctypes.c_int64(ends[-1]), self._output, self._words, block.division)  # fmt: skip
        self._pointers = (ctypes.c_void_p * len(self._arguments))(*map(ctypes.addressof, self._arguments))

    def decode(self, output: torch.Tensor) -> None:
        """All pieces, on torch's current stream; by one thread at a time.

        Args:
            output: bfloat16 [entries, words], contiguous, ``words`` a multiple of 4. What belongs to no piece stays.

        Raises:
            DeviceError: the kernel cannot be launched.
        """
        assert output.is_contiguous()
        assert output.shape[1] % STORED == 0
        self._output.value, self._words.value = output.data_ptr(), output.shape[1]
        with nvrtc.on_device(self._device):
            stream = nvrtc.current_stream(self._device)
            told = self._told.get(stream)
            early = told is not None  # behind another kernel, but not behind what wrote pieces
            if told is None:
                told = self._pinned.to(self._pieces[0].packed.device, non_blocking=True)
                if not torch.cuda.is_current_stream_capturing():  # what is captured has not run yet
                    self._told[stream] = told
            self._address.value = told.data_ptr()
            nvrtc.launcher(self._function, *self._shape, stream, early, self._device)(ctypes.addressof(self._pointers))


def _structure(piece: Piece, first_chunk: int) -> PieceStructure:
    header = piece.packed.header
    return PieceStructure(GeometryStructure.of(header.geometry), PackedStructure.of(piece.packed), first_chunk,
                          piece.start, piece.words, piece.rows)  # fmt: skip
