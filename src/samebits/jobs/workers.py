"""Worker processes: results in order, a bounded number of tasks ahead, nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import islice
from typing import Self, TypeVar

from samebits.errors import ResourceError
from samebits.parallel import THREADS_VARIABLE, threads

Task = TypeVar("Task")
Result = TypeVar("Result")

MAX_WORKERS = 8  # each costs some 300 MB and brings threads of its own
BYTES_PER_WORKER = 512 << 20  # below this much work a process costs more time to start than it saves
AHEAD = 2  # tasks per worker that may be finished or running before their turn


def worker_count(requested: int | None, nbytes: int) -> int:
    """Processes for ``nbytes`` of work; 1 means none besides this one."""
    if requested is not None:
        return requested
    return max(1, min(threads(), MAX_WORKERS, nbytes // BYTES_PER_WORKER))


class Workers:
    """``count`` processes, or this one alone; each gets its share of the codec's threads."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> Self:
        if self.count > 1:
            share = max(1, threads() // self.count)
            context = multiprocessing.get_context("spawn")  # a fork would copy the codec's threads half alive
            self._executor = ProcessPoolExecutor(self.count, context, _start_worker, (share,))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._executor:
            with _no_signals():
                if kind:
                    _terminate(self._executor)  # nobody waits for what they are at
                self._executor.shutdown(wait=True, cancel_futures=True)

    def map(self, function: Callable[[Task], Result], tasks: Iterable[Task]) -> Iterator[Result]:
        """``function`` of each task, in order; tasks are started as results are taken.

        Raises:
            ResourceError: a worker process was killed.
        """
        if self._executor is None:
            yield from map(function, tasks)
            return
        queue = iter(tasks)
        running: deque[Future[Result]] = deque()
        submit = self._executor.submit
        try:
            running.extend(submit(function, task) for task in islice(queue, AHEAD * self.count))
            while running:
                result = running.popleft().result()
                running.extend(submit(function, task) for task in islice(queue, 1))
                yield result
        except BrokenProcessPool:
            mend = "free memory or use fewer --workers, then run the same command again"
            raise ResourceError("a worker process was killed", mend=mend) from None


@contextmanager
def _no_signals() -> Iterator[None]:
    """Meanwhile ignore Ctrl-C and SIGTERM, which would break off a shutdown and leave workers that wait for ever."""
    if threading.current_thread() is not threading.main_thread():  # only that one gets signals
        yield
        return
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) is not None]
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _terminate(executor: ProcessPoolExecutor) -> None:
    for process in list((executor._processes or {}).values()):
        process.terminate()


def _start_worker(share: int) -> None:
    os.environ[THREADS_VARIABLE] = str(share)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)
