"""Decode tables in memory: csrc/tables.cu.

A table follows from a packed tensor's code section, and every block of every launch could build it: which takes 2 us,
and on small matrices as many instructions as decoding does. So tensors that are used again keep theirs, 32 KiB at most.
"""

from __future__ import annotations

import ctypes
import weakref

import torch

from samebits.format.geometry import Code
from samebits.format.packed import Header, PackedTensor, align
from samebits.kernels import nvrtc
from samebits.kernels.overlap import Bytes, bytes_of
from samebits.kernels.structures import PackedStructure

MAX_TABLE_BYTES = 4 << 13  # of codewords of at most 13 bits
_THREADS = 512

# By id, the tensors of packed bytes, these, and the table; none once they have changed, as they may go on to. As in
# overlap.py.
_tables: dict[int, tuple[weakref.ref[torch.Tensor], Bytes, torch.Tensor | None]] = {}


def table_words(header: Header) -> int:
    """32-bit words of a tensor's decode table, at least one unit of copies."""
    return max(4, 1 << header.max_code_length)


def decode_table(packed: PackedTensor) -> torch.Tensor | None:
    """The decode table: int32 [table_words(packed.header)] on the tensor's device; None where there is none yet.

    The first call for these bytes makes it on torch's current stream, behind what wrote them, and waits until it is
    there for every stream. During a capture nothing is made, nor of a buffer whose bytes have changed, nor of inference
    tensors, which do not tell that they have.

    Raises:
        DeviceError: the kernel cannot be built or launched.
    """
    data = packed.data
    if data.is_inference():
        return None
    key, its_bytes = id(data), bytes_of(data)
    known = _tables.get(key)
    if known and known[0]() is data and known[1] == its_bytes:
        return known[2]
    if torch.cuda.is_current_stream_capturing():
        return None
    changed = known is not None and known[0]() is data
    table = None if changed else _make(packed)
    _tables[key] = weakref.ref(data, lambda _: _tables.pop(key, None)), its_bytes, table
    return table


def _make(packed: PackedTensor) -> torch.Tensor:
    header, device = packed.header, packed.device.index or 0
    words = table_words(header)
    table = torch.empty(words, dtype=torch.int32, device=packed.device)
    name = f"make_table_{'quad' if header.code is Code.QUAD else 'single'}"
    with nvrtc.on_device(device):
        shared = 4 * (words + align(header.symbol_count, 4))
        nvrtc.launch(nvrtc.kernel("tables.cu", name, device), 1, _THREADS, shared, PackedStructure.of(packed),
                     ctypes.c_void_p(table.data_ptr()))  # fmt: skip
        torch.cuda.current_stream().synchronize()
    return table
