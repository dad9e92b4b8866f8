"""Memory of large tensors that the CPU decodes, used again.

The C library gets 32 MiB and more from the system each time and gives them back, and to clear the pages takes the
system as long as decoding: a model would have that for each layer and each token. So the largest block is kept, and
taken again when no tensor is in it any more.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

_LEAST = 32 << 20  # bytes; less than that glibc keeps itself
_MOST = 512 << 20  # bytes that are kept

Words = NDArray[np.int16]


class _Block(NamedTuple):
    """Memory, and who is in it: the array of a tensor, or None once that is gone."""

    memory: Words
    user: Callable[[], Words | None]


_blocks: list[_Block] = []
_lock = threading.Lock()


def empty(shape: Sequence[int]) -> torch.Tensor:
    """A BF16 tensor on the CPU, contiguous, of whatever the memory held."""
    words = math.prod(shape)
    array = np.empty(words, np.int16) if 2 * words < _LEAST else _large(words)
    return torch.from_numpy(array).view(torch.bfloat16).view(tuple(shape))


def _large(words: int) -> Words:
    if 2 * words > _MOST:
        return np.empty(words, np.int16)
    with _lock:
        busy: list[_Block] = []
        free: list[_Block] = []
        for block in _blocks:
            (free if block.user() is None else busy).append(block)
        fitting = [block.memory for block in free if block.memory.size >= words]
        memory = min(fitting, key=len) if fitting else np.empty(words, np.int16)
        array = memory[:words]
        others = [*busy, *(block for block in free if fitting and block.memory is not memory)]
        if sum(block.memory.nbytes for block in others) + memory.nbytes <= _MOST:
            others.append(_Block(memory, weakref.ref(array)))
        _blocks[:] = others
        return array


def _renew_lock() -> None:
    """In a forked child, where nobody would release it."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
