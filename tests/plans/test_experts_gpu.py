"""Products with routed experts on a GPU: the bytes of torch's own operations, fused or not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import samebits
from samebits.kernels.ops import fields_of
from samebits.plans import dispatch, experts
from samebits.plans.calibrate_experts import multiply_decoded, probe_of
from samebits.plans.experts import FEW_PAIRS, multiply_experts
from samebits.plans.key import Operation
from samebits.plans.probe import Probe
from tests.plans.conftest import new_process

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("own_plans")]
BATCHED, GROUPED = Operation.BATCHED, Operation.GROUPED
SHAPES = [(128, 1536, 2048), (128, 2048, 768), (8, 1024, 4096), (40, 512, 1280)]


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Variants of fused products."""
    made: list[int] = []
    original = experts.experts_product

    def product(*arguments: object) -> None:
        made.append(arguments[-1])  # type: ignore[arg-type]
        original(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(experts, "experts_product", product)
    return made


def cancelling(shape: tuple[int, int, int]) -> tuple[torch.Tensor, Callable[[int], torch.Tensor]]:
    """Matrices [experts, rows, columns] that all differ, and inputs [tokens, columns] under which all sums are 0."""
    experts, rows, columns = shape
    probe = Probe.make(rows, columns, torch.device("cuda"))
    weight = torch.stack([probe.weight.roll(expert, 0) for expert in range(experts)])
    return weight, lambda tokens: probe.cancelling(tokens, tokens)


def in_order(ids: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Indices as grouped products have them, and where each expert's rows end."""
    ids = ids.sort()[0].int()
    return ids, torch.bincount(ids, minlength=count).cumsum(0, dtype=torch.int32)


def assert_same(left: torch.Tensor, right: torch.Tensor) -> None:
    assert torch.equal(left.view(torch.int16), right.view(torch.int16))


@pytest.mark.parametrize("operation", Operation)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_number_of_pairs(shape: tuple[int, int, int], operation: Operation, fused: list[int]) -> None:
    """Of sums that cancel, with weights that are all other ones."""
    count, rows, _ = shape
    weight, x_of = cancelling(shape)
    packed = samebits.encode(weight)
    generator, numbers = torch.Generator("cuda").manual_seed(0), (1, 2, 7, 8, 16, 40, 128, 256)
    for pairs in numbers:
        ids = torch.randint(count, (pairs,), device="cuda", generator=generator)
        offsets = None
        if operation is GROUPED:
            ids, offsets = in_order(ids, count)
        x = x_of(pairs)
        made = multiply_experts(x, packed, ids, offsets)
        assert made.shape == (pairs, rows)
        assert_same(made, multiply_decoded(x, packed, ids, offsets))
        fields = fields_of(packed.header)
        assert_same(torch.ops.samebits.experts(x, packed.data, list(shape), fields, ids, offsets), made)
    assert len(fused) >= len(numbers)  # each of them twice, but for those that are slower or other bits


def test_products_made_again(fused: list[int]) -> None:
    """By native code, from the third one on, with other rows and indices each time, if they are fused."""
    weight, x_of = cancelling((16, 512, 2048))
    packed = samebits.encode(weight)
    generator = torch.Generator("cuda").manual_seed(0)
    for pairs, operation in ((8, BATCHED), (1, BATCHED), (64, GROUPED), (8, GROUPED)):
        again, before = [], len(fused)
        for _ in range(4):
            ids = torch.randint(16, (pairs,), device="cuda", generator=generator)
            ids, offsets = in_order(ids, 16) if operation is GROUPED else (ids, None)
            x = x_of(pairs)
            made = dispatch.experts_again(x, packed.data, ids)
            again.append(made is not None)
            y = multiply_experts(x, packed, ids, offsets) if made is None else made
            assert_same(y, multiply_decoded(x, packed, ids, offsets))
        assert again[2:] == [len(fused) > before] * 2
    assert fused


def test_more_pairs_than_have_plans(fused: list[int]) -> None:
    packed = samebits.encode(0.02 * torch.randn(8, 256, 1024, device="cuda").bfloat16())
    x = torch.randn(FEW_PAIRS + 1, 1024, device="cuda").bfloat16()
    ids = torch.randint(8, (len(x),), device="cuda")
    assert_same(multiply_experts(x, packed, ids, None), multiply_decoded(x, packed, ids, None))
    assert not fused


def test_in_a_graph_with_other_routes(fused: list[int]) -> None:
    probe, packed = probe_of((2048, 1024), torch.device("cuda"))
    stack = torch.stack([probe.weight, probe.weight.roll(1, 0), probe.weight.roll(5, 0)])
    packed = samebits.encode(stack)
    x, ids = probe.cancelling(6, 1), torch.zeros(6, dtype=torch.int64, device="cuda")
    multiply_experts(x, packed, ids, None)
    graph = torch.cuda.CUDAGraph()
    fused.clear()
    with torch.cuda.graph(graph):
        y = multiply_experts(x, packed, ids, None)
    assert len(fused) == 1
    for seed in range(5):
        ids.copy_(torch.randint(3, (6,), generator=torch.Generator().manual_seed(seed)))
        graph.replay()
        assert_same(y, multiply_decoded(x, packed, ids, None))


def test_found_again_from_disk(fused: list[int]) -> None:
    packed = samebits.encode(0.02 * torch.randn(16, 1024, 2048, device="cuda").bfloat16())
    x, ids = torch.randn(8, 2048, device="cuda").bfloat16(), torch.arange(8, device="cuda")
    first = multiply_experts(x, packed, ids, None)
    new_process()
    assert_same(multiply_experts(x, packed, ids, None), first)
    assert len(fused) == 2
    assert fused[0] == fused[1]
