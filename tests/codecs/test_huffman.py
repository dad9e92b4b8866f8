"""Code lengths are optimal under their limit; codes are canonical; the two tables undo each other."""

from __future__ import annotations

from collections import Counter
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samebits.codecs.decode_loops import several_symbols
from samebits.codecs.huffman import CanonicalCode, code_lengths, package_merge
from tests.codecs.slow_encoder import QUAD, Choices, huffman_lengths

WEIGHTS = st.lists(st.integers(1, 1000) | st.sampled_from([1, 1 << 40]), min_size=2, max_size=200)


@cache
def complete_codes(count: int, limit: int, shortest: int = 0) -> list[tuple[int, ...]]:
    """All ascending lengths, up to ``limit``, of ``count`` codewords that share ``2 ** -shortest`` completely."""
    if count == 1:
        return [(shortest,)]
    if shortest == limit:
        return []
    return sorted(
        {
            tuple(sorted(left + right))
            for size in range(1, count)
            for left in complete_codes(size, limit, shortest + 1)
            for right in complete_codes(count - size, limit, shortest + 1)
        }
    )


def cost(weights: list[int], lengths: list[int] | tuple[int, ...]) -> int:
    return sum(weight * length for weight, length in zip(weights, lengths, strict=True))


@settings(max_examples=200)
@given(st.lists(st.integers(1, 300), min_size=2, max_size=7), st.integers(3, 6))
def test_no_complete_code_is_cheaper(weights: list[int], limit: int) -> None:
    lengths = code_lengths(np.array(weights, np.int64), limit).tolist()
    assert max(lengths) <= limit
    best = min(cost(sorted(weights, reverse=True), code) for code in complete_codes(len(weights), limit))
    assert cost(weights, lengths) == best


def plain_package_merge(weights: list[int], limit: int) -> list[int]:
    """Larmore and Hirschberg's lists as they stand; of equal weights a symbol comes before a package."""
    symbols = [(weight, (i,)) for i, weight in enumerate(weights)]
    level = symbols
    for _ in range(limit - 1):
        packages = [(a + b, one + other) for (a, one), (b, other) in zip(level[::2], level[1::2], strict=False)]
        level = sorted(symbols + packages, key=lambda item: item[0])
    lengths = Counter(i for _, taken in level[: 2 * len(weights) - 2] for i in taken)
    return [lengths[i] for i in range(len(weights))]


@given(WEIGHTS | st.lists(st.integers(1, 3), min_size=2, max_size=200), st.sampled_from([8, 12, 13]))
def test_shortcuts_change_no_length(weights: list[int], limit: int) -> None:
    weights.sort()
    assert package_merge(np.array(weights, np.int64), limit).tolist() == plain_package_merge(weights, limit)


@given(WEIGHTS)
def test_without_a_limit_it_is_huffmans(weights: list[int]) -> None:
    lengths = code_lengths(np.array(weights, np.int64), 200)
    huffman = huffman_lengths(dict(enumerate(weights)), 255)
    assert cost(weights, lengths.tolist()) == cost(weights, list(huffman.values()))


@pytest.mark.clause("3.2")
@given(WEIGHTS, st.sampled_from([8, 12, 13]))
def test_codes_are_complete_and_within_the_limit(weights: list[int], limit: int) -> None:
    lengths = code_lengths(np.array(weights, np.int64), limit)
    assert 1 <= lengths.min() <= lengths.max() <= limit
    assert sum(1 << limit - length for length in lengths.tolist()) == 1 << limit


def test_one_symbol_has_one_bit() -> None:
    assert code_lengths(np.array([7], np.int64), 12).tolist() == [1]


def test_a_full_book_of_quads() -> None:
    lengths = code_lengths(np.ones(4096, np.int64), 13)
    assert (lengths == 12).all()


@pytest.mark.clause("3.1", "3.2", "3.3")
@given(WEIGHTS)
def test_tables_hold_the_canonical_code(weights: list[int]) -> None:
    symbols = np.random.default_rng(len(weights)).permutation(4096)[: len(weights)]
    lengths = code_lengths(np.array(weights, np.int64), 13)
    code = CanonicalCode.from_lengths(symbols, lengths)
    expected = Choices(QUAD, dict(zip(symbols.tolist(), lengths.tolist(), strict=True)), matrix=False)
    assert code.symbols.tolist() == expected.symbols
    encode, decode = code.encode_table(4096), code.decode_table(13)
    for symbol, codeword in expected.codewords.items():
        first_bit_lowest = int(codeword[::-1], 2)
        assert encode[symbol] == len(codeword) << 16 | first_bit_lowest
        assert (decode[first_bit_lowest :: 1 << len(codeword)] == len(codeword) << 12 | symbol).all()
    assert np.count_nonzero(encode) == len(weights)


@pytest.mark.parametrize("lengths", [[1, 2, 3, 3], [1], [3, 3, 3, 3, 3, 3, 3, 3], [1, 2, 4, 6, 8, 10, 12, 12, 10]])
def test_windows_of_several_codewords(lengths: list[int]) -> None:
    """As one codeword after the other, as many as a window holds whole, but four at most and one in any case."""
    symbols = np.arange(100, 100 + len(lengths))
    width = max(lengths)
    table = CanonicalCode.from_lengths(symbols, np.array(lengths)).decode_table(width)
    for window, entry in enumerate(several_symbols(table, width).tolist()):
        expected, used = [], 0
        while len(expected) < 4:
            length, symbol = table[window >> used] >> 12, table[window >> used] & 0xFFF
            if expected and used + length > width:
                break
            expected.append(int(symbol))
            used += int(length)
        count, length = entry >> 38, entry >> 32 & 0x3F
        assert (count, length) == (len(expected), used)
        assert [entry >> 8 * i & 0xFF for i in range(count)] == expected
        assert entry & 0xFFFFFFFF < 1 << 8 * count
