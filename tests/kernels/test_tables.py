"""Decode tables are made once for the same bytes, and never of bytes that have changed."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Barrier
from typing import Any

import pytest
import torch

import samebits
from samebits.format.packed import PackedTensor
from samebits.kernels import residents, tables
from samebits.kernels.tables import decode_table, table_words


@pytest.fixture(autouse=True)
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Tensor, str]]:
    """Tables, and the streams whose launches their memory waits for."""
    seen: list[tuple[torch.Tensor, str]] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "a stream")
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda table, stream: seen.append((table, stream)))
    return seen


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[PackedTensor]:
    """What tables were made of; as on a GPU."""
    calls: list[PackedTensor] = []

    def make(packed: PackedTensor) -> torch.Tensor:
        calls.append(packed)
        return torch.zeros(table_words(packed.header), dtype=torch.int32)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tables, "_make_apart", make)
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


def test_memory_waits_for_every_stream(
    made: list[PackedTensor], recorded: list[tuple[torch.Tensor, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = packed_tensor()
    for stream in ("one", "other"):
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=stream: stream)
        table = decode_table(packed)
        assert table is not None
        last, recorded_for = recorded.pop()
        assert last is table
        assert recorded_for == stream
    assert recorded == []
    packed.data.copy_(packed.data.clone())
    assert decode_table(packed) is None
    assert recorded == []


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


def test_two_threads_have_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """A launch keeps the address of the table that it was told: one that is made too late must not take its place."""
    packed, inside = packed_tensor(), Barrier(2)

    def make(packed: PackedTensor) -> torch.Tensor:
        inside.wait(60)  # both have found that there is none
        return torch.zeros(table_words(packed.header), dtype=torch.int32)

    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(tables, "_make_apart", make)
    with ThreadPoolExecutor(2) as pool:
        found = [future.result() for future in [pool.submit(decode_table, packed) for _ in range(2)]]
    assert found[0] is not None
    assert found[0] is found[1] is decode_table(packed)


def test_tables_have_memory_of_a_thread_and_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel runs in the caller's; errors reach the caller."""
    packed, caller = packed_tensor(), threading.current_thread()
    streams = ["the caller's"]
    places: list[tuple[str, bool, str]] = []

    @contextmanager
    def inside(stream: str) -> Iterator[None]:
        streams.append(stream)
        yield
        streams.pop()

    def note(what: str) -> None:
        places.append((what, threading.current_thread() is caller, streams[-1]))

    def empty(words: int, **options: Any) -> torch.Tensor:
        note("memory")
        if len(places) > 2:
            raise torch.OutOfMemoryError("no")
        return torch.zeros(words, dtype=torch.int32)

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[-1])
    monkeypatch.setattr(torch.cuda, "stream", inside)
    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(tables, "_apart_from", lambda stream: f"another than {stream}")
    monkeypatch.setattr(tables, "_make", lambda packed, table: note("kernel"))
    assert tables._make_apart(packed).numel() == table_words(packed.header)
    with pytest.raises(torch.OutOfMemoryError, match="no"):
        tables._make_apart(packed)
    apart = ("memory", False, "another than the caller's")
    assert places == [apart, ("kernel", True, "the caller's"), apart]


def test_the_first_table_stays_as_long_as_the_tensor(
    made: list[PackedTensor], recorded: list[tuple[torch.Tensor, str]]
) -> None:
    """A captured graph may have its address, and the same bytes be there again."""
    packed = packed_tensor()
    table = decode_table(packed)
    assert table is not None
    kept = weakref.ref(table)
    del table
    for _ in range(3):
        packed.data.copy_(packed.data.clone())
        assert decode_table(packed) is None
        gc.collect()
        assert kept() is not None
    del packed
    made.clear()
    recorded.clear()
    gc.collect()
    assert kept() is None
