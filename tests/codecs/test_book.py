"""The quad code's book is the cheapest there is, though few are tried; quads without codeword become the nearest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from samebits.codecs.book import BOOK_SIZES, PATCH_BITS, least_bits, quad_book
from samebits.codecs.huffman import code_lengths
from samebits.codecs.loops import nearest_quads
from tests.codecs.slow_encoder import QUAD, Choices, nearest_symbol

COUNTS = st.lists(st.integers(1, 60) | st.sampled_from([1 << 10, 1 << 20]), min_size=1, max_size=300)


@given(COUNTS, st.integers(0, 1000), st.integers(1, 4))
def test_no_book_is_cheaper(counts: list[int], outside: int, words_per_count: int) -> None:
    quads = np.zeros(4097, np.int64)
    quads[np.random.default_rng(len(counts)).permutation(4096)[: len(counts)]] = counts
    quads[4096] = outside
    falling = np.array(sorted(counts, reverse=True), np.int64)
    prices = []
    for size in {min(size, len(counts)) for size in BOOK_SIZES}:
        lengths = code_lengths(falling[:size], 13)
        coded, uncoded = int(lengths @ falling[:size]), int(falling[size:].sum()) + outside
        prices.append((coded + (PATCH_BITS + 7) * uncoded) * words_per_count / 4 + 16 * size)
    book, bits = quad_book(quads, words_per_count * int(quads.sum()))
    assert bits == pytest.approx(min(prices), rel=1e-12)
    taken = quads[book.symbols]
    assert taken.min() >= falling[taken.size - 1]


def test_no_quad_lies_in_the_window() -> None:
    quads = np.zeros(4097, np.int64)
    quads[4096] = 9
    book, bits = quad_book(quads, 36)
    assert (book.symbols.tolist(), bits) == ([0], 9 * (PATCH_BITS + 7) + 16)


@given(COUNTS)
def test_the_bound_is_one(counts: list[int]) -> None:
    falling = np.array(sorted(counts, reverse=True), np.int64)
    covered = np.concatenate([[0], np.cumsum(falling)])
    assert least_bits(falling, covered, falling.size) <= int(code_lengths(falling, 13) @ falling) * (1 + 1e-9)


def test_the_bound_is_close() -> None:
    falling = 1_000_000 // np.arange(10, 1010)
    covered = np.concatenate([[0], np.cumsum(falling)])
    for size in (64, 500, 1000):
        assert least_bits(falling, covered, size) > 0.9999 * int(code_lengths(falling[:size], 13) @ falling[:size])


@given(st.lists(st.integers(0, 4095), min_size=1, max_size=40, unique=True), st.integers(0, 40))
def test_nearest_quads(symbols: list[int], step: int) -> None:
    choices = Choices(QUAD, dict.fromkeys(sorted(symbols), 6), matrix=False)
    nearest = nearest_quads(np.array(choices.symbols, np.uint16))
    for quad in range(step, 4096, 41):
        assert nearest[quad] == nearest_symbol(tuple(quad >> 3 * i & 7 for i in range(4)), choices)
