"""The digest of FORMAT.md 2.3: a sum of mixed 64-bit words, so it has no order and runs at the speed of memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from samebits.compiled import compiled
from samebits.parallel import run_ranges
from samebits.vectors import DIGESTED, FIRST, GOLDEN, SECOND, mix_words

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray
    from typing_extensions import Buffer

_WORD = np.uint64
_GOLDEN, _FIRST, _SECOND = _WORD(GOLDEN), _WORD(FIRST), _WORD(SECOND)
_MASK = 0xFFFFFFFFFFFFFFFF
_GRAIN = 1 << 17  # 64-bit words per task


@compiled
def sum_words(words: NDArray[np.uint64], first: int, last: int) -> np.uint64:
    """What words [first, last) of a whole add to its digest."""
    total, start = _WORD(0), _WORD(first)
    while start + _WORD(DIGESTED) <= _WORD(last):
        total += mix_words(words, start)
        start += _WORD(DIGESTED)
    for i in range(start, _WORD(last)):
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
    return digest_of_sums(raw, run_ranges(sum_words, whole.size, _GRAIN, whole))


def digest_of_sums(data: NDArray[np.generic], sums: Iterable[np.uint64]) -> int:
    """The digest of a contiguous array, from ``sum_words`` of its whole 64-bit words, in any parts."""
    raw = _as_bytes(data)
    total, words, rest = sum(map(int, sums)), raw.size // 8, raw.size % 8
    if rest:
        tail = np.zeros(1, _WORD)
        tail.view(np.uint8)[:rest] = raw[8 * words :]
        position = words * int(_GOLDEN) & _MASK  # sum_words counts from 0
        total += int(sum_words(tail + _WORD(position), 0, 1))
    return total & _MASK


def _as_bytes(data: torch.Tensor | NDArray[np.generic] | Buffer) -> NDArray[np.uint8]:
    if isinstance(data, torch.Tensor):
        return data.detach().contiguous().as_strided((data.numel(),), (1,)).view(torch.uint8).numpy()
    if isinstance(data, np.ndarray):
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return np.frombuffer(memoryview(data), np.uint8)
