"""Loops of the CPU codec: compiled by numba at the first call, and kept on disk for later processes.

numba keeps them beside the source, else in the user's cache folder, or where NUMBA_CACHE_DIR says. Where none of these
can be written, as in a container without a home, each process compiles the loops that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from filelock import FileLock
from numba import njit, types
from numba.core.caching import FunctionCache, IndexDataCacheFile
from numba.core.ccallback import CFunc

Loop = TypeVar("Loop", bound=Callable[..., Any])

_WITH_LOOPS = "bf16.py", "compiled.py", "digest.py", "vectors.py", "codecs/*.py", "df11/*.py"  # in this package
_LOCK = "samebits.lock"
_LOCK_SECONDS = 60.0


def compiled(function: Loop) -> Loop:
    """A loop that releases the GIL."""
    return _compiled(function)


def inlined(function: Loop) -> Loop:
    """What becomes a part of each loop that calls it."""
    return _compiled(function, inline="always")


def callback(function: Callable[[int], None]) -> Callable[[], Any]:
    """A loop for C to call with an address, made at the first call."""

    @cache
    def made() -> Any:
        loop = CFunc(function, ((types.int64,), types.void), locals={}, options={})
        _keep(loop, function)
        loop.compile()
        return loop

    return made


def folder_of(loop: Callable[..., Any]) -> Path | None:
    """Where a compiled loop is kept on disk; None: nowhere."""
    path = cast(Any, loop).stats.cache_path
    return Path(path) if path else None


def _compiled(function: Loop, **options: Any) -> Loop:
    loop = njit(nogil=True, **options)(function)
    _keep(loop, function)
    return cast(Loop, loop)


def _keep(loop: Any, function: Callable[..., Any]) -> None:
    """Have what is compiled of a function kept on disk, where there is a folder for it."""
    try:
        loop._cache = _Cache(function)
    except RuntimeError:  # numba finds none
        return


class _Cache(FunctionCache):  # type: ignore[misc]  # numba has no types
    """As numba's for ``cache=True``, but for its files."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)
        implementation: Any = self._impl
        stamp = implementation.locator.get_source_stamp(), sources()
        name = f"{implementation.filename_base}-numba-{numba.__version__}"  # else versions overwrite each other's
        self._cache_file: Any = _CacheFile(self.cache_path, name, stamp)


class _CacheFile(IndexDataCacheFile):  # type: ignore[misc]
    """The files of a function: an index, and the code for each type of its arguments.

    numba writes the index, then the code that it points to, and processes that do so at one time may leave the index of
    one with the code of another (numba issue 10128). So one at a time reads or writes them.
    """

    def save(self, key: Any, data: Any) -> None:
        with self._alone():
            super().save(key, data)

    def load(self, key: Any) -> Any:
        with self._alone():
            return super().load(key)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        with ExitStack() as held:
            with suppress(OSError, NotImplementedError):  # nobody can write there, or lock, or another process hangs
                held.enter_context(FileLock(Path(self._cache_path) / _LOCK, timeout=_LOCK_SECONDS))
            yield


@cache
def sources() -> tuple[tuple[int, int], ...]:
    """What changes if a file with loops does: numba looks only at a loop's own, and not at what it calls in others."""
    package = Path(__file__).parent
    files = [path.stat() for pattern in _WITH_LOOPS for path in sorted(package.glob(pattern))]
    return tuple((each.st_mtime_ns, each.st_size) for each in files)
