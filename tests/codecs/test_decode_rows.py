"""Entries of the first dimension, decoded without the rest: the same words as from the whole tensor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import samebits
from samebits.codecs import decode
from samebits.codecs.decode import decode_cpu, decode_experts_cpu, decode_rows_cpu, gathers
from samebits.format.packed import PackedTensor
from tests.codecs.entries import SHAPES, WITH_ROWS, only, some_ids
from tests.codecs.slow_encoder import slow_encode
from tests.codecs.strategies import all_choices, words_of_any_shape
from tests.codecs.tensors import packed_of, tensor_of, without_compact, words_of
from tests.codecs.zoo import Case, Words, normal


@pytest.fixture
def _always_gathers(monkeypatch: pytest.MonkeyPatch) -> None:
    """However small the tensor is."""
    monkeypatch.setattr(decode, "gathers", lambda header, count: header.is_chunked)


def check_rows(packed: PackedTensor, words: Words, ids: torch.Tensor) -> None:
    rows = decode_rows_cpu(packed, ids)
    assert (rows.dtype, rows.shape) == (torch.bfloat16, (*ids.shape, *words.shape[1:]))
    assert words_of(rows).tobytes() == words[ids.numpy()].tobytes()


@pytest.mark.usefixtures("_always_gathers")
@pytest.mark.parametrize("case", WITH_ROWS, ids=str)
def test_rows_of_the_zoo(case: Case) -> None:
    for ids in some_ids(len(case.words)):
        check_rows(packed_of(case.packed), case.words, ids)


@pytest.mark.parametrize("case", WITH_ROWS, ids=str)
def test_rows_of_the_zoo_however_they_are_decoded(case: Case) -> None:
    for ids in some_ids(len(case.words)):
        check_rows(packed_of(case.packed), case.words, ids)


@pytest.mark.usefixtures("_always_gathers")
@given(st.data())
def test_rows_of_any_legal_choice(data: st.DataObject) -> None:
    words: Words = data.draw(words_of_any_shape(2000).filter(lambda words: words.size > 0 and words.ndim > 0))
    packed = packed_of(slow_encode(words, data.draw(all_choices(words))))
    ids = data.draw(st.lists(st.integers(0, len(words) - 1), max_size=6))
    check_rows(packed, words, torch.tensor(ids, dtype=torch.int64))


@pytest.mark.parametrize("case", WITH_ROWS, ids=str)
def test_routed_experts_of_the_zoo(case: Case) -> None:
    for ids in some_ids(len(case.words)):
        experts = decode_experts_cpu(packed_of(case.packed), ids)
        assert (experts.dtype, experts.shape) == (torch.bfloat16, case.words.shape)
        assert words_of(experts)[ids.numpy()].tobytes() == case.words[ids.numpy()].tobytes()


@pytest.mark.parametrize("shape", [(0, 3), (5,), (2, 0)], ids=str)
def test_rows_of_what_is_not_packed(shape: tuple[int, ...]) -> None:
    packed = samebits.encode(torch.ones(shape, dtype=torch.bfloat16))
    assert packed.is_raw
    for ids in [torch.tensor([], dtype=torch.int64), *([torch.tensor([1, 0])] if shape[0] else [])]:
        assert decode_rows_cpu(packed, ids).shape == (*ids.shape, *shape[1:])
        assert decode_experts_cpu(packed, ids).shape == shape


@pytest.mark.parametrize("wrong", [-1, 64, 1 << 40])
@pytest.mark.parametrize("count", [1, 500])
def test_ids_out_of_range(wrong: int, count: int) -> None:
    packed = samebits.encode(tensor_of(normal((64, 1024))))
    ids = torch.tensor([3] * (count - 1) + [wrong])
    assert gathers(packed.header, count) == (count == 1)
    for function in (decode_rows_cpu, decode_experts_cpu):
        with pytest.raises(IndexError, match="out of range"):
            function(packed, ids)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_nothing_else_is_decoded(shape: tuple[int, ...]) -> None:
    """Beside the entry asked for everything is destroyed, and its words are still right."""
    words = normal(shape)
    with without_compact():
        packed = samebits.encode(tensor_of(words))
    for entry in (0, len(words) // 2, len(words) - 1):
        damaged = only(packed, entry)
        assert gathers(damaged.header, 1)
        assert words_of(decode_cpu(damaged)).tobytes() != words.tobytes()
        assert words_of(decode_rows_cpu(damaged, torch.tensor([entry]))).tobytes() == words[entry].tobytes()
        assert words_of(decode_experts_cpu(damaged, torch.tensor([entry]))[entry]).tobytes() == words[entry].tobytes()
