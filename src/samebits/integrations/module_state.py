"""What a module's forward may depend on beside its inputs and torch's settings: all that can be reached from it.

That is its attributes, parameters, submodules and hooks, and what is in these, however deep: in lists, dicts and sets,
in attributes and slots of objects, as configurations, processors and what hooks keep, in functions (closures,
defaults), and in their classes; states of random generators of its own, and what is in arrays. Global variables that
functions read are not looked at.
"""

from __future__ import annotations

import enum
import logging
import operator
import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from inspect import GEN_CLOSED, GEN_CREATED, getgeneratorstate
from itertools import chain
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    GeneratorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    WrapperDescriptorType,
)
from typing import Any, cast
from weakref import ReferenceType

import numpy as np
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from samebits.nn.product import version_of
from samebits.nn.recipe import Recipe

MAX_VALUES = 1 << 19  # more would take too long to compare
MAX_BYTES = 1 << 20  # of an array
_LEAVES = (
    torch.Tensor, ModuleType, BuiltinFunctionType, ReferenceType, enum.Enum, logging.Logger, bool, int, float, complex,
    str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, range, slice,
    Recipe,  # whose headers keep what was worked out of them
)  # fmt: skip
_BASES = {object, nn.Module, torch.Tensor, nn.Parameter, dict, list, tuple, set, frozenset, deque, type}

Reader = Callable[[], Iterable[Any]]
_version = operator.attrgetter("_version")


class ModuleState:
    """What can be reached from a module, as it is now: by identity, and of tensors also where they lie in memory.

    Args:
        contents: also how often torch has written to each tensor.
        without: what is not looked into.

    Attributes:
        is_too_large: there is more than can be compared at each call.
        opaque: the class of something whose state cannot be compared at all, if there is one.
    """

    def __init__(self, model: nn.Module, *, contents: bool = True, without: Iterable[Any] = ()) -> None:
        self._mark = mark if contents else _place
        self._sized, self._readers, self.is_too_large = list[Any](), list[Reader](), False
        self._hidden: list[Callable[[], Any]] = []
        self.opaque: str | None = None
        self._held: list[Any] = []  # whose ids are known
        self._objects: list[Any] = []  # of classes that may become others
        self._follow(model, {id(each) for each in without})
        self._classes = list(map(type, self._objects))
        self._sizes = list(map(len, self._sized))
        self._values = list(self._now())
        self._states = self._hidden_states()
        tensors = {id(value): value for value in self._values if isinstance(value, torch.Tensor)}
        self._tensors = [tensor for tensor in tensors.values() if tensor.layout is torch.strided]
        # which no others can have the ids of
        self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in self._tensors]
        self._marks = list(map(self._mark, self._tensors))
        self._counted = [tensor for tensor in self._tensors if contents and not tensor.is_inference()]
        self._memory = self._in_memory()

    def is_in_place(self) -> bool:
        """Whether its tensors are where they were, and nobody has written to them: whoever reads them from there reads
        what they had. A small part of is_unchanged, in a small part of the time.
        """
        return self._in_memory() == self._memory

    def is_unchanged(self) -> bool:
        return (
            list(map(len, self._sized)) == self._sizes
            and all(map(operator.is_, map(type, self._objects), self._classes))
            and all(map(operator.is_, self._now(), self._values))
            and list(map(self._mark, self._tensors)) == self._marks
            and self._hidden_states() == self._states
        )

    def _hidden_states(self) -> list[Any]:
        return list(map(operator.call, self._hidden))

    def _in_memory(self) -> tuple[list[int], list[int]]:
        return list(map(torch.Tensor.data_ptr, self._tensors)), list(map(_version, self._counted))

    def _now(self) -> Iterator[Any]:
        return chain.from_iterable(map(operator.call, self._readers))

    def _follow(self, model: nn.Module, seen: set[int]) -> None:
        pending, count = deque[Any]([model]), 0
        while pending:
            value = pending.popleft()
            if isinstance(value, _LEAVES) or id(value) in seen:
                continue
            seen.add(id(value))
            self._held.append(value)
            if hidden := _hidden_state(value):
                self._hidden.append(hidden)
            elif _is_opaque(value):
                self.opaque = type(value).__name__
            if _is_of_python(type(value)):
                self._objects.append(value)
                pending.append(type(value))
            for reader, sized in _readers(value):
                found = list(reader())
                if not found and sized is None:
                    continue
                count += len(found)
                if count > MAX_VALUES:
                    self.is_too_large = True
                    return
                if sized is not None:
                    self._sized.append(sized)
                if found:
                    self._readers.append(reader)
                pending.extend(found)


def _readers(value: Any) -> Iterator[tuple[Reader, Any]]:
    """What tells all that a thing holds, and whose length says how much of it there is, if that may change."""
    if isinstance(value, dict):
        yield value.values, value
        yield value.keys, value
    elif isinstance(value, list | set | deque):
        yield value.__iter__, value
    elif isinstance(value, tuple | frozenset):
        yield value.__iter__, None
    elif isinstance(value, CellType):
        yield partial(_contents, value), None
    elif isinstance(value, MethodType):
        yield partial(_attributes, value, ("__self__", "__func__")), None
    elif isinstance(value, FunctionType):
        yield partial(_attributes, value, ("__closure__", "__defaults__", "__kwdefaults__", "__code__")), None
    elif isinstance(value, partial):
        yield partial(_attributes, value, ("func", "args", "keywords")), None
    elif isinstance(value, type):
        yield from _of_class(value)
        return
    own, kind = getattr(value, "__dict__", None), cast(Any, type(value))
    if type(own) is dict:  # some classes of C make another one each time
        yield own.values, own
    if slots := _slots(kind):
        yield partial(_attributes, value, slots), None


def _hidden_state(value: Any) -> Callable[[], Any] | None:
    """What tells by equality whether something has changed that C keeps."""
    if isinstance(value, np.ndarray):
        return partial(_array_state, value) if value.nbytes <= MAX_BYTES and not value.dtype.hasobject else None
    if isinstance(value, random.Random):
        return None if isinstance(value, random.SystemRandom) else value.getstate
    if isinstance(value, torch.Generator):
        return lambda: value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return lambda: str(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return lambda: str(value.get_state(legacy=False))
    if isinstance(value, GeneratorType) and getgeneratorstate(value) in (GEN_CREATED, GEN_CLOSED):  # a decorator's, say
        return partial(getgeneratorstate, value)
    if isinstance(value, bytearray | array) and memoryview(value).nbytes <= MAX_BYTES:
        return partial(bytes, value)
    return None


def _array_state(value: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    return value.shape, value.strides, value.dtype, value.tobytes()


def _is_opaque(value: Any) -> bool:
    """C keeps where an iterator is, of generators and files too; others may write to what a memoryview shows."""
    buffers = np.ndarray, random.SystemRandom, memoryview, bytearray, array
    return isinstance(getattr(type(value), "__next__", None), WrapperDescriptorType) or isinstance(value, buffers)


def _of_class(value: type) -> Iterator[tuple[Reader, Any]]:
    for base in value.__mro__:
        if base not in _BASES and _is_of_python(base):
            yield vars(base).values, vars(base)


def _is_of_python(value: type) -> bool:
    return bool(value.__flags__ & 1 << 9)  # Py_TPFLAGS_HEAPTYPE: made by a class statement, or as if


@cache
def _slots(kind: Any) -> tuple[str, ...]:
    """Names under which a class's objects have what is in no dict."""
    bases = [base for base in getattr(kind, "__mro__", ()) if "__slots__" in vars(base)]
    return tuple(name for base in bases for name, slot in vars(base).items() if isinstance(slot, MemberDescriptorType))


def _attributes(value: Any, names: tuple[str, ...]) -> Iterator[Any]:
    return (getattr(value, name, None) for name in names)


def _contents(cell: CellType) -> tuple[Any, ...]:
    try:
        return (cell.cell_contents,)
    except ValueError:  # empty
        return (None,)


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Changes where another memory is its, or it is read otherwise."""
    storage = tensor.untyped_storage()
    return tensor.data_ptr(), storage._cdata, tensor.shape, tensor.stride(), tensor.requires_grad


def mark(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Of one with strides: changes also where torch has written to it."""
    return *_place(tensor), version_of(tensor)
