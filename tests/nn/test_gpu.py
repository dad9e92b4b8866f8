"""Packed modules on a GPU: the same bits as the dense ones, also inside CUDA graphs, compiled, and on other streams."""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn
from torch.autograd import DeviceType
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

import samebits
from samebits.errors import DigestError, InputError

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


def test_all_kernels_run_on_the_current_stream(pair: tuple[nn.Sequential, nn.Sequential]) -> None:
    """As soon as some have run on another one, kernels in graphs begin later, in all of the process."""
    _, packed = pair
    tokens = torch.zeros((1, 8), dtype=torch.int64, device="cuda")
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        packed(tokens)
        torch.cuda.synchronize()
    kernels = {e.name: e.device_resource_id for e in seen.events() if e.device_type == DeviceType.CUDA}
    assert any(name.startswith("make_table") for name in kernels)
    assert len({*kernels.values()}) == 1, kernels


def test_a_weight_that_is_read(pair: tuple[nn.Sequential, nn.Sequential]) -> None:
    """It has no memory, and computes as what has, also where autocast asks for other types."""
    (_, dense, *_), (_, packed, *_) = pair
    weight, plain, other = packed.weight, dense.weight, torch.ones(3, dtype=torch.bfloat16, device="cuda")
    assert (weight.device, weight.is_cuda, weight.is_meta, weight.get_device()) == (plain.device, True, False, 0)
    for lent in (weight, weight.data, weight[2:5], weight.t()):
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            other.data = lent
    x = torch.randn(2, 256, device="cuda")
    for dtype in (torch.float16, torch.bfloat16):
        with torch.autocast("cuda", dtype):
            for made, expected in ((F.linear(x, weight), F.linear(x, plain)), (weight.t() @ weight, plain.t() @ plain)):
                assert made.dtype is expected.dtype is dtype
                assert_same(made, expected)
    assert_same(weight.t().clone(), plain.t().clone())
    assert_same(weight.to("cpu"), plain.to("cpu"))


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1024, 1024), (4096, 4096), (32000, 4096)], ids=str)
def test_inputs_with_gaps(
    shape: tuple[int, int], bias: bool, mode: Callable[[], AbstractContextManager[None]], trained: bool
) -> None:
    """torch multiplies these in another way if the weight has requires_grad, as from_pretrained makes it."""
    torch.manual_seed(1)
    rows, columns = shape
    dense = nn.Linear(columns, rows, bias=bias, device="cuda", dtype=torch.bfloat16).requires_grad_(trained)
    packed = copy.deepcopy(dense)
    samebits.compress(packed)
    h = torch.randn(5, 12, columns, device="cuda").to(torch.bfloat16)
    with mode():
        for x in (h[:, -1:], h[:1, -1:], h.transpose(0, 1), h[:, ::2], h[..., None, :].transpose(0, 1), h):
            for _ in range(3):
                assert_same(packed(x), dense(x))
            assert_same(F.linear(x, packed.weight), F.linear(x, dense.weight))


@torch.no_grad()
def test_bytes_that_were_written_to_are_not_captured_unread(pair: tuple[nn.Sequential, nn.Sequential]) -> None:
    layer = pair[1][1]
    x = torch.randn(1, 256, device="cuda").to(torch.bfloat16)
    layer(x)
    layer.sb_packed[70] += 1
    with pytest.raises(InputError, match=r"written to.*run the module once"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        layer(x)
    with pytest.raises(DigestError, match="its packed bytes were changed"):
        layer(x)


def test_bytes_whose_memory_was_freed(pair: tuple[nn.Sequential, nn.Sequential]) -> None:
    """As torch's fully_shard frees them behind a forward pass: no kernel reads at address 0."""
    _, packed = pair
    x = torch.randn(4, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    output, kept = packed[1](x), packed[1].weight
    for parameter in packed[1].parameters():
        if parameter.dtype is torch.uint8:
            parameter.untyped_storage().resize_(0)
    with pytest.raises(InputError, match="memory was freed"):
        kept.clone()
    with pytest.raises(InputError, match="memory was freed"):
        output.sum().backward()
    torch.cuda.synchronize()


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_a_norm_with_a_kernel_of_its_own_on_gpus(mode: Callable[[], AbstractContextManager[None]]) -> None:
    """Torch takes it apart on other devices, which rounds otherwise."""
    plain = nn.RMSNorm((64, 96), device="cuda", dtype=torch.bfloat16).requires_grad_(False)
    nn.init.normal_(plain.weight, std=0.02)
    packed = copy.deepcopy(plain)
    assert samebits.compress(packed).packed
    outputs, gradients = [], []
    with mode():
        for norm in (plain, packed):
            torch.manual_seed(0)
            x = torch.randn(50, 64, 96, device="cuda").to(torch.bfloat16).requires_grad_(torch.is_grad_enabled())
            outputs.append(norm(x))
            if x.requires_grad:
                outputs[-1].sum().backward()
                gradients.append(x.grad)
    assert_same(*outputs)
    if gradients:
        assert_same(*gradients)


def test_a_parent_hands_a_view_of_a_weight_to_a_kernel() -> None:
    """Which reads memory, as Triton's and others do."""
    layer = nn.Conv1d(2048, 2048, 4, groups=2048, device="cuda", dtype=torch.bfloat16)
    expected = layer.weight.squeeze(1).clone()
    assert samebits.compress(layer).packed
    view = layer.weight.squeeze(1)
    assert torch.Tensor.data_ptr(view) == view.data_ptr() != 0
    assert_same(view + 0, expected)


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


def test_memory_is_given_back() -> None:
    """Packed bytes do not take a part of the blocks where weights were, and the other way round."""
    torch.cuda.empty_cache()
    others = torch.cuda.memory_reserved()
    model = nn.Sequential(*(nn.Linear(3072, 3072, bias=False) for _ in range(12))).to("cuda", torch.bfloat16)
    model.requires_grad_(False).apply(lambda module: getattr(module, "weight", torch.empty(0)).normal_(std=0.02))
    nbytes = 12 * 3072 * 3072 * 2
    assert torch.cuda.memory_reserved() - others >= nbytes
    assert len(samebits.compress(model).packed) == 12
    assert torch.cuda.memory_reserved() - others < 0.85 * nbytes  # torch rounds up to 2 MiB
    samebits.decompress(model)
    assert nbytes <= torch.cuda.memory_reserved() - others < 1.2 * nbytes


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


def make_modules() -> nn.ModuleDict:
    """Of every number of dimensions, bare parameters and torch's attention, one after the other."""
    torch.manual_seed(0)
    model = nn.ModuleDict(
        {
            "conv1d": nn.Conv1d(64, 128, 3, padding=1),
            "conv2d": nn.Conv2d(64, 128, 3, padding=1),
            "channels_last": nn.Conv2d(64, 128, 3, padding=1).to(memory_format=torch.channels_last),
            "conv3d": nn.Conv3d(16, 64, 3, padding=1),
            "attention": nn.MultiheadAttention(128, 4, batch_first=True),
            "lists": nn.ParameterList([torch.randn(128, 128) / 16 for _ in range(2)]),
        }
    )
    return model.to("cuda", torch.bfloat16).requires_grad_(False)


def call_all(model: nn.ModuleDict, x: torch.Tensor) -> list[torch.Tensor]:
    """``x``: [2, 64, 64, 16]."""
    sequence = x.reshape(2, -1, 128)
    return [
        model["conv1d"](x.flatten(2)),
        model["conv2d"](x),
        model["channels_last"](x.to(memory_format=torch.channels_last)),
        model["conv3d"](x.reshape(2, 16, 4, 64, 16)),
        model["attention"](sequence, sequence, sequence, need_weights=False)[0],
        sequence @ model["lists"][0] @ model["lists"][1].T,
    ]


@pytest.fixture
def modules() -> tuple[nn.ModuleDict, nn.ModuleDict]:
    dense = make_modules()
    packed = copy.deepcopy(dense)
    assert len(samebits.compress(packed).packed) == 8
    return dense, packed


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modules_of_all_kinds(modules: tuple[nn.ModuleDict, nn.ModuleDict], mode: type) -> None:
    dense, packed = modules
    x = torch.randn(2, 64, 64, 16, device="cuda").to(torch.bfloat16)
    with mode():
        for expected, result in zip(call_all(dense, x), call_all(packed, x), strict=True):
            assert_same(result, expected)


def test_modules_of_all_kinds_inside_a_cuda_graph(modules: tuple[nn.ModuleDict, nn.ModuleDict]) -> None:
    dense, packed = modules
    x = torch.randn(2, 64, 64, 16, device="cuda").to(torch.bfloat16)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad():
        with torch.cuda.stream(side):
            call_all(packed, x)
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            outputs = call_all(packed, x)
        for _ in range(2):
            x.copy_(torch.randn_like(x))
            graph.replay()
            for expected, result in zip(call_all(dense, x), outputs, strict=True):
                assert_same(result, expected)


@torch.no_grad()
def test_modules_of_all_kinds_compiled(modules: tuple[nn.ModuleDict, nn.ModuleDict]) -> None:
    dense, packed = modules
    x = torch.randn(2, 64, 64, 16, device="cuda").to(torch.bfloat16)
    torch.compiler.reset()
    compiled = torch.compile(call_all, backend="aot_eager")
    for expected, result in zip(call_all(dense, x), compiled(packed, x), strict=True):
        assert_same(result, expected)


@pytest.mark.parametrize("own_streams", [True, False])
@torch.no_grad()
def test_products_in_threads(own_streams: bool) -> None:
    """Of few tokens, which need no decoded weight, and of many; on streams of their own, or all on one."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(2048, 4096), nn.GELU(), nn.Linear(4096, 2048)).to("cuda", torch.bfloat16)
    packed = copy.deepcopy(dense)
    samebits.compress(packed)
    inputs = [
        torch.randn(tokens, 2048, device="cuda").to(torch.bfloat16)
        for tokens in (1, 64, 2, 1, 8, 256, 1, 64, 16, 3, 300)
    ]
    expected = [dense(x) for x in inputs]
    torch.cuda.synchronize()

    @torch.no_grad()
    def call(x: torch.Tensor) -> torch.Tensor:
        stream = torch.cuda.Stream() if own_streams else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            outputs = [packed(x) for _ in range(20)]
        stream.synchronize()
        assert all(torch.equal(outputs[0], output) for output in outputs)
        return outputs[-1]

    with ThreadPoolExecutor(4) as pool:
        for theirs, ours in zip(expected, pool.map(call, inputs), strict=True):
            assert_same(ours, theirs)


def test_threads_with_their_own_streams(modules: tuple[nn.ModuleDict, nn.ModuleDict]) -> None:
    dense, packed = modules
    inputs = [torch.randn(2, 64, 64, 16, device="cuda").to(torch.bfloat16) for _ in range(8)]
    with torch.no_grad():
        expected = [call_all(dense, x) for x in inputs]
    torch.cuda.synchronize()

    @torch.no_grad()
    def call(x: torch.Tensor) -> list[torch.Tensor]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            outputs = call_all(packed, x)
        stream.synchronize()
        return outputs

    with ThreadPoolExecutor(4) as pool:
        for theirs, ours in zip(expected, pool.map(call, inputs), strict=True):
            for first, second in zip(theirs, ours, strict=True):
                assert_same(second, first)


@sdpa_kernel(SDPBackend.MATH)  # the others' backward passes do not give the same twice
@torch.backends.cudnn.flags(deterministic=True)
def test_gradients(modules: tuple[nn.ModuleDict, nn.ModuleDict]) -> None:
    x = torch.randn(2, 64, 64, 16, device="cuda").to(torch.bfloat16)
    gradients = []
    for model in modules:
        leaf = x.clone().requires_grad_()
        outputs = call_all(model, leaf)
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
        gradients.append(leaf.grad)
    assert_same(*gradients)


def test_nothing_dense_is_kept_for_the_backward_pass() -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(4))).to("cuda", torch.bfloat16)
    dense.requires_grad_(False)
    packed = copy.deepcopy(dense)
    samebits.compress(packed)
    x = torch.randn(8, 2048, device="cuda").to(torch.bfloat16)
    first, second = x.clone().requires_grad_(), x.clone().requires_grad_()
    dense(first).float().square().sum().backward()
    before = torch.cuda.memory_allocated()
    output = packed(second)
    assert torch.cuda.memory_allocated() - before < dense[0].weight.nbytes / 2
    output.float().square().sum().backward()
    assert_same(second.grad, first.grad)


@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [1, 16, 300])
def test_autocast(tokens: int, dtype: torch.dtype, given: torch.dtype) -> None:
    """To BF16 a product of BF16 is what it is without; all others are torch's."""
    torch.manual_seed(0)
    dense = nn.Linear(4096, 4096).to("cuda", torch.bfloat16).requires_grad_(False)
    packed = copy.deepcopy(dense)
    samebits.compress(packed)
    x = torch.randn(tokens, 4096, device="cuda").to(given)
    outer = torch.randn(tokens, 4096, device="cuda").to(dtype)
    for wants_gradient in (False, True):
        for _ in range(4):
            made = []
            for module in (dense, packed):
                leaf = x.clone().requires_grad_(wants_gradient)
                with torch.autocast("cuda", dtype):
                    y = module(leaf)
                made.append([y.detach(), *(torch.autograd.grad(y, leaf, outer) if wants_gradient else ())])
            for first, second in zip(*made, strict=True):
                assert first.dtype == second.dtype
                assert_same(second, first)


@pytest.mark.parametrize("own_streams", [True, False])
def test_gradients_in_threads(own_streams: bool) -> None:
    """Again and again, which is made by native code then; where dimensions are alike, one shape is of both passes."""
    torch.manual_seed(0)
    layers = (nn.Linear(2048, 2048, bias=False), nn.GELU(), nn.Linear(2048, 4096), nn.GELU(), nn.Linear(4096, 2048))
    dense = nn.Sequential(*layers).to("cuda", torch.bfloat16).requires_grad_(False)
    packed = copy.deepcopy(dense)
    samebits.compress(packed)
    for model in (dense, packed):
        model[4].bias.requires_grad_()
    inputs = [torch.randn(tokens, 2048, device="cuda").to(torch.bfloat16) for tokens in (1, 64, 2, 256, 300, 64, 2048)]

    def passes(model: nn.Sequential, x: torch.Tensor) -> list[torch.Tensor]:
        leaf = x.clone().requires_grad_()
        y = model(leaf)
        return [y.detach(), *torch.autograd.grad(y, [leaf, model[4].bias], torch.ones_like(y))]

    expected = [passes(dense, x) for x in inputs]
    torch.cuda.synchronize()

    def call(x: torch.Tensor) -> list[list[torch.Tensor]]:
        stream = torch.cuda.Stream() if own_streams else torch.cuda.current_stream()
        with torch.cuda.stream(stream):
            made = [passes(packed, x) for _ in range(12)]
        stream.synchronize()
        return made

    with ThreadPoolExecutor(4) as pool:
        for theirs, every in zip(expected, pool.map(call, inputs), strict=True):
            for ours in every:
                for first, second in zip(theirs, ours, strict=True):
                    assert_same(second, first)


@torch.no_grad()
def test_compiled_with_graphs_of_its_own() -> None:
    """What a weight keeps from its first call, which warms a graph up, is not the graph's."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(2048, 4096), nn.GELU(), nn.Linear(4096, 2048)).to("cuda", torch.bfloat16)
    packed = copy.deepcopy(dense)
    samebits.compress(packed)
    torch.compiler.reset()
    expected, result = (torch.compile(model, mode="reduce-overhead") for model in (dense, packed))
    for seed in range(4):
        x = torch.randn(1, 2048, device="cuda", generator=torch.Generator("cuda").manual_seed(seed)).to(torch.bfloat16)
        assert_same(result(x).clone(), expected(x).clone())
