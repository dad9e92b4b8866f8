"""The CPU decoder against everything the format allows, not only what samebits' encoder writes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import samebits
from samebits.codecs.decode import decode_cpu
from samebits.codecs.reference import decode_reference
from tests.codecs.slow_encoder import Choices, quad_choices, single_choices, slow_encode
from tests.codecs.strategies import all_choices, words_of_any_shape
from tests.codecs.tensors import packed_of, words_of
from tests.codecs.zoo import ZOO, Case, Words, scattered


@pytest.mark.clause("1.3", "1.4", "1.5", "3.3", "4.3", "5.2", "5.3", "6.3", "6.4", "6.5")
@pytest.mark.clause("1.6", "3.6", "3.7", "5.5", "6.7", "6.8")
@pytest.mark.parametrize("case", ZOO, ids=str)
def test_decodes_the_zoo(case: Case) -> None:
    decoded = words_of(samebits.decode(packed_of(case.packed)))
    assert decoded.shape == case.words.shape
    assert decoded.tobytes() == case.words.tobytes()


@settings(max_examples=300)
@given(st.data())
def test_decodes_any_legal_choice(data: st.DataObject) -> None:
    words: Words = data.draw(words_of_any_shape(2000).filter(lambda words: words.size > 0))
    packed = slow_encode(words, data.draw(all_choices(words)))
    assert decode_reference(packed).tobytes() == words.tobytes()
    assert words_of(samebits.decode(packed_of(packed))).tobytes() == words.tobytes()


@pytest.mark.clause("5.4")
@pytest.mark.parametrize("shape", [(11, 200), (3, 7, 65), (1000,), (1,)], ids=str)
@pytest.mark.parametrize("choose", [quad_choices, single_choices])
def test_ignores_what_padding_holds(choose: Callable[..., Choices], shape: tuple[int, ...]) -> None:
    words = scattered(shape)
    choices = choose(words, matrix=len(shape) > 1)
    packed = slow_encode(words, replace(choices, strange_padding=True))
    assert packed != slow_encode(words, choices)
    assert decode_reference(packed).tobytes() == words.tobytes()
    assert words_of(samebits.decode(packed_of(packed))).tobytes() == words.tobytes()


@pytest.mark.parametrize(
    "case", [case for case in ZOO if case.name in ("quad_matrix", "single_flat", "compact_escapes")], ids=str
)
def test_decodes_into_a_given_tensor(case: Case) -> None:
    out = torch.full(case.words.shape, torch.nan, dtype=torch.bfloat16)
    assert decode_cpu(packed_of(case.packed), out) is out
    assert words_of(out).tobytes() == case.words.tobytes()


def test_raw_tensors_decode_to_a_copy() -> None:
    tensor = torch.ones(3, dtype=torch.bfloat16)
    packed = samebits.encode(tensor)
    assert packed.is_raw
    samebits.decode(packed).zero_()
    assert words_of(samebits.decode(packed)).tolist() == [0x3F80] * 3


def test_two_threads_decode_at_once() -> None:
    """The compiled loops share nothing."""
    cases = [case for case in ZOO if case.words.size > 10_000] * 4
    with ThreadPoolExecutor(4) as pool:
        decoded = list(pool.map(lambda case: words_of(samebits.decode(packed_of(case.packed))).tobytes(), cases))
    assert decoded == [case.words.tobytes() for case in cases]
