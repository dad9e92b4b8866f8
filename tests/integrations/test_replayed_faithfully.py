"""samebits.cuda_graphs never gives what a call would not have: onto tapes, which do without Python, as graphs do."""

from __future__ import annotations

import random
import re
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import count
from threading import Thread
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import samebits
from samebits.integrations import module_state
from samebits.integrations.module_state import ModuleState
from samebits.integrations.replayed import MAX_FIRST_CALLS, MAX_USELESS_CALLS, replayed
from tests.integrations.tape import Tapes


class Slotted:
    __slots__ = ("__hidden", "factor")

    def __init__(self) -> None:
        self.factor, self.__hidden = 1.0, [1.0]

    @property
    def hidden(self) -> list[float]:
        return self.__hidden


class Model(nn.Module):
    """Whose output depends on what lies deep, of many kinds."""

    kind: ClassVar[float] = 1.0
    table: ClassVar[dict[str, float]] = {"scale": 1.0}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(8, 8)
        self.options: dict[str, Any] = {"a": {"b": [1.0, {"c": 1.0}]}, "once": True}
        self.others = (nn.Linear(8, 8).requires_grad_(False), [nn.Linear(8, 8)])
        self.slotted, self.queue = Slotted(), deque([1.0])
        self.runs = 0

        def closure() -> float:
            return factor

        def change(value: float) -> None:
            nonlocal factor
            factor = value

        factor = 1.0
        self.closure, self.change = closure, change
        self.partial = partial(self.scaled, factors=[1.0])

    def scaled(self, x: torch.Tensor, factors: list[float]) -> torch.Tensor:
        return x * factors[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.options["a"]["b"]
        y = self.linear(x) * first * second["c"] * self.kind * self.table["scale"]
        y = self.others[1][0](self.others[0](y)) * self.slotted.factor * self.slotted.hidden[0] * self.queue[0]
        return self.partial(y) * self.closure() * (2.0 if "twice" in self.options else 1.0)


@pytest.fixture
def model() -> Model:
    return Model().eval()


def x_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (3, 8)), generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def assert_same(left: torch.Tensor, right: torch.Tensor) -> None:
    assert left.shape == right.shape
    assert torch.equal(left.contiguous().view(torch.int32), right.contiguous().view(torch.int32))


def eager(model: nn.Module, *args: Any) -> Any:
    with torch.no_grad():
        return type(model).forward(model, *args)


def rename(model: Model) -> None:
    model.options.pop("once")
    model.options["twice"] = True


CHANGES: dict[str, Callable[[Model], object]] = {
    "a dict in a dict": lambda model: model.options["a"]["b"][1].update(c=3.0),
    "a list in a dict": lambda model: model.options["a"]["b"].__setitem__(0, 3.0),
    "a key": rename,
    "a module in a tuple": lambda model: model.others[0].weight.mul_(2),
    "a module in a list": lambda model: setattr(model.others[1][0], "weight", nn.Parameter(torch.ones(8, 8))),
    "a slot": lambda model: setattr(model.slotted, "factor", 3.0),
    "what a hidden slot has": lambda model: model.slotted.hidden.insert(0, 3.0),
    "a queue": lambda model: model.queue.appendleft(3.0),
    "a closure": lambda model: model.change(3.0),
    "a partial's argument": lambda model: model.partial.keywords["factors"].insert(0, 3.0),
    "a class attribute": lambda model: setattr(Model, "kind", 3.0),
    "a class's dict": lambda model: Model.table.update(scale=3.0),
    "a transposed parameter": lambda model: setattr(model.linear.weight, "data", model.linear.weight.data.t()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_however_deep_are_seen(model: Model, change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "kind", 1.0)
    monkeypatch.setattr(Model, "table", {"scale": 1.0})
    tapes = Tapes()
    with replayed(model, tapes), torch.no_grad():
        before = [model(x_of(seed)) for seed in range(3)]
        CHANGES[change](model)
        after = [model(x_of(seed)) for seed in range(3)]
        assert_same(after[-1], eager(model, x_of(2)))
    assert not torch.equal(before[-1], after[-1])
    is_written_to = change == "a module in a tuple"  # and so seen before a replay
    assert (tapes.captures, tapes.replays) == (2, 4 if is_written_to else 5)


class Drawing(nn.Module):
    """Whose output depends on what C keeps the state of."""

    def __init__(self, source: Any, draw: Callable[[Any], Any]) -> None:
        super().__init__()
        self.source, self.draw = source, draw
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x * float(self.draw(self.source))


SOURCES: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "Python's generator": (lambda: random.Random(0), lambda source: source.random()),
    "the system's": (random.SystemRandom, lambda source: source.random()),
    "NumPy's generator": (lambda: np.random.default_rng(0), lambda source: source.random()),
    "NumPy's older one": (lambda: np.random.RandomState(0), lambda source: source.random()),
    "torch's generator": (torch.Generator, lambda source: torch.rand(1, generator=source)),
    "a count": (lambda: count(1), next),
    "a generator": (lambda: (each for each in range(100)), next),
    "an iterator of a list": (lambda: iter([*range(100)]), next),
}


@pytest.mark.parametrize("name", SOURCES)
def test_states_that_c_keeps(name: str, caplog: pytest.LogCaptureFixture) -> None:
    make, draw = SOURCES[name]
    other = make()
    model = Drawing(make(), draw)
    with replayed(model, refuse), torch.no_grad():
        made = [float(model(torch.ones(1))) for _ in range(8)]
    assert len({*made}) == 8
    if name != "the system's":
        assert made == [pytest.approx(float(draw(other))) for _ in range(8)]
    assert re.search("cannot be compared|changes what its modules hold", caplog.records[0].message)


@pytest.mark.parametrize(
    "values", [np.ones(3), bytearray([1, 1]), array("d", [1.0])], ids=lambda each: type(each).__name__
)
def test_arrays_that_are_written_to(values: Any) -> None:
    model = Drawing(values, lambda source: source[0])
    tapes = Tapes()
    with replayed(model, tapes), torch.no_grad():
        for _ in range(3):
            assert float(model(torch.ones(1))) == 1
        values[0] = 7
        for _ in range(3):
            assert float(model(torch.ones(1))) == 7
    assert tapes.captures == 2


def test_requires_grad_is_seen(model: Model) -> None:
    state = ModuleState(model)
    assert state.is_unchanged()
    model.linear.requires_grad_(False)
    assert not state.is_unchanged()


def test_more_than_can_be_compared(
    model: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module_state, "MAX_VALUES", 100)
    with replayed(model, refuse), torch.no_grad():
        for seed in range(3):
            assert_same(model(x_of(seed)), eager(model, x_of(seed)))
    assert "more than can be compared" in caplog.records[0].message


def refuse(run: Callable[[], Any]) -> Callable[[], Any]:
    pytest.fail("captured")


@dataclass
class Output:
    y: torch.Tensor


def test_outputs_that_would_stay_in_the_graph(model: Model, caplog: pytest.LogCaptureFixture) -> None:
    forward = model.forward
    vars(model)["forward"] = lambda x: Output(forward(x))
    with replayed(model, refuse), torch.no_grad():
        made = [model(x_of(seed)).y for seed in range(4)]
    for seed, y in enumerate(made):
        assert_same(y, eager(model, x_of(seed)))
    assert "its output has a Output" in caplog.records[0].message


def test_a_text_encoder_that_gives_its_cache(caplog: pytest.LogCaptureFixture) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3Config(
        vocab_size=50, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    encoder, tokens = transformers.Qwen3Model(config).eval(), torch.arange(6)[None]
    with replayed(encoder, refuse), torch.no_grad():
        caches = [encoder(tokens + step).past_key_values for step in range(4)]
    assert len({id(cache) for cache in caches}) == 4
    assert "its output has a DynamicCache" in caplog.records[0].message


@pytest.mark.parametrize("name", ["PyramidAttentionBroadcast", "FirstBlockCache", "TaylorSeer", "MagCache"])
def test_caches_of_diffusers(name: str) -> None:
    diffusers = pytest.importorskip("diffusers")
    from tests.integrations.test_diffusers_pipeline import tiny_pipeline

    options: dict[str, dict[str, Any]] = {
        "PyramidAttentionBroadcast": {"spatial_attention_block_skip_range": 2,
                                      "spatial_attention_timestep_skip_range": (0, 2000),
                                      "current_timestep_callback": lambda: 500.0},
        "FirstBlockCache": {"threshold": 0.2},
        "TaylorSeer": {"cache_interval": 3, "disable_cache_before_step": 2, "max_order": 1},
        "MagCache": {"threshold": 0.5, "num_inference_steps": 8, "retention_ratio": 0.2, "mag_ratios": [1.0] * 8},
    }  # fmt: skip
    kind = {"TaylorSeer": "TaylorSeerCacheConfig"}.get(name, f"{name}Config")

    def drawn(capture: Callable[[Callable[[], Any]], Callable[[], Any]] | None) -> torch.Tensor:
        pipeline = tiny_pipeline()
        pipeline.set_progress_bar_config(disable=True)
        pipeline.transformer.enable_cache(getattr(diffusers, kind)(**options[name]))
        run = partial(pipeline, "And the earth", height=32, width=32, num_inference_steps=8, max_sequence_length=16,
                      output_type="latent", generator=torch.Generator().manual_seed(3))  # fmt: skip
        if capture is None:
            return run().images
        with replayed(pipeline.transformer, capture):
            return run().images

    left, right = drawn(None), drawn(Tapes())
    assert torch.equal(left.view(torch.int16), right.view(torch.int16))


class Casting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).float()


def test_a_graph_casts_weights_itself() -> None:
    """What autocast has cast before is given back where it ends."""
    model, tapes, cast = Casting(), Tapes(), []

    def capture(run: Callable[[], Any]) -> Callable[[], Any]:
        assert not torch.is_autocast_cache_enabled()
        cast.append(True)
        return tapes(run)

    with replayed(model, capture), torch.no_grad():
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                for seed in range(3):
                    y = model(x_of(seed))
                    assert_same(y, eager(model, x_of(seed)))
                assert torch.is_autocast_cache_enabled()
    assert cast == [True]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x)


class Random(nn.Module):
    def __init__(self, draw: Callable[[], Any]) -> None:
        super().__init__()
        self.linear, self.draw = nn.Linear(8, 8), draw

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * float(self.draw())


def test_each_call_runs_once_where_it_is_not_replayed() -> None:
    model, other = Normed(), Normed()
    with replayed(model, refuse), torch.no_grad():
        for seed in range(4):
            assert_same(model(x_of(seed)), eager(other, x_of(seed)))
    assert int(model.norm.num_batches_tracked) == 4


@pytest.mark.parametrize("draw", [random.random, lambda: torch.rand(()), lambda: F.dropout(torch.ones(()), 0.5)])
def test_random_numbers_are_drawn_as_often(draw: Callable[[], Any], caplog: pytest.LogCaptureFixture) -> None:
    model, made = Random(draw), []
    for capture in (None, refuse):
        torch.manual_seed(1)
        random.seed(1)
        with torch.no_grad():
            if capture is None:
                made.append([model(x_of(seed)) for seed in range(4)])
                continue
            with replayed(model, capture):
                made.append([model(x_of(seed)) for seed in range(4)])
    for left, right in zip(*made, strict=True):
        assert_same(left, right)
    assert "draws random numbers" in caplog.records[0].message


def test_threads_get_their_own_outputs(model: Model) -> None:
    wrong: list[int] = []
    expected = [eager(model, x_of(seed)) for seed in range(40)]

    def run(first: int) -> None:
        with torch.no_grad():
            for seed in range(first, 40, 4):
                if not torch.equal(model(x_of(seed)), expected[seed]):
                    wrong.append(seed)

    with replayed(model, Tapes()):
        threads = [Thread(target=run, args=(first,)) for first in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong


SETTINGS: dict[str, Callable[[pytest.MonkeyPatch], object]] = {
    "default dtype": lambda patch: torch.set_default_dtype(torch.float64),
    "float32 precision": lambda patch: torch.set_float32_matmul_precision("high"),
    "deterministic": lambda patch: torch.use_deterministic_algorithms(True),
    "cuDNN": lambda patch: patch.setattr(torch.backends.cudnn, "enabled", False),
    "cuDNN's benchmark": lambda patch: patch.setattr(torch.backends.cudnn, "benchmark", True),
    "fp16 reduction": lambda patch: torch._C._set_cublas_allow_fp16_reduced_precision_reduction(False),
    "multi-head attention": lambda patch: torch.backends.mha.set_fastpath_enabled(False),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_are_seen(model: Model, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_float32_matmul_precision()
    tapes = Tapes()
    try:
        with replayed(model, tapes), torch.no_grad():
            for seed in range(3):
                model(x_of(seed))
            SETTINGS[setting](monkeypatch)
            for seed in range(3):
                model(x_of(seed))
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision(before)
        torch.use_deterministic_algorithms(False)
        torch._C._set_cublas_allow_fp16_reduced_precision_reduction(True)
        torch.backends.mha.set_fastpath_enabled(True)
    assert (tapes.captures, tapes.replays) == (2, 4)


def test_diffusers_attention_backend_is_seen() -> None:
    dispatch = pytest.importorskip("diffusers.models.attention_dispatch")
    from samebits.integrations.replayed import _settings

    before = _settings(torch.device("cpu"))
    with dispatch.attention_backend("_native_math"):
        assert _settings(torch.device("cpu")) != before


class Attending(nn.Module):
    def forward(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return query * (2 if query is key else 3)

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))


def test_which_inputs_are_the_same_one() -> None:
    model, tapes = Attending(), Tapes()
    with replayed(model, tapes), torch.no_grad():
        for seed in range(3):
            x, other = x_of(seed), x_of(seed)
            assert_same(model(x, x), 2 * x)
            assert_same(model(x, other), 3 * x)
    assert (tapes.captures, tapes.replays) == (2, 4)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.runs, self.scale = nn.Linear(8, 8), [0], 1.0

    def forward(self, x: torch.Tensor, step: float = 0.0) -> torch.Tensor:
        RUNS.append(1)
        return self.linear(x) * self.scale + step


RUNS: list[int] = []


@pytest.mark.parametrize("how", ["a number", "a shape", "an attribute"])
def test_what_is_never_the_same_runs_once_a_call(how: str, caplog: pytest.LogCaptureFixture) -> None:
    model, calls = Counting(), MAX_USELESS_CALLS + 10
    RUNS.clear()
    with replayed(model, refuse), torch.no_grad():
        for seed in range(calls):
            if how == "an attribute":
                model.scale = seed / 2
            x = x_of(seed, 1 + seed if how == "a shape" else 3, 8)
            model(x, seed / 2 if how == "a number" else 0.0)
    assert len(RUNS) == calls
    words = "is another in each call" if how == "an attribute" else f"none of the last {MAX_USELESS_CALLS}"
    assert words in caplog.records[0].message
    assert MAX_FIRST_CALLS < MAX_USELESS_CALLS


class Shaped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.linear(x)
        return y[:, :4], y.t(), y[:, :1].expand(3, 8), y[:, 0]


def test_outputs_lie_in_memory_as_they_would() -> None:
    model, tapes = Shaped(), Tapes()
    with replayed(model, tapes), torch.no_grad():
        for seed in range(4):
            for made, expected in zip(model(x_of(seed)), eager(model, x_of(seed)), strict=True):
                assert_same(made, expected)
                assert made.stride() == expected.stride()
    assert tapes.replays == 3


def test_what_is_more_than_values_runs_as_it_is(model: Model) -> None:
    tapes = Tapes()
    with replayed(model, tapes), torch.no_grad():
        for seed in range(3):
            assert_same(torch.vmap(model)(x_of(seed, 2, 3, 8)), eager(model, x_of(seed, 2, 3, 8)))
        jagged = torch.nested.nested_tensor([x_of(0), x_of(1)])
        linear = nn.Linear(8, 8)
        with replayed(linear, tapes):
            for _ in range(3):
                assert_same(linear(jagged).unbind()[0], eager(linear, x_of(0)))
        value, tangent = torch.func.jvp(model, (x_of(0),), (x_of(1),))
        assert tangent.abs().sum() > 0
        assert_same(value, eager(model, x_of(0)))
    assert tapes.captures == 0


def test_inputs_that_are_written_to_where_torch_does_not_count() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x.add_(1))

    model = Writing()
    with torch.inference_mode(), replayed(model, refuse):
        for seed in range(4):
            x, own = x_of(seed), x_of(seed)
            assert_same(model(x), Writing.forward(model, own))
            assert_same(x, own)


def test_packed_models_have_a_state_that_stays() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Conv1d(3, 3, 3, padding=1)).to(torch.bfloat16)
    samebits.compress(model, min_weights=1)
    tapes, x = Tapes(), x_of(0, 3, 64).bfloat16()
    with replayed(model, tapes), torch.no_grad():
        made = [model(x * step) for step in range(5)]
    for step, y in enumerate(made):
        with torch.no_grad():
            assert torch.equal(y, model(x * step))
    assert (tapes.captures, tapes.replays) == (1, 4)
