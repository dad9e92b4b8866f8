"""Blocks of weights that lie in main memory and are copied to a device as their turn comes.

The weights of a block lie one behind the other, so that one copy brings them all. On the device are a few staging
buffers, as large as the largest block. While a block computes from its buffer, the next ones are copied into the
others, on a stream of their own:

    copies     2 to B   3 to A   1 to B   2 to A   ...
    compute    1 in A   2 in B   3 in A   1 in B   ...

A block waits for the event behind its copy; a copy waits for the event behind the block that computed from its buffer
before. Behind the last block of a forward pass comes the first one of the next. Which block follows which is learned
from pass to pass, so that it need not be known; a block that nobody expected is copied when it is asked for.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.graph import increment_version

from samebits.errors import InputError, ResourceError
from samebits.format.header import align
from samebits.kernels.pinned import PAGE, pin, unpin
from samebits.nn.packed_module import PackedModule

ALIGNMENT = 256  # of each weight in a block, in bytes
_MEND = "call samebits.onload on the model first"

Owners = Sequence[tuple[nn.Module, str]]  # the modules that have a parameter, and its name there


class Lane:
    """How bytes get from main memory to a device; on a CPU at once, and nothing has to wait for anything.

    An event is whatever ``mark`` and ``copy`` give.
    """

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """uint8 [nbytes], on pages of its own."""
        pages = torch.empty(align(nbytes, PAGE) + PAGE, dtype=torch.uint8, device="cpu")
        start = -pages.data_ptr() % PAGE
        return pages[start : start + nbytes]

    def release(self, memory: torch.Tensor) -> None:
        """Nothing is copied from ``memory`` any more."""

    def check(self) -> None:
        """Whether weights can be copied now.

        Raises:
            InputError: they cannot.
        """

    def mark(self) -> Any:
        """An event behind everything that computes so far."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        """Copy once the event ``after`` has happened; the event behind that."""
        target.copy_(source)

    def wait(self, event: Any, memory: torch.Tensor) -> None:
        """Let what computes from now on come behind ``event``, because it reads ``memory``."""


class CudaLane(Lane):
    """From pinned memory to a GPU, on a stream of its own; what computes does so on torch's current stream."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.stream = device, torch.cuda.Stream(device)
        self._pinned: set[int] = set()  # addresses; other memory is torch's

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """
        Raises:
            ResourceError: it cannot be pinned.
        """
        memory = super().host_memory(nbytes)
        if pin(memory, self.device):
            self._pinned.add(memory.data_ptr())
            return memory
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        except RuntimeError as error:
            what = f"{nbytes:,} bytes of main memory cannot be pinned"
            raise ResourceError(what, mend="free main memory, or let the GPU have more of the model") from error

    def release(self, memory: torch.Tensor) -> None:
        self.stream.synchronize()
        if memory.data_ptr() in self._pinned:
            self._pinned.remove(memory.data_ptr())
            unpin(memory)

    def check(self) -> None:
        if torch.cuda.is_current_stream_capturing():
            mend = "run it without, or call samebits.onload on the model first"
            raise InputError("weights that are streamed cannot be captured in a CUDA graph", mend=mend)

    def mark(self) -> Any:
        return torch.cuda.current_stream(self.device).record_event()

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any) -> Any:
        target.record_stream(self.stream)  # its memory is nobody else's before the copies into it have ended
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(after)
            target.copy_(source, non_blocking=True)
            return self.stream.record_event()

    def wait(self, event: Any, memory: torch.Tensor) -> None:
        stream = torch.cuda.current_stream(self.device)
        stream.wait_event(event)
        memory.record_stream(stream)


def lane_to(device: torch.device) -> Lane:
    return CudaLane(device) if device.type == "cuda" else Lane()


class _Place(NamedTuple):
    """Where a weight lies in its block."""

    parameter: nn.Parameter
    owners: Owners
    start: int
    host: torch.Tensor


class Block:
    """Weights in main memory, and for a while in a staging buffer: the parameters stay the same objects.

    Whatever reads a parameter outside of ``staged`` sees main memory.

    Attributes:
        name: of the module, for errors.
        memory: uint8, all of it.
    """

    def __init__(self, name: str, weights: Sequence[tuple[nn.Parameter, Owners]], lane: Lane) -> None:
        self.name = name
        self.memory = lane.host_memory(block_bytes([parameter for parameter, _ in weights]))
        self.release = weakref.finalize(self, lane.release, self.memory)
        self._stagings = 0
        self._places: list[_Place] = []
        start = 0
        for parameter, owners in weights:
            host = _view(self.memory, start, parameter)
            parameter.data = host.copy_(parameter.detach())
            self._places.append(_Place(parameter, owners, start, host))
            start += align(parameter.nbytes, ALIGNMENT)

    @property
    def edition(self) -> int:
        """Another number whenever something has written to the weights.

        Raises:
            InputError: they are not those that were brought here.
        """
        for parameter, owners, _, host in self._places:
            held = all(owner._parameters.get(name) is parameter for owner, name in owners)
            if not held or parameter.data_ptr() != host.data_ptr():
                raise InputError("streamed weights were moved or replaced", where=self.name, mend=_MEND)
        return sum(place.parameter._version for place in self._places) - self._stagings * len(self._places)

    @contextmanager
    def staged(self, buffer: torch.Tensor) -> Iterator[None]:
        """Have the parameters read what was copied to ``buffer``."""
        with torch.inference_mode(False):
            views = [_view(buffer, place.start, place.host) for place in self._places]
        self._stagings += 1
        try:
            for place, view in zip(self._places, views, strict=True):
                packed = ((owner, name) for owner, name in place.owners if isinstance(owner, PackedModule))
                unchanged = [(owner, name) for owner, name in packed if owner.sb_is_unchanged(name)]
                place.parameter.data = view
                increment_version(place.parameter)  # other bytes: see kernels/residents.py
                for owner, name in unchanged:
                    owner.sb_accept([name])
            yield
        finally:
            for place in self._places:
                place.parameter.data = place.host


def block_bytes(weights: Sequence[torch.Tensor]) -> int:
    """What a Block of these takes."""
    return sum(align(weight.nbytes, ALIGNMENT) for weight in weights)


def _view(memory: torch.Tensor, start: int, like: torch.Tensor) -> torch.Tensor:
    return memory[start : start + like.nbytes].view(like.dtype).view(like.shape)


class _Buffer:
    """Staging memory on the device.

    Attributes:
        block, edition: what was copied to it last.
        ready: the event behind that copy.
        free: the event behind what computed from it last; None: that was interrupted.
        busy: whether its block is computing.
    """

    def __init__(self, memory: torch.Tensor, free: Any) -> None:
        self.memory, self.free = memory, free
        self.block: Block | None = None
        self.edition = 0
        self.ready: Any = None
        self.busy = False


class Streamer:
    """The blocks of a model, and the buffers through which they go. One thread at a time runs a block.

    Args:
        blocks: in the order in which they are thought to run.
        buffers: how many; at least one.
    """

    def __init__(self, blocks: Sequence[Block], device: torch.device, buffers: int, lane: Lane) -> None:
        self.device, self._lane, self._lock = device, lane, RLock()
        self._following = dict(zip(blocks, [*blocks[1:], blocks[0]], strict=True))
        self._last = blocks[-1]
        largest = max(len(block.memory) for block in blocks)
        with torch.inference_mode(False):
            memories = [torch.empty(largest, dtype=torch.uint8, device=device) for _ in range(buffers)]
        self._buffers = [_Buffer(memory, lane.mark()) for memory in memories]
        self._prefetch()

    @contextmanager
    def staged(self, block: Block) -> Iterator[None]:
        """Have a block's weights on the device.

        Raises:
            InputError: not now, see Lane.check; or its weights are gone; or too many blocks run inside of each other.
        """
        with self._lock:
            self._lane.check()
            buffer = self._holding(block) or self._fill(self._idle(block), block)
            if buffer.busy:
                raise InputError("runs inside of itself", where=block.name, mend=_MEND)
            self._lane.wait(buffer.ready, buffer.memory)
            self._lane.wait(self._free(buffer), buffer.memory)  # so the event behind this use is behind all before it
            self._following[self._last] = block
            try:
                self._last, buffer.busy = block, True
                with block.staged(buffer.memory):
                    yield
            finally:
                buffer.busy, buffer.free = False, None  # before any call: Python raises a KeyboardInterrupt behind one
                buffer.free = self._lane.mark()
            self._prefetch()

    def _holding(self, block: Block) -> _Buffer | None:
        held = (buffer for buffer in self._buffers if buffer.block is block)
        return next((buffer for buffer in held if buffer.busy or buffer.edition == block.edition), None)

    def _idle(self, block: Block) -> _Buffer:
        idle = next((buffer for buffer in self._buffers if not buffer.busy), None)
        if idle is None:
            what = f"runs inside of {len(self._buffers)} others whose weights are streamed too"
            raise InputError(what, where=block.name, mend=_MEND)
        return idle

    def _fill(self, buffer: _Buffer, block: Block) -> _Buffer:
        edition = block.edition
        buffer.block = None  # whose weights it has nobody knows if this is interrupted
        buffer.ready = self._lane.copy(buffer.memory[: len(block.memory)], block.memory, self._free(buffer))
        buffer.block, buffer.edition = block, edition
        return buffer

    def _free(self, buffer: _Buffer) -> Any:
        return self._lane.mark() if buffer.free is None else buffer.free

    def _prefetch(self) -> None:
        """Have the blocks that come next copied to the buffers in which they are not yet."""
        upcoming = [self._following[self._last]]
        while len(upcoming) < len(self._buffers):
            upcoming.append(self._following[upcoming[-1]])
        for block in upcoming:
            unused = (buffer for buffer in self._buffers if not buffer.busy and buffer.block not in upcoming)
            buffer = next(unused, None)
            if buffer is not None and self._holding(block) is None:
                self._fill(buffer, block)
