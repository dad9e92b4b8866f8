"""Streaming to a GPU: the same bits when copies are slow and when blocks are, on any stream."""

from __future__ import annotations

import copy
import gc
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import samebits
from samebits.errors import InputError

pytestmark = pytest.mark.gpu
SIZE = 2048


class Block(nn.Module):
    """Two products, the GPU idle for ``cycles`` before each."""

    def __init__(self, cycles: int) -> None:
        super().__init__()
        self.cycles = cycles
        self.up, self.down = nn.Linear(SIZE, 2 * SIZE), nn.Linear(2 * SIZE, SIZE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.cuda._sleep(self.cycles)
        hidden = self.up(x)
        torch.cuda._sleep(self.cycles)
        return x + self.down(hidden)


class Model(nn.Module):
    def __init__(self, cycles: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(cycles) for _ in range(9))
        self.head = nn.Linear(SIZE, SIZE, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_pair(cycles: int) -> tuple[Model, Model, int]:
    """Dense on the GPU, and packed in main memory; and the latter's bytes."""
    torch.manual_seed(0)
    dense = Model(cycles).to("cuda", torch.bfloat16).requires_grad_(False)
    packed = copy.deepcopy(dense)
    samebits.compress(packed)
    packed.to("cpu")
    return dense, packed, sum(parameter.nbytes for parameter in packed.parameters())


def assert_same(left: torch.Tensor, right: torch.Tensor) -> None:
    assert torch.equal(left.view(torch.int16), right.view(torch.int16))


def is_pinned(memory: torch.Tensor) -> bool:
    """As the driver says: torch knows only what its own allocator pinned."""
    from cuda.bindings import driver

    code, _ = driver.cuMemHostGetFlags(memory.data_ptr())
    return int(code) == 0


def inputs(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, SIZE, device="cuda").to(torch.bfloat16)


SLOW_COPIES, SLOW_BLOCKS = 0, 3_000_000  # cycles
ALL = 0.26  # of the model's bytes: every block is streamed


@pytest.mark.parametrize("cycles", [SLOW_COPIES, SLOW_BLOCKS])
@pytest.mark.parametrize("share", [ALL, 0.8])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_same_bits(cycles: int, share: float, mode: type) -> None:
    dense, packed, size = make_pair(cycles)
    report = samebits.offload(packed, int(size * share))
    assert len(report.streamed) >= 3
    assert report.device.type == "cuda"
    with mode():
        for tokens in (1, 1, 1, 7, 300, 1, 1):
            x = inputs(tokens)
            assert_same(packed(x), dense(x))
        results = [(packed(x), x) for x in (inputs(1) for _ in range(20))]  # nothing waits in between
        for result, x in results:
            assert_same(result, dense(x))


def test_fused_products_of_streamed_weights() -> None:
    """Whose kernels may start early where weights are not streamed."""
    dense, packed, size = make_pair(SLOW_COPIES)
    samebits.offload(packed, int(size * ALL))
    assert samebits.prepare(packed, [1]).products
    x = inputs(1)
    with torch.no_grad():
        for _ in range(50):
            assert_same(packed(x), dense(x))


def test_memory_on_the_card() -> None:
    dense, packed, size = make_pair(SLOW_COPIES)
    x = inputs(1)
    with torch.no_grad():
        expected = dense(x)
        del dense
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        report = samebits.offload(packed, int(size * ALL))
        rounding = (1 << 20) * (2 + len(list(packed.parameters())))
        packed(x)  # finds plans
        torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            assert_same(packed(x), expected)
        decoded = 2 * 2 * SIZE * SIZE
        assert torch.cuda.max_memory_allocated() - before <= report.device_bytes + rounding + decoded + (1 << 20)
        assert report.device_bytes <= torch.cuda.memory_allocated() - before <= report.device_bytes + rounding
    assert len(report.streamed) == 9
    assert all(is_pinned(block.forward.block.memory) for block in packed.blocks)


def test_onload_unpins() -> None:
    dense, packed, size = make_pair(SLOW_BLOCKS)
    samebits.offload(packed, int(size * ALL))
    x = inputs(3)
    with torch.no_grad():
        packed(x)
        memory = packed.blocks[0].forward.block.memory
        assert is_pinned(memory)
        samebits.onload(packed)
        assert not is_pinned(memory)
        assert_same(packed.to("cuda")(x), dense(x))
        samebits.offload(packed, int(size * ALL))  # from the GPU
        assert_same(packed(x), dense(x))


def test_other_streams() -> None:
    dense, packed, size = make_pair(SLOW_BLOCKS)
    samebits.offload(packed, int(size * ALL))
    xs = [inputs(2) for _ in range(8)]
    with torch.no_grad():
        expected = [dense(x) for x in xs]
    torch.cuda.synchronize()

    @torch.no_grad()
    def run(x: torch.Tensor) -> torch.Tensor:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            result = packed(x)
        stream.synchronize()
        return result

    with ThreadPoolExecutor(3) as pool:
        for theirs, ours in zip(expected, pool.map(run, xs), strict=True):
            assert_same(ours, theirs)


def test_memory_is_not_given_away_while_copies_run() -> None:
    """What is allocated where staging buffers were does not change."""
    _, packed, size = make_pair(SLOW_COPIES)
    x = inputs(1)
    for _ in range(5):
        offloaded = copy.deepcopy(packed)
        samebits.offload(offloaded, int(size * ALL))
        with torch.no_grad():
            offloaded(x)
        del offloaded
        gc.collect()
        others = [torch.full((1 << 20,), 7, dtype=torch.uint8, device="cuda") for _ in range(64)]
        torch.cuda.synchronize()
        assert all(bool((other == 7).all()) for other in others)


def test_cuda_graphs_are_refused() -> None:
    dense, packed, size = make_pair(SLOW_COPIES)
    samebits.offload(packed, int(size * ALL))
    x, graph = inputs(1), torch.cuda.CUDAGraph()
    with torch.no_grad():
        packed(x)
        torch.cuda.synchronize()
        with pytest.raises(InputError, match="CUDA graph"), torch.cuda.graph(graph):
            packed(x)
        torch.cuda.synchronize()
        assert_same(packed(x), dense(x))


def test_a_streamed_layer_called_alone_does_not_crash() -> None:
    """Its weight is in main memory then."""
    _, packed, size = make_pair(SLOW_COPIES)
    samebits.offload(packed, int(size * ALL))
    with torch.no_grad(), pytest.raises(InputError, match="packed bytes in main memory"):
        packed.blocks[0].up(inputs(1))
    torch.cuda.synchronize()
