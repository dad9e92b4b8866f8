"""samebits.cuda_graphs, with functions that are called again where a GPU replays kernels."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM, CompileConfig, DynamicCache, StaticCache
from transformers.cache_utils import StaticSlidingWindowLayer

import samebits
from samebits.errors import InputError
from samebits.integrations import graphs as cuda_graphs
from samebits.integrations.transformers import graphs as transformers_graphs
from samebits.integrations.transformers.graphs import DecodingStep, decoding_steps

TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 128, "max_position_embeddings": 256, "pad_token_id": 0,
}  # fmt: skip


def config(kind: str = "llama", **options: Any) -> Any:
    return AutoConfig.for_model(kind, **TINY, **options)


def made(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(kind, **options), dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    return model


class Recorder:
    """Counts captures; a replay calls the function again."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, run: Callable[[], Any]) -> Callable[[], Any]:
        self.captures += 1

        def replay() -> Any:
            self.replays += 1
            return run()

        return replay


@pytest.fixture
def cache() -> StaticCache:
    return StaticCache(config=config(), max_cache_len=16)


def generated(model: Any, length: int = 5, **options: Any) -> torch.Tensor:
    return written(model, length, **options)[0]


def logits_of(model: Any, length: int = 5, **options: Any) -> torch.Tensor:
    """Of all new tokens, as words: tokens alone tell little of a model that was not trained."""
    _, logits = written(model, length, **options)
    return torch.stack(logits).view(torch.int32)


def written(model: Any, length: int, **options: Any) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Tokens, and the logits of each new one in FP32."""
    prompt = torch.arange(2 * length, device=model.device).reshape(2, length) + 1
    compiled = CompileConfig()
    compiled._compile_all_devices = True  # a CPU too
    if options:
        options["compile_config"] = compiled
    output = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=12, do_sample=False, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip
    return output.sequences, output.logits


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_the_same_tokens(kind: str) -> None:
    """Each call of generate has a graph of its own; packed models are no other case."""
    model, capture = made(kind), Recorder()
    expected = generated(model, cache_implementation="static", disable_compile=True)  # a growing one may differ
    for number in (1, 2):
        if number == 2:
            samebits.compress(model)
        with decoding_steps(model, capture):
            assert torch.equal(generated(model, cache_implementation="static"), expected)
        assert (capture.captures, capture.replays) == (number, 9 * number)  # a prompt and two steps before
    assert "get_compiled_call" not in vars(model)


def test_a_step_like_one_before_is_captured_at_once() -> None:
    """In later calls of generate, also in another context, with a cache of the same size."""
    model, cases = made("llama"), ((5, 20), (5, 20), (7, 20), (5, 24), (7, 24), (5, 20))

    def found(capture: Callable[..., Any], length: int, room: int) -> torch.Tensor:
        with decoding_steps(model, capture):
            return logits_of(model, length, past_key_values=StaticCache(config=model.config, max_cache_len=room))

    expected, captures = [found(refuse, *case) for case in cases], [Recorder() for _ in cases]
    for case, logits, capture in zip(cases, expected, captures, strict=True):
        assert torch.equal(found(capture, *case), logits)
    assert [capture.captures for capture in captures] == [1] * len(cases)
    assert [capture.replays for capture in captures] == [9, 11, 11, 9, 11, 11]


@pytest.mark.parametrize("change", ["packed", "settings", "parameter"])
def test_a_model_that_has_changed_is_another(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, capture = made("llama"), Recorder()
    with decoding_steps(model, capture):
        generated(model, cache_implementation="static")
        if change == "packed":
            samebits.compress(model)
        elif change == "settings":
            monkeypatch.setattr(transformers_graphs, "blas_state", lambda: "others")
        else:
            model.lm_head.weight = nn.Parameter(model.lm_head.weight.clone())
        generated(model, cache_implementation="static")
    assert (capture.captures, capture.replays) == (2, 18)


def test_a_step_that_cannot_be_captured_at_once(cache: StaticCache, caplog: pytest.LogCaptureFixture) -> None:
    """Kernels that run for the first time may have to be loaded: it runs as it is twice, as if it were new."""
    known: set[int] = set()
    capture = Recorder()

    def step(capture: Callable[..., Any]) -> DecodingStep:
        return DecodingStep(lambda ids, past_key_values: ids + 1, capture, known)

    first = step(capture)
    assert [int(first(ids=torch.tensor(n), past_key_values=cache)) for n in range(4)] == [1, 2, 3, 4]
    answers = iter((refuse, capture))
    second = step(lambda run: next(answers)(run))
    assert [int(second(ids=torch.tensor(n), past_key_values=cache)) for n in range(5)] == [1, 2, 3, 4, 5]
    assert (capture.captures, capture.replays) == (2, 2 + 3)
    assert not caplog.records
    third = step(refuse)
    assert [int(third(ids=torch.tensor(n), past_key_values=cache)) for n in range(5)] == [1, 2, 3, 4, 5]
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["samebits.cuda_graphs"]
    assert not known


class Operations(TorchDispatchMode):
    """What a graph has of a function: its operations on tensors that stay where they are, without any Python."""

    def __init__(self) -> None:
        super().__init__()
        self.all: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[torch.Tensor]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            refuse(lambda: None)  # the host would have to wait for a value
        output = func(*args, **(kwargs or {}))
        self.all.append((func, args, kwargs or {}, tensors_of(output)))
        return output

    def replay(self) -> None:
        for func, args, kwargs, outputs in self.all:
            inputs = {each.untyped_storage().data_ptr() for each in tensors_of((args, kwargs))}
            for there, again in zip(outputs, tensors_of(func(*args, **kwargs)), strict=True):
                if there.untyped_storage().data_ptr() not in inputs:  # else a view, or written to already
                    there.copy_(again)


def tensors_of(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


class Graphs(Recorder):
    """A replay does what a graph would; a capture computes nothing, though Python runs."""

    def __init__(self, cache: StaticCache) -> None:
        super().__init__()
        self.cache = cache

    def __call__(self, run: Callable[[], Any]) -> Callable[[], Any]:
        kept = tensors_of([vars(layer) for layer in self.cache.layers])
        before = [tensor.clone() for tensor in kept]
        with Operations() as operations:
            output = run()
        for tensor, value in zip(kept, before, strict=True):
            tensor.copy_(value)

        def replayed() -> Any:
            operations.replay()
            return output

        return super().__call__(replayed)


def refuse(run: Callable[[], Any]) -> Callable[[], Any]:
    raise RuntimeError("operation not permitted when stream is capturing")


WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},  # in all layers
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "cohere2": {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]},
}


@pytest.mark.parametrize("prompt", [2, 5, 8, 12])
@pytest.mark.parametrize("kind", WINDOWS)
def test_windows(kind: str, prompt: int) -> None:
    """Which are full at once, or become full; then there is another graph. The second time no step runs before it."""
    model = made(kind, **WINDOWS[kind])
    with decoding_steps(model, refuse):
        expected = logits_of(model, prompt, past_key_values=StaticCache(config=model.config, max_cache_len=32))
    growing = min(max(8 - prompt, 0), 11)  # steps
    for eager in (2, 0):
        cache = StaticCache(config=model.config, max_cache_len=32)
        capture = Graphs(cache)
        with decoding_steps(model, capture):
            assert torch.equal(logits_of(model, prompt, past_key_values=cache), expected)
        windows = [layer for layer in cache.layers if isinstance(layer, StaticSlidingWindowLayer)]
        assert {window.cumulative_length_int for window in windows} == {prompt + 11}
        assert not any("update" in vars(window) for window in windows)
        replays = [max(steps - eager, 0) for steps in (growing, 11 - growing)]
        assert (capture.captures, capture.replays) == (sum(each > 0 for each in replays), sum(replays))


LAYERS = {"layer_types": ["linear_attention", "full_attention"]}
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32,
}  # fmt: skip


STATES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": LAYERS,
    "qwen3_next": LAYERS | EXPERTS,
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 16},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "falcon_h1": {},
}


@pytest.mark.parametrize("kind", STATES)
def test_states_instead_of_attention(kind: str) -> None:
    """They stay where they are in memory. The second time the first step is captured."""
    model = made(kind, **STATES[kind])
    with decoding_steps(model, refuse):
        expected = logits_of(model, past_key_values=StaticCache(config=model.config, max_cache_len=32))
    for replays in (9, 11):
        cache = StaticCache(config=model.config, max_cache_len=32)
        capture = Graphs(cache)
        with decoding_steps(model, capture):
            assert torch.equal(logits_of(model, past_key_values=cache), expected)
        assert (capture.captures, capture.replays) == (1, replays)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*WINDOWS, *STATES])
def test_replays_of_a_gpu(kind: str, graphs: list[Any]) -> None:
    model = made(kind, **(WINDOWS | STATES)[kind]).to("cuda")
    samebits.compress(model)
    with decoding_steps(model, refuse):
        expected = logits_of(model, cache_implementation="static")
    for _ in range(2):  # the second time captured at once
        graphs.clear()
        with samebits.cuda_graphs(model):
            assert torch.equal(logits_of(model, cache_implementation="static"), expected)
        assert len(graphs) == (2 if kind in WINDOWS else 1)


def test_states_that_are_kept_in_modules(caplog: pytest.LogCaptureFixture) -> None:
    """A replay would begin with those of the capture each time."""
    model, capture = made("recurrent_gemma", block_types=["recurrent", "attention"], lru_width=64), Recorder()
    with decoding_steps(model, capture):
        generated(model, cache_implementation="static")
    assert capture.captures == 0
    assert "each step changes what its modules hold in Python" in caplog.text


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.options = {"counts": [0]}

    def forward(self, ids: torch.Tensor, past_key_values: StaticCache) -> torch.Tensor:
        self.options["counts"][0] += 1
        return ids + self.options["counts"][0]


def test_a_model_that_counts_its_steps(cache: StaticCache, caplog: pytest.LogCaptureFixture) -> None:
    step = DecodingStep(Counting(), refuse)
    assert [int(step(ids=torch.tensor(0), past_key_values=cache)) for _ in range(5)] == [1, 2, 3, 4, 5]
    assert "each step changes what its modules hold in Python" in caplog.text


@pytest.mark.parametrize("change", ["moved", "shortened", "counted", "tokens", "inside"])
def test_a_cache_that_python_changes(change: str, cache: StaticCache, caplog: pytest.LogCaptureFixture) -> None:
    layer: Any = cache.layers[0]
    layer.states, layer.count, layer.extra = torch.zeros(16), 0, {"states": [torch.zeros(4)]}
    layer.cumulative_length_int = 0  # as a window's, which this is not

    def forward(ids: torch.Tensor, past_key_values: StaticCache) -> int:
        layer.states.add_(1)
        if change == "moved":
            layer.states = layer.states.clone()
        elif change == "shortened":
            layer.states = layer.states[:-1]
        elif change == "counted":
            layer.count += 1
        elif change == "tokens":
            layer.cumulative_length_int += 1
        else:
            layer.extra["states"][0] = layer.extra["states"][0] + 1
        return int(ids)

    capture = Recorder()
    step = DecodingStep(forward, capture)
    assert [step(ids=torch.tensor(number), past_key_values=cache) for number in range(5)] == [0, 1, 2, 3, 4]
    assert capture.captures == 0
    places = {
        "moved": "states",
        "shortened": "states",
        "counted": "count",
        "tokens": "cumulative_length_int",
        "inside": "extra[states][0]",
    }
    assert [record.getMessage() for record in caplog.records] == [
        f"samebits.cuda_graphs: the decoding step runs as it is: each step changes its cache's "
        f"layers[0].{places[change]} in Python, which no replay does"
    ]


def step_of_window(kept: list[Any]) -> tuple[StaticCache, Callable[..., int]]:
    """A step that does nothing but tell the cache's only layer of its tokens."""
    cache = StaticCache(config=config("mistral", sliding_window=8), max_cache_len=16)
    cache.layers = cache.layers[:1]

    def forward(ids: torch.Tensor, past_key_values: StaticCache, **others: Any) -> int:
        kept.append(vars(cache.layers[0]).get("update"))
        states = torch.zeros(1, 2, ids.shape[-1], 16)
        return int(past_key_values.update(states, states, 0)[0].shape[-2])

    return cache, forward


@pytest.mark.parametrize(
    ("options", "tokens", "reason"),
    [
        ({"mask": torch.ones(1, 5)}, 1, "masks of a sliding window are made in the model, by what Python has counted"),
        ({}, 1, "masks of a sliding window are made in the model, by what Python has counted"),
        (
            {"mask": torch.ones(1, 1, 1, 8), "attention_mask": torch.ones(1, 5)},
            1,
            "masks of a sliding window are made in the model, by what Python has counted",
        ),
        ({"mask": torch.ones(1, 1, 2, 8)}, 2, "a sliding window does not take in one token a step"),
    ],
)
def test_windows_that_are_not_captured(
    options: dict[str, Any], tokens: int, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    cache, forward = step_of_window([])
    capture = Recorder()
    step = DecodingStep(forward, capture)
    for _ in range(12):
        step(ids=torch.ones(1, tokens), past_key_values=cache, **options)
    assert capture.captures == 0
    assert cache.layers[0].cumulative_length_int == 12 * tokens
    assert [record.getMessage() for record in caplog.records] == [
        f"samebits.cuda_graphs: the decoding step runs as it is: {reason}"
    ]


def test_a_full_window_whose_capture_fails() -> None:
    """It counts on, and moves as it did before."""
    seen: list[Any] = []
    cache, forward = step_of_window(seen)

    def capture(run: Callable[[], Any]) -> Callable[[], Any]:
        run()
        return refuse(run)

    step = DecodingStep(forward, capture)
    for _ in range(8):
        cache.update(torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 16), 0)
    for _ in range(5):
        assert step(ids=torch.ones(1, 1), past_key_values=cache, mask=torch.ones(1, 1, 1, 8)) == 8
    assert [update is None for update in seen] == [True, True, False, True, True, True]
    assert cache.layers[0].cumulative_length_int == 13


def test_contents_may_change(cache: StaticCache) -> None:
    capture = Recorder()
    step = DecodingStep(lambda ids, mask, past_key_values, scale: (ids + mask["full"]) * scale, capture)
    for number in range(6):
        mask = {"full": torch.tensor([10 * number])}
        assert step(ids=torch.tensor([number]), mask=mask, past_key_values=cache, scale=2) == 22 * number
    assert (capture.captures, capture.replays) == (1, 4)


@pytest.mark.parametrize("what", ["shape", "dtype", "cache", "number", "kind of number", "name"])
def test_anything_else_begins_anew(what: str, cache: StaticCache) -> None:
    capture = Recorder()
    step = DecodingStep(lambda ids, past_key_values, **others: ids.float().sum() + others.get("scale", 0), capture)
    before: dict[str, Any] = {"ids": torch.ones(2, dtype=torch.int64), "past_key_values": cache, "scale": 3}
    after = (
        before
        | {
            "shape": {"ids": torch.ones(3, dtype=torch.int64)},
            "dtype": {"ids": torch.ones(2, dtype=torch.int32)},
            "cache": {"past_key_values": StaticCache(config=config(), max_cache_len=16)},
            "number": {"scale": 4},
            "kind of number": {"scale": 3.0},
            "name": {"other": None},
        }[what]
    )
    expected = after["ids"].float().sum() + after["scale"]
    assert [step(**before) for _ in range(3)] == [5] * 3
    assert [step(**after) for _ in range(4)] == [expected] * 4
    assert (capture.captures, capture.replays) == (2, 5 if what == "cache" else 3)  # it is like the one before


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"past_key_values": DynamicCache()}, "its cache is a DynamicCache, not a StaticCache"),
        ({}, "its cache is missing, not a StaticCache"),
        (
            {"past_key_values": StaticCache(config=config(), max_cache_len=16), "output_hidden_states": True},
            "output_hidden_states keeps tensors that the next replay overwrites",
        ),
    ],
)
def test_what_is_not_captured(options: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture) -> None:
    capture = Recorder()
    step = DecodingStep(lambda ids, **others: ids + 1, capture)
    assert [int(step(ids=torch.tensor(number), **options)) for number in range(5)] == [1, 2, 3, 4, 5]
    assert capture.captures == 0
    assert [record.getMessage() for record in caplog.records] == [
        f"samebits.cuda_graphs: the decoding step runs as it is: {reason}"
    ]


def test_an_offloaded_cache_is_not_captured(cache: StaticCache) -> None:
    capture = Recorder()
    cache.offloading = True
    step = DecodingStep(lambda ids, past_key_values: ids, capture)
    assert [int(step(ids=torch.tensor(1), past_key_values=cache)) for _ in range(4)] == [1] * 4
    assert capture.captures == 0


def test_a_capture_that_fails(cache: StaticCache, caplog: pytest.LogCaptureFixture) -> None:
    """The step runs as it is from then on, and capturing is not tried again."""
    tries = 0

    def capture(run: Callable[[], Any]) -> Callable[[], Any]:
        nonlocal tries
        tries += 1
        return refuse(run)

    step = DecodingStep(lambda ids, past_key_values: ids + 1, capture)
    assert [int(step(ids=torch.tensor(n), past_key_values=cache)) for n in range(6)] == [1, 2, 3, 4, 5, 6]
    assert tries == 1
    assert "it cannot be captured: operation not permitted" in caplog.text


def test_says_that_nothing_was_replayed(caplog: pytest.LogCaptureFixture) -> None:
    model = made("llama")
    with decoding_steps(model, Recorder()):
        generated(model)
    assert 'generate(..., cache_implementation="static") asks for it' in caplog.text


def test_what_was_there_comes_back() -> None:
    model, mine = made("llama"), object()
    vars(model)["get_compiled_call"] = mine

    def fail() -> None:
        with decoding_steps(model, Recorder()):
            assert isinstance(model.get_compiled_call(None), DecodingStep)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert vars(model)["get_compiled_call"] is mine


def test_nothing_happens_on_a_cpu(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    model = made("llama")
    with samebits.cuda_graphs(model):
        assert "get_compiled_call" not in vars(model)
    assert not [record for record in caplog.records if record.name.startswith("samebits")]


@pytest.mark.parametrize("kind", ["generates", "has adapters", "reads"])
def test_which_steps_are_replayed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of PEFT's model around one that generates, that one's: it asks for the step. Of others, their calls."""
    seen: list[tuple[str, nn.Module]] = []
    monkeypatch.setattr(transformers_graphs, "decoding_steps", lambda model, capture: seen.append(("steps", model)))
    monkeypatch.setattr(cuda_graphs, "replayed", lambda model, capture: seen.append(("calls", model)))
    model = made("llama")
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"])) if kind == "has adapters" else model
    cuda_graphs._steps(model.model if kind == "reads" else adapted, refuse)
    assert seen == [("calls", model.model) if kind == "reads" else ("steps", model)]


class Placed(nn.Module):
    """With parameters on devices that need not exist."""

    def __init__(self, *devices: str) -> None:
        super().__init__()
        self.devices = devices

    def parameters(self, recurse: bool = True) -> Iterator[Any]:
        return iter(SimpleNamespace(device=torch.device(device)) for device in self.devices)


@pytest.mark.parametrize("devices", [("cuda:0", "cuda:1"), ("cuda:0", "cpu"), ("cuda:0", "meta")])
def test_models_on_several_devices_are_refused(devices: tuple[str, str]) -> None:
    where = ", ".join(sorted(devices))
    with pytest.raises(InputError, match=f"a CUDA graph of a model on {where}"), samebits.cuda_graphs(Placed(*devices)):
        pass


def test_one_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    with pytest.raises(InputError, match="one of several processes"), samebits.cuda_graphs(Placed("cuda:0")):
        pass
