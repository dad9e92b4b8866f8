"""The fused linear layer: the bits of its order of summation, for every weight that it takes, in every variant."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import samebits
from samebits.format.geometry import Code
from samebits.format.packed import PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.linear.clusters import MAX_CLUSTER_TOKENS, clusters
from samebits.kernels.linear.clusters import TILES as CLUSTER_TILES
from samebits.kernels.linear.job import MAX_TOKENS, Footprint, Launch
from samebits.kernels.linear.launch import VARIANTS, launch_of, shared_launch
from samebits.kernels.linear.pairs import MAX_WGMMA_TOKENS
from samebits.kernels.linear.products import (
    LinearPlan,
    Operands,
    Products,
    fused_linear,
    fused_linears,
    is_prefetchable,
    is_supported,
    launch_together,
    variants,
)
from samebits.kernels.linear.relay import TILES, relay
from samebits.kernels.structures import MAX_PREFETCHED, JobStructure
from tests.codecs.tensors import always_quad
from tests.kernels.weights import KINDS, SHAPES, weight_of

pytestmark = pytest.mark.gpu
PLAIN = Path(__file__).with_name("plain_linear.cu")
DEFAULT_PORT, LAUNCH_ORDER_PORT = 0, 2  # of an edge in a CUDA graph: behind the kernel's end, or beside it
TOKENS = (1, 2, 3, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 100, 128, 129, 256, 300, 512)


@pytest.fixture(autouse=True)
def _quad_code() -> Iterator[None]:
    with always_quad():
        yield


@cache
def plain_kernel() -> Any:
    from cuda.core import Device, Program, ProgramOptions

    Device(0).set_current()
    target = nvrtc.architecture(torch.cuda.get_device_capability(0))
    program = Program(PLAIN.read_text(), "c++", ProgramOptions(arch=target, std="c++17"))
    return program.compile("cubin").get_kernel("plain_linear")


def plain_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, split: int) -> torch.Tensor:
    """By parts of as many tokens as the plain kernel takes."""
    return torch.cat([_plain_linear(part, weight, bias, split) for part in x.split(16)])


def _plain_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, split: int) -> torch.Tensor:
    (tokens, columns), rows = x.shape, weight.shape[0]
    y = torch.empty(tokens, rows, dtype=torch.bfloat16, device=x.device)
    pointers = (x.data_ptr(), weight.data_ptr(), bias.data_ptr() if bias is not None else None, y.data_ptr())
    numbers = (tokens, rows, columns, -(-columns // 64 // split))
    nvrtc.launch(plain_kernel(), rows // 8, 32, 0, *map(ctypes.c_void_p, pointers), *map(ctypes.c_int32, numbers))
    return y


def first_difference(left: torch.Tensor, right: torch.Tensor) -> tuple[int, ...] | None:
    different = (left.view(torch.int16) != right.view(torch.int16)).nonzero()
    return tuple(different[0].tolist()) if len(different) else None


def inputs(tokens: int, columns: int, seed: int) -> torch.Tensor:
    """Values of wide range, so that any other order of summation shows."""
    generator = torch.Generator("cuda").manual_seed(seed)
    scale = torch.exp2(torch.randint(-8, 8, (1, columns), device="cuda", generator=generator))
    return (torch.randn(tokens, columns, device="cuda", generator=generator) * scale).bfloat16()


def skip_unless_supported(packed: PackedTensor, tokens: int) -> None:
    if not is_supported(packed.header, tokens, 0):
        pytest.skip(f"no kernel for {tokens} tokens on this device")


def assert_all_alike(weight: torch.Tensor, packed: PackedTensor, tokens: int, splits: tuple[int, ...]) -> int:
    """Compare every variant with the plain kernel; returns how many launches that were."""
    rows, columns = weight.shape
    x, launches = inputs(tokens, columns, tokens), 0
    bias = torch.randn(rows, device="cuda").bfloat16()
    for split in splits:
        for added in (None, bias):
            expected = plain_linear(x, weight, added, split)
            for variant in variants(packed.header, tokens, split):
                y = fused_linear(x, packed, added, LinearPlan(split, variant))
                assert first_difference(y, expected) is None, f"split {split}, variant {variant}"
                launches += 1
    return launches


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_weight(kind: str, shape: tuple[int, int]) -> None:
    weight = weight_of(kind, *shape)
    packed = samebits.encode(weight).to("cuda")
    assert packed.code is Code.QUAD
    assert is_supported(packed.header, 1, 0)
    for tokens in (1, 5, 12, 20, 50, 128):
        if is_supported(packed.header, tokens, 0):
            assert assert_all_alike(weight.cuda(), packed, tokens, (1, 3)) >= (8 if tokens <= MAX_TOKENS else 4)
    if is_supported(packed.header, 300, 0):  # chunks of incompressible weights leave no room for warpgroups
        fitting = sum(len(variants(packed.header, 300, split)) for split in (1, 3))
        assert fitting or kind in ("raw chunks", "subnormal") or (kind == "raw ends" and shape[1] % 1024 > 64)
        assert assert_all_alike(weight.cuda(), packed, 300, (1, 3)) == 2 * fitting


@pytest.mark.parametrize("tokens", TOKENS)
def test_every_number_of_tokens_and_split(tokens: int) -> None:
    weight = weight_of("row scales", 1032, 4096)
    packed = samebits.encode(weight).to("cuda")
    skip_unless_supported(packed, tokens)
    assert assert_all_alike(weight.cuda(), packed, tokens, (1, 2, 3, 4, 5, 7, 8)) >= 14


def test_every_number_of_tokens() -> None:
    """Up to 128, however many are left over in a kernel's last tile of them."""
    weight = weight_of("row scales", 1032, 4096)
    packed, weight = samebits.encode(weight).to("cuda"), weight.cuda()
    for tokens in range(1, 129):
        if is_supported(packed.header, tokens, 0):
            assert assert_all_alike(weight, packed, tokens, (3,)) >= 2


@pytest.mark.parametrize("tokens", [9, 33, 64, 128])
def test_ranges_that_begin_within_chunks(tokens: int) -> None:
    """And within pairs of stages; linear_tiles.cuh decodes such chunks for both ranges."""
    weight = weight_of("patches", 520, 14336)
    packed = samebits.encode(weight).to("cuda")
    skip_unless_supported(packed, tokens)
    assert assert_all_alike(weight.cuda(), packed, tokens, (3, 4)) >= 4


@pytest.mark.parametrize("tokens", [129, 513, 1000, 2100])
@pytest.mark.parametrize("shape", [(72, 1088), (1064, 2880), (136, 6080), (4104, 2112)], ids=str)
def test_many_tokens(shape: tuple[int, int], tokens: int) -> None:
    """More and fewer than fit into tiles, passes and chunks."""
    weight = weight_of("row scales", *shape)
    packed = samebits.encode(weight).to("cuda")
    skip_unless_supported(packed, tokens)
    expected = plain_linear(inputs(tokens, shape[1], tokens), weight.cuda(), None, 1)
    tiles = [(relay, rank) for rank in range(len(TILES))]
    tiles += [(clusters, rank) for rank in range(len(CLUSTER_TILES)) if tokens <= MAX_CLUSTER_TOKENS]
    for make, rank in tiles:
        launch = make((Footprint.of(packed.header),), tokens, (1,), 0, rank)
        assert launch is not None
        (y,) = Products(launch)(inputs(tokens, shape[1], tokens), None, lambda: [Operands(packed, None, LinearPlan(1))])
        assert first_difference(y, expected) is None, launch.name
    assert assert_all_alike(weight.cuda(), packed, tokens, (1,)) >= 6


@pytest.mark.parametrize("tokens", [2, 40, 128])
def test_many_row_groups_of_a_block(tokens: int) -> None:
    """More than a block keeps the sums of."""
    weight = weight_of("normal", 132 * 8 * 65 + 8, 1024)
    packed = samebits.encode(weight).to("cuda")
    skip_unless_supported(packed, tokens)
    assert assert_all_alike(weight.cuda(), packed, tokens, (1, 2)) >= 4


@pytest.fixture
def gpu_with_less(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Without Hopper's instructions and with less shared memory."""
    caches = (shared_launch, nvrtc.kernel, nvrtc.launcher, nvrtc.configured)
    with monkeypatch.context() as patch:
        patch.setattr(nvrtc, "has_wgmma", lambda device: False)
        patch.setattr(nvrtc, "shared_memory", lambda device: 101376)
        for each in caches:
            each.cache_clear()
        yield
    for each in caches:
        each.cache_clear()


@pytest.mark.usefixtures("gpu_with_less")
@pytest.mark.parametrize("shape", [(1032, 4096), (2048, 5376)], ids=str)
def test_as_on_gpus_with_less(shape: tuple[int, int]) -> None:
    """x does not fit into shared memory there."""
    weight = weight_of("row scales", *shape)
    packed, names = samebits.encode(weight).to("cuda"), set()
    for tokens in (1, 8, 16):
        assert assert_all_alike(weight.cuda(), packed, tokens, (1, 2, 3, 5)) >= 8
        for split in (1, 2, 3, 5):
            launches = (launch_of(packed.header, tokens, split, number, 0) for number in range(len(VARIANTS)))
            names |= {launch.name for launch in launches if launch}
    assert any(name.endswith("global_borders") for name in names) == (shape[1] == 5376)


def test_many_chunks_of_a_warp() -> None:
    """More than a warp of linear_chains.cuh has in its list: x leaves room for few warps."""
    weight = weight_of("normal", 13 * 132 * 8, 8192)
    packed = samebits.encode(weight).to("cuda")
    skip_unless_supported(packed, 8)
    assert assert_all_alike(weight.cuda(), packed, 8, (1, 5)) >= 4


def test_more_row_groups_than_warps() -> None:
    """Those of linear_rounds.cuh go on to a second round, in which some of them have nothing to walk."""
    weight = weight_of("row scales", (132 * 23 + 1) * 8, 1088)
    packed = samebits.encode(weight).to("cuda")
    skip_unless_supported(packed, 8)
    for tokens in (3, 8, 16):
        assert assert_all_alike(weight.cuda(), packed, tokens, (1, 2)) >= 4


def test_walks_that_begin_with_a_short_piece() -> None:
    """Their second chunk is opened a turn after the first: its streams must have come from memory, which takes long."""
    rows, columns, tokens = 132 * 8 * 65, 1024, 2
    weight, x = weight_of("normal", rows, columns), inputs(tokens, columns, 0)
    packed = samebits.encode(weight).to("cuda")
    expected = plain_linear(x, weight.cuda(), None, 2)
    for variant in variants(packed.header, tokens, 2):
        for _ in range(20):
            y = fused_linear(x, packed, None, LinearPlan(2, variant))
            assert first_difference(y, expected) is None, f"variant {variant}"


@pytest.mark.parametrize("tokens", [1, 7, 16, 32, 64])
@pytest.mark.parametrize(("rows", "columns", "splits"), [(3848, 8704, (5, 7, 13)), (17000, 2176, (1, 2))])
def test_blocks_hand_sums_on(rows: int, columns: int, splits: tuple[int, ...], tokens: int) -> None:
    """Over and over: who goes on with sums must never read what is there from before."""
    if not nvrtc.has_wgmma(0):
        pytest.skip("no kernel that does on this device")
    handing, weight = [i for i, variant in enumerate(VARIANTS) if variant.hand_on], weight_of("normal", rows, columns)
    packed, weight, tried = samebits.encode(weight).to("cuda"), weight.cuda(), 0
    for split in splits:
        for variant in handing:
            if launch_of(packed.header, tokens, split, variant, 0) is None:
                continue
            for seed in range(10):
                x = inputs(tokens, columns, seed)
                y = fused_linear(x, packed, None, LinearPlan(split, variant))
                assert first_difference(y, plain_linear(x, weight, None, split)) is None, (split, variant)
            tried += 1
    assert tried


@pytest.mark.parametrize(("rows", "columns", "tokens"), [(3080, 2112, 4608), (4104, 4096, 2048), (13832, 1984, 1300)])
def test_clusters_hand_sums_on(rows: int, columns: int, tokens: int) -> None:
    """Over and over, as above; with some tiles there is nothing left over to share."""
    if not nvrtc.has_wgmma(0):
        pytest.skip("no kernel that does on this device")
    weight, tried = weight_of("normal", rows, columns), 0
    packed, weight = samebits.encode(weight).to("cuda"), weight.cuda()
    given = [inputs(tokens, columns, seed) for seed in range(5)]
    expected = [plain_linear(x, weight, None, 1) for x in given]
    for rank in range(len(TILES)):
        launch = relay((Footprint.of(packed.header),), tokens, (1,), 0, rank)
        if launch is None or not JobStructure(*[None] * 5, *launch.jobs[0]).segment_stages:
            continue
        products = Products(launch)
        for x, right in zip(given * 2, expected * 2, strict=True):
            (y,) = products(x, None, lambda: [Operands(packed, None, LinearPlan(1))])
            assert first_difference(y, right) is None, launch.name
        tried += 1
    assert tried


@pytest.mark.parametrize("rank", range(len(CLUSTER_TILES)))
def test_launches_of_clusters_end(rank: int) -> None:
    """Over and over, with few stages: whether x or weights of the last one are there first differs at times."""
    weight = weight_of("normal", 5000, 576)
    packed, x = samebits.encode(weight).to("cuda"), inputs(256, 576, 1)
    skip_unless_supported(packed, 256)
    launch = clusters((Footprint.of(packed.header),), 256, (1,), 0, rank)
    assert launch is not None
    products, expected = Products(launch), plain_linear(x, weight.cuda(), None, 1)
    for _ in range(20):
        for _ in range(1000):
            (y,) = products(x, None, lambda: [Operands(packed, None, LinearPlan(1))])
        assert first_difference(y, expected) is None


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("tokens", [1, 16, 48, 200, 600])
def test_streams_and_graphs(tokens: int, place: int) -> None:
    weight, split = weight_of("normal", 2048, 2048), 2 if tokens <= MAX_WGMMA_TOKENS else 1
    packed = samebits.encode(weight).to("cuda")
    skip_unless_supported(packed, tokens)
    plan = LinearPlan(split, variants(packed.header, tokens, split)[place])
    x = inputs(tokens, 2048, 1)
    expected = plain_linear(x, weight.cuda(), None, split)
    streams = [torch.cuda.Stream() for _ in range(4)]
    torch.cuda.synchronize()
    results = []
    for _ in range(8):
        for stream in streams:
            with torch.cuda.stream(stream):
                results.append(fused_linear(x, packed, None, plan))
    torch.cuda.synchronize()
    assert all(first_difference(y, expected) is None for y in results)
    graph, static = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph):
        chained = fused_linear(fused_linear(static, packed, None, plan), packed, None, plan)
    for seed in range(3):
        static.copy_(inputs(tokens, 2048, seed))
        graph.replay()
        first = plain_linear(static, weight.cuda(), None, split)
        assert first_difference(chained, plain_linear(first, weight.cuda(), None, split)) is None


def test_follows_the_kernel_that_wrote_the_bytes() -> None:
    """The first launch on new bytes waits for whatever writes them."""
    weights = [weight_of("normal", 2048, 2048) * 2.0**i for i in range(3)]
    packed = [samebits.encode(weight).to("cuda") for weight in weights]
    x = inputs(4, 2048, 2)
    for _ in range(20):
        for weight, each in zip(weights, packed, strict=True):
            copy = PackedTensor(each.header, torch.empty_like(each.data).copy_(each.data))
            y = fused_linear(x, copy, None, LinearPlan(1))
            assert first_difference(y, plain_linear(x, weight.cuda(), None, 1)) is None


@pytest.mark.parametrize("tokens", [1, 4, 8, 16, 48, 200, 600])
def test_behind_each_other(tokens: int) -> None:
    """Launches start while those in front of them run, and disturb neither these nor torch's kernels behind them."""
    weights = [weight_of("row scales", rows, 4096) for rows in (1024, 1032, 4096, 9216)]
    packed = [samebits.encode(weight).to("cuda") for weight in weights]
    skip_unless_supported(packed[0], tokens)
    x = inputs(tokens, 4096, 3)
    split = 2 if tokens <= MAX_WGMMA_TOKENS else 1
    expected = [plain_linear(x, weight.cuda(), None, split) for weight in weights]
    sorted_ones = [y.view(torch.int16).sort(-1).values for y in expected]
    launches = [(i, variant) for i, each in enumerate(packed) for variant in variants(each.header, tokens, split)]
    for order in range(40):
        generator = torch.Generator().manual_seed(order)
        chosen = [launches[i] for i in torch.randperm(len(launches), generator=generator).tolist()]
        results = [fused_linear(x, packed[i], None, LinearPlan(split, variant)) for i, variant in chosen]
        after = [y.view(torch.int16).sort(-1).values for y in results]
        alternating = []
        for i, variant in chosen:
            y = fused_linear(x, packed[i], None, LinearPlan(split, variant))
            alternating.append((y, y.view(torch.int16).sort(-1).values))
        for (i, variant), y, ordered, (again, ordered_again) in zip(chosen, results, after, alternating, strict=True):
            for found in (y, again):
                assert first_difference(found, expected[i]) is None, (order, i, variant)
            for found in (ordered, ordered_again):
                assert torch.equal(found, sorted_ones[i]), (order, i, variant)


@pytest.mark.parametrize("tokens", [1, 16, 48, 128, 200, 600])
def test_begins_beside_the_kernel_in_front(tokens: int) -> None:
    """In a graph, behind a kernel that writes the input at its end, and has not let anything start."""
    weight, split = weight_of("normal", 4096, 2048), 2 if tokens <= MAX_WGMMA_TOKENS else 1
    packed = samebits.encode(weight).to("cuda")
    skip_unless_supported(packed, tokens)
    terms = torch.empty(max(16384 // tokens, 32), tokens, 2048, dtype=torch.bfloat16, device="cuda")
    x = inputs(tokens, 2048, 0)
    for variant in variants(packed.header, tokens, split):
        plan = LinearPlan(split, variant)
        fused_linear(x, packed, None, plan)  # from the second launch on these bytes it may start early
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with torch.cuda.graph(graph):
            torch.sum(terms, 0, out=x)
            y = fused_linear(x, packed, None, plan)
        assert ports_of(graph) - {DEFAULT_PORT} == {LAUNCH_ORDER_PORT}
        for seed in range(3):
            terms.normal_(generator=torch.Generator("cuda").manual_seed(seed))
            x.fill_(float("nan"))
            graph.replay()
            assert not x.isnan().any()
            assert first_difference(y, plain_linear(x, weight.cuda(), None, split)) is None, f"variant {variant}"


def ports_of(graph: torch.cuda.CUDAGraph) -> set[int]:
    """When the nodes of a kept graph let those behind them begin."""
    from cuda.bindings import driver

    raw = driver.CUgraph(graph.raw_cuda_graph())
    *_, count = driver.cuGraphGetEdges(raw, 0)
    _, _, _, edges, _ = driver.cuGraphGetEdges(raw, count)
    return {edge.from_port for edge in edges}


LATER = (
    ("normal", 1064, 2880), ("row scales", 4104, 1024), ("patches", 72, 1088), ("payloads", 2048, 2112),
    ("subnormal", 136, 6080), ("raw chunks", 264, 1984),
)  # fmt: skip


def later_weights(launch: Launch) -> list[tuple[torch.Tensor, PackedTensor]]:
    """As many of LATER as a launch takes; beside each, what it is packed from."""
    found = []
    for kind, rows, columns in LATER:
        weight = weight_of("row scales" if kind == "payloads" else kind, rows, columns)
        if kind == "payloads":
            weight.view(torch.int16)[5::9, 3::77] = 0x7FA5
        packed = samebits.encode(weight).to("cuda")
        if is_prefetchable(packed, launch, 0):
            found.append((weight.cuda(), packed))
    return found[:MAX_PREFETCHED]


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("rank", range(len(TILES)))
def test_weights_for_products_to_come(rank: int, together: bool) -> None:
    """Decoded on the way, eagerly and in graphs, and the products are what they are without."""
    if not nvrtc.has_wgmma(0):
        pytest.skip("no kernel that does on this device")
    tokens, columns = 1100, 2112
    weights = [weight_of("patches", rows, columns) for rows in ((1544, 1000) if together else (2056,))]
    operands = [Operands(samebits.encode(weight).to("cuda"), None, LinearPlan(1)) for weight in weights]
    launch = relay(tuple(Footprint.of(each.packed.header) for each in operands), tokens, (1,) * len(operands), 0, rank)
    assert launch is not None
    later = later_weights(launch)
    assert len(later) >= 3
    x = inputs(tokens, columns, rank)
    expected = [plain_linear(x, weight.cuda(), None, 1) for weight in weights] + [weight for weight, _ in later]
    for count in (1, len(later)):
        products = Products(launch, [packed for _, packed in later[:count]])
        found = [products(x, None, lambda: operands) for _ in range(6)]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found.append(products(x, None, lambda: operands))
        for tensor in found[-1]:
            tensor.fill_(1)
        for _ in range(3):
            graph.replay()
        for made in found:
            assert len(made) == len(weights) + count
            for number, (left, right) in enumerate(zip(made, expected, strict=False)):
                assert first_difference(left, right) is None, (launch.name, count, number)


def test_hostile_weights_for_products_to_come() -> None:
    """As below: sections that change after they were validated."""
    if not nvrtc.has_wgmma(0):
        pytest.skip("no kernel that does on this device")
    own = Operands(samebits.encode(weight_of("normal", 2056, 1024)).to("cuda"), None, LinearPlan(1))
    launch, x = relay((Footprint.of(own.packed.header),), 1100, (1,), 0, 0), inputs(1100, 1024, 0)
    assert launch is not None
    generator, expected = torch.Generator("cuda").manual_seed(1), None
    for _, intact in later_weights(launch):
        for name in ("code", "offsets", "streams"):
            for fill in (0x00, 0x01, 0x7F, 0xFF, None):
                packed = PackedTensor(intact.header, intact.data.clone())
                section = packed.section(name)
                section.random_(0, 256, generator=generator) if fill is None else section.fill_(fill)
                y, _ = Products(launch, [packed])(x, None, lambda: [own])
                expected = y if expected is None else expected
                assert first_difference(y, expected) is None
    torch.cuda.synchronize()


@pytest.mark.parametrize("kind", ["normal", "patches", "raw chunks"])
def test_hostile_contents_do_not_fault(kind: str) -> None:
    """Sections that change after they were validated: nothing is read or written out of bounds, and nothing hangs."""
    weight = weight_of(kind, 1024, 2048)
    intact = samebits.encode(weight).to("cuda")
    generator = torch.Generator("cuda").manual_seed(1)
    for name in ("code", "offsets", "streams"):
        for fill in (0x00, 0x01, 0x7F, 0xFF, None):
            packed = PackedTensor(intact.header, intact.data.clone())
            section = packed.section(name)
            section.random_(0, 256, generator=generator) if fill is None else section.fill_(fill)
            for tokens, split in ((1, 3), (16, 3), (100, 3), (300, 1)):
                for variant in variants(packed.header, tokens, split):
                    fused_linear(inputs(tokens, 2048, 0), packed, None, LinearPlan(split, variant))
            torch.cuda.synchronize()
    assert assert_all_alike(weight.cuda(), intact, 1, (3,)) >= 4


GROUPS = (
    (("normal", 64), ("patches", 1064)),
    (("row scales", 2048), ("normal", 512), ("not finite", 512)),
    (("raw chunks", 136), ("subnormal", 4104), ("normal", 64), ("patches", 2048)),
    (("normal", 14336), ("normal", 14336)),
)


@pytest.mark.parametrize("columns", [1088, 4096])
@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 16, 40, 100, 129, 512, 1300])
@pytest.mark.parametrize("group", GROUPS, ids=lambda group: " ".join(str(rows) for _, rows in group))
def test_several_weights_in_one_launch(group: tuple[tuple[str, int], ...], tokens: int, columns: int) -> None:
    weights = [weight_of(kind, rows, columns) for kind, rows in group]
    x, tried = inputs(tokens, columns, tokens), 0
    for splits in ((1, 1, 1, 1), (2, 3, 5, 1), (2, 4, 2, 4)):  # the last are all cut by linear_tiles.cuh
        biases = [torch.randn(rows, device="cuda").bfloat16() if i % 2 else None for i, (_, rows) in enumerate(group)]
        operands = [
            Operands(samebits.encode(weight).to("cuda"), bias, LinearPlan(split))
            for weight, bias, split in zip(weights, biases, splits, strict=False)
        ]
        expected = [
            plain_linear(x, weight.cuda(), bias, split)
            for weight, bias, split in zip(weights, biases, splits, strict=False)
        ]
        for variant in range(len(VARIANTS)):
            launch = launch_together(operands, tokens, variant, 0)
            if launch is None:
                continue
            for _ in range(2):  # without decode tables in memory, then with them
                for y, right in zip(fused_linears(x, operands, launch), expected, strict=True):
                    assert first_difference(y, right) is None, f"splits {splits}, variant {variant}"
            tried += 1
    if tokens > MAX_TOKENS and not nvrtc.has_wgmma(0):
        pytest.skip(f"no kernel for {tokens} tokens on this device")
    least = 4 if tokens <= MAX_TOKENS else 2 if tokens <= 64 else 1
    assert tried >= (0 if tokens > 64 and "raw chunks" in dict(group) else least)  # these take too much memory
