"""What a launch hands to the driver, which is played by a function that reads it."""

from __future__ import annotations

import ctypes
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cuda.bindings import driver

import samebits
from samebits.format.packed import PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.linear import job as linear_job
from samebits.kernels.linear import products as linear_products
from samebits.kernels.linear.products import LinearPlan, Operands, Products, fused_linear, fused_linears
from samebits.kernels.pieces import Piece, Pieces
from samebits.kernels.residents import resident
from samebits.kernels.structures import (
    MAX_PREFETCHED,
    ArrangementStructure,
    DivisionStructure,
    JobStructure,
    PieceStructure,
    PrefetchedStructure,
    ProductStructure,
    TogetherStructure,
)

Launch = SimpleNamespace


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Launches of the fused product so far, on a CPU that is taken for an H200."""
    seen: list[Launch] = []

    def launcher(function: Any, grid: int, threads: int, shared: int, stream: int, early: bool, device: int) -> Any:
        def start(pointers: int) -> None:
            address = ctypes.c_void_p.from_address(pointers).value or 0  # of a thread's room for any argument
            if function == "arrange":
                assert (threads, shared, stream, early) == (128, 0, 7, True)
                arranged = ArrangementStructure.from_buffer_copy(ArrangementStructure.from_address(address))
                seen.append(Launch(function=function, grid=grid, arrangement=arranged))
                return
            told = TogetherStructure.from_buffer_copy(TogetherStructure.from_address(address))
            seen.append(Launch(function=function, grid=grid, threads=threads, stream=stream, early=early,
                               together=told, geometry=told.products[0].geometry, packed=told.products[0].packed,
                               job=told.products[0].job))  # fmt: skip

        return start

    monkeypatch.setattr(nvrtc, "launcher", launcher)
    monkeypatch.setattr(nvrtc, "kernel", lambda file, name, device: name)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(linear_products, "nearest_launch", lambda *arguments: LAUNCH)
    monkeypatch.setattr(linear_products, "decode_table", lambda packed: None)
    return seen


_NAMES = [name for name, *_ in JobStructure._fields_]
_BEHIND_POINTERS = _NAMES[_NAMES.index("tokens") : _NAMES.index("x_map")]
RING = 1 + _BEHIND_POINTERS.index("ring")
JOB = (*range(1, len(_BEHIND_POINTERS)), tuple(range(JobStructure.division.size // 4)))
LAUNCH = linear_job.Launch(file="f.cu", name="kernel", grid=132, warps=16, shared_bytes=1000, jobs=(JOB,))


def packed_matrix(seed: int) -> PackedTensor:
    generator = torch.Generator().manual_seed(seed)
    return samebits.encode(torch.randn(64, 1024, generator=generator).mul(0.02).to(torch.bfloat16))


def test_every_launch_has_its_own_addresses(launches: list[Launch]) -> None:
    """The packed structure's other fields, the geometry and the launch are kept between calls."""
    inputs = [torch.zeros(shape, dtype=torch.bfloat16) for shape in ((4, 1024), (2, 3, 1024), (1024,), (1, 1, 1024))]
    bias, matrices = torch.zeros(64, dtype=torch.bfloat16), [packed_matrix(0), packed_matrix(1)]
    for x in inputs:
        for packed in matrices:
            for b in (None, bias):
                y = fused_linear(x, packed, b, LinearPlan(2))
                found = launches[-1]
                assert y.shape == (*x.shape[:-1], 64)
                assert (found.packed.data, found.job.x, found.job.y) == (
                    packed.data.data_ptr(),
                    x.data_ptr(),
                    y.data_ptr(),
                )
                assert found.job.bias == (b.data_ptr() if b is not None else None)
                assert (found.job.tokens, found.job.ring) == (1, RING)
                assert tuple(found.job.division) == JOB[-1]
                assert found.packed.planes == packed.header.sections["planes"].start
                assert found.geometry.columns == 1024
                assert (found.grid, found.threads, found.stream) == (132, 512, 7)


def test_only_settled_bytes_start_early(launches: list[Launch]) -> None:
    x, packed = torch.zeros(1, 1024, dtype=torch.bfloat16), packed_matrix(2)
    for _ in range(3):
        fused_linear(x, packed, None, LinearPlan(1))
    packed.data.add_(0)
    fused_linear(x, packed, None, LinearPlan(1))
    assert [launch.early for launch in launches] == [False, True, True, False]


def test_several_weights_in_one_launch(launches: list[Launch]) -> None:
    """Each with its own addresses and blocks; those that there are not lie behind the grid."""
    jobs = tuple((*JOB[:7], first, *JOB[8:]) for first in (0, 40, 90))
    launch = linear_job.Launch("f.cu", "kernel", grid=132, warps=16, shared_bytes=1000, jobs=jobs)
    bias, matrices = torch.zeros(64, dtype=torch.bfloat16), [packed_matrix(seed) for seed in range(3)]
    operands = [Operands(packed, b, LinearPlan(2)) for packed, b in zip(matrices, (None, bias, None), strict=True)]
    for shape in ((2, 1024), (2, 1, 1024)):
        x = torch.zeros(shape, dtype=torch.bfloat16)
        made = fused_linears(x, operands, launch)
        products = launches[-1].together.products
        for y, (packed, b, _), product, first in zip(made, operands, products, (0, 40, 90), strict=False):
            assert y.shape == (*shape[:-1], 64)
            assert (product.packed.data, product.job.x, product.job.y) == (
                packed.data.data_ptr(),
                x.data_ptr(),
                y.data_ptr(),
            )
            assert product.job.bias == (b.data_ptr() if b is not None else None)
            assert (product.job.first_block, product.job.ring) == (first, RING)
        assert products[3].job.first_block > 1 << 30


def test_weights_for_products_to_come(monkeypatch: pytest.MonkeyPatch, launches: list[Launch]) -> None:
    """The blocks of every product are told where they go and where their units are counted; only for that launch."""
    table = torch.zeros(1 << 13, dtype=torch.int32)
    monkeypatch.setattr(linear_products, "decode_table", lambda packed: table)
    prepared = linear_job.Arrangement(0, 1024, 8, 0, (6 + MAX_PREFETCHED, 3), (4096, 512), part_steps=4)
    jobs, spare = ((*JOB[:-1], (0,)),) * 2, linear_job.Spare(1 << 20, 1 << 13, 1000)
    launch = linear_job.Launch("f.cu", "kernel", 132, 16, 1000, jobs, prepared, None, spare)
    x, own, later = torch.zeros(5, 1024, dtype=torch.bfloat16), [packed_matrix(0), packed_matrix(1)], [packed_matrix(2)]
    later.append(samebits.encode(torch.randn(72, 2048, generator=torch.Generator().manual_seed(3)).bfloat16()))
    operands = [Operands(packed, None, LinearPlan(1)) for packed in own]
    streams: list[str] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "the current stream")
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda each, stream: streams.append(stream))
    for weights in (later, [], later[:1], later):
        streams.clear()
        made = Products(launch, weights)(x, None, lambda: operands)
        assert streams == ["the current stream"] * len(weights)  # their tables' memory
        arranged, told = launches[-2].arrangement, launches[-1].together
        assert [tuple(y.shape) for y in made] == [(5, 64), (5, 64), *(packed.shape for packed in weights)]
        assert arranged.done_count == 6 + MAX_PREFETCHED + 3
        assert told.products[1].job.done == arranged.done + 4 * (6 + MAX_PREFETCHED)
        for product in told.products[:2]:
            every = (PrefetchedStructure * MAX_PREFETCHED).from_buffer_copy(product.job, JobStructure.division.offset)
            for number, (packed, output, each) in enumerate(zip(weights, made[2:], every, strict=False)):
                assert (each.packed.data, each.packed.table) == (packed.data.data_ptr(), table.data_ptr())
                assert (each.output, each.claimed) == (output.data_ptr(), arranged.done + 4 * (6 + number))
                assert (8 * each.row_groups, 64 * each.stages) == packed.shape
            assert not any(each.output for each in every[len(weights) :])


def test_launches_are_timed_with_what_they_have_the_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = packed_matrix(0)
    monkeypatch.setattr(linear_products, "is_prefetchable", lambda packed, launch, device: True)
    monkeypatch.setattr(linear_products, "Products", lambda launch, weights: weights)
    for weights, expected in ((None, None), (64 * 1024 - 1, None), (64 * 1024, [packed])):
        spare = None if weights is None else linear_job.Spare(weights, 0, 0)
        launch = linear_job.Launch("f.cu", "kernel", 132, 16, 1000, (JOB,), None, None, spare)
        assert linear_products.loaded([Operands(packed, None, LinearPlan(1))], launch, 0) == expected


def test_what_stays_is_told_once(monkeypatch: pytest.MonkeyPatch, launches: list[Launch]) -> None:
    """From the third call on without looking at the weights; every byte is as if it were told anew.

    To another stream once more, whose launches the tables' memory has to wait for as well.
    """

    def has_table(packed: PackedTensor) -> None:
        kept = resident(packed.data)
        assert kept
        kept.has_table = True

    monkeypatch.setattr(linear_products, "decode_table", has_table)
    joint = linear_job.Launch("f.cu", "kernel", 132, 8, 1000, (JOB, (*reversed(JOB[:-1]), JOB[-1]), JOB))
    biases = [torch.zeros(64, dtype=torch.bfloat16) for _ in range(2)]
    operands = [Operands(packed_matrix(seed), bias, LinearPlan(2)) for seed, bias in enumerate((*biases, None), 20)]
    asked: list[list[Operands]] = []
    products = Products(joint)
    for number in range(4):
        x, bias = torch.zeros(1, number + 1, 1024, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.bfloat16)
        first = operands[0]._replace(bias=bias)
        every = [first, *operands[1:]]

        def ask(every: list[Operands] = every) -> list[Operands]:
            asked.append(every)
            return every

        made = products(x, bias, ask)
        fused_linears(x, every, joint)
        told, anew = launches[-2:]
        assert told.early == (number > 0)
        for product, y in zip(anew.together.products, made, strict=False):
            product.job.y = y.data_ptr()
        assert bytes(told.together) == bytes(anew.together)
    assert len(asked) == 2
    for stream in (8, 8, 7):
        monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device, stream=stream: stream)
        products(x, bias, ask)
        assert launches[-1].stream == stream
        assert launches[-1].early
    assert len(asked) == 3


def test_each_thread_has_room_of_its_own(monkeypatch: pytest.MonkeyPatch, launches: list[Launch]) -> None:
    """While one waits in the driver, which lets others run, another one launches."""
    matrices = [packed_matrix(seed) for seed in range(2)]
    inside, seen = [threading.Event(), threading.Event()], dict[int, ProductStructure]()

    def launcher(*arguments: Any) -> Any:
        def start(pointers: int) -> None:
            number = int(threading.current_thread().name)
            inside[number].set()
            assert inside[1 - number].wait(60)
            address = ctypes.c_void_p.from_address(pointers).value or 0
            seen[number] = ProductStructure.from_buffer_copy(ProductStructure.from_address(address))

        return start

    def launch(number: int) -> None:
        x = torch.zeros(4, 1024, dtype=torch.bfloat16)
        y = fused_linear(x, matrices[number], None, LinearPlan(2))
        found = seen[number]
        results[number] = (found.packed.data, found.job.x, found.job.y) == (
            matrices[number].data.data_ptr(),
            x.data_ptr(),
            y.data_ptr(),
        )

    results: dict[int, bool] = {}
    monkeypatch.setattr(nvrtc, "launcher", launcher)
    threads = [threading.Thread(target=launch, args=(number,), name=str(number)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == {0: True, 1: True}


def test_x_is_arranged_before_a_product(monkeypatch: pytest.MonkeyPatch, launches: list[Launch]) -> None:
    """In memory that the product reads, where the sums of its ranges meet too, every product of a launch elsewhere."""
    prepared = linear_job.Arrangement(5, 1024, 8, 1 << 14, (6, 0, 2), (4096, 0, 1024), part_steps=4)
    x, matrices = torch.zeros(5, 1024, dtype=torch.bfloat16), [packed_matrix(seed) for seed in range(3)]
    joint = linear_job.Launch("f.cu", "kernel", 132, 8, 1000, (JOB, JOB, JOB), prepared)
    fused_linears(x, [Operands(packed, None, LinearPlan(2)) for packed in matrices], joint)
    first, launched = launches
    arranged = first.arrangement
    assert (first.function, first.grid) == ("arrange", 3)
    assert (arranged.x, arranged.tokens, arranged.columns) == (x.data_ptr(), 5, 1024)
    assert (arranged.wide, arranged.part_steps, arranged.done_count) == (8, 4, 8)
    jobs = [product.job for product in launched.together.products[:3]]
    assert {job.x for job in jobs} == {arranged.arranged}
    assert arranged.arranged % 16 == 0
    parts = arranged.arranged + (1 << 14)
    assert [job.parts for job in jobs] == [parts, parts + 4096, parts + 4096]
    assert [job.done for job in jobs] == [arranged.done, arranged.done + 24, arranged.done + 24]
    assert arranged.done == parts + 5120
    prepared = linear_job.Arrangement(5, 1024, 8, 1 << 14, (0,), (0,), part_steps=0)
    single = linear_job.Launch("f.cu", "kernel", 132, 8, 1000, (JOB,), prepared)
    monkeypatch.setattr(linear_products, "nearest_launch", lambda *arguments: single)
    fused_linear(x, matrices[0], None, LinearPlan(1))
    again, product = launches[2:]
    assert product.job.x == again.arrangement.arranged
    assert again.arrangement.done_count == 0


def test_x_as_it_is_with_memory_for_sums(monkeypatch: pytest.MonkeyPatch, launches: list[Launch]) -> None:
    """Few tokens of x are arranged by the product itself; what its ranges' sums need is made ready before it."""
    prepared = linear_job.Arrangement(0, 1024, 8, 0, (6,), (4096,), part_steps=0)
    monkeypatch.setattr(linear_products, "nearest_launch", lambda *arguments: launch)
    x, matrix = torch.zeros(4, 1024, dtype=torch.bfloat16), packed_matrix(0)
    launch = linear_job.Launch("f.cu", "kernel", 132, 8, 1000, (JOB,), prepared)
    fused_linear(x, matrix, None, LinearPlan(2))
    first, product = launches
    ready = first.arrangement
    assert (ready.tokens, ready.done_count) == (0, 6)
    assert product.job.x == x.data_ptr()
    assert product.job.done == ready.done == product.job.parts + 4096


def test_scratch_memory_is_held_until_the_product_is_launched(
    monkeypatch: pytest.MonkeyPatch, launches: list[Launch]
) -> None:
    """Another thread's launches on the stream might come in between, and would get it."""
    made: list[weakref.ref[torch.Tensor]] = []
    alive: list[bool] = []

    class Input(torch.Tensor):
        def new_empty(self, *args: Any, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
            memory = torch.empty(*args, dtype=kwargs.get("dtype", self.dtype))
            if memory.dtype is torch.uint8:
                made.append(weakref.ref(memory))
            return memory

    def launcher(*arguments: Any) -> Any:
        return lambda pointers: alive.append(made[0]() is not None)

    prepared = linear_job.Arrangement(5, 1024, 8, 1 << 14, (6,), (4096,), part_steps=4)
    launch = linear_job.Launch("f.cu", "kernel", 132, 8, 1000, (JOB,), prepared)
    monkeypatch.setattr(nvrtc, "launcher", launcher)
    x = torch.zeros(5, 1024, dtype=torch.bfloat16).as_subclass(Input)
    Products(launch)(x, None, lambda: [Operands(packed_matrix(31), None, LinearPlan(1))])
    assert alive == [True, True]  # while x is arranged, while it is multiplied
    assert made[0]() is None


def test_a_tensor_map_goes_with_the_job(monkeypatch: pytest.MonkeyPatch, launches: list[Launch]) -> None:
    asked: list[tuple[int, ...]] = []

    def tensor_map(*box: int) -> tuple[int, ...]:
        asked.append(box)
        return tuple(range(100, 132))

    monkeypatch.setattr(nvrtc, "tensor_map", tensor_map)
    boxes = linear_job.Boxes(4, 1024, 128, 64)
    with_map = linear_job.Launch("f.cu", "kernel", 132, 16, 1000, (JOB,), boxes=boxes)
    packed, x = packed_matrix(30), torch.zeros(4, 1024, dtype=torch.bfloat16)
    for launch, words in ((with_map, range(100, 132)), (LAUNCH, [0] * 32)):
        Products(launch)(x, None, lambda: [Operands(packed, None, LinearPlan(1))])
        assert list(launches[-1].job.x_map) == list(words)
        assert launches[-1].job.ring == RING
    assert asked == [boxes]


KERNEL, COPY = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL, driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY
PROGRAMMATIC = driver.CUgraphEdgeData()
PROGRAMMATIC.from_port = PROGRAMMATIC.type = 1


@pytest.mark.parametrize(
    ("nodes", "edges", "beside"),
    [
        ([KERNEL], [driver.CUgraphEdgeData()], True),
        ([KERNEL], [], True),
        ([], [], False),
        ([COPY], [driver.CUgraphEdgeData()], False),
        ([KERNEL, KERNEL], [driver.CUgraphEdgeData()] * 2, False),
        ([KERNEL], [PROGRAMMATIC], False),
    ],
    ids=["a kernel", "a kernel, nothing said of edges", "nothing", "a copy", "two kernels", "edge of its own"],
)
@pytest.mark.parametrize("capturing", [False, True])
def test_begins_beside_a_kernel_in_a_graph(
    nodes: list[Any], edges: list[Any], beside: bool, capturing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream's next node has an edge that says so, and is launched without the attribute that makes another."""
    done, told, started = driver.CUresult.CUDA_SUCCESS, [], []

    def configured(*settings: Any) -> nvrtc.Configured:
        return nvrtc.Configured(settings[-2], 0)  # early

    def start(early: bool, *others: Any) -> tuple[Any]:
        started.append(early)
        return (done,)

    def update(stream: Any, *changes: Any) -> tuple[Any]:
        told.append((int(stream), *changes))
        return (done,)

    for target, name, value in (
        (nvrtc, "starts_early", lambda device: True),
        (nvrtc, "configured", configured),
        (torch.cuda, "is_current_stream_capturing", lambda: capturing),
        (driver, "cuLaunchKernelEx", start),
        (driver, "cuStreamGetCaptureInfo", lambda stream: (done, 1, 5, None, nodes, edges, len(nodes))),
        (driver, "cuGraphNodeGetType", lambda node: (done, node)),
        (driver, "cuStreamUpdateCaptureDependencies", update),
    ):
        monkeypatch.setattr(target, name, value)
    nvrtc.launcher.cache_clear()
    nvrtc.launcher("kernel", 1, 32, 0, 7, True, 0)(0)  # type: ignore[arg-type]
    nvrtc.launcher.cache_clear()
    assert started == [not (capturing and beside)]
    if not (capturing and beside):
        assert told == []
        return
    [(stream, depends, [edge], count, replaces)] = told
    assert (stream, depends, count, replaces) == (7, nodes, 1, 1)
    assert (edge.from_port, edge.to_port, edge.type) == (2, 0, 1)


def test_pieces_are_told_where_they_belong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each launch has its own output; the first that runs begins behind whatever wrote the pieces.

    One that is captured has not run.
    """
    started: list[tuple[Any, ...]] = []
    types = (ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64)

    def launcher(function: Any, grid: int, threads: int, shared: int, stream: int, early: bool, device: int) -> Any:
        def start(pointers: int) -> None:
            addresses = (ctypes.c_void_p * 6).from_address(pointers)
            values = [each.from_address(address).value for each, address in zip(types, addresses, strict=False)]
            structures = (PieceStructure * 2).from_buffer_copy((PieceStructure * 2).from_address(values[0]))
            division = DivisionStructure.from_buffer_copy(DivisionStructure.from_address(addresses[5]))
            assert 4 * (division.table_words + division.entry_words + threads // 16 * division.buffer_words) == shared
            started.append((function, grid, stream, early, values[1:], structures))

        return start

    for target, name, value in (
        (nvrtc, "launcher", launcher),
        (nvrtc, "kernel", lambda file, name, device: name),
        (nvrtc, "multiprocessors", lambda device: 132),
        (nvrtc, "shared_memory", lambda device: 227 << 10),
        (torch._C, "_cuda_getCurrentRawStream", lambda device: 7),
        (torch.cuda, "current_device", lambda: -1),  # a tensor in main memory says so
        (torch.Tensor, "pin_memory", lambda tensor: tensor),
        (torch.cuda, "is_current_stream_capturing", lambda: len(started) < 1),
    ):
        monkeypatch.setattr(target, name, value, raising=False)
    pieces = [Piece(packed_matrix(0), 0, 1024), Piece(packed_matrix(1), 1024, 2048)]
    several, chunks = Pieces(pieces), [piece.packed.header.geometry.chunks for piece in pieces]
    outputs = [torch.empty(64, words, dtype=torch.bfloat16) for words in (3072, 4096, 3072)]
    for output in outputs:
        several.decode(output)
    for number, (output, seen) in enumerate(zip(outputs, started, strict=True)):
        function, grid, stream, early, values, structures = seen
        assert (function, grid, stream, early) == ("decode_pieces", min(132, sum(chunks)), 7, number > 1)
        assert values == [2, sum(chunks), output.data_ptr(), output.shape[1]]
        for structure, piece, first in zip(structures, pieces, (0, chunks[0]), strict=True):
            assert structure.packed.data == piece.packed.data.data_ptr()
            told = structure.first_chunk, structure.start, structure.words, structure.rows
            assert told == (first, piece.start, piece.words, piece.words // 1024)
