"""What tests have worker processes do: they need not import torch for it, as test modules do."""

from __future__ import annotations

import os
import signal

from samebits.parallel import threads


def double(number: int) -> int:
    return 2 * number


def threads_of(_: int) -> int:
    return threads()


def die(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def blocked(_: int) -> bool:
    return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
