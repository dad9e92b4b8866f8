"""The torch.library operator samebits::decode: CPU, CUDA and fake implementations.

Its arguments are the packed bytes and the fields of their header, so that a caller keeps the parsed header and no call
ever reads the bytes back from a GPU.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from samebits.codecs.decode import decode_cpu
from samebits.format.geometry import Code, Layout
from samebits.format.packed import Header, PackedTensor

_LIBRARY = torch.library.Library("samebits", "DEF")
_LIBRARY.define("decode(Tensor data, int[] shape, int[] fields) -> Tensor")


def fields_of(header: Header) -> list[int]:
    """What the operator needs to know besides bytes and shape."""
    return [header.code, header.layout, header.chunk_stages, header.max_code_length, header.window, header.shift,
            header.symbol_count, header.has_row_shifts, header.max_chunk_words, header.stream_words]  # fmt: skip


@lru_cache(maxsize=65536)
def header_of(shape: tuple[int, ...], fields: tuple[int, ...]) -> Header:
    """The inverse of fields_of, without digests; kept, because a header works out its section table only once."""
    code, layout, chunk_stages, length, window, shift, symbols, row_shifts, chunk_words, stream_words = fields
    return Header(Code(code), Layout(layout), shape, chunk_stages, length, window, shift, symbols,
                  bool(row_shifts), chunk_words, stream_words)  # fmt: skip


def decode_packed(packed: PackedTensor) -> torch.Tensor:
    """Decode a validated packed tensor on its device."""
    return torch.ops.samebits.decode(packed.data, packed.shape, fields_of(packed.header))  # type: ignore[no-any-return]


def _decode_on_cpu(data: torch.Tensor, shape: list[int], fields: list[int]) -> torch.Tensor:
    return decode_cpu(PackedTensor(header_of(tuple(shape), tuple(fields)), data))


def _decode_on_cuda(data: torch.Tensor, shape: list[int], fields: list[int]) -> torch.Tensor:
    from samebits.kernels.decode import decode_cuda

    return decode_cuda(PackedTensor(header_of(tuple(shape), tuple(fields)), data))


def _decode_fake(data: torch.Tensor, shape: list[int], fields: list[int]) -> torch.Tensor:
    return data.new_empty(shape, dtype=torch.bfloat16)


_LIBRARY.impl("decode", _decode_on_cpu, "CPU")
_LIBRARY.impl("decode", _decode_on_cuda, "CUDA")
torch.library.register_fake("samebits::decode", _decode_fake, lib=_LIBRARY)
