"""Products of tokens with the experts that a router has chosen for them: csrc/linear_experts.cuh."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

import torch

from samebits.errors import DeviceError
from samebits.format.geometry import EXPERTS_DIMENSIONS, LANES, ROW_GROUP
from samebits.format.header import Header
from samebits.format.packed import PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.linear.job import OCTET, magic
from samebits.kernels.linear.products import can_be_multiplied
from samebits.kernels.linear.walk import WalkPlanner
from samebits.kernels.repeat import Patch, Repeat, Step, X
from samebits.kernels.residents import Resident, make_room, resident
from samebits.kernels.structures import GeometryStructure, JobStructure, PackedStructure, RoutingStructure
from samebits.kernels.tables import decode_table

_FILE = "linear_experts.cu"
_MAX_WARPS = {1: 20, 2: 16, 4: 16}  # kMaxWarps, kFewWarps: by OCTETs of pairs that a unit has
_UNIT_WORDS = {1: 10, 2: 18, 4: 34}  # csrc: Unit
_COLUMN_WORDS = 256  # kColumnBytes
_PLACES = {1: 4, 2: 3, 4: 2}  # kPlaces
_MAX_PAIRS = 1 << 13
_MAX_EXPERTS = (1 << 16) - 1  # kNoExpert
_MAX_ITEMS = 1 << 16  # csrc: Piece::place
_MAX_DIVIDED = 1 << 32  # csrc: divide
_SCHEDULERS = 4  # of a multiprocessor
_COLUMNS, _LEAST = 128, 640  # pairs of stages, and as many as such weights get the quad code with (codecs/plan.py)


@dataclass(frozen=True, eq=False)
class ExpertsLaunch:
    """For one packed tensor, number of pairs and device.

    Attributes:
        job, routing: without addresses.
    """

    name: str
    grid: int
    warps: int
    shared_bytes: int
    job: JobStructure
    routing: RoutingStructure

    @property
    def threads(self) -> int:
        return LANES * self.warps

    @property
    def source(self) -> nvrtc.Source:
        return nvrtc.Source(_FILE, self.name)


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
    GLOBAL = "x in global memory"
    IN_STEP = "x brought turn by turn"


class Variant(NamedTuple):
    """One way to run it; changes the speed and never the bits.

    Attributes:
        octets: of pairs that a unit has.
    """

    octets: int
    input: Input

    def __str__(self) -> str:
        return f"units of {OCTET * self.octets}, {self.input.value}"


# x of units of 32 leaves too few warps room in shared memory, and is waited for from global memory.
VARIANTS = (*(Variant(octets, kind) for octets in (1, 2) for kind in Input), Variant(4, Input.IN_STEP))


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
    planner = _Planner(header, pairs, sharing, kind, device)
    is_too_large = (
        pairs > _MAX_PAIRS
        or planner.experts > _MAX_EXPERTS
        or planner.items > _MAX_ITEMS
        or planner.most_divided > _MAX_DIVIDED
    )
    if is_too_large or (kind.octets > 1 and planner.tokens <= OCTET * kind.octets // 2):
        return None
    most = planner.most_warps
    return planner.launch(planner.even_warps(most)) if most >= min(_SCHEDULERS, planner.items) else None


class _Planner(WalkPlanner):
    """Memory in 32-bit words."""

    def __init__(self, header: Header, pairs: int, sharing: int, variant: Variant, device: int) -> None:
        super().__init__(header, OCTET * variant.octets, 1, device, 1)
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
            Input.GLOBAL: 0,
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
        routing = RoutingStructure(None, None, 0, self.pairs, self.experts, self.groups, self.sharing, self.units,
                                   self.unit_pairs, magic(self.groups), magic(self.sharing),
                                   magic(self.unit_pairs))  # fmt: skip
        job = JobStructure(None, None, None, None, None, *self.job_fields(
            warps, 1, warps, x=self.x, first_block=0, ring=_PLACES[self.variant.octets]
        ))  # fmt: skip
        return ExpertsLaunch(name, self.grid, warps + self.others, 4 * (self.fixed + warps * self.walker), job, routing)


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
        told.launch(arguments.pointers)


def repeat(x: torch.Tensor, packed: PackedTensor, ids: torch.Tensor, variant: int) -> Repeat | None:
    """``experts_product`` without scales, to be made again for inputs and indices like these; None if it may be another
    launch then."""
    kept, stream = resident(packed.data), nvrtc.current_stream(x.get_device())
    told: _Told | None = kept.experts.get((ids.numel(), len(x), variant, stream)) if kept else None
    if told is None:
        return None
    room, job, routing = _Parameters.from_buffer_copy(told.without_addresses), *_STARTS[2:]
    room.routing.wide = ids.dtype is torch.int64
    patches = (
        Patch(job + JobStructure.x.offset, X),
        Patch(job + JobStructure.y.offset, 1),
        Patch(routing + RoutingStructure.ids.offset, 2),
    )
    sizes = ((ids.numel(), packed.shape[1]),)
    return Repeat(sizes, 0, bytes(room), patches, (told.step,))


class _Parameters(ctypes.Structure):
    """The kernel's, one behind the other."""

    _fields_ = (
        ("geometry", GeometryStructure), ("packed", PackedStructure), ("job", JobStructure),
        ("routing", RoutingStructure),
    )  # fmt: skip


_STARTS = tuple(getattr(_Parameters, name).offset for name, _ in _Parameters._fields_)


class _Arguments(threading.local):
    """Room for the arguments of a thread's next launch.

    Attributes:
        pointers: as the driver takes them.
    """

    def __init__(self) -> None:
        self._structure = _Parameters()
        places = [ctypes.addressof(self._structure) + start for start in _STARTS]
        self._addresses = (ctypes.c_void_p * len(places))(*places)
        self.pointers = ctypes.addressof(self._addresses)
        self.bytes = memoryview(self._structure).cast("B")
        self.job, self.routing = self._structure.job, self._structure.routing


_arguments = _Arguments()


class _Told(NamedTuple):
    """What holds for each product of a kind with one packed tensor's bytes, on a stream.

    Attributes:
        without_addresses: the arguments, but for those of x, y, ids and scales.
        step: the launch.
        launch: makes it, as nvrtc.launcher gives it.
    """

    without_addresses: bytes
    step: Step
    launch: Callable[[int], None]


def _tell(packed: PackedTensor, kept: Resident | None, kind: tuple[int, int, int, int], device: int) -> _Told:
    pairs, tokens, variant, stream = kind
    launch = launch_of(packed.header, pairs, pairs // tokens, variant, device)
    if launch is None:
        raise DeviceError(f"{VARIANTS[variant]} does not fit on this device", mend="ask launch_of first")
    geometry, table = GeometryStructure.of(packed.header.geometry), decode_table(packed)
    arguments = bytes(_Parameters(geometry, PackedStructure.of(packed, table), launch.job, launch.routing))
    kernel = nvrtc.kernel(_FILE, launch.name, device)
    step = Step(kernel, launch.grid, launch.threads, launch.shared_bytes, _STARTS)
    told = _Told(arguments, step, nvrtc.launcher(*step[:4], stream, True, device))
    if kept and kept.has_table:  # or it will have one
        make_room(kept.experts, kind)
        kept.experts[kind] = told
    return told
