"""How whoever waits for long work is told of it."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[int, int], object]  # is called with what is done, and all that is to do


def silent(done: int, total: int) -> None:
    """Progress that nobody watches."""
