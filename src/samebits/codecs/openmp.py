"""Compiled loops on the threads that torch multiplies with.

Between two products torch's OpenMP threads wait for the next one actively, for milliseconds: threads of our own would
share the cores with them, at half the speed. So a module's weights are decoded by torch's threads, by a call of the
function that compilers make of "omp parallel", in the library that torch has loaded (GNU's, or LLVM's and Intel's,
which have that function too).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from samebits.parallel import threads

if TYPE_CHECKING:
    from numpy.typing import NDArray

NEXT, DONE, COUNT, GRAIN, FIELDS = range(5)  # places in what a task is given; from FIELDS on its own
THREAD_WORDS = 1 << 15  # for one thread at least, as torch has it

_forked = False  # the threads of an OpenMP library do not outlive a fork, and it does not know


def run(
    task: Callable[[], Any], count: int, words: int, arrays: Sequence[NDArray[Any]], numbers: Sequence[int]
) -> bool:
    """Have torch's threads do ``count`` items of work.

    Args:
        task: a compiled.callback. It gets an address of int64: the next item, how many are done, ``count``, how many to
            take at once; address and length of each array; the numbers. It takes items by ``fetch_add`` of the first,
            and adds to the second those that it has done.
        count: of items.
        words: BF16 values in all of them.
        arrays: contiguous.

    Returns:
        Whether it is done. False, with nothing done: torch has no such threads here.

    Raises:
        MemoryError: no room for a thread's buffers.
    """
    parallel = _parallel()
    if parallel is None or _forked or not all(array.flags.c_contiguous and array.flags.aligned for array in arrays):
        return False
    used = max(1, min(threads(), torch.get_num_threads(), words // THREAD_WORDS))
    grain = max(1, count // (8 * used))
    places = (number for array in arrays for number in (array.__array_interface__["data"][0], array.size))
    fields = np.array([0, 0, count, grain, *places, *numbers], np.int64)
    parallel(task().address, fields.__array_interface__["data"][0], used, 0)
    if fields[DONE] != count:
        raise MemoryError("no memory to decode with")
    return True


@cache
def _parallel() -> Any:
    """GOMP_parallel(function, data, threads, flags) of torch's OpenMP library; None if torch has none."""
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        parallel = library.GOMP_parallel  # found in what that is linked with
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None
    return parallel


@intrinsic  # type: ignore[untyped-decorator]
def fetch_add(typing_context: Any, address: Any, number: Any) -> Any:
    """Add to the int64 at an address, for all threads at once; what it was before."""

    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", pointer, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), make


@intrinsic  # type: ignore[untyped-decorator]
def pointer(typing_context: Any, address: Any) -> Any:
    """What numba.carray takes, of an int64."""

    def make(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.int64), make


def _in_child() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
