"""What stands in front of a graph's replay."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from samebits.errors import DeviceError
from samebits.kernels import nvrtc
from samebits.kernels.replay import fast_replay


class Graph:
    """Plays torch's."""

    def __init__(self, seen: list[Any]) -> None:
        self.seen = seen

    def replay(self) -> None:
        self.seen.append("replay")


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Launches and replays so far, on a CPU that is taken for an H200."""
    found: list[Any] = []

    def launch(kernel: Any, grid: int, threads: int, shared: int, *arguments: Any, early: bool = False) -> None:
        found.append((kernel, grid, threads, shared, arguments, early))

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(nvrtc, "starts_early", lambda device: device == 3)
    monkeypatch.setattr(nvrtc, "kernel", lambda file, name, device: (file, name, device))
    monkeypatch.setattr(nvrtc, "launch", launch)
    return found


def test_an_early_launch_before_each_replay(seen: list[Any]) -> None:
    replay = fast_replay(Graph(seen))  # type: ignore[arg-type]
    assert seen == []
    replay()
    replay()
    before = (("replay.cu", "before_replay", 3), 1, 32, 0, (), True)
    assert seen == [before, "replay", before, "replay"]


def test_on_the_device_of_the_capture(seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever is the current one at the replay."""

    @contextmanager
    def on(device: int) -> Iterator[None]:
        seen.append(f"on {device}")
        yield
        seen.append("back")

    replay = fast_replay(Graph(seen))  # type: ignore[arg-type]
    monkeypatch.setattr(nvrtc, "on_device", on)
    replay()
    assert [each for each in seen if isinstance(each, str)] == ["on 3", "replay", "back"]


def test_alone_where_none_starts_early(seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "starts_early", lambda device: False)
    fast_replay(Graph(seen))()  # type: ignore[arg-type]
    assert seen == ["replay"]


def test_alone_where_no_kernel_can_be_had(seen: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """BF16 models are replayed without cuda-core, too."""

    def refuse(file: str, name: str, device: int) -> None:
        raise DeviceError("no compiler")

    monkeypatch.setattr(nvrtc, "kernel", refuse)
    fast_replay(Graph(seen))()  # type: ignore[arg-type]
    assert seen == ["replay"]
