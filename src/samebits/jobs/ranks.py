"""Processes that do one job together, as torchrun starts them: each writes some of the shards.

They tell each other how far they are through the store of torch's ``env://`` rendezvous, and ask it now and then: a
process that waits for the others can be interrupted as any. Meanwhile each says that it is there, and who is silent for
long is not waited for.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from samebits.errors import ResourceError, SamebitsError
from samebits.parallel import THREADS_VARIABLE, number_of, threads

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

Item = TypeVar("Item")

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_JOINING = timedelta(minutes=5)
_SECONDS_BETWEEN_QUESTIONS = 0.1
_SECONDS_TO_LEAVE = 10.0
_SECONDS_BETWEEN_BEATS, _SECONDS_OF_SILENCE = 5.0, 120.0
_HERE, _FAILED, _LEAVES, _BEAT = "here", "failed", "leaves", "beat"
_GO_ON = "run the same command again: it goes on where it stopped"


class Ranks:
    """This process alone, rank 0 of 1, or one of several.

    Attributes:
        rank, size: as torch counts processes.
    """

    def __init__(self, rank: int = 0, size: int = 1, store: Store | None = None) -> None:
        self.rank, self.size, self._store = rank, size, store

    @classmethod
    def of_environment(cls) -> Ranks:
        """Those that torchrun, or whoever sets its variables, has started; waits until all have come.

        Those of one host share its GPUs and its cores.

        Raises:
            InputError: a variable is no number.
            ResourceError: some do not come.
        """
        if not all(os.environ.get(name) for name in _VARIABLES):
            return cls()
        all_here = number_of("LOCAL_WORLD_SIZE", "number of processes") or 1
        place = number_of("LOCAL_RANK", "process's number", least=0) or 0
        if number_of("WORLD_SIZE", "number of processes") == 1:
            return cls()
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous

        try:
            store, rank, size = next(rendezvous("env://", timeout=_JOINING))
            job = store.add(f"samebits {rank}", 1)  # torchrun's store is that of all that its processes do in turn
            found = cls(rank, size, PrefixStore(f"samebits {job}", store))
            found.tell(_HERE)
            store.wait([f"samebits {job}/{_HERE} {other}" for other in range(size)], _JOINING)
        except (RuntimeError, ValueError) as error:
            [why, *_] = str(error).splitlines()
            what = f"the {os.environ['WORLD_SIZE']} processes of this job have not found each other ({why.rstrip('.')})"
            raise ResourceError(what, mend="start them by torchrun, or unset WORLD_SIZE to do it with one") from error
        if torch.cuda.is_available():
            torch.cuda.set_device(place % torch.cuda.device_count())
        if THREADS_VARIABLE not in os.environ:
            os.environ[THREADS_VARIABLE] = str(max(1, threads() // all_here))
            threads.cache_clear()
        return found

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def own(self, items: Sequence[Item]) -> Sequence[Item]:
        """Those of some items that this process is to see to."""
        return items[self.rank :: self.size]

    def tell(self, what: str, value: object = None) -> None:
        """Say to the others how far this process is, once."""
        if self._store:
            with _the_first_one_is_there():
                self._store.set(f"{what} {self.rank}", json.dumps(value))

    def hear(self, what: str, rank: int = 0) -> Any:
        """Wait until another process has told that, and return what it said.

        Raises:
            ResourceError: a process has failed, or is gone.
        """
        key, beat = f"{what} {rank}", f"{_BEAT} {rank}"
        last, heard = self._said(beat), time.monotonic()
        while (said := self._said(key)) is None:
            self.check()
            time.sleep(_SECONDS_BETWEEN_QUESTIONS)
            if last != (last := self._said(beat)):
                heard = time.monotonic()
            elif time.monotonic() - heard > _SECONDS_OF_SILENCE:
                silent = f"process {rank} of {self.size} has been silent for {_SECONDS_OF_SILENCE:.0f} seconds"
                raise ResourceError(silent, mend=f"end what is left of it, and {_GO_ON}")
        return json.loads(said)

    def check(self) -> None:
        """
        Raises:
            ResourceError: another process has failed, or is gone.
        """
        failed = self._said(_FAILED)
        if failed is not None:
            number, why = json.loads(failed)
            raise ResourceError(f"process {number} of {self.size} has failed: {why}", mend=f"mend that, and {_GO_ON}")

    def _said(self, key: str) -> bytes | None:
        if self._store is None:
            return None
        with _the_first_one_is_there():
            return self._store.get(key) if self._store.check([key]) else None

    def hear_others(self, what: str) -> list[Any]:
        """As the first process."""
        return [self.hear(what, rank) for rank in range(1, self.size)]

    @contextmanager
    def together(self) -> Iterator[Ranks]:
        """Around all that they do: others are told of an error; the first, which may have the store, leaves last."""
        try:
            with self._beating():
                yield self
        except Exception as error:
            if self._store:
                self.check()  # for another's error, which may be why
                with suppress(RuntimeError):
                    self._store.set(_FAILED, json.dumps([self.rank, _told(error)]))
            raise
        if not self.is_first:
            with suppress(ResourceError):
                self.tell(_LEAVES)
        deadline = time.monotonic() + _SECONDS_TO_LEAVE
        keys = [f"{_LEAVES} {rank}" for rank in range(1, self.size)] if self.is_first else []
        while any(self._said(key) is None for key in keys) and time.monotonic() < deadline:
            time.sleep(_SECONDS_BETWEEN_QUESTIONS)

    @contextmanager
    def _beating(self) -> Iterator[None]:
        """Meanwhile this process says now and then that it is there."""
        ended = Event()

        def beat() -> None:
            number = 0
            with suppress(ResourceError):  # which whoever asks the store is told
                while not ended.wait(_SECONDS_BETWEEN_BEATS):
                    self.tell(_BEAT, number := number + 1)

        if self._store:
            Thread(target=beat, name="samebits ranks", daemon=True).start()
        try:
            yield
        finally:
            ended.set()


@contextmanager
def _the_first_one_is_there() -> Iterator[None]:
    """
    Raises:
        ResourceError: it is not, as the store says.
    """
    try:
        yield
    except RuntimeError as error:
        raise ResourceError("the first process of this job is gone", mend=_GO_ON) from error


def _told(error: Exception) -> str:
    """What and where; how to mend it says the process that failed."""
    return str(type(error)(error.what, where=error.where)) if isinstance(error, SamebitsError) else str(error)


ALONE = Ranks()
