"""The fused linear layer on a CUDA device: csrc/linear_*.cuh; all but ahead and chains on Hopper alone.

All give the bits of one order of summation: K is cut into ranges of whole stages, each summed in fp32 by
``mma.m16n8k16`` step after step; the ranges' sums are added in order, then the bias; one rounding. cuBLAS sums in this
order, with a number of ranges that depends on the shape and on much else (see samebits.plans).
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch

from samebits.errors import DeviceError
from samebits.format.geometry import ROW_GROUP, SLAB_BYTES, STAGE, Code, Layout
from samebits.format.header import Header
from samebits.format.packed import PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.decode import decode_source
from samebits.kernels.linear.job import CHUNK_STAGES, Arrangement, Footprint, Launch
from samebits.kernels.linear.launch import VARIANTS, different, joint_launch, launch_of, max_tokens, nearest_launch
from samebits.kernels.repeat import Patch, Repeat, Step, X
from samebits.kernels.residents import resident
from samebits.kernels.structures import (
    MAX_PREFETCHED,
    ArrangementStructure,
    GeometryStructure,
    JobStructure,
    PackedStructure,
    PrefetchedStructure,
    ProductStructure,
    TogetherStructure,
)
from samebits.kernels.tables import decode_table

_MAX_COLUMNS = 1 << 22  # kernels number what they read in 32 bits


@dataclass(frozen=True)
class LinearPlan:
    """How one fused launch is made.

    Attributes:
        split: ranges that K is asked to be cut into; ceil(ceil(K / 64) / split) stages each.
        variant: index into launch.VARIANTS; changes the speed and never the bits.
    """

    split: int
    variant: int = 0

    def __str__(self) -> str:
        return f"split {self.split}, {VARIANTS[self.variant]}"


@lru_cache(maxsize=8192)
def is_supported(header: Header, m: int, device: int) -> bool:
    """Whether there is a fused kernel for ``m`` tokens: quad code, matrix layout, whole row groups and stages."""
    has_long_rows = can_be_multiplied(header) and header.geometry.stages >= CHUNK_STAGES
    return has_long_rows and 1 <= m <= max_tokens(device)


def can_be_multiplied(header: Header) -> bool:
    """What the kernels that multiply ask of any tensor: quad code, matrix layout, whole row groups and stages."""
    if header.code is not Code.QUAD or header.layout is not Layout.MATRIX:
        return False
    geometry = header.geometry
    return (
        header.chunk_stages == CHUNK_STAGES
        and geometry.rows % ROW_GROUP == 0
        and geometry.columns % STAGE == 0
        and 4 * header.stream_words >= CHUNK_STAGES // 2 * SLAB_BYTES  # loads ahead may pass the planes' end by a chunk
        and geometry.columns <= _MAX_COLUMNS
        and geometry.rows * geometry.columns < 1 << 40
    )


def variants(header: Header, m: int, split: int) -> list[int]:
    """The different variants of a supported launch that fit on the current device, as LinearPlan counts them."""
    return list(different(_launches(header, m, split, torch.cuda.current_device())))


def sources(header: Header, m: int, plans: Iterable[LinearPlan], device: int) -> set[nvrtc.Source]:
    """What is compiled for supported products, fused under these plans or decoded first."""
    launches = (launch_of(header, m, plan.split, plan.variant, device) for plan in plans)
    return {decode_source(header, device)}.union(*(launch.sources for launch in launches if launch))


def first_variant(header: Header, m: int, split: int) -> int | None:
    """Of these the first, without working out the others."""
    launches = enumerate(_launches(header, m, split, torch.cuda.current_device()))
    return next((i for i, launch in launches if launch), None)


def _launches(header: Header, m: int, split: int, device: int) -> Iterator[Launch | None]:
    return (launch_of(header, m, split, i, device) for i in range(len(VARIANTS)))


def is_launchable(header: Header, m: int, plan: LinearPlan, device: int) -> bool:
    """Whether a supported launch can use a plan made for another tensor of its shape, if need be in another variant."""
    return nearest_launch(header, m, plan.split, plan.variant, device) is not None


def is_prefetchable(packed: PackedTensor, launch: Launch, device: int) -> bool:
    """Whether a launch can decode that weight on the way, however many others there are."""
    spare, header = launch.spare, packed.header
    suits = spare is not None and is_supported(header, 1, device) and spare.suits(Footprint.of(header))
    return suits and decode_table(packed) is not None


def loaded(operands: Sequence[Operands], launch: Launch, device: int) -> Products | None:
    """Products of a launch that decodes the first weight once more on the way, to time it; None without the time."""
    first = operands[0].packed
    rows, columns = first.header.shape
    has_time = launch.spare is not None and launch.spare.weights >= rows * columns
    return Products(launch, [first]) if has_time and is_prefetchable(first, launch, device) else None


def fused_linear(x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None, plan: LinearPlan) -> torch.Tensor:
    """``x @ W.T + bias`` without ever writing W, on torch's current stream.

    Args:
        x: bfloat16 [..., K], contiguous, 16-byte aligned; m tokens in all.
        packed: W, [N, K], on x's device; is_supported(packed.header, m, its device).
        bias: bfloat16 [N], contiguous, 16-byte aligned, or None.

    Returns:
        bfloat16 [..., N].

    Raises:
        DeviceError: the plan does not fit on the device, or the kernel cannot be built or launched.
    """
    products = products_of(packed.header, x.numel() // x.shape[-1], plan, x.get_device())
    return products(x, bias, lambda: [Operands(packed, bias, plan)])[0]


def products_of(header: Header, m: int, plan: LinearPlan, device: int) -> Products:
    """For ``fused_linear`` of ``m`` tokens with one weight, again and again.

    Raises:
        DeviceError: the plan does not fit on the device.
    """
    launch = nearest_launch(header, m, plan.split, plan.variant, device)
    if launch is None:
        raise DeviceError(f"{plan} does not fit on this device", mend="ask is_launchable first")
    return Products(launch)


class Operands(NamedTuple):
    """What an input is multiplied with, and how."""

    packed: PackedTensor
    bias: torch.Tensor | None
    plan: LinearPlan


def launch_together(operands: Sequence[Operands], m: int, variant: int, device: int) -> Launch | None:
    """One launch for supported products of ``m`` tokens, two to MAX_TOGETHER; None if they do not fit into one.

    Args:
        operands: as ``fused_linear`` takes them; their plans' variants do not count.
    """
    headers = tuple(each.packed.header for each in operands)
    return joint_launch(headers, m, tuple(each.plan.split for each in operands), variant, device)


def _prefetched_of(job: JobStructure) -> ctypes.Array[PrefetchedStructure]:
    return (PrefetchedStructure * MAX_PREFETCHED).from_buffer(job, JobStructure.division.offset)


class _Arguments(threading.local):
    """Room for the arguments of a thread's next launches, of products and of the kernel that arranges their input.

    Attributes:
        pointers, arrangement_pointers: as the driver takes them.
    """

    def __init__(self) -> None:
        self._together, self.arrangement = TogetherStructure(), ArrangementStructure()
        self._addresses = (ctypes.c_void_p * 2)(ctypes.addressof(self._together), ctypes.addressof(self.arrangement))
        self.pointers = ctypes.addressof(self._addresses)
        self.arrangement_pointers = self.pointers + ctypes.sizeof(ctypes.c_void_p)
        self.bytes = memoryview(self._together).cast("B")
        self.jobs = [product.job for product in self._together.products]
        self.prefetched = list(map(_prefetched_of, self.jobs))


_arguments = _Arguments()


class Products:
    """Products of one input with one weight or several, by one launch.

    What the kernel is told of the weights is made once: whoever calls it again makes sure that their bytes have not
    changed since, nor any bias but the first, and holds them until it returns.

    Args:
        prefetched: weights of products to come, that are decoded on the way: MAX_PREFETCHED at most, each with a decode
            table, that suit ``launch.spare``. What holds for the others' bytes holds for theirs.
    """

    def __init__(self, launch: Launch, prefetched: Sequence[PackedTensor] = ()) -> None:
        self.launch = launch
        self._told: dict[int, bytes] = {}  # by stream, without the addresses of x and y
        self._rows: list[int] = []
        self._shapes = [packed.header.shape for packed in prefetched]
        self._tables = [table for packed in prefetched if (table := decode_table(packed)) is not None]
        self._prefetched = (PrefetchedStructure * MAX_PREFETCHED)(*map(_without_addresses, prefetched))
        self._launchers: dict[tuple[int, bool], Callable[[int], None]] = {}  # by stream, and whether it starts early

    def __call__(
        self, x: torch.Tensor, bias: torch.Tensor | None, operands: Callable[[], Sequence[Operands]]
    ) -> list[torch.Tensor]:
        """``fused_linear`` of each; behind these, what was prefetched, bfloat16.

        Args:
            bias: of the first weight.
            operands: all of them, if they are asked for.

        Raises:
            DeviceError: the kernel cannot be built or launched.
        """
        device = x.get_device()
        with nvrtc.on_device(device):
            stream, to = nvrtc.current_stream(device), self.launch.arrangement
            known = self._told.get(stream)
            told, early = (known, True) if known else self._tell(operands(), stream)
            leading, address, arguments = x.shape[:-1], x.data_ptr(), _arguments
            made = [x.new_empty((*leading, rows)) for rows in self._rows]
            decoded = [x.new_empty(shape) for shape in self._shapes]
            arguments.bytes[: len(told)] = told
            for job, y in zip(arguments.jobs, made, strict=False):
                job.x, job.y = address, y.data_ptr()
            if bias is not None:
                arguments.jobs[0].bias = bias.data_ptr()
            scratch = self._arrange(x, to, stream, device) if to else None
            if to and scratch is not None and decoded:
                counters = scratch.data_ptr() + _counters(to)
                for each in arguments.prefetched[: len(made)]:
                    for number, output in enumerate(decoded):
                        each[number].output, each[number].claimed = output.data_ptr(), counters + 4 * number
            launcher = self._launchers.get((stream, early)) or self._launcher(stream, early, device)
            launcher(arguments.pointers)
            del scratch  # not before, or another thread's launches on this stream may get it in between
        return made + decoded

    def repeat(self, x: torch.Tensor, bias: torch.Tensor | None) -> Repeat | None:
        """This call, to be made again for inputs of this shape; None if it may be another then."""
        launch, device = self.launch, x.get_device()
        told = self._told.get(nvrtc.current_stream(device))
        if told is None:
            return None
        to, count = launch.arrangement, len(self._rows)
        scratch, room, job, ahead = 1 + count + len(self._shapes), bytearray(told), JobStructure, PrefetchedStructure
        patches: list[Patch] = []
        for number in range(count):
            start = number * ctypes.sizeof(ProductStructure) + ProductStructure.job.offset
            patches.append(Patch(start + job.x.offset, scratch if to and to.tokens else X))
            patches.append(Patch(start + job.y.offset, 1 + number))
            if not to:
                continue
            patches.append(Patch(start + job.parts.offset, scratch, to.parts[number]))
            patches.append(Patch(start + job.done.offset, scratch, to.done[number]))
            for i in range(len(self._shapes)):
                place = start + job.division.offset + i * ctypes.sizeof(ahead)
                patches.append(Patch(place + ahead.output.offset, 1 + count + i))
                patches.append(Patch(place + ahead.claimed.offset, scratch, _counters(to) + 4 * i))
        if bias is not None:
            start = ProductStructure.job.offset + job.bias.offset
            room[start : start + ctypes.sizeof(ctypes.c_void_p)] = bytes(ctypes.c_void_p(bias.data_ptr()))
        function = nvrtc.kernel(launch.file, launch.name, device)
        steps = [Step(function, launch.grid, launch.threads, launch.shared_bytes, (0,))]
        if to and to.grid:
            start, structure = len(room), ArrangementStructure
            room += bytes(structure(None, None, None, to.done_count, to.tokens, to.columns, to.wide, to.part_steps))
            patches.append(Patch(start + structure.x.offset, X))
            patches.append(Patch(start + structure.arranged.offset, scratch))
            patches.append(Patch(start + structure.done.offset, scratch, to.done[0]))
            steps.insert(0, Step(nvrtc.kernel("arrange.cu", "arrange", device), to.grid, to.threads, 0, (start,)))
        sizes = (*((*x.shape[:-1], rows) for rows in self._rows), *self._shapes)
        return Repeat(sizes, to.total_bytes if to else 0, bytes(room), tuple(patches), tuple(steps))

    def _arrange(self, x: torch.Tensor, to: Arrangement, stream: int, device: int) -> torch.Tensor:
        """Has x arranged, and memory ready, for the launch that follows; to be held until that is made."""
        scratch, structure = x.new_empty(to.total_bytes, dtype=torch.uint8), _arguments.arrangement
        address = scratch.data_ptr()
        for job, parts, done in zip(_arguments.jobs, to.parts, to.done, strict=False):
            job.parts, job.done = address + parts, address + done
            if to.tokens:
                job.x = address
        if not to.grid:
            return scratch
        structure.x, structure.arranged, structure.done = x.data_ptr(), address, address + to.done[0]
        structure.done_count, structure.tokens, structure.columns = to.done_count, to.tokens, to.columns
        structure.wide, structure.part_steps = to.wide, to.part_steps
        function = nvrtc.kernel("arrange.cu", "arrange", device)
        launcher = nvrtc.launcher(function, to.grid, to.threads, 0, stream, True, device)
        launcher(_arguments.arrangement_pointers)
        return scratch

    def _tell(self, operands: Sequence[Operands], stream: int) -> tuple[bytes, bool]:
        """And whether the launch may start early; from then on all of it stays, for torch's current stream."""
        kept = [resident(packed.data) for packed, _, _ in operands]
        early = [each is not None and each.settle() for each in kept]
        products: list[ProductStructure] = []
        for (packed, bias, _), job in zip(operands, _jobs(self.launch), strict=True):
            geometry, table = GeometryStructure.of(packed.header.geometry), decode_table(packed)
            product = ProductStructure(geometry, PackedStructure.of(packed, table), job)
            if self._shapes:
                _prefetched_of(product.job)[:] = list(self._prefetched)
            if products and bias is not None:
                product.job.bias = bias.data_ptr()
            products.append(product)
        for table in self._tables:
            table.record_stream(torch.cuda.current_stream())  # as decode_table does with the others
        told = bytes(products[0] if len(products) == 1 else TogetherStructure.of(products))
        self._rows = [packed.header.shape[0] for packed, _, _ in operands]
        if all(early) and all(each and each.has_table for each in kept):
            self._told[stream] = told
        return told, all(early)

    def _launcher(self, stream: int, early: bool, device: int) -> Callable[[int], None]:
        launch = self.launch
        function = nvrtc.kernel(launch.file, launch.name, device)
        found = nvrtc.launcher(function, launch.grid, launch.threads, launch.shared_bytes, stream, early, device)
        self._launchers[stream, early] = found
        return found


def _counters(to: Arrangement) -> int:
    """Where units of what is prefetched are counted, in bytes: behind the first tensor's meetings."""
    return to.done[0] + 4 * (to.meetings[0] - MAX_PREFETCHED)


def _without_addresses(packed: PackedTensor) -> PrefetchedStructure:
    geometry, table = packed.header.geometry, decode_table(packed)
    assert table is not None, "is_prefetchable"
    return PrefetchedStructure(PackedStructure.of(packed, table), None, None, geometry.row_groups, geometry.stages)


@lru_cache(maxsize=8192)
def _jobs(launch: Launch) -> list[JobStructure]:
    """Without addresses, to be copied: there are so many fields that to make them takes longer than to launch."""
    jobs = [JobStructure(None, None, None, None, None, *fields) for fields in launch.jobs]
    if launch.boxes:
        for job in jobs:
            job.x_map[:] = nvrtc.tensor_map(*launch.boxes)
    return jobs


def fused_linears(x: torch.Tensor, operands: Sequence[Operands], launch: Launch) -> list[torch.Tensor]:
    """``fused_linear`` of one x with several weights, in the launch that ``launch_together`` gave for these.

    Raises:
        DeviceError: the kernel cannot be built or launched.
    """
    return Products(launch)(x, operands[0].bias, lambda: operands)
