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
from samebits.format.packed import Header, PackedTensor, align
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
    return kept.table


def _make_apart(packed: PackedTensor) -> torch.Tensor:
    """``_make``, on a stream and in a thread of its own, behind torch's current stream.

    Whoever warms up a CUDA graph (torch.compile's) may have this thread's and this stream's memory taken from the
    graph's, where nothing may stay that the graph does not know of.
    """
    device, outcome = packed.device, Future[torch.Tensor]()
    behind = torch.cuda.current_stream(device).record_event()

    def run() -> None:
        try:
            with torch.cuda.stream(_side_stream(device)):
                behind.wait()
                outcome.set_result(_make(packed))
        except BaseException as error:
            outcome.set_exception(error)

    thread = Thread(target=run)
    thread.start()
    thread.join()
    return outcome.result()


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


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
