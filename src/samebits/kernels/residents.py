"""What is known of tensors on a GPU as long as they live and nobody changes their bytes.

Not as attributes of the tensors: these would be copied and pickled with them, and say of other bytes what holds for
those.
"""

from __future__ import annotations

import sys
import weakref
from collections import deque
from collections.abc import Hashable, Iterator
from threading import RLock
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

residents: dict[int, Resident] = {}  # by id of the tensor
gradients: dict[int, Gradients] = {}  # likewise, of the same tensors
_lock = RLock()  # a tensor that is collected meanwhile is forgotten by the same thread


MAX_SHAPES = 16  # of inputs of one weight, for which something is kept
_RECENT = 16  # products of many tokens
_OFTEN = 8  # of these that had the same number of them
_CHANGING = 4  # different numbers among these


class Bytes:
    """Those of a tensor that is not an inference tensor, which would not tell when they change."""

    __slots__ = ("_address", "_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version, self._address = weakref.ref(tensor), tensor._version, tensor.data_ptr()

    def now(self) -> torch.Tensor | None:
        """The tensor, if its bytes are these. torch counts its own changes of them, and may give it others."""
        tensor = self._tensor()
        unchanged = tensor is not None and tensor._version == self._version and tensor.data_ptr() == self._address
        return tensor if unchanged else None

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether they are, or were, that tensor's."""
        return self._tensor() is tensor


class ParameterBytes(Bytes):
    """Those of a weight or a bias, whose memory may be replaced: by ``parameter.data = other``, as offloading does.

    torch does not count that, and an allocator gives the address again that it gave before: the storage is another.
    """

    __slots__ = ("_storage",)

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self._storage = StorageWeakRef(tensor.untyped_storage())

    def now(self) -> torch.Tensor | None:
        tensor = super().now()
        is_same = tensor is not None and tensor.untyped_storage()._cdata == self._storage.cdata
        return tensor if is_same else None


class Recalled(ParameterBytes):
    """A packed weight's bytes, and products with them that are made again by native code; see samebits.plans.recall.

    Attributes:
        shortcuts: as they were made, by the input's shape; None: not yet.
        training: likewise, of inputs that have requires_grad.
        prefetched: where the weight was decoded ahead, and the weight; see samebits.plans.prefetch.
        is_changing: products of many tokens have another number of them in each call; but for those in ``planned`` the
            weight is decoded first.
        planned: numbers of many tokens for which there are plans.
    """

    __slots__ = ("is_changing", "planned", "prefetched", "shortcuts", "training")

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor)
        self.is_changing, self.planned = False, set[int]()
        self.shortcuts: dict[Hashable, Any] = {}
        self.training: dict[Hashable, Any] = {}
        self.prefetched: tuple[Any, torch.Tensor] | None = None

    def forget_products(self) -> None:
        self.shortcuts.clear()
        self.training.clear()


class Resident(Recalled):
    """A tensor's bytes, and what is known of them.

    Attributes:
        has_changed: other bytes were there before, so these may not stay either.
        is_settled: a kernel was launched on them before; see ``may_start_early``.
        lengths: tokens of the last products that were many and had no plan.
        table: the decode table, where they are a packed tensor that has one in memory; see samebits.kernels.tables.
        first_table: that of the bytes that were there at first, which graphs may read as long as the tensor lives.
        has_table: whether that was decided.
        calls: of the fused layer, by the input's shape; see samebits.plans.call.
        decoders: launches of kernels that decode them, as far as they are always the same.
        followers: what is asked for behind a product of theirs; see samebits.plans.together.
        at_once: what is asked for with one; see samebits.plans.at_once.
        carriers: launches of theirs that decode what comes next, by the input's shape; see samebits.plans.prefetch.
        experts: products of rows with experts whose matrices they are; see samebits.kernels.linear.experts.
    """

    __slots__ = (
        "at_once",
        "calls",
        "carriers",
        "decoders",
        "experts",
        "first_table",
        "followers",
        "has_changed",
        "has_table",
        "is_settled",
        "lengths",
        "table",
    )

    def __init__(self, tensor: torch.Tensor, has_changed: bool) -> None:
        super().__init__(tensor)
        self.has_changed, self.is_settled, self.has_table = has_changed, False, False
        self.table: torch.Tensor | None = None
        self.first_table: torch.Tensor | None = None
        self.lengths = deque[int](maxlen=_RECENT)
        self.calls: dict[Hashable, Any] = {}
        self.decoders: dict[Hashable, Any] = {}
        self.experts: dict[Hashable, Any] = {}
        self.followers: Any = None
        self.at_once: Any = None
        self.carriers: dict[Hashable, Any] = {}

    def comes_often(self, tokens: int) -> bool:
        """Say that a product of so many tokens is asked for that has no plan; returns whether one is worth a search.

        That takes as long as hundreds of products; prompts and what a router gives an expert differ in length.
        """
        self.lengths.append(tokens)
        numbers = len(set(self.lengths))
        if numbers >= _CHANGING or (numbers == 1 and len(self.lengths) == _RECENT):
            self.is_changing = numbers > 1
        return not self.is_changing and self.lengths.count(tokens) >= _OFTEN

    def settle(self) -> bool:
        """Say that a kernel is launched on them on torch's current stream; returns whether one was before."""
        was_settled = self.is_settled
        if not was_settled and not torch.cuda.is_current_stream_capturing():  # a captured launch has not happened yet
            self.is_settled = True
        return was_settled


class Gradients(Recalled):
    """A packed weight's bytes, and gradients that are made with them: products of the output's, by its shape."""

    __slots__ = ()


def resident(tensor: torch.Tensor) -> Resident | None:
    """Of a tensor's present bytes; None of one that does not tell when they change.

    That is an inference tensor, or one that torch's fully_shard gathers and gives back: whatever is first seen since it
    is at work may be such.
    """
    key = id(tensor)
    known = residents.get(key)
    if known is not None and known.now() is tensor:
        return known
    if tensor.is_inference() or _is_gathered():
        return None
    with _lock:  # of two threads' the first one stays: launches keep what it has
        known = residents.get(key)
        return known if known is not None and known.now() is tensor else _settled_in(tensor, known)


def _settled_in(tensor: torch.Tensor, known: Resident | None) -> Resident:
    key, has_changed = id(tensor), known is not None and known.is_of(tensor)
    if not has_changed:
        weakref.finalize(tensor, _forget, key).atexit = False
    else:
        _forget(key)
    made, gradients[key] = Resident(tensor, has_changed), Gradients(tensor)
    residents[key] = made
    if has_changed and known is not None:
        made.first_table = known.first_table if known.table is None else known.table
    return made


def make_room(kept: dict[Hashable, Any], shape: Hashable) -> None:
    """For what is to be kept by that shape: where there are too many, all that is kept goes."""
    if shape not in kept and len(kept) >= MAX_SHAPES:
        kept.clear()


def _is_gathered() -> bool:
    """Whether torch's fully_shard is at work: it has made classes of modules' classes then."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind: type | None = getattr(fsdp, "FSDPModule", None)
    return kind is not None and any(issubclass(each, nn.Module) for each in _subclasses(kind))


def _subclasses(kind: type) -> Iterator[type]:
    each: type
    for each in kind.__subclasses__():
        yield each
        yield from _subclasses(each)


def _forget(key: int) -> None:
    """Of a tensor, or bytes, that are gone; others may still know of them, and they of others, in a circle."""
    known = residents.pop(key, None)
    for each in (known, gradients.pop(key, None)):
        if each is not None:
            each.prefetched = None
            each.forget_products()
    if known is not None:
        known.carriers.clear()


def may_start_early(tensor: torch.Tensor) -> bool:
    """Whether a kernel that reads these bytes may start before the one in front of it has ended.

    In such a programmatic dependent launch it builds its decode table and loads its first chunks while the other one
    still runs, and waits before it touches anything else; so nobody may be writing these bytes. The first launch on
    them says no, and waits for whatever wrote them; later ones on torch's current stream stand behind it.
    """
    known = resident(tensor)
    return known is not None and known.settle()
