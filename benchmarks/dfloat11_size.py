"""What DFloat11 would need for the same weights: its published layout, counted without writing it.

One unit (all matrices of a layer behind each other) holds sign_mantissa (a byte a weight), the Huffman stream of the
exponents, 5 bits for each 8 bytes and 4 bytes for each 4096 bytes of that stream, decode tables of 256 bytes each, and
8 bytes for each matrix but the last.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from samebits.df11.code import UnitCode
from samebits.df11.unit import BLOCK_BYTES, BLOCK_WINDOWS, GAP_BITS
from samebits.errors import InputError


def unit_bytes(histogram: NDArray[np.int64], matrices: int) -> int:
    """Bytes of one unit of ``matrices`` matrices with this histogram of exponents, int64 [256].

    A unit that the layout cannot hold stays uncompressed: two bytes a weight.
    """
    weights = int(histogram.sum())
    try:
        code = UnitCode.from_histogram(histogram)
        tables = code.tables().size
    except InputError:
        return 2 * weights
    stream = -(-int((histogram * code.lengths).sum()) // 8)
    blocks = -(-stream // BLOCK_BYTES)
    gaps = BLOCK_WINDOWS * GAP_BITS // 8 * blocks
    return weights + stream + tables + gaps + 4 * (blocks + 1) + 8 * (matrices - 1)
