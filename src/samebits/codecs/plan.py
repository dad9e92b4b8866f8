"""How a tensor is to be packed: layout, shifts, code. Decided from counts alone, so every device decides alike.

1. Row statistics: exponent histogram of the tensor, or of rows at even distances if it is large; mean exponent of each.
2. Shifts: rows of different scale are moved by whole powers of two onto a common target, so that one code fits them
   all. The target's fraction also decides which exponents pair up in a quad code's top7, whose lowest bit goes uncoded.
3. The quad code over a sample of rows, the single code over the whole histogram; quad unless single is much smaller.
4. Whether the compact code is worth trying: for small tensors always.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from samebits.bf16 import entropy
from samebits.codecs.book import quad_book
from samebits.codecs.huffman import CanonicalCode, code_lengths
from samebits.codecs.row_statistics import FRACTIONS, RowStatistics, shift_histogram
from samebits.compiled import compiled
from samebits.format.geometry import EXPERTS_DIMENSIONS, STREAMS, Code, Geometry, Layout
from samebits.format.header import MAX_COMPACT_WORDS, MAX_DIMENSIONS, MAX_SINGLE_CODE_LENGTH, MAX_WINDOW

if TYPE_CHECKING:
    from numpy.typing import NDArray

CHUNK_STAGES = 16
STREAM_BITS = 5.4  # what a stream's length costs: a nibble, and the rounding to its unit
CHUNK_BITS = 80  # a chunk's first word, its offset and the rounding to whole words
CLASSES = 8
SAMPLE_WORDS = 1 << 22  # words whose quads are counted
OUTSIDE_BITS = 44  # what a word outside the window is charged while the target is sought
QUAD_PREMIUM, QUAD_OVERHEAD = 0.10, 0.195  # bits per weight a quad code may cost beyond the single code, and beyond
# the entropy, for its speed;
FUSED_PREMIUM, FUSED_OVERHEAD = 0.15, 0.24  # where rows are long enough for fused kernels, which take no other code
COMPACT_WORDS = 1 << 16  # smaller tensors take the compact code wherever it is the smallest
COMPACT_EXCESS = 0.25  # larger ones where the others take so many bits more than 8 and the entropy


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


def make_plan(shape: tuple[int, ...], counter: Counter) -> Plan | None:
    """Decide how to pack a tensor of ``shape``; None if packing would not make it smaller."""
    layout, geometry = Geometry.of_shape(shape, CHUNK_STAGES)
    stride = max(1, geometry.words // SAMPLE_WORDS) | 1
    statistics = counter.rows(stride)
    best = _best_candidate(statistics, counter, geometry, stride, may_be_fused=_may_be_fused(shape, geometry))
    if best.code is Code.SINGLE and statistics.words < geometry.words:
        statistics = counter.rows(1)  # every exponent that occurs needs a codeword
        best = _single(statistics, geometry)
    if best.bits >= 16:
        return None
    return Plan(best.code, layout, geometry, best.shifts, best.window, best.table, statistics.entropy,
                best.bits + _framing(geometry))  # fmt: skip


def can_be_packed(shape: tuple[int, ...]) -> bool:
    """Whether there is anything to pack, and a header for it."""
    return math.prod(shape) > 0 and len(shape) <= MAX_DIMENSIONS


def is_small(words: int) -> bool:
    """Whether a tensor of ``words`` words tries the compact code whatever its plan is."""
    return words < COMPACT_WORDS


def wants_compact(words: int, plan: Plan | None) -> bool:
    """Whether to try the compact code for a tensor of ``words`` words, for which there is that plan otherwise."""
    if is_small(words):
        return True
    others_are_long = plan is None or plan.bits > 8 + plan.entropy + COMPACT_EXCESS
    return words <= MAX_COMPACT_WORDS and others_are_long


def _may_be_fused(shape: tuple[int, ...], geometry: Geometry) -> bool:
    """Whether rows are long enough for fused kernels; of stacks of matrices, experts, shorter ones are."""
    is_stack = len(shape) == EXPERTS_DIMENSIONS and geometry.row_groups_per_chunk == 1
    return geometry.stages >= CHUNK_STAGES or is_stack


def _best_candidate(
    statistics: RowStatistics, counter: Counter, geometry: Geometry, stride: int, *, may_be_fused: bool
) -> _Candidate:
    """The quad code, unless it is much longer than the single code or misses its bound."""
    single = _single(statistics, geometry)
    premium, overhead = (FUSED_PREMIUM, FUSED_OVERHEAD) if may_be_fused else (QUAD_PREMIUM, QUAD_OVERHEAD)
    if single.bits >= 16 + premium:
        return single
    quad = _quad(statistics, counter, geometry, stride)
    within = quad.bits + _framing(geometry) <= 8 + statistics.entropy + overhead
    worthy = quad.bits <= single.bits + premium and within
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
    table, bits = quad_book(counts, geometry.words)
    bits += row_bits + 8 * geometry.plane_bytes(Code.QUAD)
    return _Candidate(Code.QUAD, bits / geometry.words, shifts, window, table)


def _best_target(statistics: RowStatistics) -> tuple[int, float]:
    """The target (sixteenths) at which top7 costs least, and that cost in bits."""
    targets = statistics.center + np.arange(0, 2 * FRACTIONS, 2)
    costs = _top7_costs(statistics.aligned, statistics.pinned, statistics.extent, targets)
    best = int(np.argmin(costs))
    return int(targets[best]), float(costs[best])


@compiled
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


@compiled
def _windows(
    aligned: NDArray[np.int64], pinned: NDArray[np.int64], extent: tuple[int, int], target: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many words have each top7 [128], and how many each window covers [121]."""
    histogram = shift_histogram(aligned, pinned, extent, target)
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


@compiled
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
