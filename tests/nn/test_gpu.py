"""Packed modules on a GPU: the same bits as the dense ones, also inside CUDA graphs, compiled, and on other streams."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import samebits

pytestmark = pytest.mark.gpu


def make_model() -> nn.Sequential:
    """An embedding, two linear layers with bias and without, all large enough to be packed."""
    torch.manual_seed(0)
    layers = (nn.Embedding(512, 256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 512, bias=False))
    model = nn.Sequential(*layers).to("cuda", torch.bfloat16).requires_grad_(False)
    for parameter in model.parameters():
        parameter.mul_(0.1)
    return model


@pytest.fixture
def pair() -> tuple[nn.Sequential, nn.Sequential]:
    """The dense model, and a packed copy of it."""
    dense = make_model()
    packed = copy.deepcopy(dense)
    samebits.compress(packed)
    names = [name for name, _ in packed.named_parameters() if "sb_" in name]
    assert len(names) == 3
    return dense, packed


def assert_same(first: torch.Tensor, second: torch.Tensor) -> None:
    assert torch.equal(first.view(torch.int16), second.view(torch.int16))


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (4, 64)], ids=str)
def test_same_output(pair: tuple[nn.Sequential, nn.Sequential], shape: tuple[int, int]) -> None:
    dense, packed = pair
    tokens = torch.randint(0, 512, shape, device="cuda")
    assert_same(packed(tokens), dense(tokens))


def test_memory_is_packed(pair: tuple[nn.Sequential, nn.Sequential]) -> None:
    dense, packed = pair
    tokens = torch.randint(0, 512, (1, 8), device="cuda")
    packed(tokens)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    packed(tokens)
    largest = max(parameter.numel() for parameter in dense.parameters()) * 2
    activations = 1 << 20
    assert torch.cuda.memory_allocated() <= before + activations
    assert torch.cuda.max_memory_allocated() - before <= largest + activations


def test_inside_a_cuda_graph(pair: tuple[nn.Sequential, nn.Sequential]) -> None:
    dense, packed = pair
    tokens = torch.randint(0, 512, (2, 16), device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        packed(tokens)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = packed(tokens)
    for _ in range(3):
        tokens.copy_(torch.randint(0, 512, (2, 16), device="cuda"))
        graph.replay()
        assert_same(output, dense(tokens))


def test_rows_of_an_embedding_inside_a_cuda_graph() -> None:
    """So few that they are decoded alone; each replay those of the tokens then."""
    dense = nn.Embedding(8192, 512).to("cuda", torch.bfloat16).requires_grad_(False)
    packed = copy.deepcopy(dense)
    samebits.compress(packed)
    tokens = torch.zeros((2, 4), dtype=torch.int64, device="cuda")
    packed(tokens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    with torch.cuda.graph(graph):
        output = packed(tokens)
    assert torch.cuda.max_memory_allocated() - before < dense.weight.nbytes / 2
    for _ in range(3):
        tokens.copy_(torch.randint(0, 8192, (2, 4), device="cuda"))
        graph.replay()
        assert_same(output, dense(tokens))


def test_on_another_stream(pair: tuple[nn.Sequential, nn.Sequential]) -> None:
    dense, packed = pair
    tokens = torch.randint(0, 512, (2, 16), device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        output = packed(tokens)
    stream.synchronize()
    assert_same(output, dense(tokens))


def test_compiled(pair: tuple[nn.Sequential, nn.Sequential]) -> None:
    dense, packed = pair
    tokens = torch.randint(0, 512, (2, 16), device="cuda")
    compiled = torch.compile(
        packed, backend="aot_eager"
    )  # the same operators: other backends may fuse, and round elsewhere
    assert_same(compiled(tokens), dense(tokens))


def test_moves_to_the_cpu_and_back(pair: tuple[nn.Sequential, nn.Sequential]) -> None:
    dense, packed = pair
    tokens = torch.randint(0, 512, (2, 16), device="cuda")
    packed.to("cpu")
    assert {parameter.device.type for parameter in packed.parameters()} == {"cpu"}
    assert_same(packed.cuda()(tokens), dense(tokens))
