"""How a tensor is to be packed: layout, shifts, code. Decided from counts alone, so every device decides alike.

1. Row statistics: exponent histogram of the whole tensor, mean exponent of each row.
2. Shifts: rows of different scale are moved by whole powers of two onto a common target, so that one code fits them
   all. The target's fraction also decides which exponents pair up in a quad code's top7, whose lowest bit goes uncoded.
3. The quad code over a sample of rows, the single code over the whole histogram; quad unless single is much smaller.
4. Whether the compact code is worth trying: for small tensors always.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numba import njit

from samebits.bf16 import entropy
from samebits.codecs.huffman import CanonicalCode, code_lengths, package_merge
from samebits.format.geometry import STREAMS, Code, Geometry, Layout
from samebits.format.packed import (
    EXPONENTS,
    MAX_CODE_LENGTH,
    MAX_COMPACT_WORDS,
    MAX_SHIFT,
    MAX_SINGLE_CODE_LENGTH,
    MAX_WINDOW,
    QUAD_SYMBOLS,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK_STAGES = 16
STREAM_BITS = 5.4  # what a stream's length costs: a nibble, and the rounding to its unit
CHUNK_BITS = 80  # a chunk's first word, its offset and the rounding to whole words
FRACTIONS = 16  # row means are kept in sixteenths of an exponent
ALIGNED = 512  # width of a histogram of exponents relative to a row's mean
ALIGNED_ZERO = 256
PINNED = -1  # centre of a row that must not be shifted
CLASSES = 8
SAMPLE_WORDS = 1 << 22  # words whose quads are counted

PATCH_BITS = 48  # what a quad without codeword is charged: a patch and a half
OUTSIDE_BITS = 44  # what a word outside the window is charged while the target is sought
QUAD_PREMIUM = 0.10  # bits per weight a quad code may cost beyond the single code, for its speed
QUAD_OVERHEAD = 0.195  # and beyond the entropy
COMPACT_WORDS = 1 << 16  # smaller tensors take the compact code wherever it is the smallest
COMPACT_EXCESS = 0.25  # larger ones where the others take so many bits more than 8 and the entropy
BOOK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 640, 800, 1000, 1250, 1600)


@njit(cache=True, nogil=True)
def _extent(aligned: NDArray[np.int64]) -> tuple[int, int]:
    total = np.zeros(ALIGNED, np.int64)
    for fraction in range(FRACTIONS):
        total += aligned[fraction]
    used = np.nonzero(total)[0]
    return (used[0], used[-1] + 1) if used.size > 0 else (0, 0)


@njit(cache=True, nogil=True)
def _shift_histogram(
    aligned: NDArray[np.int64], pinned: NDArray[np.int64], extent: tuple[int, int], target: int
) -> NDArray[np.int64]:
    result = pinned.copy()
    for fraction in range(FRACTIONS):
        move = (target - fraction + FRACTIONS // 2) // FRACTIONS - ALIGNED_ZERO
        for i in range(extent[0], extent[1]):
            result[min(max(i + move, 1), 254)] += aligned[fraction, i]
    return result


@njit(cache=True, nogil=True)
def _align(histogram: NDArray[np.int64], is_free: bool) -> tuple[int, NDArray[np.int64], NDArray[np.int64]]:
    """Centre, ``aligned`` and ``pinned`` (RowStatistics) of one row."""
    aligned, pinned = np.zeros((FRACTIONS, ALIGNED), np.int64), histogram.copy()
    nonzero = histogram[1:].sum()
    if nonzero == 0 or not is_free:
        return PINNED, aligned, pinned
    center = FRACTIONS * (np.arange(histogram.size) * histogram).sum() // nonzero
    start = ALIGNED_ZERO - center // FRACTIONS
    aligned[center % FRACTIONS, start + 1 : start + histogram.size] = histogram[1:]
    pinned[1:] = 0
    return center, aligned, pinned


@njit(cache=True, nogil=True)
def _median_center(centers: NDArray[np.int32]) -> int:
    counts = np.zeros(FRACTIONS * EXPONENTS, np.int64)
    for center in centers:
        if center != PINNED:
            counts[center] += 1
    below = np.cumsum(counts)
    return np.searchsorted(below, below[-1] // 2, side="right") if below[-1] > 0 else 0


@njit(cache=True, nogil=True)
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
        histogram: NDArray[np.int64] = _shift_histogram(self.aligned, self.pinned, self.extent, target)
        return histogram

    def shifts(self, target: int) -> tuple[NDArray[np.int32], bool]:
        """The shift of each row for ``target``, kept within FORMAT.md 4.3; whether ``shifted`` is what they make."""
        shifts: tuple[NDArray[np.int32], bool] = _shift_rows(self.centers, self.lowest, self.highest, target)
        return shifts

    @cached_property
    def extent(self) -> tuple[int, int]:
        """The columns [first, last) of ``aligned`` that are in use."""
        extent: tuple[int, int] = _extent(self.aligned)
        return extent

    @cached_property
    def entropy(self) -> float:
        """Of the histogram, in bits."""
        return entropy(self.histogram)

    @cached_property
    def center(self) -> int:
        """The median centre of the rows that may be shifted; 0 if there are none."""
        return int(_median_center(self.centers))


class Counter(Protocol):
    """Counts on one device what a plan is decided from."""

    def rows(self, stride: int) -> RowStatistics:
        """Statistics by row, exponents counted in every ``stride``-th (matrix); of all words as one row (flat)."""

    def quads(self, shifts: NDArray[np.int32], window: int, stride: int) -> NDArray[np.int64]:
        """Quads of every ``stride``-th row: int64 [QUAD_SYMBOLS + 1]; the last entry counts those that have a word
        outside the window.
        """


@dataclass(frozen=True)
class Plan:
    """Everything an encoder needs besides the words.

    Attributes:
        shifts: int32 [rows] or [1]; one entry is the header's scalar shift.
        entropy: of the exponents, bits.
        bits: what a weight takes, about.
    """

    code: Code
    layout: Layout
    geometry: Geometry
    shifts: NDArray[np.int32]
    window: int
    table: CanonicalCode
    entropy: float
    bits: float

    @property
    def has_row_shifts(self) -> bool:
        return self.shifts.size > 1


@dataclass(frozen=True)
class _Candidate:
    code: Code
    bits: float  # per weight, without framing
    shifts: NDArray[np.int32]
    window: int
    table: CanonicalCode


def make_plan(shape: tuple[int, ...], counter: Counter, chunk_stages: int = CHUNK_STAGES) -> Plan | None:
    """Decide how to pack a tensor of ``shape``; None if packing would not make it smaller."""
    layout, geometry = Geometry.of_shape(shape, chunk_stages)
    stride = max(1, geometry.words // SAMPLE_WORDS) | 1
    statistics = counter.rows(stride)
    best = _best_candidate(statistics, counter, geometry, stride)
    if best.code is Code.SINGLE and statistics.words < geometry.words:
        statistics = counter.rows(1)  # every exponent that occurs needs a codeword
        best = _single(statistics, geometry)
    if best.bits >= 16:
        return None
    return Plan(best.code, layout, geometry, best.shifts, best.window, best.table, statistics.entropy,
                best.bits + _framing(geometry))  # fmt: skip


def is_small(words: int) -> bool:
    """Whether a tensor of ``words`` words tries the compact code whatever its plan is."""
    return words < COMPACT_WORDS


def wants_compact(words: int, plan: Plan | None) -> bool:
    """Whether to try the compact code for a tensor of ``words`` words, for which there is that plan otherwise."""
    if is_small(words):
        return True
    others_are_long = plan is None or plan.bits > 8 + plan.entropy + COMPACT_EXCESS
    return words <= MAX_COMPACT_WORDS and others_are_long


def _best_candidate(statistics: RowStatistics, counter: Counter, geometry: Geometry, stride: int) -> _Candidate:
    """The quad code, unless it is much longer than the single code or misses its bound."""
    single = _single(statistics, geometry)
    if single.bits >= 16 + QUAD_PREMIUM:
        return single
    quad = _quad(statistics, counter, geometry, stride)
    bound = 8 + statistics.entropy + QUAD_OVERHEAD
    worthy = quad.bits <= single.bits + QUAD_PREMIUM and quad.bits + _framing(geometry) <= bound
    return quad if worthy or quad.bits < single.bits else single


def _framing(geometry: Geometry) -> float:
    """Bits per weight that chunk words, offsets and stream lengths (a nibble and half a unit each) take, about."""
    chunk_words = 512 * geometry.stages * geometry.row_groups / geometry.chunks
    return (STREAMS * STREAM_BITS + CHUNK_BITS) / chunk_words


def _single(statistics: RowStatistics, geometry: Geometry) -> _Candidate:
    """The single code, with row shifts where they pay and can be followed exactly."""
    rows = statistics.centers.size
    shifts, histogram = np.zeros(1, np.int32), statistics.histogram
    if rows > 1 and geometry.columns > 64:
        moved = statistics.shifted(statistics.center)
        row_shifts, exact = statistics.shifts(statistics.center)
        gain = (statistics.entropy - entropy(moved)) * geometry.words
        if exact and gain > 8 * rows:
            shifts, histogram = row_shifts, moved
    symbols = np.nonzero(histogram)[0]
    lengths = code_lengths(histogram[symbols], MAX_SINGLE_CODE_LENGTH)
    coded = int((lengths * histogram[symbols]).sum()) * geometry.words / statistics.words
    bits = coded + 16 * symbols.size + (8 * rows if shifts.size > 1 else 0)
    table = CanonicalCode.from_lengths(symbols, lengths)
    bits += 8 * geometry.plane_bytes(Code.SINGLE)
    return _Candidate(Code.SINGLE, bits / geometry.words, shifts, 0, table)


def _quad(statistics: RowStatistics, counter: Counter, geometry: Geometry, stride: int) -> _Candidate:
    rows = statistics.centers.size
    scalar = statistics.as_one_row() if rows > 1 else statistics
    target, cost = _best_target(scalar)
    chosen, row_bits = scalar, 0
    if rows > 1:
        row_target, row_cost = _best_target(statistics)
        if row_cost + 8 * rows * statistics.words / geometry.words < cost:
            chosen, target, row_bits = statistics, row_target, 8 * rows
    shifts, window = _place_window(chosen, target)
    counts = counter.quads(shifts, window, stride)
    table, bits = _quad_book(counts, geometry.words)
    bits += row_bits + 8 * geometry.plane_bytes(Code.QUAD)
    return _Candidate(Code.QUAD, bits / geometry.words, shifts, window, table)


def _best_target(statistics: RowStatistics) -> tuple[int, float]:
    """The target (sixteenths) at which top7 costs least, and that cost in bits."""
    targets = statistics.center + np.arange(0, 2 * FRACTIONS, 2)
    costs = _top7_costs(statistics.aligned, statistics.pinned, statistics.extent, targets)
    best = int(np.argmin(costs))
    return int(targets[best]), float(costs[best])


@njit(cache=True, nogil=True)
def _top7_costs(
    aligned: NDArray[np.int64], pinned: NDArray[np.int64], extent: tuple[int, int], targets: NDArray[np.int64]
) -> NDArray[np.float64]:
    """For each target, bits of coding top7 in its best window, legal or not (a further even shift makes it legal)."""
    costs = np.empty(targets.size)
    for i in range(targets.size):
        top7, words = _windows(aligned, pinned, extent, targets[i])
        start = np.argmax(words)
        covered = words[start]
        costs[i] = OUTSIDE_BITS * (top7.sum() - covered)
        for number in top7[start : start + CLASSES]:
            if number > 0:
                costs[i] += number * np.log2(covered / number)
    return costs


@njit(cache=True, nogil=True)
def _windows(
    aligned: NDArray[np.int64], pinned: NDArray[np.int64], extent: tuple[int, int], target: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many words have each top7 [128], and how many each window covers [121]."""
    histogram = _shift_histogram(aligned, pinned, extent, target)
    top7 = histogram[0::2] + histogram[1::2]
    words = np.empty(MAX_WINDOW + 1, np.int64)
    words[0] = top7[:CLASSES].sum()
    for window in range(1, words.size):
        words[window] = words[window - 1] + top7[window + CLASSES - 1] - top7[window - 1]
    return top7, words


def _place_window(statistics: RowStatistics, target: int) -> tuple[NDArray[np.int32], int]:
    """The rows' shifts and the window (FORMAT.md 3.4) that covers most words."""
    moves = (0, 1, -1, 2, -2, 3, -3, 4, -4)  # in top7; one of them leads out of every straddling window
    targets = target + 2 * FRACTIONS * np.array(moves)
    best, window = _best_window(statistics.aligned, statistics.pinned, statistics.extent, targets)
    return statistics.shifts(best)[0], window


@njit(cache=True, nogil=True)
def _best_window(
    aligned: NDArray[np.int64], pinned: NDArray[np.int64], extent: tuple[int, int], targets: NDArray[np.int64]
) -> tuple[int, int]:
    """The first target, and the first window for it, with which a legal window covers most words."""
    covered, best, best_window = -1, 0, 0
    for target in targets:
        _, words = _windows(aligned, pinned, extent, target)
        for window in range(words.size):
            if window % 16 <= 8 and words[window] > covered:
                covered, best, best_window = words[window], target, window
    return best, best_window


def _quad_book(counts: NDArray[np.int64], words: int) -> tuple[CanonicalCode, float]:
    """The code book that makes ``words`` words cheapest, and the bits they take, from the counts of a sample."""
    inside = counts[:QUAD_SYMBOLS]
    used = np.flatnonzero(inside) if inside.any() else np.zeros(1, np.int64)
    order = used[np.argsort(-inside[used], kind="stable")[: BOOK_SIZES[-1]]]
    sizes = np.array([size for size in BOOK_SIZES if size < order.size] + [order.size])
    sample = max(1, int(counts.sum()))
    lengths, bits = _best_book(inside[order], sizes, sample, words / (4 * sample))
    # Of equally frequent quads the first gets the longest code.
    rarest_first = np.argsort(inside[order[: lengths.size]], kind="stable")
    return CanonicalCode.from_lengths(order[rarest_first], lengths), bits


@njit(cache=True, nogil=True)
def _best_book(
    counts: NDArray[np.int64], sizes: NDArray[np.int64], sample: int, scale: float
) -> tuple[NDArray[np.int64], float]:
    """The code lengths of the most frequent quads, rarest first, in the cheapest book; what it costs in bits.

    Bounds say which sizes cannot be the cheapest, so that a code is made for one or two of them.

    Args:
        counts: of the most frequent quads, falling.
        sizes: of the books to choose from.
        sample: quads counted, those outside the window too.
        scale: quads of the tensor for each of them.
    """
    covered = np.zeros(counts.size + 1, np.int64)
    covered[1:] = np.cumsum(counts)
    rest = (PATCH_BITS + 7) * (sample - covered)[sizes] * scale + 16 * sizes
    ascending = counts[::-1].copy()
    loose = _entropies(counts, covered)[sizes] * scale * (1 - 1e-9) + rest
    bounds, is_tight = loose.copy(), np.zeros(sizes.size, np.bool_)
    best, best_bits, best_lengths = 0, np.inf, np.zeros(0, np.int64)
    while True:
        i = np.argmin(bounds)
        if bounds[i] > best_bits or bounds[i] == np.inf:
            return best_lengths, best_bits
        size = sizes[i]
        if not is_tight[i]:
            bounds[i] = max(bounds[i], _least_bits(counts, covered, size) * scale * (1 - 1e-9) + rest[i])
            is_tight[i] = True
            continue
        weights = ascending[counts.size - size :]
        lengths = package_merge(weights, MAX_CODE_LENGTH)
        coded = (lengths * weights).sum()
        bits = (coded + (PATCH_BITS + 7) * (sample - covered[size])) * scale + 16 * size
        bounds[i] = np.inf
        if bits < best_bits or (bits == best_bits and loose[i] < loose[best]):
            best, best_bits, best_lengths = int(i), bits, lengths


@njit(cache=True, nogil=True)
def _entropies(counts: NDArray[np.int64], covered: NDArray[np.int64]) -> NDArray[np.float64]:
    """Bits of the first ``size`` symbols at their entropy, for every size: no prefix code takes fewer."""
    bits, own = np.zeros(covered.size), 0.0
    for size in range(1, covered.size):
        own += counts[size - 1] * np.log2(max(counts[size - 1], 1))
        bits[size] = covered[size] * np.log2(max(covered[size], 1)) - own
    return bits


@njit(cache=True, nogil=True)
def _least_bits(counts: NDArray[np.int64], covered: NDArray[np.int64], size: int) -> float:
    """Fewer bits than any prefix code takes for the first ``size`` symbols, by very little.

    At a price for every share of the codes that it uses up, each symbol by itself takes the length that is best for it
    (Lagrange's relaxation of Kraft's inequality). That is a bound at any price; the best price uses up all codes.
    """
    best = 0.0
    low, high = 1.0 * covered[size], 4.0 * covered[size]
    for _ in range(10):
        price = np.sqrt(low * high)
        bits, shares, first = 0, 0.0, 0
        for length in range(1, MAX_CODE_LENGTH + 1):
            last, beyond = first, size  # the symbols [first, last) gain nothing from being a bit longer
            if length == MAX_CODE_LENGTH:
                last = size
            least = price / (2 << length)
            while last < beyond:
                middle = (last + beyond) // 2
                if counts[middle] >= least:
                    last = middle + 1
                else:
                    beyond = middle
            bits += length * int(covered[last] - covered[first])
            shares += (last - first) / (1 << length)
            first = last
        best = max(best, bits + price * (shares - 1))
        if shares > 1:
            low = price
        else:
            high = price
    return best
