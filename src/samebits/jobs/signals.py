"""Ctrl-C and SIGTERM end a command at once, wherever it is at; one with worker processes ends these first.

An exception would have to get through code of others, which may swallow it or be left half imported. Nothing is lost
without one: what a job has written it takes up again, as after a kill.

SIGBUS comes of reading a mapped file that became shorter: Python would go on where it came, which is to read again.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

NUMBERS = (signal.SIGINT, signal.SIGTERM)
_BUS = getattr(signal, "SIGBUS", None)  # Windows has none


class Interrupted(BaseException):
    """Unwinds to the end of ``unwinding``, where the process ends."""


class _State:
    def __init__(self) -> None:
        self.say: Callable[[int], None] | None = None
        self.received: int | None = None
        self.unwinds = False


_state = _State()


def end_by_signals(say: Callable[[int], None]) -> None:
    """From now on a signal ends this process with the exit code 128 + its number, after ``say(number)``."""
    _state.say = say
    shown = sys.unraisablehook
    sys.unraisablehook = lambda found: None if found.exc_type is Interrupted else shown(found)
    for number in NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup leaves it
            signal.signal(number, _receive)
    if _BUS:
        ctypes.CDLL(None).signal(int(_BUS), _handler)


def end_by_default() -> None:
    """From now on it ends this process as the system does it: nothing is left to be said."""
    for number in NUMBERS:
        if signal.getsignal(number) is _receive:
            signal.signal(number, signal.SIG_DFL)


def _receive(number: int, frame: object) -> None:
    _state.received = number
    if _state.unwinds:
        raise Interrupted
    _end(number)


def _end(number: int) -> None:
    for other in NUMBERS:
        signal.signal(other, signal.SIG_IGN)
    if _state.say:
        _state.say(number)
    os._exit(128 + number)


def _end_at_once(number: int) -> None:
    """The system's own handler, in whichever thread read: loops over data hold no lock of Python's."""
    if _state.say:
        _state.say(number)
    os._exit(128 + number)


_handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(_end_at_once)  # the system is to call it as long as this process runs


@contextmanager
def unwinding() -> Iterator[None]:
    """Meanwhile a signal raises Interrupted, because there is something to tidy up; the process ends behind it."""
    _state.unwinds = True
    try:
        yield
    finally:
        _state.unwinds = False
        if _state.received is not None:
            _end(_state.received)


def check() -> None:
    """
    Raises:
        Interrupted: a signal came, and what it raised was swallowed.
    """
    if _state.unwinds and _state.received is not None:
        raise Interrupted


@contextmanager
def held() -> Iterator[None]:
    """Meanwhile signals wait: one would break off a shutdown and leave workers that wait for ever.

    If all goes well, they are delivered afterwards.
    """
    if threading.current_thread() is not threading.main_thread():  # only that one gets signals
        yield
        return
    received: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in NUMBERS
        if signal.getsignal(number) is not None
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        signal.raise_signal(received[0])
