"""The digest of FORMAT.md 2.3: a sum of mixed 64-bit words, so it has no order and runs at the speed of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numba import njit

from samebits.parallel import run_ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from typing_extensions import Buffer

_WORD = np.uint64
_GOLDEN = _WORD(0x9E3779B97F4A7C15)
_FIRST = _WORD(0xBF58476D1CE4E5B9)
_SECOND = _WORD(0x94D049BB133111EB)
_MASK = 0xFFFFFFFFFFFFFFFF
_GRAIN = 1 << 17  # 64-bit words per task


@njit(cache=True, nogil=True)
def _sum(words: NDArray[np.uint64], first: int, last: int) -> np.uint64:
    total = _WORD(0)
    for i in range(first, last):
        z = words[i] + _WORD(i + 1) * _GOLDEN
        z ^= z >> _WORD(30)
        z *= _FIRST
        z ^= z >> _WORD(27)
        z *= _SECOND
        total += z ^ (z >> _WORD(31))
    return total


def digest(data: torch.Tensor | NDArray[np.generic] | Buffer) -> int:
    """The 64-bit digest of the bytes of a CPU tensor (contiguous), an array or any buffer."""
    raw = _as_bytes(data)
    whole = raw[: raw.size // 8 * 8].view(_WORD)
    total = sum(int(part) for part in run_ranges(_sum, whole.size, _GRAIN, whole))
    if raw.size % 8:
        tail = np.zeros(1, _WORD)
        tail.view(np.uint8)[: raw.size % 8] = raw[whole.size * 8 :]
        position = whole.size * int(_GOLDEN) & _MASK  # _sum counts from 0
        total += _sum(tail + _WORD(position), 0, 1)
    return int(total) & _MASK


def _as_bytes(data: torch.Tensor | NDArray[np.generic] | Buffer) -> NDArray[np.uint8]:
    if isinstance(data, torch.Tensor):
        return data.detach().contiguous().as_strided((data.numel(),), (1,)).view(torch.uint8).numpy()
    if isinstance(data, np.ndarray):
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return np.frombuffer(memoryview(data), np.uint8)
