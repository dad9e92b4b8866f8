"""What is counted of a tensor's rows, and where shifts would move their exponents."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from samebits.bf16 import entropy
from samebits.cached import cached_property
from samebits.compiled import compiled
from samebits.format.header import EXPONENTS, MAX_SHIFT

if TYPE_CHECKING:
    from numpy.typing import NDArray

FRACTIONS = 16  # row means are kept in sixteenths of an exponent
ALIGNED = 512  # width of a histogram of exponents relative to a row's mean
ALIGNED_ZERO = 256
PINNED = -1  # centre of a row that must not be shifted


@dataclass(frozen=True)
class RowStatistics:
    """What is counted first. A flat tensor counts as one row.

    Attributes:
        histogram: int64 [256], exponents of the sampled rows (of all words, if all rows are).
        centers: int32 [rows], mean exponent of the row's nonzero words in sixteenths, rounded down; PINNED where a word
            is subnormal, infinite or NaN (FORMAT.md 4.3), or where all are zero.
        lowest, highest: int32 [rows], bounds of the exponents other than 0: their extremes or, if these lie closer,
            64 and 191.
        has_subnormals: whether any word has exponent 0 and a mantissa.
        aligned: int64 [FRACTIONS, ALIGNED], exponents other than 0 of the sampled rows that may be shifted, relative to
            the row's whole mean (plus ALIGNED_ZERO), by the fraction of the mean.
        pinned: int64 [256], of the sampled rows: exponents of pinned ones, zeros of all others.
    """

    histogram: NDArray[np.int64]
    centers: NDArray[np.int32]
    lowest: NDArray[np.int32]
    highest: NDArray[np.int32]
    has_subnormals: bool
    aligned: NDArray[np.int64]
    pinned: NDArray[np.int64]

    @classmethod
    def of_one_row(cls, histogram: NDArray[np.int64], lowest: int, highest: int, has_subnormals: bool) -> RowStatistics:
        """Statistics of words that share one shift."""
        center, aligned, pinned = _align(histogram, highest < 255 and not has_subnormals)
        centers, lows, highs = (np.array([value], np.int32) for value in (center, lowest, highest))
        return cls(histogram, centers, lows, highs, has_subnormals, aligned, pinned)

    @classmethod
    def of_flat(cls, histogram: NDArray[np.int64], has_subnormals: bool) -> RowStatistics:
        """Statistics of a flat tensor, all of which is counted."""
        used = np.nonzero(histogram[1:])[0] + 1
        lowest, highest = (int(used[0]), int(used[-1])) if used.size else (1, 254)
        return cls.of_one_row(histogram, lowest, highest, has_subnormals)

    def as_one_row(self) -> RowStatistics:
        """The same words under one shift for all."""
        return self.of_one_row(self.histogram, int(self.lowest.min()), int(self.highest.max()), self.has_subnormals)

    @property
    def words(self) -> int:
        """Words counted in the histogram."""
        return int(self.histogram.sum())

    def shifted(self, target: int) -> NDArray[np.int64]:
        """Histogram [256] of the exponents after shifting every row's mean to ``target`` sixteenths."""
        histogram: NDArray[np.int64] = shift_histogram(self.aligned, self.pinned, self.extent, target)
        return histogram

    def shifts(self, target: int) -> tuple[NDArray[np.int32], bool]:
        """The shift of each row for ``target``, kept within FORMAT.md 4.3; whether ``shifted`` is what they make."""
        shifts: tuple[NDArray[np.int32], bool] = _shift_rows(self.centers, self.lowest, self.highest, target)
        return shifts

    @cached_property
    def extent(self) -> tuple[int, int]:
        """The columns [first, last) of ``aligned`` that are in use."""
        used = np.flatnonzero(self.aligned.sum(axis=0))
        return (int(used[0]), int(used[-1]) + 1) if used.size else (0, 0)

    @cached_property
    def entropy(self) -> float:
        """Of the histogram, in bits."""
        return entropy(self.histogram)

    @cached_property
    def center(self) -> int:
        """The median centre of the rows that may be shifted; 0 if there are none."""
        centers = np.sort(self.centers[self.centers != PINNED])
        return int(centers[centers.size // 2]) if centers.size else 0


@compiled
def shift_histogram(
    aligned: NDArray[np.int64], pinned: NDArray[np.int64], extent: tuple[int, int], target: int
) -> NDArray[np.int64]:
    """RowStatistics.shifted, compiled."""
    result = pinned.copy()
    for fraction in range(FRACTIONS):
        move = (target - fraction + FRACTIONS // 2) // FRACTIONS - ALIGNED_ZERO
        for i in range(extent[0], extent[1]):
            result[min(max(i + move, 1), 254)] += aligned[fraction, i]
    return result


def _align(histogram: NDArray[np.int64], is_free: bool) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
    """Centre, ``aligned`` and ``pinned`` (RowStatistics) of one row."""
    aligned, pinned, nonzero = np.zeros((FRACTIONS, ALIGNED), np.int64), histogram.copy(), histogram[1:]
    if not is_free or not nonzero.any():
        return PINNED, aligned, pinned
    center = int(FRACTIONS * (np.arange(1, EXPONENTS) @ nonzero) // nonzero.sum())
    first = ALIGNED_ZERO + 1 - center // FRACTIONS
    aligned[center % FRACTIONS, first : first + nonzero.size] = nonzero
    pinned[1:] = 0
    return center, aligned, pinned


@compiled
def _shift_rows(
    centers: NDArray[np.int32], lowest: NDArray[np.int32], highest: NDArray[np.int32], target: int
) -> tuple[NDArray[np.int32], bool]:
    """Each row's shift (RowStatistics.shifts), and whether none had to be cut."""
    shifts, exact = np.zeros(centers.size, np.int32), True
    for row in range(centers.size):
        if centers[row] != PINNED:
            wanted = (target - centers[row] + FRACTIONS // 2) // FRACTIONS
            shift = max(wanted, 1 - lowest[row], -MAX_SHIFT)
            shifts[row] = min(shift, 254 - highest[row], MAX_SHIFT)
            exact &= shifts[row] == wanted
    return shifts, exact
