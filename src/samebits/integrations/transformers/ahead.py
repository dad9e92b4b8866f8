"""transformers' ``generate`` without waiting for the GPU: whether a text has ended is read a step later.

After each token generate asks whether all sequences have ended, which only the GPU knows. So the host waits until it is
idle, and then the GPU waits until the host has prepared the next step, which takes long beside a step that is one
launch. transformers can put the question off by a step (DeferredStopCheck), and does so on Apple's GPUs alone; here it
does for steps that are replayed as CUDA graphs. What the step behind the end has done is undone: its token and logits
by generate, its place in the cache and its random numbers here.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers.cache_utils import StaticCache, StaticLayer
from transformers.generation import utils

_NAME = "DeferredStopCheck"  # in transformers.generation.utils, where generate looks for it
_WAITS = ("cuda",)  # devices that the host would wait for
_ARGUMENTS = ["self", "input_ids", "max_length", "cache", "cache_is_returned", "streamer"]
_Deferred: Any = getattr(utils, _NAME, object)
_IS_KNOWN = [*inspect.signature(_Deferred.__init__).parameters] == _ARGUMENTS  # or this transformers has another way
_thread = threading.local()
_lock = threading.Lock()
_contexts = 0


class RunAhead(_Deferred):  # type: ignore[misc]
    """DeferredStopCheck that also takes part where ``ask`` was called before, in the same thread."""

    @staticmethod
    def is_supported(device: torch.device, cache: Any, cache_is_returned: bool, is_assistant: bool) -> bool:
        asked, _thread.asked = getattr(_thread, "asked", False), False
        if not asked or device.type not in _WAITS:
            return bool(_Deferred.is_supported(device, cache, cache_is_returned, is_assistant=is_assistant))
        return not is_assistant and (not cache_is_returned or _can_go_back(cache))

    def __init__(
        self, input_ids: torch.Tensor, max_length: int, cache: Any, cache_is_returned: bool, streamer: Any = None
    ) -> None:
        device = input_ids.device
        waits = device.type in _WAITS
        super().__init__(input_ids, max_length, None if waits else cache, cache_is_returned and not waits, streamer)
        self._kept = cache.layers if waits and cache_is_returned else ()
        self._generator = _generator(device) if waits else None
        self._state: torch.Tensor | None = None  # of the generator, after the last token

    def __call__(self, unfinished_sequences: torch.Tensor, tokens: torch.Tensor, length: int) -> bool:
        stops = bool(super().__call__(unfinished_sequences, tokens, length))
        if self._generator is not None:
            if self.stop_reported and self._state is not None:
                self._generator.set_state(self._state)
            self._state = self._generator.get_state()
        return stops

    def finish(self) -> int:
        steps = int(super().finish())
        for layer in self._kept if steps else ():
            layer.cumulative_length.sub_(steps)
        return steps


def ask() -> None:
    """Have the next ``generate`` of this thread run ahead, if it can."""
    _thread.asked = True


@contextmanager
def may_run_ahead() -> Iterator[None]:
    """Inside, ``ask`` has an effect."""
    global _contexts
    _thread.asked = False  # by a generate before, that did not look
    if not _IS_KNOWN:
        yield
        return
    with _lock:
        _contexts += 1
        setattr(utils, _NAME, RunAhead)
    try:
        yield
    finally:
        with _lock:
            _contexts -= 1
            if not _contexts:
                setattr(utils, _NAME, _Deferred)


def _generator(device: torch.device) -> torch.Generator:
    """Of the random numbers that tokens are drawn with."""
    return torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator


def _can_go_back(cache: Any) -> bool:
    """Whether a token less is all that there is to undo: what was written for it is not looked at."""
    return isinstance(cache, StaticCache) and all(type(layer) is StaticLayer for layer in cache.layers)
