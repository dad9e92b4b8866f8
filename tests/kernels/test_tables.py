"""Decode tables are made once for the same bytes, and never of bytes that have changed."""

from __future__ import annotations

import gc

import pytest
import torch

import samebits
from samebits.format.packed import PackedTensor
from samebits.kernels import residents, tables
from samebits.kernels.tables import decode_table, table_words


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[PackedTensor]:
    """What tables were made of; as on a GPU."""
    calls: list[PackedTensor] = []

    def make(packed: PackedTensor) -> torch.Tensor:
        calls.append(packed)
        return torch.zeros(table_words(packed.header), dtype=torch.int32)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tables, "_make", make)
    return calls


def packed_tensor() -> PackedTensor:
    return samebits.encode(torch.randn(256, 256, generator=torch.Generator().manual_seed(1)).bfloat16())


def test_made_once(made: list[PackedTensor]) -> None:
    packed = packed_tensor()
    first, second = decode_table(packed), decode_table(PackedTensor(packed.header, packed.data))
    assert first is second
    assert first is not None
    assert first.numel() == 1 << packed.header.max_code_length
    assert len(made) == 1


def test_none_of_bytes_that_change(made: list[PackedTensor]) -> None:
    packed = packed_tensor()
    assert decode_table(packed) is not None
    for _ in range(2):
        packed.data.copy_(packed.data.clone())
        assert decode_table(packed) is None
        assert decode_table(packed) is None
    assert len(made) == 1


def test_none_of_bytes_that_took_the_place_of_others(made: list[PackedTensor]) -> None:
    packed = packed_tensor()
    assert decode_table(packed) is not None
    packed.data.data = packed.data.clone()
    assert decode_table(packed) is None
    assert len(made) == 1


def test_not_made_during_a_capture(made: list[PackedTensor], monkeypatch: pytest.MonkeyPatch) -> None:
    packed = packed_tensor()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert decode_table(packed) is None
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    table = decode_table(packed)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert decode_table(packed) is table  # made before
    assert len(made) == 1


def test_none_of_inference_tensors(made: list[PackedTensor]) -> None:
    with torch.inference_mode():
        packed = packed_tensor()
        packed = PackedTensor(packed.header, packed.data.clone())
    assert decode_table(packed) is None
    assert made == []


def test_forgotten_with_the_bytes(made: list[PackedTensor]) -> None:
    packed = packed_tensor()
    decode_table(packed)
    key = id(packed.data)
    assert key in residents.residents
    made.clear()
    del packed
    gc.collect()
    assert key not in residents.residents
