"""The quad code's book: which quads get codewords, and how long these are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

from samebits.codecs.huffman import CanonicalCode, package_merge
from samebits.format.packed import MAX_CODE_LENGTH, QUAD_SYMBOLS

if TYPE_CHECKING:
    from numpy.typing import NDArray

PATCH_BITS = 48  # what a quad without codeword is charged: a patch and a half
BOOK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 640, 800, 1000, 1250, 1600)


def quad_book(counts: NDArray[np.int64], words: int) -> tuple[CanonicalCode, float]:
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
            bounds[i] = max(bounds[i], least_bits(counts, covered, size) * scale * (1 - 1e-9) + rest[i])
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
def least_bits(counts: NDArray[np.int64], covered: NDArray[np.int64], size: int) -> float:
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
