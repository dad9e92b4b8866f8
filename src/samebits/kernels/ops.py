"""The torch.library operators samebits::decode, decode_rows and decode_experts: CPU, CUDA and fake implementations.

    decode(data, shape, fields)                    the original tensor
    decode_rows(data, shape, fields, ids)          the same as decode(...)[ids], decoding no more than that takes
    decode_experts(data, shape, fields, routed)    of decode(...) only what lies at the indices ``routed`` of the first
                                                   dimension; the rest is whatever the memory held, and not to be read

ids and routed are int32 or int64, of any shape, on the device of the data. What is launched depends on their number
alone, not on their values, and the host never waits for these, so that a CUDA graph can be replayed with others. An
index that is negative or too large is an IndexError on the CPU and a failed device-side assertion on a GPU, as with
torch's own embedding.

The first arguments are the packed bytes and the fields of their header, so that a caller keeps the parsed header and no
call ever reads the bytes back from a GPU.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from samebits.codecs.decode import decode_cpu, decode_experts_cpu, decode_rows_cpu
from samebits.errors import DtypeError, InputError
from samebits.format.geometry import Code, Layout
from samebits.format.header import Header
from samebits.format.packed import PackedTensor

_LIBRARY = torch.library.Library("samebits", "DEF")
_LIBRARY.define("decode(Tensor data, int[] shape, int[] fields) -> Tensor")
_LIBRARY.define("decode_rows(Tensor data, int[] shape, int[] fields, Tensor ids) -> Tensor")
_LIBRARY.define("decode_experts(Tensor data, int[] shape, int[] fields, Tensor routed) -> Tensor")


def fields_of(header: Header) -> list[int]:
    """What the operator needs to know besides bytes and shape."""
    return [header.code, header.layout, header.chunk_stages, header.max_code_length, header.window, header.shift,
            header.symbol_count, header.has_row_shifts, header.max_chunk_words, header.stream_words]  # fmt: skip


@lru_cache(maxsize=8192)
def header_of(shape: tuple[int, ...], fields: tuple[int, ...]) -> Header:
    """The inverse of fields_of, without digests; kept, because a header works out its section table only once."""
    code, layout, chunk_stages, length, window, shift, symbols, row_shifts, chunk_words, stream_words = fields
    return Header(Code(code), Layout(layout), shape, chunk_stages, length, window, shift, symbols,
                  bool(row_shifts), chunk_words, stream_words)  # fmt: skip


def decode_packed(packed: PackedTensor) -> torch.Tensor:
    """Decode a validated packed tensor on its device."""
    return torch.ops.samebits.decode(packed.data, packed.shape, fields_of(packed.header))  # type: ignore[no-any-return]


def decode_rows(packed: PackedTensor, ids: torch.Tensor) -> torch.Tensor:
    """``decode_packed(packed)[ids]`` by the operator decode_rows."""
    return torch.ops.samebits.decode_rows(  # type: ignore[no-any-return]
        packed.data, packed.shape, fields_of(packed.header), ids
    )


def decode_experts(packed: PackedTensor, routed: torch.Tensor) -> torch.Tensor:
    """By the operator decode_experts: a tensor that is to be read at the indices ``routed`` only."""
    return torch.ops.samebits.decode_experts(  # type: ignore[no-any-return]
        packed.data, packed.shape, fields_of(packed.header), routed
    )


def packed_of(data: torch.Tensor, shape: list[int], fields: list[int]) -> PackedTensor:
    """What an operator's arguments stand for; without digests.

    Raises:
        InputError: not so many bytes as the header says, beyond whose end a decoder would read.
    """
    header = header_of(tuple(shape), tuple(fields))
    if not header.fits(data):
        raise InputError(header.misfit(data), mend="give the bytes that the shape and the fields are of")
    return PackedTensor(header, data)


def _check_ids(data: torch.Tensor, shape: list[int], ids: torch.Tensor) -> None:
    if not shape:
        raise InputError("a packed tensor without dimensions has no rows", mend="decode it whole")
    if ids.dtype not in (torch.int32, torch.int64):
        raise DtypeError(f"indices must be int32 or int64, not {ids.dtype}", mend="convert them with .long()")
    if ids.device != data.device:
        raise InputError(f"indices on {ids.device} for packed data on {data.device}", mend="move them there")


def _decode_on_cpu(data: torch.Tensor, shape: list[int], fields: list[int]) -> torch.Tensor:
    return decode_cpu(packed_of(data, shape, fields))


def _decode_on_cuda(data: torch.Tensor, shape: list[int], fields: list[int]) -> torch.Tensor:
    from samebits.kernels.decode import decode_cuda

    return decode_cuda(packed_of(data, shape, fields))


def _decode_fake(data: torch.Tensor, shape: list[int], fields: list[int]) -> torch.Tensor:
    return data.new_empty(shape, dtype=torch.bfloat16)


def _rows_on_cpu(data: torch.Tensor, shape: list[int], fields: list[int], ids: torch.Tensor) -> torch.Tensor:
    _check_ids(data, shape, ids)
    return decode_rows_cpu(packed_of(data, shape, fields), ids)


def _rows_on_cuda(data: torch.Tensor, shape: list[int], fields: list[int], ids: torch.Tensor) -> torch.Tensor:
    from samebits.kernels.rows import decode_rows_cuda

    _check_ids(data, shape, ids)
    return decode_rows_cuda(packed_of(data, shape, fields), ids)


def _rows_fake(data: torch.Tensor, shape: list[int], fields: list[int], ids: torch.Tensor) -> torch.Tensor:
    _check_ids(data, shape, ids)
    return data.new_empty((*ids.shape, *shape[1:]), dtype=torch.bfloat16)


def _experts_on_cpu(data: torch.Tensor, shape: list[int], fields: list[int], routed: torch.Tensor) -> torch.Tensor:
    _check_ids(data, shape, routed)
    return decode_experts_cpu(packed_of(data, shape, fields), routed)


def _experts_on_cuda(data: torch.Tensor, shape: list[int], fields: list[int], routed: torch.Tensor) -> torch.Tensor:
    from samebits.kernels.rows import decode_experts_cuda

    _check_ids(data, shape, routed)
    return decode_experts_cuda(packed_of(data, shape, fields), routed)


def _experts_fake(data: torch.Tensor, shape: list[int], fields: list[int], routed: torch.Tensor) -> torch.Tensor:
    _check_ids(data, shape, routed)
    return _decode_fake(data, shape, fields)


for _name, _on_cpu, _on_cuda, _fake in (
    ("decode", _decode_on_cpu, _decode_on_cuda, _decode_fake),
    ("decode_rows", _rows_on_cpu, _rows_on_cuda, _rows_fake),
    ("decode_experts", _experts_on_cpu, _experts_on_cuda, _experts_fake),
):
    _LIBRARY.impl(_name, _on_cpu, "CPU")
    _LIBRARY.impl(_name, _on_cuda, "CUDA")
    torch.library.register_fake(f"samebits::{_name}", _fake, lib=_LIBRARY)
