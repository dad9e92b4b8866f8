"""A tensor of 4,096 to 1,048,576 words takes at most 8.5 bits a word and the entropy of its exponents, or 9.5.

However its exponents are distributed, if these are at most 24 or the words at least 16,384. What remains are tensors of
dozens of exponents far apart or of a hundred equally frequent ones, of which the frequencies alone take a quarter of a
bit a word and more.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import samebits
from samebits.bf16 import entropy, histogram_of_words
from tests.codecs import zoo
from tests.codecs.tensors import tensor_of, words_of
from tests.codecs.zoo import Words

Rng = np.random.Generator
KINDS = {
    "normal": lambda size, rng: zoo.to_bf16(rng.standard_normal(size) * 2.0 ** rng.uniform(-60, 60)),
    "laplace": lambda size, rng: zoo.to_bf16(rng.laplace(size=size) * 2.0 ** rng.uniform(-60, 60)),
    "heavy tails": lambda size, rng: zoo.to_bf16(rng.standard_cauchy(size)),
    "uniform": lambda size, rng: zoo.to_bf16(rng.uniform(-1, 1, size)),
    "any bits": lambda size, rng: rng.integers(0, 1 << 16, size),
    "wide": lambda size, rng: zoo.to_bf16(2.0 ** rng.uniform(-20, 20, size)),
    "constant": lambda size, rng: np.full(size, rng.integers(0, 1 << 16)),
    "two values": lambda size, rng: rng.choice(rng.integers(0, 1 << 16, 2), size),
    "two values, one rare": lambda size, rng: rng.choice(rng.integers(0, 1 << 16, 2), size, p=[0.97, 0.03]),
    "sparse": lambda size, rng: np.where(rng.random(size) < rng.random(), 0, zoo.normal((size,), rng.integers(99))),
    "85 % zeros": lambda size, rng: np.where(rng.random(size) < 0.85, 0, zoo.normal((size,), rng.integers(99))),
    "near 1": lambda size, rng: zoo.to_bf16(1 + 0.1 * rng.standard_normal(size)),
    "three exponents": lambda size, rng: rng.choice([0x0000, 0x2D00, 0x3F80], size, p=[0.01, 0.5, 0.49]),
    "every twentieth any": lambda size, rng: zoo.scattered((size,), rng.integers(99)),
    "rows of any scale": lambda size, rng: zoo.scaled_rows((-(-size // 64), 64), rng.integers(99)).reshape(-1)[:size],
    "subnormal": lambda size, rng: rng.integers(0, 128, size),
    "24 exponents": lambda size, rng: any_exponents(24, size, rng),
}


def any_exponents(most: int, size: int, rng: Rng) -> Words:
    """Up to ``most`` exponents, anywhere, distributed in any way."""
    exponents = rng.permutation(256)[: rng.integers(1, most + 1)]
    shares = rng.dirichlet(np.full(exponents.size, 10 ** rng.uniform(-2, 2)))
    shares = np.append(shares[:-1] * rng.random(), 0)
    shares[-1] = 1 - shares.sum()
    return (rng.choice(exponents, size, p=shares) << 7 | rng.integers(0, 128, size)).astype(np.uint16)


@st.composite
def shapes(draw: st.DrawFn, least: int, most: int) -> tuple[int, ...]:
    """1 to 4 dimensions of ``least`` to ``most`` words."""
    others = draw(st.lists(st.integers(1, 15), max_size=3))
    last = draw(st.integers(-(-least // math.prod(others)), most // math.prod(others)))
    return tuple(draw(st.permutations([*others, last])))


def check_bound(shape: tuple[int, ...], kind: str, seed: int) -> None:
    words = KINDS[kind](math.prod(shape), np.random.default_rng(seed)).astype(np.uint16)
    check_words(words.reshape(shape))


def check_words(words: Words) -> None:
    packed = samebits.encode(tensor_of(words))
    assert packed.bits_per_weight <= max(8 + entropy(histogram_of_words(words.reshape(-1))) + 0.5, 9.5)
    assert words_of(samebits.decode(packed)).tobytes() == words.tobytes()


@settings(max_examples=400)
@given(shapes(4096, 65535), st.sampled_from(sorted(KINDS)), st.integers(0, 2**32 - 1))
def test_bound_of_small_tensors(shape: tuple[int, ...], kind: str, seed: int) -> None:
    check_bound(shape, kind, seed)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("words", [4096, 4097, 4113])
def test_bound_of_the_smallest_tensors(words: int, kind: str) -> None:
    for seed in range(3):
        check_bound((1, 1, 1, words), kind, seed)


@settings(max_examples=30)
@given(shapes(65536, 1 << 20), st.sampled_from(sorted(KINDS)), st.integers(0, 2**32 - 1))
@example((65537,), "normal", 0)
@example((256, 257), "normal", 0)
@example((300, 333), "normal", 0)
@example((1000, 999), "any bits", 0)
@example((1 << 20,), "constant", 0)
def test_bound_of_larger_tensors(shape: tuple[int, ...], kind: str, seed: int) -> None:
    check_bound(shape, kind, seed)


@settings(max_examples=100)
@given(shapes(16384, 65535), st.integers(0, 2**32 - 1))
def test_bound_whatever_the_exponents(shape: tuple[int, ...], seed: int) -> None:
    check_words(any_exponents(256, math.prod(shape), np.random.default_rng(seed)).reshape(shape))


@pytest.mark.parametrize("shape", [(4097,), (80, 80), (128, 50), (512, 9), (200, 77), (128, 100)], ids=str)
def test_small_trained_tensors_take_little_more_than_their_entropy(shape: tuple[int, ...]) -> None:
    """Tables and the like take less than 125 bytes, and run lengths, first states and the code 0.12 bits a word."""
    words = zoo.normal(shape)
    packed = samebits.encode(tensor_of(words))
    limit = 8 + entropy(histogram_of_words(words.reshape(-1)))
    assert packed.nbytes < words.size * (limit + 0.12) / 8 + 125
