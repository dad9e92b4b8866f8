"""Decode tables in memory: csrc/tables.cu.

A table follows from a packed tensor's code section, and every block of every launch could build it: which takes 2 us,
and on small matrices as many instructions as decoding does. So tensors that are used again keep theirs, 32 KiB at most.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import Future
from functools import cache
from threading import Lock, Thread

import torch

from samebits.format.geometry import Code
from samebits.format.header import Header, align
from samebits.format.packed import PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.residents import resident
from samebits.kernels.structures import PackedStructure

MAX_TABLE_BYTES = 4 << 13  # of codewords of at most 13 bits
_THREADS = 512
_lock = Lock()


def table_words(header: Header) -> int:
    """32-bit words of a tensor's decode table, at least one unit of copies."""
    return max(4, 1 << header.max_code_length)


def decode_table(packed: PackedTensor) -> torch.Tensor | None:
    """The decode table: int32 [table_words(packed.header)] on the tensor's device; None where there is none yet.

    It is for launches on torch's current stream: its memory is nobody else's before they have ended, whenever the
    tensor goes. So whoever keeps the address asks once for each stream.

    The first call for these bytes makes it on torch's current stream, behind what wrote them, and waits until it is
    there for every stream. During a capture nothing is made, nor of a buffer whose bytes have changed, nor of inference
    tensors, which do not tell that they have.

    Raises:
        DeviceError: the kernel cannot be built or launched.
    """
    kept = resident(packed.data)
    if kept is None:
        return None
    if not kept.has_table and not torch.cuda.is_current_stream_capturing():
        made = None if kept.has_changed else _make_apart(packed)
        with _lock:  # of two threads' tables the first one stays, whose address launches may have by now
            if not kept.has_table:
                kept.table, kept.has_table = made, True
    if kept.table is not None:
        kept.table.record_stream(torch.cuda.current_stream(packed.device))
    return kept.table


def _make_apart(packed: PackedTensor) -> torch.Tensor:
    """A table made on torch's current stream, in memory taken by a thread and for a stream of its own.

    Whoever warms up a CUDA graph (torch.compile's) may have this thread's and this stream's memory taken from the
    graph's, where nothing may stay that the graph does not know of. No kernel runs on that other stream: where some
    have, all kernels of a process begin later, in graphs by 0.2 to 0.35 us each.
    """
    words, outcome = table_words(packed.header), Future[torch.Tensor]()
    apart = _apart_from(torch.cuda.current_stream(packed.device))

    def take() -> None:
        try:
            with torch.cuda.stream(apart):
                outcome.set_result(torch.empty(words, dtype=torch.int32, device=packed.device))
        except BaseException as error:
            outcome.set_exception(error)

    thread = Thread(target=take)
    thread.start()
    thread.join()
    table = outcome.result()
    _make(packed, table)
    return table


@cache
def _apart_from(stream: torch.cuda.Stream) -> torch.cuda.Stream:
    """Another one for each: what becomes free of its memory is given to tables that are made behind this one."""
    return torch.cuda.Stream(stream.device)


def _make(packed: PackedTensor, table: torch.Tensor) -> None:
    header, device = packed.header, packed.device.index or 0
    name = f"make_table_{'quad' if header.code is Code.QUAD else 'single'}"
    with nvrtc.on_device(device):
        shared = 4 * (len(table) + align(header.symbol_count, 4))
        nvrtc.launch(nvrtc.kernel("tables.cu", name, device), 1, _THREADS, shared, PackedStructure.of(packed),
                     ctypes.c_void_p(table.data_ptr()))  # fmt: skip
        torch.cuda.current_stream().synchronize()
