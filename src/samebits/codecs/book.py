"""The quad code's book: which quads get codewords, and how long these are."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from samebits.codecs.huffman import CanonicalCode, package_merge
from samebits.compiled import compiled
from samebits.format.header import MAX_CODE_LENGTH, QUAD_SYMBOLS

if TYPE_CHECKING:
    from numpy.typing import NDArray

PATCH_BITS = 48  # what a quad without codeword is charged: a patch and a half
BOOK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 640, 800, 1000, 1250, 1600)
ROUNDING = 1e-9  # more than a bound can be too high because its numbers are rounded


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


@compiled
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
    ascending, own = np.empty(counts.size, np.int64), np.zeros(counts.size + 1)
    for i in range(counts.size):
        covered[i + 1] = covered[i] + counts[i]
        own[i + 1] = own[i] + counts[i] * np.log2(max(counts[i], 1))
        ascending[counts.size - 1 - i] = counts[i]
    loose, bounds, is_tight = np.empty(sizes.size), np.empty(sizes.size), np.zeros(sizes.size, np.bool_)
    for i in range(sizes.size):
        bits = covered[sizes[i]] * np.log2(max(covered[sizes[i]], 1)) - own[sizes[i]]  # at their entropy
        loose[i] = bounds[i] = _price(bits, sizes[i], covered, sample, scale) * (1 - ROUNDING)
    best, best_bits, best_lengths = 0, np.inf, np.zeros(0, np.int64)
    while True:
        i = int(np.argmin(bounds))
        if bounds[i] > best_bits or bounds[i] == np.inf:
            return best_lengths, best_bits
        if not is_tight[i]:
            bits = least_bits(counts, covered, sizes[i])
            bounds[i] = max(bounds[i], _price(bits, sizes[i], covered, sample, scale) * (1 - ROUNDING))
            is_tight[i] = True
            continue
        weights = ascending[counts.size - sizes[i] :]
        lengths = package_merge(weights, np.int64(MAX_CODE_LENGTH))  # for a literal it would be compiled once more
        coded = 0
        for symbol in range(weights.size):
            coded += lengths[symbol] * weights[symbol]
        bits = _price(float(coded), sizes[i], covered, sample, scale)
        bounds[i] = np.inf
        if bits < best_bits or (bits == best_bits and loose[i] < loose[best]):
            best, best_bits, best_lengths = i, bits, lengths


@compiled
def _price(coded: float, size: int, covered: NDArray[np.int64], sample: int, scale: float) -> float:
    """Bits of the whole tensor: of quads with codewords, which take ``coded`` in the sample, of others, of the book."""
    return float((coded + (PATCH_BITS + 7) * (sample - covered[size])) * scale + 16 * size)


@compiled
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
