"""Packed states on several streams, as far as it can be seen without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from samebits.format.packed import PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.pieces import Piece, Pieces
from samebits.nn import packed_states
from samebits.nn.packed_states import Arena, PackedStates
from tests.codecs.tensors import tensor_of
from tests.codecs.zoo import octaves


def states_of(tokens: int) -> torch.Tensor:
    return torch.randn(1, 8, tokens, 128, generator=torch.Generator().manual_seed(tokens)).bfloat16()


class OnGpu:
    """What claims to be a tensor on a GPU, and notes which streams it is recorded for."""

    is_cuda = True

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.recorded = tensor, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.tensor, name)

    def record_stream(self, stream: str) -> None:
        self.recorded.append(stream)


@pytest.fixture
def held() -> PackedStates:
    held = PackedStates(Arena(), 64)
    held.updated(states_of(200))
    return held


def test_nothing_is_launched_to_count_tokens(held: PackedStates, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a launch is told is copied to the GPU on the stream that is current then."""
    made: list[object] = []
    monkeypatch.setattr(packed_states, "can_be_piece", lambda piece: True)
    monkeypatch.setattr(packed_states, "Pieces", made.append)
    held._keep([block._replace(packed=_with(block.packed, OnGpu(block.packed.data))) for block in held._blocks])
    assert held._blocks
    assert held.tokens == 200
    assert not made


def _with(packed: PackedTensor, data: Any) -> Any:
    made = object.__new__(PackedTensor)
    vars(made).update(vars(packed) | {"data": data})
    return made


def test_memory_is_kept_for_each_stream_that_computes(held: PackedStates, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks and of the latest tokens, once for each change of streams."""
    current = ["first"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[0])
    [block] = held._blocks
    data = OnGpu(block.packed.data)
    held._blocks = [block._replace(packed=_with(block.packed, data))]
    held._room = room = OnGpu(held._room)  # type: ignore[assignment, arg-type]
    for stream in ("first", "first", "second", "second", "first"):
        current[0] = stream
        held._note_stream(room)  # type: ignore[arg-type]
    for each in (data, room):
        assert each.recorded == ["first", "second", "first"]


def test_what_a_launch_is_told_is_copied_on_each_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when it is made, and not for good while a stream is captured; a launch right behind the copy is not early."""
    now: dict[str, Any] = {"stream": 7, "captures": False}
    launched: list[tuple[int, bool]] = []
    copied: list[int] = []

    def launcher(function: Any, grid: int, threads: int, shared: int, stream: int, early: bool, device: int) -> Any:
        launched.append((stream, early))
        return lambda pointers: None

    def copy_to(tensor: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        copied.append(now["stream"])
        return tensor.clone()

    replaced: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (nvrtc, "launcher", launcher),
        (nvrtc, "kernel", lambda file, name, device: name),
        (nvrtc, "multiprocessors", lambda device: 132),
        (nvrtc, "shared_memory", lambda device: 227 << 10),
        (torch._C, "_cuda_getCurrentRawStream", lambda device: now["stream"]),
        (torch.cuda, "current_device", lambda: -1),  # a tensor in main memory says so
        (torch.Tensor, "pin_memory", lambda tensor: tensor),
        (torch.cuda, "is_current_stream_capturing", lambda: now["captures"]),
    )
    for target, name, value in replaced:
        monkeypatch.setattr(target, name, value, raising=False)
    packed = packed_states.encode(tensor_of(octaves((64, 1024))))
    pieces, output = Pieces([Piece(packed, 0, 8192)]), torch.empty(8, 8192, dtype=torch.bfloat16)
    monkeypatch.setattr(torch.Tensor, "to", copy_to)
    for stream, captures in ((8, True), (8, False), (8, False), (9, False), (8, True), (9, False)):
        now.update(stream=stream, captures=captures)
        pieces.decode(output)
    assert copied == [8, 8, 9]
    assert launched == [(8, False), (8, False), (8, True), (9, False), (8, True), (9, True)]
