"""Launches that can be made again: all that kernels are told but for addresses, which are other ones each time."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from cuda.core import Kernel

X = 0  # a source of addresses: the input; behind it the outputs in their order, indices if there are any, the scratch


class Patch(NamedTuple):
    """An address to be put into a room.

    Attributes:
        offset: where, in bytes.
        source: whose address it is.
        addend: bytes behind that.
    """

    offset: int
    source: int
    addend: int = 0


class Step(NamedTuple):
    """One launch.

    Attributes:
        shared: bytes of shared memory.
        arguments: where in the room each of them begins.
    """

    function: Kernel
    grid: int
    threads: int
    shared: int
    arguments: tuple[int, ...]


class Repeat(NamedTuple):
    """Launches, one after another, that start early and belong to one input.

    Attributes:
        sizes: of the outputs, bfloat16.
        scratch: bytes of memory that is needed until the last launch.
        room: the arguments.
    """

    sizes: tuple[tuple[int, ...], ...]
    scratch: int
    room: bytes
    patches: tuple[Patch, ...]
    steps: tuple[Step, ...]
