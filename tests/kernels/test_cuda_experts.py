"""Products with routed experts: the bits of one chain over all of K, for each pair of a token and an expert."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import samebits
from samebits.bf16 import same_words
from samebits.errors import DeviceError
from samebits.format.packed import PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.linear.experts import VARIANTS, Input, experts_product, is_supported, launch_of
from samebits.kernels.linear.products import LinearPlan, fused_linear
from samebits.kernels.linear.products import is_supported as supports_fused
from tests.codecs.tensors import always_quad
from tests.kernels.weights import KINDS, weight_of

pytestmark = pytest.mark.gpu
SHAPES = (
    (1, 64, 1024),
    (8, 24, 768),
    (5, 136, 1088),
    (128, 16, 640),
    (3, 520, 4096),
    (40, 8, 2880),
)  # three of two chunks and more
ROUTED = [number for number, variant in enumerate(VARIANTS) if variant.input is Input.ARRANGED]
_LEAST_ROWS = 64  # of a matrix for the fused layer, whose bytes are enough then


@pytest.fixture(autouse=True)
def _quad_code() -> Iterator[None]:
    with always_quad():
        yield


def experts_of(kind: str, shape: tuple[int, int, int]) -> torch.Tensor:
    experts, rows, columns = shape
    return weight_of(kind, max(experts * rows, 24), columns)[: experts * rows].view(shape).cuda()


def routed(pairs: int, experts: int, seed: int) -> torch.Tensor:
    """Some have many tokens, also the same one twice, some none; a few pairs have no expert."""
    generator = torch.Generator().manual_seed(seed)
    ids = (experts * torch.rand(pairs, generator=generator) ** 2).int()
    ids[torch.rand(pairs, generator=generator) < 0.05] = -1
    ids[torch.rand(pairs, generator=generator) < 0.05] = experts
    return ids.cuda()


def expected_of(x: torch.Tensor, weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """As the fused layer of each expert gives it, whose reference is plain_linear.cu (test_cuda_linear.py)."""
    pairs, (experts, rows, columns) = len(ids), weight.shape
    missing = max(1024 - columns, 0)  # which that layer needs: with tokens of zeros they add nothing
    wide = torch.cat([weight, 0.02 * torch.randn(experts, rows, missing, device="cuda").bfloat16()], 2)
    tall = wide.repeat(1, -(-_LEAST_ROWS // rows), 1)
    inputs = torch.cat([x, x.new_zeros(len(x), missing)], 1).repeat_interleave(pairs // len(x), 0)
    expected = torch.zeros(pairs, rows, dtype=x.dtype, device="cuda")
    for expert in range(experts):
        packed = samebits.encode(tall[expert])
        assert supports_fused(packed.header, 8, 0)
        for some in (ids == expert).nonzero()[:, 0].split(8):
            if len(some):
                expected[some] = fused_linear(inputs[some], packed, None, LinearPlan(1))[:, :rows]
    return expected


def found_by(
    x: torch.Tensor, packed: PackedTensor, ids: torch.Tensor, scales: torch.Tensor | None, variant: int
) -> torch.Tensor:
    assert is_supported(packed.header)
    y = torch.full((len(ids), packed.shape[1]), torch.nan, dtype=torch.bfloat16, device="cuda")
    experts_product(x, packed, ids, scales, y, variant)
    return y


def fitting(packed: PackedTensor, pairs: int, sharing: int) -> list[int]:
    return [variant for variant in range(len(VARIANTS)) if launch_of(packed.header, pairs, sharing, variant, 0)]


@pytest.mark.parametrize("sharing", [1, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_pair_has_the_bits_of_its_expert(shape: tuple[int, int, int], sharing: int) -> None:
    weight = experts_of("normal", shape)
    packed = samebits.encode(weight)
    tried = set()
    for tokens in (1, 2, 7, 8, 9, 16, 33, 100, 300):
        x = torch.randn(tokens, shape[2], device="cuda").bfloat16()
        ids = routed(tokens * sharing, shape[0], tokens)
        expected = expected_of(x, weight, ids)
        scales = torch.exp2(torch.randint(-3, 4, (len(ids),), device="cuda").float())
        for variant in fitting(packed, len(ids), sharing):
            tried.add(variant)
            assert same_words(found_by(x, packed, ids, None, variant), expected)
            scaled = (expected.float() * scales[:, None]).bfloat16()  # exact, by powers of two
            assert same_words(found_by(x, packed, ids.long(), scales, variant), scaled)
    assert tried >= {0, 1, 3}
    assert not nvrtc.has_wgmma(0) or tried >= {*ROUTED}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_weight(kind: str) -> None:
    shape = (6, 80, 1088)
    weight = experts_of(kind, shape)
    packed = samebits.encode(weight)
    tried = set()
    for tokens in (20, 250):
        x, ids = torch.randn(tokens, shape[2], device="cuda").bfloat16(), routed(3 * tokens, shape[0], 1)
        expected, variants = expected_of(x, weight, ids), fitting(packed, 3 * tokens, 3)
        assert all(same_words(found_by(x, packed, ids, None, variant), expected) for variant in variants)
        tried |= {*variants}
    wide = set() if kind in ("raw chunks", "subnormal") else {*ROUTED[3:]}  # which leave no room for long chunks
    assert tried >= {*range(4)} | (({*ROUTED[:3]} | wide) if nvrtc.has_wgmma(0) else set())


def test_experts_are_chosen_anew_in_a_graph() -> None:
    weight = experts_of("normal", (32, 64, 1024))
    packed = samebits.encode(weight)
    routed_ones = ((40, ROUTED[0]), (300, ROUTED[1]), (400, ROUTED[3])) if nvrtc.has_wgmma(0) else ()
    for tokens, variant in ((1, 0), (4, 1), (40, 2), (40, 3), *routed_ones):
        x, ids = torch.zeros(tokens, 1024, device="cuda").bfloat16(), routed(8 * tokens, 32, 0)
        y = found_by(x, packed, ids, None, variant)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            experts_product(x, packed, ids, None, y, variant)
        for seed in range(3):
            x.copy_(torch.randn(tokens, 1024))
            ids.copy_(routed(8 * tokens, 32, seed))
            y.fill_(torch.nan)
            graph.replay()
            assert same_words(y, expected_of(x, weight, ids))


def test_streams_beside_each_other() -> None:
    weight = experts_of("normal", (16, 256, 2048))
    packed = samebits.encode(weight)
    streams = [torch.cuda.Stream() for _ in range(4)]
    for tokens, variant in ((5, 0), (50, 4)) if nvrtc.has_wgmma(0) else ((5, 0),):
        inputs = [
            (torch.randn(tokens, 2048, device="cuda").bfloat16(), routed(4 * tokens, 16, seed))
            for seed in range(len(streams))
        ]
        torch.cuda.synchronize()
        found = []
        for _ in range(10):
            for stream, (x, ids) in zip(streams, inputs, strict=True):
                with torch.cuda.stream(stream):
                    found.append(found_by(x, packed, ids, None, variant))
        torch.cuda.synchronize()
        expected = [expected_of(x, weight, ids) for x, ids in inputs]
        assert all(same_words(each, expected[i % len(streams)]) for i, each in enumerate(found))


@pytest.mark.parametrize(
    "shape", [(4, 60, 1024), (4, 64, 1000), (4, 64, 512), (64, 1024), (2, 2, 64, 1024)], ids=str
)  # fmt: skip
def test_others_are_not_supported(shape: tuple[int, ...]) -> None:
    """Experts that share row groups, rows with padding, row groups that share chunks; what is no stack of matrices."""
    packed = samebits.encode((torch.randn(shape) * 0.02).bfloat16())
    assert not is_supported(packed.header)


def test_a_variant_that_does_not_fit() -> None:
    packed = samebits.encode(experts_of("normal", (2, 64, 1024)))
    x = torch.randn(2, 1024, device="cuda").bfloat16()
    assert launch_of(packed.header, 4, 2, 3, 0) is None  # no expert can have more than eight
    with pytest.raises(DeviceError, match="does not fit"):
        found_by(x, packed, torch.zeros(4, dtype=torch.int32, device="cuda"), None, 3)


@pytest.mark.parametrize("kind", ["normal", "patches", "raw chunks"])
def test_hostile_contents_do_not_fault(kind: str) -> None:
    """Sections that change after they were validated: nothing is read or written out of bounds, and nothing hangs."""
    weight = experts_of(kind, (8, 128, 2048))
    intact = samebits.encode(weight)
    generator = torch.Generator("cuda").manual_seed(1)
    few, many = (
        (torch.randn(tokens, 2048, device="cuda").bfloat16(), routed(2 * tokens, 8, 0)) for tokens in (30, 500)
    )
    for name in ("code", "offsets", "streams"):
        for fill in (0x00, 0x01, 0x7F, 0xFF, None):
            packed = PackedTensor(intact.header, intact.data.clone())
            section = packed.section(name)
            section.random_(0, 256, generator=generator) if fill is None else section.fill_(fill)
            for x, ids in (few, many):
                for variant in fitting(packed, len(ids), 2):
                    found_by(x, packed, ids, None, variant)
            torch.cuda.synchronize()
    x, ids = few
    assert same_words(found_by(x, intact, ids, None, 0), expected_of(x, weight, ids))
