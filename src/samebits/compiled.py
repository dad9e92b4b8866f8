"""Loops of the CPU codec: compiled by numba at the first call, and kept on disk for later processes.

numba keeps them beside the source, else in the user's cache folder, or where NUMBA_CACHE_DIR says. Where none of these
can be written, as in a container without a home, numba would not even let them be defined: then each process compiles
the loops that it needs.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from numba import cfunc, njit, types

Loop = TypeVar("Loop", bound=Callable[..., Any])


def compiled(function: Loop) -> Loop:
    """A loop that releases the GIL."""
    return _compiled(function)


def inlined(function: Loop) -> Loop:
    """What becomes a part of each loop that calls it."""
    return _compiled(function, inline="always")


def callback(function: Callable[[int], None]) -> Callable[[], Any]:
    """A loop for C to call with an address, made at the first call."""
    signature = types.void(types.int64)

    @cache
    def made() -> Any:
        try:
            return cfunc(signature, cache=True)(function)
        except RuntimeError:  # no such folder
            return cfunc(signature)(function)

    return made


def folder_of(loop: Callable[..., Any]) -> Path | None:
    """Where a compiled loop is kept on disk; None: nowhere."""
    path = cast(Any, loop).stats.cache_path
    return Path(path) if path else None


def _compiled(function: Loop, **options: Any) -> Loop:
    try:
        return cast(Loop, njit(cache=True, nogil=True, **options)(function))
    except RuntimeError:  # no such folder
        return cast(Loop, njit(nogil=True, **options)(function))
