"""Which modules there are that have packed weights, and who holds which: what is shared is replaced for all at once."""

from __future__ import annotations

import os
import threading
import weakref
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from samebits.nn.recipe import is_sharded


class Modules:
    """As a weak set, which several threads may add to while others look."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    def add(self, module: nn.Module) -> None:
        with self._lock:
            self._held.add(module)

    def renew_lock(self) -> None:
        """In a forked child, where nobody would release it."""
        self._lock = threading.Lock()

    def now(self) -> list[nn.Module]:
        with self._lock:
            return list(self._held)


modules = Modules()  # all packed ones, and some that were
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=modules.renew_lock)


class Loading(threading.local):
    """Who holds which packed tensors: looked for once in a call of load_state_dict, for a thread.

    Attributes:
        messages: of the call's errors; each call has a list of its own, by which it is known.
        holders: modules and their slots by the id of the parameter there.
        replaced: memory of packed tensors whose place others have taken, where they begin there, and these.
    """

    def __init__(self) -> None:
        self.messages: list[str] | None = None
        self.holders: dict[int, list[tuple[weakref.ref[nn.Module], str]]] = {}
        self.replaced: list[tuple[StorageWeakRef, int, weakref.ref[nn.Parameter]]] = []

    def replace(self, old: nn.Parameter, new: nn.Parameter, messages: list[str]) -> dict[Any, list[str]]:
        """Put another parameter wherever ``old`` is; returns who had it, and in which slots."""
        found = self._holding(old) if self.messages is messages else {}
        if not found:  # the first that is asked for, or it came since
            self._look()
            self.replaced = self.replaced if self.messages is messages else []
            self.messages, found = messages, self._holding(old)
        for holder, slots in found.items():
            holder._parameters.update(dict.fromkeys(slots, new))
        self.holders[id(new)] = self.holders.pop(id(old), [])
        self.replaced.append((StorageWeakRef(old.untyped_storage()), int(old.storage_offset()), weakref.ref(new)))
        return found

    def now(self, data: torch.Tensor, messages: list[str]) -> nn.Parameter | None:
        """What has taken the place of ``data``, if that is a module's own memory, as in an updated ``state_dict()``.

        A parameter that has several names there is loaded under one of them; under the others it means what it is now.
        """
        if self.messages is not messages or not self.replaced or is_sharded(data) or data.is_meta:
            return None
        place = data.untyped_storage()._cdata, data.storage_offset()
        found = (new() for old, start, new in self.replaced if (old.cdata, start) == place and not old.expired())
        return next(found, None)

    def _look(self) -> None:
        self.holders = defaultdict(list)
        for module in modules.now():
            for slot, held in vars(module).get("_parameters", {}).items():  # it may be filled just now
                self.holders[id(held)].append((weakref.ref(module), slot))

    def _holding(self, parameter: nn.Parameter) -> dict[Any, list[str]]:
        found: dict[Any, list[str]] = {}
        for reference, slot in self.holders.get(id(parameter), ()):
            holder = reference()
            if holder is not None and "sb_recipes" in vars(holder) and holder._parameters.get(slot) is parameter:
                found.setdefault(holder, []).append(slot)
        return found


loading = Loading()
