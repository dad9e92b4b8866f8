"""Memory of large tensors that the CPU decodes, used again.

The C library gets 32 MiB and more from the system each time and gives them back, and to clear the pages takes the
system as long as decoding: a model would have that for each layer and each token. So blocks are kept, and
taken again when no tensor is in them any more.
"""

from __future__ import annotations

import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

_LEAST = 32 << 20  # bytes; less than that glibc keeps itself
_MOST = 512 << 20  # bytes that are kept

_Words = NDArray[np.int16]


class _Block:
    """Memory, and who is in it: the array of a tensor, or None once that is gone."""

    __slots__ = ("memory", "user")

    def __init__(self, words: int) -> None:
        self.memory = np.empty(words, np.int16)
        self.user: Callable[[], _Words | None] = lambda: None

    def take(self, words: int) -> _Words:
        array = self.memory[:words]
        self.user = weakref.ref(array)
        return array


class _Asked(threading.local):
    to_stay = False


_asked = _Asked()


@contextmanager
def staying() -> Iterator[None]:
    """What this thread decodes meanwhile is to stay: it gets no more memory than it needs, and its own."""
    before, _asked.to_stay = _asked.to_stay, True
    try:
        yield
    finally:
        _asked.to_stay = before


_blocks: list[_Block] = []
_lock = threading.Lock()


def empty(shape: Sequence[int]) -> torch.Tensor:
    """A BF16 tensor on the CPU, contiguous, of whatever the memory held."""
    words = math.prod(shape)
    array = _large(words) if 2 * words >= _LEAST and not _asked.to_stay else np.empty(words, np.int16)
    return torch.from_numpy(array).view(torch.bfloat16).view(tuple(shape))


def _large(words: int) -> _Words:
    if 2 * words > _MOST:
        return np.empty(words, np.int16)
    with _lock:
        fitting = [block for block in _blocks if block.user() is None and block.memory.size >= words]
        if fitting:
            return min(fitting, key=lambda block: block.memory.size).take(words)
        _blocks[:] = [block for block in _blocks if block.user() is not None]  # what is free is too small
        block = _Block(words)
        if sum(each.memory.nbytes for each in (*_blocks, block)) <= _MOST:
            _blocks.append(block)
        return block.take(words)


def _renew_lock() -> None:
    """In a forked child, where nobody would release it."""
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_lock)
