"""Threads for the CPU codec: compiled loops that release the GIL, over ranges of their work.

A thread pool of our own instead of numba's, because numba's default pool must not be entered by two threads at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from typing import Any

from samebits.errors import InputError

THREADS_VARIABLE = "SAMEBITS_THREADS"
TASK_WORDS = 1 << 20  # at most
_MIN_TASK_WORDS = 1 << 18


@cache
def threads() -> int:
    """Threads of the CPU codec: SAMEBITS_THREADS, else the cores this process may use."""
    said = number_of(THREADS_VARIABLE, "number of threads")
    if said is None:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return said


def number_of(variable: str, what: str, least: int = 1) -> int | None:
    """What an environment variable says; None without it.

    Raises:
        InputError: it says something else than a whole number from ``least`` on.
    """
    text = os.environ.get(variable)
    if text is None:
        return None
    if not text.isdecimal() or int(text) < least:
        raise InputError(f"{variable}={text!r} is no {what}", mend=f"set it to {least} or more")
    return int(text)


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads(), thread_name_prefix="samebits")


def grain_of(words: int, each: int = 1) -> int:
    """How many parts of ``each`` words a task has, of so many words: threads share what is worth it."""
    return max(1, min(TASK_WORDS, max(_MIN_TASK_WORDS, words // (2 * threads()))) // each)


def run_ranges(function: Callable[..., Any], count: int, grain: int, *arguments: Any) -> list[Any]:
    """Call ``function(*arguments, first, last)`` over [0, count) in ranges of ``grain``; the results in order.

    If one of them fails, or the caller is interrupted, none is running any more when this raises.
    """
    starts = range(0, count, grain)
    if threads() == 1 or len(starts) <= 1:  # a wrong number of threads is told of, however little there is to do
        return [function(*arguments, first, min(first + grain, count)) for first in starts]
    submit = _pool(os.getpid()).submit  # a forked child makes a pool of its own
    tasks = [submit(function, *arguments, first, min(first + grain, count)) for first in starts]
    try:
        return [task.result() for task in tasks]
    except BaseException:
        for task in tasks:
            task.cancel()
        wait(tasks)
        raise
