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
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Self, TypeVar

from samebits.errors import ResourceError
from samebits.jobs import signals
from samebits.parallel import THREADS_VARIABLE, threads

Task = TypeVar("Task")
Result = TypeVar("Result")

MAX_WORKERS = 8  # each costs some 300 MB and brings threads of its own
BYTES_PER_WORKER = 512 << 20  # below this much work a process costs more time to start than it saves
_MOST_PER_CORE = 4  # of those that are asked for
AHEAD = 2  # tasks per worker that may be finished or running before their turn


def worker_count(requested: int | None, tasks: int, nbytes: int) -> int:
    """Processes for ``nbytes`` of work in so many tasks; 1 means none besides this one."""
    if requested is None:
        return max(1, min(threads(), MAX_WORKERS, nbytes // BYTES_PER_WORKER))
    return max(1, min(requested, tasks, _MOST_PER_CORE * (os.cpu_count() or 1)))


class Workers:
    """``count`` processes, or this one alone; each gets its share of the codec's threads."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._executor: ProcessPoolExecutor | None = None
        self._end = ExitStack()

    def __enter__(self) -> Self:
        if self.count > 1:
            share = max(1, threads() // self.count)
            context = multiprocessing.get_context("spawn")  # a fork would copy the codec's threads half alive
            with ExitStack() as end:
                end.enter_context(signals.unwinding())
                self._executor = ProcessPoolExecutor(self.count, context, _start_worker, (share,))
                self._end = end.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if self._executor:
            with self._end, signals.held():
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
        executor = self._executor

        def submit(count: int) -> None:
            for task in islice(queue, count):
                with _without_interrupts():
                    running.append(executor.submit(function, task))

        try:
            submit(AHEAD * self.count)
            while running:
                result = running.popleft().result()
                submit(1)
                yield result
                signals.check()
        except BrokenProcessPool:
            mend = "free memory or use fewer --workers, then run the same command again"
            raise ResourceError("a worker process was killed", mend=mend) from None


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """A process that is started meanwhile never sees Ctrl-C, from its first moment on: the parent decides."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _terminate(executor: ProcessPoolExecutor) -> None:
    for process in list((executor._processes or {}).values()):
        process.terminate()


def _start_worker(share: int) -> None:
    os.environ[THREADS_VARIABLE] = str(share)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent:
        parent.join()
        os._exit(1)
