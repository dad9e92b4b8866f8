"""Decoding some of a packed tensor's entries on a CUDA device: csrc/rows.cu."""

from __future__ import annotations

import torch

from samebits.codecs.decode import gathers
from samebits.format.geometry import STAGE
from samebits.format.packed import PackedTensor
from samebits.kernels.decode import decode_cuda, is_whole, launch
from samebits.kernels.structures import GatherStructure, RoutedStructure


def decode_rows_cuda(packed: PackedTensor, ids: torch.Tensor) -> torch.Tensor:
    """``decode_cuda(packed)[ids]``, decoding no more than that takes, on torch's current stream.

    Args:
        ids: int32 or int64, any shape, on the same device. Its size decides what is launched; its values are not read.

    Raises:
        DeviceError: as decode_cuda. An id out of range fails an assertion on the device.
    """
    header, geometry = packed.header, packed.header.geometry
    shape, count = (*ids.shape, *packed.shape[1:]), ids.numel()
    if not gathers(header, count):
        return decode_cuda(packed).index_select(0, ids.reshape(-1)).view(shape)
    output = torch.empty(shape, dtype=torch.bfloat16, device=packed.device)
    if count == 0:
        return output
    ids = ids.contiguous()
    chunks = geometry.chunks_of_runs(header.entry_words)
    whole_rows = geometry.columns % STAGE == 0 and header.entry_words % geometry.columns == 0
    launch("rows.cu", "decode_rows", packed, output, count * chunks, whole_rows,
           GatherStructure(ids.data_ptr(), header.shape[0], header.entry_words, ids.dtype == torch.int64, count,
                           chunks))  # fmt: skip
    return output


def decode_experts_cuda(packed: PackedTensor, routed: torch.Tensor) -> torch.Tensor:
    """A tensor of the packed shape, written at the indices ``routed`` of the first dimension only, on torch's stream.

    Args:
        routed: int32 or int64, any shape, on the same device. Neither its size nor its values decide what is launched.

    Raises:
        DeviceError: as decode_cuda. An index out of range fails an assertion on the device.
    """
    header = packed.header
    flags = torch.zeros(header.shape[0], dtype=torch.uint8, device=packed.device)
    flags.scatter_(0, routed.reshape(-1).long(), 1)  # asserts that they are in range
    if not header.is_chunked:
        return decode_cuda(packed)
    output = torch.empty(packed.shape, dtype=torch.bfloat16, device=packed.device)
    launch("rows.cu", "decode_experts", packed, output, header.geometry.chunks, is_whole(header.geometry),
           RoutedStructure(flags.data_ptr(), header.entry_words))  # fmt: skip
    return output
