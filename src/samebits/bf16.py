"""BF16 words: their exponents, and how much those carry."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from samebits.compiled import compiled
from samebits.parallel import run_ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray

_GRAIN = 1 << 20  # words per task
_FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")
# Of the other dtypes that can hold values of BF16: integers of their width, to compare bits.
_WORDS = {
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
    **{getattr(torch, name): torch.int8 for name in _FLOAT8 if hasattr(torch, name)},  # not all in older torch
}
_VALUES_AT_ONCE = 1 << 24  # that are rounded or compared, so that copies of them stay small
_NAN = 0x7FC0  # what every NaN is rounded to: torch gives it other bits on other machines, of F64 on other threads


def words_of(tensor: torch.Tensor) -> NDArray[np.uint16]:
    """The words of a BF16 CPU tensor, row-major (a view where the tensor is contiguous)."""
    return tensor.detach().contiguous().reshape(-1).view(torch.int16).numpy().view(np.uint16)


def same_words(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two BF16 tensors of one device have the same shape and bits."""
    return torch.equal(left.view(torch.int16), right.view(torch.int16))


def round_into(out: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """Round floating point values to BF16, to nearest, ties to even, with the same bits on every machine.

    Args:
        out: bfloat16, contiguous, with as many values; filled and returned.
    """
    parts = (values.detach().reshape(-1).split(_VALUES_AT_ONCE) for values in (out, tensor))
    for rounded, values in zip(*parts, strict=True):
        rounded.copy_(values)
        rounded.view(torch.int16).masked_fill_(rounded.isnan(), _NAN)
    return out


def is_bf16(tensor: torch.Tensor) -> bool:
    """Whether BF16 has every value of a tensor, whatever floating point dtype it is stored in; compared as bits.

    In another dtype it has no NaN: conversion need not keep its bits.
    """
    if tensor.dtype == torch.bfloat16:
        return True
    words = _WORDS.get(tensor.dtype)
    return words is not None and all(
        _are_bf16(values, words) for values in tensor.detach().reshape(-1).split(_VALUES_AT_ONCE)
    )


def _are_bf16(values: torch.Tensor, words: torch.dtype) -> bool:
    rounded = values.to(torch.bfloat16)
    return torch.equal(rounded.to(values.dtype).view(words), values.view(words)) and not rounded.isnan().any()


@compiled
def count_exponents(words: NDArray[np.uint16], first: int, last: int, counts: NDArray[np.int64]) -> None:
    """Add the exponents of words[first:last] to ``counts`` [4, 256]; four tables keep the additions independent."""
    part = words[first:last]  # whose indices are known not to be negative
    middle = part.size // 4 * 4
    for i in range(0, middle, 4):
        counts[0, (part[i] >> 7) & 255] += 1
        counts[1, (part[i + 1] >> 7) & 255] += 1
        counts[2, (part[i + 2] >> 7) & 255] += 1
        counts[3, (part[i + 3] >> 7) & 255] += 1
    for i in range(middle, part.size):
        counts[0, (part[i] >> 7) & 255] += 1


def exponent_histogram(tensor: torch.Tensor) -> NDArray[np.int64]:
    """How often each exponent byte occurs in a BF16 CPU tensor: int64 [256]."""
    return histogram_of_words(words_of(tensor))


def histogram_of_words(words: NDArray[np.uint16]) -> NDArray[np.int64]:
    """How often each exponent byte occurs: int64 [256]."""
    parts = run_ranges(histogram_of_range, words.size, _GRAIN, words)
    return np.sum(parts, axis=0, dtype=np.int64) if parts else np.zeros(256, np.int64)


def histogram_of_range(words: NDArray[np.uint16], first: int, last: int) -> NDArray[np.int64]:
    """``histogram_of_words`` of words[first:last], by this thread."""
    counts = np.zeros((4, 256), np.int64)
    count_exponents(words, first, last, counts)
    total: NDArray[np.int64] = counts.sum(0)
    return total


def entropy(histogram: NDArray[np.int64]) -> float:
    """Shannon entropy of a histogram, in bits per symbol."""
    total = int(histogram.sum())
    if total == 0:
        return 0.0
    shares = histogram[histogram > 0] / total
    return max(0.0, float(-(shares * np.log2(shares)).sum()))
