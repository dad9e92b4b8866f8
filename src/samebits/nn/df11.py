"""Modules that keep their weights in the layout of DFloat11, and have them only while they run.

The tensors of a unit are buffers of its module, under the layout's names: a state dict gives the layout back. Right
before the module's forward one launch decodes all its matrices; right behind it they are gone. All units of a model
are decoded in the same memory, one after the other; in a graph of torch.compile, in memory that the graph manages.
Threads that run the same unit share what is decoded, and those that run another one meanwhile have memory of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from threading import Lock, get_ident
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import increment_version

from samebits.df11.operator import LAYOUT, check_outcome, check_unit
from samebits.errors import FormatError
from samebits.nn.recipe import shows_requires_grad
from samebits.nn.stored import Mark

_NAMES = (*LAYOUT, "split_positions")
_MEND = "load it into the model that it was made from"
_ALIGNED_WORDS = 8  # where a matrix starts; cuBLAS computes otherwise on one that is aligned to less than 16 bytes


class DecodingMemory:
    """Memory for the largest unit of a model, on each device that has one.

    Attributes:
        lock: held while a unit is decoded or given back, not while it runs.
    """

    def __init__(self) -> None:
        self.lock = Lock()
        self._words = 0
        self._streams: dict[int, set[torch.cuda.Stream]] = {}  # which may read what lies at an address
        self._memory: dict[torch.device, torch.Tensor] = {}
        self._malformed: dict[torch.device, torch.Tensor] = {}
        self._borrowed: set[torch.device] = set()

    def reserve(self, words: int) -> None:
        """Have room for a unit of so many weights."""
        self._words = max(self._words, words)

    def borrow(self, words: int, device: torch.device) -> torch.Tensor:
        """bfloat16 [words]. Not the shared memory if that is lent already: a unit may run inside of another."""
        with torch.inference_mode(False):  # it outlives that mode
            if device in self._borrowed:
                return torch.empty(words, dtype=torch.bfloat16, device=device)
            memory = self._memory.get(device)
            if memory is None or memory.numel() < self._words:
                memory = self._memory[device] = torch.empty(self._words, dtype=torch.bfloat16, device=device)
            self._borrowed.add(device)
            return memory[:words]

    def give_back(self, borrowed: torch.Tensor) -> None:
        memory = self._memory.get(borrowed.device)
        if memory is not None and memory.data_ptr() == borrowed.data_ptr():
            self._borrowed.discard(borrowed.device)
        else:
            self._streams.pop(borrowed.data_ptr(), None)  # torch's allocator sees to it from here on

    def follow(self, lent: torch.Tensor, decoding: bool) -> None:
        """Have the current stream wait for others of its GPU; not while a graph is captured, which can wait for none.

        Args:
            decoding: whether it is to write to the memory, or to read what another one has decoded.
        """
        if not lent.is_cuda or torch.cuda.is_current_stream_capturing():
            return
        current, known = torch.cuda.current_stream(lent.device), self._streams.setdefault(lent.data_ptr(), set())
        for stream in known - {current}:
            current.wait_stream(stream)
        if decoding:
            known.clear()
        known.add(current)
        lent.record_stream(current)  # the shared memory may have been taken on another one, and makes room for a larger

    def malformed(self, device: torch.device) -> torch.Tensor:
        """int32 [1], for the decoder to write to."""
        if device not in self._malformed:
            with torch.inference_mode(False):
                self._malformed[device] = torch.zeros(1, dtype=torch.int32, device=device)
        return self._malformed[device]

    def __deepcopy__(self, memo: dict[int, Any]) -> DecodingMemory:
        copy = memo[id(self)] = DecodingMemory()
        copy.reserve(self._words)
        return copy

    def __reduce__(self) -> tuple[Any, ...]:
        return DecodingMemory, (), {"_words": self._words}


def attach_unit(
    module: nn.Module, tensors: Mapping[str, torch.Tensor], attributes: Sequence[str], memory: DecodingMemory
) -> None:
    """Give a module its weights as a unit of DFloat11. For inference: nothing can be trained through them.

    Args:
        tensors: the six tensors of the unit by their names in the layout, on any device.
        attributes: the modules below ``module`` whose weights the unit holds, in its order; empty: ``module`` itself.
            They have these weights as parameters, on the meta device if need be; these are removed.
        memory: the same for all units of a model.

    Raises:
        FormatError: damaged tensors, weights that are not there or of other sizes.
    """
    unit = check_unit({name: tensors[name] for name in _NAMES})
    try:
        owners = [module.get_submodule(attribute) for attribute in attributes] or [module]
        weights = [_Weight.of(owner) for owner in owners]
    except AttributeError as error:
        raise FormatError(f"a unit for weights that the model does not have ({error})", mend=_MEND) from error
    if unit.sizes != [weight.shape.numel() for weight in weights]:
        what = f"a unit of {unit.sizes} weights for matrices {[list(weight.shape) for weight in weights]}"
        raise FormatError(what, mend=_MEND)
    for owner in owners:
        del owner.weight
    for name in _NAMES:
        module.register_buffer(name, tensors[name])
    memory.reserve(unit.words)
    _hook(module, _AttachedUnit(module, weights, memory))


def share_unit(holder: nn.Module, reader: nn.Module, memory: DecodingMemory) -> None:
    """Give ``reader`` the weight that is a unit of ``holder``'s and all of it, for tied weights; its own is removed.

    Raises:
        FormatError: it is no unit of that size.
    """
    weight, stored = _Weight.of(reader), holder._buffers.get("sign_mantissa")
    if stored is None or weight.shape.numel() != stored.numel():
        raise FormatError(f"a tied matrix {list(weight.shape)} that is not a unit of its own", mend=_MEND)
    del reader.weight
    _hook(reader, _AttachedUnit(holder, [weight], memory))


def holds_units(model: nn.Module) -> bool:
    """Whether it or a module in it has weights in the layout."""
    return any("sign_mantissa" in module._buffers for module in model.modules())


def _hook(module: nn.Module, attached: _AttachedUnit) -> None:
    module.register_forward_pre_hook(attached.show)
    module.register_forward_hook(attached.hide, always_call=True)


class _Weight(NamedTuple):
    """One that a unit holds, as the parameter was."""

    owner: nn.Module
    shape: torch.Size
    requires_grad: bool

    @classmethod
    def of(cls, owner: nn.Module) -> _Weight:
        """
        Raises:
            AttributeError: it has no weight.
        """
        parameter = owner.get_parameter("weight")
        return cls(owner, parameter.shape, parameter.requires_grad)


class _AttachedUnit:
    """The hooks of a module that runs with the weights of a unit, whose tensors ``holder`` has."""

    def __init__(self, holder: nn.Module, weights: list[_Weight], memory: DecodingMemory) -> None:
        self._holder = holder
        self._weights = weights
        self._memory = memory
        self._checked = False
        self._running: set[int] = set()  # threads; one that was interrupted stays until it runs again
        self._lent: torch.Tensor | None = None
        self._decoded_of: list[Mark] = []  # the layout's tensors, as they were

    def show(self, *_: Any) -> None:
        """Decode, and set the weights.

        Raises:
            FormatError: at the first time, if the stream contradicts the other tensors.
        """
        layout = [self._holder.get_buffer(name) for name in LAYOUT]
        if torch.compiler.is_compiling():
            self._set(_decoded_in_a_graph(layout), shows=False)
            return
        thread = get_ident()
        with self._memory.lock:
            if self._lent is not None and self._running - {thread} and self._is_of(layout):
                self._memory.follow(self._lent, decoding=False)
            else:
                self._decode(layout)
                self._decoded_of = [Mark.of(tensor) for tensor in layout]
            self._running.add(thread)

    def _is_of(self, layout: Sequence[torch.Tensor]) -> bool:
        """Whether what is decoded are these tensors' weights."""
        marks = self._decoded_of
        return bool(marks) and all(mark.holds(tensor) for mark, tensor in zip(marks, layout, strict=True))

    def _decode(self, layout: Sequence[torch.Tensor]) -> None:
        stored = layout[2]
        if self._lent is None or self._lent.device != stored.device:
            self._give_back()
            self._lent = self._memory.borrow(stored.numel(), stored.device)
        output, malformed = self._lent, self._memory.malformed(stored.device)
        self._memory.follow(output, decoding=True)
        # Not while a CUDA graph is captured: to look at the outcome is to wait for the device.
        check = not self._checked and not (stored.is_cuda and torch.cuda.is_current_stream_capturing())
        if check:
            malformed.zero_()
        torch.ops.samebits.df11_decode(*layout, output, malformed)
        increment_version(output)  # a backward pass that still needs what was there before fails
        if check:
            check_outcome(malformed)
        self._checked |= check
        shows = shows_requires_grad(output.dtype, output.device)
        with torch.inference_mode(False) if shows else nullcontext():  # as parameters are made
            self._set(output, shows)

    def _set(self, output: torch.Tensor, shows: bool) -> None:
        """Args: shows: whether weights are to have requires_grad as the parameters had."""
        start = 0
        for owner, shape, requires_grad in self._weights:
            weight = output[start : start + shape.numel()].view(shape)
            weight = weight.clone() if start % _ALIGNED_WORDS else weight
            owner.__dict__["weight"] = weight.detach().requires_grad_() if shows and requires_grad else weight
            start += shape.numel()

    def hide(self, *_: Any) -> None:
        """Take the weights away again."""
        if torch.compiler.is_compiling():
            for weight in self._weights:
                del weight.owner.__dict__["weight"]
            return
        with self._memory.lock:
            self._running.discard(get_ident())
            if not self._running:
                self._give_back()

    def _give_back(self) -> None:
        for weight in self._weights:
            weight.owner.__dict__.pop("weight", None)
        if self._lent is not None:
            self._memory.give_back(self._lent)
            self._lent = None

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which no thread runs."""
        return self.__dict__ | {"_running": set(), "_lent": None, "_decoded_of": []}


def _decoded_in_a_graph(layout: Sequence[torch.Tensor]) -> torch.Tensor:
    """Into memory that the graph manages; nobody looks at the outcome."""
    stored = layout[2]
    output = torch.empty(stored.numel(), dtype=torch.bfloat16, device=stored.device)
    malformed = torch.zeros(1, dtype=torch.int32, device=stored.device)
    torch.ops.samebits.df11_decode(*layout, output, malformed)
    return output
