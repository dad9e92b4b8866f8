"""The digest of FORMAT.md 2.3 against the reference's, and exponents against plain counting."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from samebits.bf16 import entropy, exponent_histogram
from samebits.codecs.reference import digest_reference
from samebits.digest import digest
from tests.codecs.strategies import words_of_any_shape
from tests.codecs.tensors import tensor_of
from tests.codecs.zoo import Words, normal


@pytest.mark.clause("2.3")
@given(st.binary(max_size=300))
def test_digest_is_the_references(data: bytes) -> None:
    expected = digest_reference(data)
    assert digest(data) == digest(bytearray(data)) == digest(memoryview(data)) == expected
    array = np.frombuffer(data, np.uint8)
    assert digest(array) == digest(torch.from_numpy(array.copy())) == expected


@pytest.mark.clause("2.3")
def test_digest_over_several_tasks() -> None:
    """Ranges of 2^17 words of 64 bits each, and a tail."""
    data = np.random.default_rng(0).integers(0, 256, (1 << 21) + 5, dtype=np.uint8)
    pieces = np.concatenate([data, np.zeros(3, np.uint8)]).view("<u8")
    with np.errstate(over="ignore"):
        z = pieces + np.arange(1, pieces.size + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        expected = int((z ^ z >> np.uint64(31)).sum())
    assert digest(data) == expected


def test_digest_of_tensors() -> None:
    words = normal((30, 50))
    tensor = tensor_of(words)
    assert digest(tensor) == digest_reference(words.tobytes())
    assert digest(tensor.T) == digest_reference(words.T.tobytes())
    assert digest(torch.tensor(1.5)) == digest_reference(np.float32(1.5).tobytes())
    assert digest(tensor[:0]) == 0


@given(words_of_any_shape())
def test_histogram_counts_exponents(words: Words) -> None:
    counts = Counter((words.reshape(-1) >> 7 & 255).tolist())
    histogram = exponent_histogram(tensor_of(words))
    assert (histogram.dtype, histogram.shape) == (np.int64, (256,))
    assert {exponent: count for exponent, count in enumerate(histogram.tolist()) if count} == counts


def test_histogram_over_several_tasks() -> None:
    words = np.tile(np.arange(65536, dtype=np.uint16), 40)
    assert exponent_histogram(tensor_of(words)).tolist() == [256 * 40] * 256


@pytest.mark.parametrize(
    ("counts", "bits"), [([], 0), ([7], 0), ([1, 1], 1), ([4, 2, 1, 1], 1.75), ([1] * 256, 8), ([0, 3, 0, 3], 1)]
)
def test_entropy(counts: list[int], bits: float) -> None:
    histogram = np.array(counts + [0] * (256 - len(counts)), np.int64)
    assert math.isclose(entropy(histogram), bits)
