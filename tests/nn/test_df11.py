"""Models that run on DFloat11's layout: the same bits as in bfloat16, and the layout back in the state dict."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from threading import Event, current_thread, main_thread

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from samebits.df11.unit import Unit
from samebits.errors import FormatError, SamebitsError
from samebits.nn.df11 import DecodingMemory, attach_unit
from tests.codecs.tensors import words_of
from tests.df11.test_unit import FOLDER, NAMES, TENSORS, matrices_of, unit_of
from tests.integrations.models import assert_same_bits, outputs
from tests.nn.modules import products_of

LAYER = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
         "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]  # fmt: skip
PATTERNS = {r"lm_head": [], r"model\.embed_tokens": [], r"model\.layers\.\d+": LAYER}
TOKENS = torch.randint(3, 1024, (2, 9), generator=torch.Generator().manual_seed(1))


def tensors_of(unit: Unit, device: str = "cpu") -> dict[str, torch.Tensor]:
    return {name: torch.from_numpy(getattr(unit, name)).to(device) for name in TENSORS}


def encoded(weights: list[torch.Tensor]) -> Unit:
    words = [words_of(weight).reshape(-1) for weight in weights]
    return Unit.encode(np.concatenate(words), [part.size for part in words])


def tiny_llama() -> nn.Module:
    """With the weights of the vectors in the units that there are vectors of."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(FOLDER)
    model = transformers.LlamaForCausalLM(config).to(torch.bfloat16).eval()
    for name in NAMES:
        module = model.get_submodule(name)
        for attribute, words in zip(LAYER if "layers" in name else [""], matrices_of(name), strict=True):
            weight = module.get_submodule(attribute).weight
            weight.data = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).view(weight.shape)
    return model


def attached(model: nn.Module, device: str = "cpu") -> nn.Module:
    """A copy of ``model`` with all its units in the layout, those of the vectors from there."""
    model, memory = copy.deepcopy(model), DecodingMemory()
    for name, module in list(model.named_modules()):
        attributes = next((known for pattern, known in PATTERNS.items() if re.fullmatch(pattern, name)), None)
        if attributes is not None:
            weights = [module.get_submodule(attribute).weight.detach() for attribute in attributes or [""]]
            unit = unit_of(name) if name in NAMES else encoded(weights)
            attach_unit(module, tensors_of(unit), attributes, memory)
    return model.to(device)


def test_tiny_llama_says_the_same() -> None:
    model = tiny_llama()
    packed = attached(model)
    names = [name for name, _ in packed.named_parameters()]
    assert names
    assert all("norm" in name for name in names)
    logits, continuation = outputs(model, TOKENS)
    packed_logits, packed_continuation = outputs(packed, TOKENS)
    assert_same_bits(packed_logits, logits)
    assert packed_continuation.tolist() == continuation.tolist()


def test_state_dict_is_the_layout() -> None:
    state = attached(tiny_llama()).state_dict()
    for name in NAMES:
        for tensor, stored in tensors_of(unit_of(name)).items():
            assert torch.equal(state[f"{name}.{tensor}"], stored)
    assert not [name for name in state if "proj" in name]


def test_copies_and_pickles_run_on_their_own() -> None:
    packed = attached(tiny_llama())
    expected = outputs(packed, TOKENS)[0]
    for copied in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        packed.lm_head.sign_mantissa.zero_()
        assert_same_bits(outputs(copied, TOKENS)[0], expected)
        assert copied.lm_head.luts.data_ptr() != packed.lm_head.luts.data_ptr()
        packed = copied


def pair(shapes: list[tuple[int, int]], trained: bool = True) -> tuple[nn.Sequential, nn.Sequential, DecodingMemory]:
    """Linear layers as one unit."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(columns, rows, bias=False) for rows, columns in shapes)).to(torch.bfloat16)
    model.requires_grad_(trained)
    packed, memory = copy.deepcopy(model), DecodingMemory()
    unit = encoded([layer.weight.detach() for layer in model])
    attach_unit(packed, tensors_of(unit), [str(number) for number in range(len(shapes))], memory)
    return model, packed, memory


def test_weights_that_start_anywhere() -> None:
    """Matrices are 16-byte aligned for the product, wherever they lie in their unit."""
    model, packed, _ = pair([(7, 9), (33, 7), (5, 33)])
    addresses = []
    for layer in packed:
        layer.register_forward_pre_hook(lambda layer, _: addresses.append(layer.weight.data_ptr()))
    x = torch.randn(4, 9, dtype=torch.bfloat16)
    with torch.no_grad():
        assert_same_bits(packed(x), model(x))
    assert [address % 16 for address in addresses] == [0, 0, 0]


def test_weights_are_gone_behind_the_forward() -> None:
    _, packed, _ = pair([(8, 8), (8, 8)])
    packed(torch.zeros(1, 8, dtype=torch.bfloat16))
    assert not hasattr(packed[0], "weight")
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        packed(torch.zeros(1, 9, dtype=torch.bfloat16))
    assert not hasattr(packed[0], "weight")
    packed(torch.zeros(1, 8, dtype=torch.bfloat16))


def test_inference_mode_and_others_in_turn() -> None:
    model, packed, _ = pair([(16, 8), (8, 16)])
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    for mode in (torch.inference_mode(), torch.no_grad(), torch.enable_grad(), torch.inference_mode()):
        with mode:
            assert_same_bits(packed(x).detach(), model(x).detach())


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_torch_multiplies_as_with_the_plain_weight(
    mode: Callable[[], AbstractContextManager[None]], trained: bool
) -> None:
    """It looks at requires_grad, if the input has gaps. Where gradients are recorded, the weights count as frozen."""
    model, packed, _ = pair([(16, 8), (7, 16), (8, 7)], trained)
    x = torch.randn(3, 5, 8, dtype=torch.bfloat16)[:, -1:]
    with mode():
        model.requires_grad_(trained and not torch.is_grad_enabled())
        assert products_of(lambda: packed(x)) == products_of(lambda: model(x))
        assert_same_bits(packed(x), model(x))


def test_compiled() -> None:
    """In one graph, and as before behind it."""
    model, packed, _ = pair([(7, 9), (33, 7), (5, 33)])
    x = torch.randn(4, 9, dtype=torch.bfloat16)
    compiled = torch.compile(packed, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        for run in (compiled, packed, compiled):
            assert_same_bits(run(x), model(x))
            assert not hasattr(packed[0], "weight")


def test_a_unit_inside_of_another() -> None:
    """Each has memory of its own then."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.own = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.own(self.inner(x))

    model = Outer().to(torch.bfloat16)
    packed, memory = copy.deepcopy(model), DecodingMemory()
    attach_unit(packed.inner, tensors_of(encoded([model.inner.weight.detach()])), [], memory)
    attach_unit(packed, tensors_of(encoded([model.own.weight.detach()])), ["own"], memory)
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    for _ in range(2):
        assert_same_bits(packed(x).detach(), model(x).detach())


def test_another_thread_runs_the_model_meanwhile() -> None:
    """While a forward waits between two of its layers."""
    model, packed, memory = pair([(16, 8), (8, 16)])
    behind = copy.deepcopy(model[0])
    attach_unit(behind, tensors_of(encoded([behind.weight.detach()])), [], memory)  # decoded where the first unit was
    x, waits, goes_on = torch.randn(3, 8, dtype=torch.bfloat16), Event(), Event()

    def wait(*_: object) -> None:
        if current_thread() is not main_thread():
            waits.set()
            assert goes_on.wait(60)

    packed[1].register_forward_pre_hook(wait)

    @torch.no_grad()
    def run() -> torch.Tensor:
        return packed(x)

    with ThreadPoolExecutor(1) as pool, torch.no_grad():
        slow = pool.submit(run)
        assert waits.wait(60)
        assert_same_bits(packed(x), model(x))
        assert_same_bits(behind(x), model[0](x))
        goes_on.set()
        assert_same_bits(slow.result(), model(x))
        assert not hasattr(packed[0], "weight")
        assert_same_bits(behind(x), model[0](x))


def test_an_interrupted_forward_leaves_nothing_behind() -> None:
    """torch tells no hook of a KeyboardInterrupt."""
    model, packed, _ = pair([(16, 8), (8, 16)])
    x = torch.randn(3, 8, dtype=torch.bfloat16)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    hook = packed[1].register_forward_pre_hook(interrupt)
    with torch.no_grad(), pytest.raises(KeyboardInterrupt):
        packed(x)
    hook.remove()
    for tensor, stored in tensors_of(encoded([layer.weight.detach() + 1 for layer in model])).items():
        packed.register_buffer(tensor, stored)
    with ThreadPoolExecutor(1) as pool, torch.no_grad():
        for layer in model:
            layer.weight += 1
        expected = model(x)
        assert_same_bits(pool.submit(torch.no_grad()(packed), x).result(), expected)
        assert_same_bits(packed(x), expected)
    assert not hasattr(packed[0], "weight")


class FakeStream:
    def __init__(self) -> None:
        self.waits_for: list[FakeStream] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.waits_for.append(other)


class OnGpu:
    """What streams see of memory on a GPU."""

    is_cuda, device = True, torch.device("cuda", 0)

    def __init__(self) -> None:
        self.used_by: list[FakeStream] = []

    def record_stream(self, stream: FakeStream) -> None:
        self.used_by.append(stream)

    def data_ptr(self) -> int:
        return id(self)


def test_streams_that_decode_and_read_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads waits for who decoded; who decodes waits for all who may read; a captured graph waits for none."""
    memory, lent, (first, second, third) = DecodingMemory(), OnGpu(), (FakeStream() for _ in range(3))

    def follow(stream: FakeStream, decoding: bool, capturing: bool = False, lent: OnGpu = lent) -> list[FakeStream]:
        stream.waits_for.clear()
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
        memory.follow(lent, decoding)  # type: ignore[arg-type]
        return stream.waits_for

    assert follow(first, decoding=True) == []
    assert follow(first, decoding=True) == []
    assert follow(second, decoding=False) == [first]
    assert lent.used_by == [first, first, second]
    assert follow(third, decoding=True, capturing=True) == []
    assert {*follow(third, decoding=True)} == {first, second}
    assert follow(second, decoding=True, lent=OnGpu()) == []  # a unit that runs meanwhile, elsewhere
    assert follow(first, decoding=True) == [third]
    assert lent.used_by == [first, first, second, third, first]


def test_a_larger_unit_comes_later() -> None:
    _, packed, memory = pair([(8, 8)])
    packed(torch.zeros(1, 8, dtype=torch.bfloat16))
    larger = nn.Linear(8, 64, bias=False).to(torch.bfloat16)
    other = copy.deepcopy(larger)
    attach_unit(other, tensors_of(encoded([larger.weight.detach()])), [], memory)
    x = torch.randn(2, 8, dtype=torch.bfloat16)
    assert_same_bits(other(x).detach(), larger(x).detach())


def test_no_wrong_gradients() -> None:
    """The memory holds other weights by the time of the backward pass."""
    _, packed, _ = pair([(8, 8)])
    x = torch.randn(2, 8, dtype=torch.bfloat16, requires_grad=True)
    first = packed(x)
    packed(x.detach())
    with pytest.raises(RuntimeError, match="inplace operation"):
        first.sum().backward()


def test_weights_may_be_on_the_meta_device() -> None:
    with torch.device("meta"):
        packed = nn.Linear(256, 1024, bias=False)
    attach_unit(packed, tensors_of(unit_of("lm_head")), [], DecodingMemory())
    weight = torch.from_numpy(matrices_of("lm_head")[0].view(np.int16)).view(torch.bfloat16).view(1024, 256)
    x = torch.randn(2, 256, dtype=torch.bfloat16)
    assert_same_bits(packed(x), nn.functional.linear(x, weight))


def test_refuses_units_of_other_matrices() -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(FormatError, match=r"a unit of \[262144\] weights for matrices \[\[8, 8\]\]"):
        attach_unit(model, tensors_of(unit_of("lm_head")), [], DecodingMemory())
    assert isinstance(model.weight, nn.Parameter)


@pytest.mark.parametrize("attributes", [["q_proj"], ["0"]], ids=str)
def test_refuses_units_of_other_models(attributes: list[str]) -> None:
    with pytest.raises(FormatError, match="weights that the model does not have"):
        attach_unit(nn.Sequential(nn.GELU()), tensors_of(unit_of("lm_head")), attributes, DecodingMemory())


@pytest.mark.parametrize("name", TENSORS)
def test_refuses_damaged_tensors(name: str) -> None:
    tensors = tensors_of(unit_of("lm_head"))
    for damaged in (tensors[name].to(torch.int32), tensors[name].view(1, *tensors[name].shape)):
        with pytest.raises(SamebitsError, match=name):
            attach_unit(nn.Linear(256, 1024), {**tensors, name: damaged}, [], DecodingMemory())


def test_a_stream_that_contradicts_its_tables_is_refused() -> None:
    packed = nn.Linear(256, 1024, bias=False)
    tensors = tensors_of(unit_of("lm_head"))
    tensors["encoded_exponent"].zero_()
    attach_unit(packed, tensors, [], DecodingMemory())
    with pytest.raises(FormatError, match="does not fit its tables"):
        packed(torch.zeros(1, 256, dtype=torch.bfloat16))
    assert not hasattr(packed, "weight")


@pytest.mark.gpu
def test_tiny_llama_says_the_same_on_a_gpu() -> None:
    model = tiny_llama()
    packed = attached(model, "cuda")
    model.cuda()
    logits, continuation = outputs(model, TOKENS.cuda())
    packed_logits, packed_continuation = outputs(packed, TOKENS.cuda())
    assert_same_bits(packed_logits, logits)
    assert packed_continuation.tolist() == continuation.tolist()


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [True, False], ids=["of one module", "of two"])
def test_threads_with_their_own_streams_on_a_gpu(shared: bool) -> None:
    """Units that two threads run at the same time, one behind the other in one memory, and in memory of their own."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(6))).to(torch.bfloat16)
    model.requires_grad_(False)
    packed, memory = copy.deepcopy(model), DecodingMemory()
    for layer in packed:
        attach_unit(layer, tensors_of(encoded([layer.weight])), [], memory)
    halves = [slice(0, 6), slice(0, 6)] if shared else [slice(0, 3), slice(3, 6)]
    model.cuda()
    packed.cuda()
    torch.cuda.synchronize()

    @torch.no_grad()
    def run(half: slice) -> None:
        x = torch.randn(512, 2048, dtype=torch.bfloat16, device="cuda")
        expected = model[half](x)
        torch.cuda.current_stream().synchronize()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            results = [packed[half](x) for _ in range(200)]
        stream.synchronize()
        for result in results:
            assert_same_bits(result, expected)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(run, halves)) == [None, None]
    assert not any(hasattr(layer, "weight") for layer in packed)


@pytest.mark.gpu
def test_inside_a_cuda_graph() -> None:
    model, packed, _ = pair([(512, 256), (256, 512)])
    model.cuda()
    packed.cuda()
    x = torch.randn(4, 256, dtype=torch.bfloat16, device="cuda")
    with torch.no_grad():
        packed(x)  # compiles, checks, and takes the memory
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = packed(x)
        x.copy_(torch.randn_like(x))
        graph.replay()
        assert_same_bits(result, model(x))


@pytest.mark.gpu
def test_a_contradiction_is_reported_on_a_gpu() -> None:
    packed = nn.Linear(256, 1024, bias=False)
    tensors = tensors_of(unit_of("lm_head"), "cuda")
    tensors["encoded_exponent"].zero_()
    attach_unit(packed, tensors, [], DecodingMemory())
    with pytest.raises(FormatError, match="contradict the stream"):
        packed(torch.zeros(1, 256, dtype=torch.bfloat16, device="cuda"))
    assert not hasattr(packed, "weight")
