"""Products of tokens with the experts that a router has chosen for them: csrc/linear_experts.cuh, linear_routed.cuh."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from enum import Enum
from functools import lru_cache
from math import inf
from typing import NamedTuple

import torch

from samebits.errors import DeviceError
from samebits.format.geometry import EXPERTS_DIMENSIONS, LANES, ROW_GROUP
from samebits.format.header import Header
from samebits.format.packed import PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.linear.job import OCTET, Footprint
from samebits.kernels.linear.products import can_be_multiplied
from samebits.kernels.linear.routed import routed
from samebits.kernels.linear.routing import MAX_DIVIDED, MAX_EXPERTS, ExpertsLaunch, Part, routing
from samebits.kernels.linear.walk import WalkPlanner
from samebits.kernels.repeat import Patch, Repeat, Step, X
from samebits.kernels.residents import Resident, make_room, resident
from samebits.kernels.structures import GeometryStructure, JobStructure, PackedStructure, RoutingStructure
from samebits.kernels.tables import decode_table

_FILE = "linear_experts.cu"
_MAX_WARPS = {1: 20, 2: 16}  # kMaxWarps, kFewWarps: by OCTETs of pairs that a unit has
_UNIT_WORDS = {1: 10, 2: 18}  # csrc: Unit
_COLUMN_WORDS = 256  # kColumnBytes
_PLACES = {1: 4, 2: 3}  # kPlaces
_MAX_PAIRS = 1 << 13
_MAX_ITEMS = 1 << 16  # csrc: Piece::place
# Pairs of an expert, on average, with which units of so many OCTETs may be the fastest.
_AVERAGES = {1: (0, 16), 2: (0, 32), 8: (4, 96), 12: (24, 192), 16: (32, 384), 24: (64, 768), 32: (96, inf)}
_SCHEDULERS = 4  # of a multiprocessor
_COLUMNS, _LEAST = 128, 640  # pairs of stages, and as many as such weights get the quad code with (codecs/plan.py)


@lru_cache(maxsize=8192)
def is_supported(header: Header) -> bool:
    """Whether there is a kernel for a tensor: experts' matrices of whole row groups, each in chunks of its own."""
    is_stack = len(header.shape) == EXPERTS_DIMENSIONS and header.shape[1] % ROW_GROUP == 0
    return is_stack and header.geometry.row_groups_per_chunk == 1 and can_be_multiplied(header)


def may_be_fused(shape: Sequence[int]) -> bool:
    """What is_supported says of a stack of that shape, if its weights are as trained ones."""
    return len(shape) == EXPERTS_DIMENSIONS and not (shape[1] % ROW_GROUP or shape[2] % _COLUMNS) and shape[2] >= _LEAST


class Input(Enum):
    """Where x is."""

    SHARED = "x in shared memory"
    IN_STEP = "x brought turn by turn"
    ARRANGED = "x arranged in memory"


class Variant(NamedTuple):
    """One way to run it; changes the speed and never the bits.

    Attributes:
        octets: of pairs that a unit has.
    """

    octets: int
    input: Input

    def __str__(self) -> str:
        return f"units of {OCTET * self.octets}, {self.input.value}"


VARIANTS = (
    *(Variant(octets, kind) for octets in (1, 2) for kind in (Input.SHARED, Input.IN_STEP)),
    *(Variant(octets, Input.ARRANGED) for octets in (8, 12, 16, 24, 32)),
)


@lru_cache(maxsize=8192)
def launch_of(header: Header, pairs: int, sharing: int, variant: int, device: int) -> ExpertsLaunch | None:
    """None if the tensor is not supported, or it does not fit, or is of no use.

    Args:
        pairs: of tokens and experts.
        sharing: pairs behind each other that have one row of x.
        variant: an index into VARIANTS.
    """
    kind = VARIANTS[variant]
    if not is_supported(header):
        return None
    if kind.input is Input.ARRANGED:
        return routed(header, pairs, sharing, OCTET * kind.octets, device)
    planner = _Planner(header, pairs, sharing, kind, device)
    is_too_large = (
        pairs > _MAX_PAIRS
        or planner.experts > MAX_EXPERTS
        or planner.items > _MAX_ITEMS
        or planner.most_divided > MAX_DIVIDED
    )
    if is_too_large or (kind.octets > 1 and planner.tokens <= OCTET * kind.octets // 2):
        return None
    most = planner.most_warps
    return planner.launch(planner.even_warps(most)) if most >= min(_SCHEDULERS, planner.items) else None


def may_be_fastest(pairs: int, experts: int, variant: int) -> bool:
    """Whether a variant is worth trying, if no expert is chosen much more often than others."""
    least, most = _AVERAGES[VARIANTS[variant].octets]
    return least <= pairs / experts <= most


class _Planner(WalkPlanner):
    """Memory in 32-bit words."""

    def __init__(self, header: Header, pairs: int, sharing: int, variant: Variant, device: int) -> None:
        super().__init__(Footprint.of(header), OCTET * variant.octets, 1, device, 1)
        self.pairs, self.sharing, self.variant = pairs, sharing, variant
        self.experts, rows, self.columns = header.shape
        self.groups, self.grid = rows // ROW_GROUP, nvrtc.multiprocessors(device)
        self.tokens = pairs // sharing
        self.unit_pairs = min(self.m, self.tokens)
        units = min(pairs, self.experts + pairs // self.unit_pairs)  # of all blocks, at most
        self.all_items = units * self.groups
        self.items = -(-self.all_items // self.grid)  # of a block
        self.units = max(self.items - 2, 0) // self.groups + 2
        self.others = 1 if variant.input is Input.IN_STEP else 0  # warps that bring x
        x = {
            Input.SHARED: self.units * self.unit_pairs * self.columns // 2,
            Input.IN_STEP: _PLACES[variant.octets] * self.unit_pairs * _COLUMN_WORDS,
        }
        self.x = max(x[variant.input], self.entries)
        flags = (1 + _MAX_WARPS[variant.octets]) * self.others
        unit_words = self.units * _UNIT_WORDS[variant.octets]
        self.fixed = self.table + self.x + unit_words + self.experts + pairs + flags

    @property
    def most_divided(self) -> int:
        """Times the divisor."""
        return max(self.all_items * self.groups, self.items * self.chunks**2, self.pairs * max(self.sharing, self.m))

    @property
    def most_warps(self) -> int:
        """That walk."""
        return min(_MAX_WARPS[self.variant.octets] - self.others, (self.room - self.fixed) // self.walker)

    def even_warps(self, most: int) -> int:
        """As few as have no more items each than with as many as fit."""
        each = -(-self.items // most)
        return -(-self.items // each)

    def launch(self, warps: int) -> ExpertsLaunch:
        name = f"linear_experts_{self.m}_{self.variant.input.name.lower()}"
        job = JobStructure(None, None, None, None, None, *self.job_fields(
            warps, 1, warps, x=self.x, first_block=0, ring=_PLACES[self.variant.octets]
        ))  # fmt: skip
        part = Part(_FILE, name, self.grid, LANES * (warps + self.others), 4 * (self.fixed + warps * self.walker),
                    tuple(_STARTS))  # fmt: skip
        return ExpertsLaunch((part,), job, routing(self.pairs, self.experts, self.groups, self.sharing, self.units,
                                                   self.unit_pairs))  # fmt: skip


def experts_product(
    x: torch.Tensor, packed: PackedTensor, ids: torch.Tensor, scales: torch.Tensor | None, y: torch.Tensor, variant: int
) -> None:
    """``y[p] = x[p // sharing] @ W[ids[p]].T * scales[p]``, decoding what that takes, on torch's current stream.

    The sums are those of ``fused_linear`` with one range of K, times the scale, and then rounded. A pair whose index is
    out of range gets zeros. Neither waits for the indices' values: a graph can be replayed with others.

    Args:
        x: bfloat16 [tokens, K], contiguous, 16-byte aligned; pairs that share a token are behind each other.
        packed: W, [experts, N, K], on x's device; is_supported(packed.header).
        ids: int32 or int64, one for each pair, contiguous.
        scales: float32, as many, contiguous, or None.
        y: bfloat16, N for each pair, contiguous, 4-byte aligned; written.
        variant: an index into VARIANTS.

    Raises:
        DeviceError: it does not fit, or the kernel cannot be built or launched.
    """
    pairs, device, kept, arguments = ids.numel(), x.get_device(), resident(packed.data), _arguments
    with nvrtc.on_device(device):
        stream = nvrtc.current_stream(device)
        kind = pairs, len(x), variant, stream
        told = (kept.experts.get(kind) if kept else None) or _tell(packed, kept, kind, device)
        arguments.bytes[:] = told.without_addresses
        job, routing = arguments.job, arguments.routing
        job.x, job.y, routing.ids, routing.wide = x.data_ptr(), y.data_ptr(), ids.data_ptr(), ids.dtype is torch.int64
        if scales is not None:
            routing.scales = scales.data_ptr()
        if told.scratch_bytes:
            scratch = torch.empty(told.scratch_bytes, dtype=torch.uint8, device=x.device)
            job.parts = scratch.data_ptr()
            job.done = job.parts + told.arranged_bytes
        for launch, names in told.launches:
            launch(arguments.pointers(names))


def repeat(x: torch.Tensor, packed: PackedTensor, ids: torch.Tensor, variant: int) -> Repeat | None:
    """``experts_product`` without scales, to be made again for inputs and indices like these; None if it may be another
    launch then."""
    kept, stream = resident(packed.data), nvrtc.current_stream(x.get_device())
    told: _Told | None = kept.experts.get((ids.numel(), len(x), variant, stream)) if kept else None
    if told is None:
        return None
    room, job, routing = _Parameters.from_buffer_copy(told.without_addresses), _STARTS["job"], _STARTS["routing"]
    room.routing.wide = ids.dtype is torch.int64
    patches = [
        Patch(job + JobStructure.x.offset, X),
        Patch(job + JobStructure.y.offset, 1),
        Patch(routing + RoutingStructure.ids.offset, 2),
    ]
    if told.scratch_bytes:
        patches.append(Patch(job + JobStructure.parts.offset, 3))
        patches.append(Patch(job + JobStructure.done.offset, 3, told.arranged_bytes))
    sizes = ((ids.numel(), packed.shape[1]),)
    return Repeat(sizes, told.scratch_bytes, bytes(room), tuple(patches), told.steps)


class _Parameters(ctypes.Structure):
    """The kernel's, one behind the other."""

    _fields_ = (
        ("geometry", GeometryStructure), ("packed", PackedStructure), ("job", JobStructure),
        ("routing", RoutingStructure),
    )  # fmt: skip


_STARTS: dict[str, int] = {name: getattr(_Parameters, name).offset for name, _ in _Parameters._fields_}


class _Arguments(threading.local):
    """Room for the arguments of a thread's next launches."""

    def __init__(self) -> None:
        self._structure = _Parameters()
        self._arrays: dict[tuple[str, ...], ctypes.Array[ctypes.c_void_p]] = {}
        self.bytes = memoryview(self._structure).cast("B")
        self.job, self.routing = self._structure.job, self._structure.routing

    def pointers(self, names: tuple[str, ...]) -> int:
        """As the driver takes those of a kernel."""
        array = self._arrays.get(names)
        if array is None:
            places = [ctypes.addressof(self._structure) + _STARTS[name] for name in names]
            array = self._arrays[names] = (ctypes.c_void_p * len(places))(*places)
        return ctypes.addressof(array)


_arguments = _Arguments()


class _Told(NamedTuple):
    """What holds for each product of a kind with one packed tensor's bytes, on a stream.

    Attributes:
        without_addresses: the arguments, but for those of x, y, ids, scales and scratch.
        arranged_bytes, scratch_bytes: as ExpertsLaunch has them.
        steps: the launches.
        launches: make them, as nvrtc.launcher gives it, each with the names of its arguments.
    """

    without_addresses: bytes
    arranged_bytes: int
    scratch_bytes: int
    steps: tuple[Step, ...]
    launches: tuple[tuple[Callable[[int], None], tuple[str, ...]], ...]


def _tell(packed: PackedTensor, kept: Resident | None, kind: tuple[int, int, int, int], device: int) -> _Told:
    pairs, tokens, variant, stream = kind
    launch = launch_of(packed.header, pairs, pairs // tokens, variant, device)
    if launch is None:
        raise DeviceError(f"{VARIANTS[variant]} does not fit on this device", mend="ask launch_of first")
    geometry, table = GeometryStructure.of(packed.header.geometry), decode_table(packed)
    arguments = bytes(_Parameters(geometry, PackedStructure.of(packed, table), launch.job, launch.routing))
    steps = tuple(
        Step(nvrtc.kernel(part.file, part.name, device), part.grid, part.threads, part.shared_bytes,
             tuple(_STARTS[name] for name in part.arguments))
        for part in launch.parts
    )  # fmt: skip
    launches = tuple(
        (nvrtc.launcher(*step[:4], stream, True, device), part.arguments)
        for step, part in zip(steps, launch.parts, strict=True)
    )
    told = _Told(arguments, launch.arranged_bytes, launch.scratch_bytes, steps, launches)
    if kept and kept.has_table:  # or it will have one
        make_room(kept.experts, kind)
        kept.experts[kind] = told
    return told
