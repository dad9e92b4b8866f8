"""Ranges over threads: results in order, nothing left running."""

from __future__ import annotations

import threading
import time

import pytest

from samebits.parallel import run_ranges


@pytest.fixture(autouse=True)
def several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samebits.parallel.threads", lambda: 4)


def test_results_come_in_order() -> None:
    assert run_ranges(lambda first, last: (first, last), 10, 4) == [(0, 4), (4, 8), (8, 10)]
    assert run_ranges(lambda first, last: (first, last), 0, 4) == []


def test_nothing_goes_on_after_a_failure() -> None:
    started: list[int] = []
    ended: list[int] = []
    running = threading.Event()

    def work(first: int, last: int) -> None:
        if first == 0:
            running.wait()
            raise KeyboardInterrupt
        started.append(first)
        running.set()
        time.sleep(0.01)
        ended.append(first)

    with pytest.raises(KeyboardInterrupt):
        run_ranges(work, 10_000, 1)
    assert 0 < len(started) < 9_999
    assert sorted(started) == sorted(ended)
