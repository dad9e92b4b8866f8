"""samebits.cuda_graphs of a module's forward, with tapes where a GPU replays kernels."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import samebits
from samebits.integrations import replayed as module
from samebits.integrations.replayed import MAX_GRAPHS, replayed

pytest.importorskip("diffusers")
from tests.integrations.diffusers_models import ARCHITECTURES, assert_same_bytes, inputs, make
from tests.integrations.tape import Tapes
from tests.integrations.test_diffusers_pipeline import drawn, load, plain  # noqa: F401  (a fixture)

ROUTED = "hidream"  # asks the GPU for numbers of tokens


class Scaled(nn.Module):
    """With all kinds of what a forward may depend on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64, dtype=torch.bfloat16)
        self.scaling = {"default": 2.0}
        self.shift, self.calls = 0.0, 0
        self.processor = SimpleNamespace(power=1, scales=[1.0])
        self.counts = False

    def forward(self, x: torch.Tensor, more: dict[str, Any] | None = None, times: int = 1) -> dict[str, torch.Tensor]:
        if self.counts:
            self.calls += 1
        y = self.linear(x).pow(self.processor.power) * self.scaling["default"] * self.processor.scales[0] + self.shift
        for each in (more or {}).get("added", ()):
            y = y + each
        return {"y": y * times}


@pytest.fixture
def scaled() -> Scaled:
    torch.manual_seed(0)
    return Scaled()


def x_of(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (3, 64)), generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


@torch.no_grad()
def called(model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    return model(*args, **kwargs)["y"]


def expected(model: Scaled, *args: Any, **kwargs: Any) -> torch.Tensor:
    with torch.no_grad():
        return type(model).forward(model, *args, **kwargs)["y"]


def test_calls_are_replayed_from_the_second_on(scaled: Scaled) -> None:
    capture, kept = Tapes(), []
    with replayed(scaled, capture):
        for seed in range(6):
            kept.append(called(scaled, x_of(seed)))
    for seed, y in enumerate(kept):  # of the first, too, after all others were made
        assert_same_bytes(y, expected(scaled, x_of(seed)))
    assert (capture.captures, capture.replays) == (1, 5)
    assert "forward" not in vars(scaled)


def test_it_takes_the_same_arguments(scaled: Scaled) -> None:
    before = inspect.signature(scaled.forward)
    with replayed(scaled, Tapes()):
        assert inspect.signature(scaled.forward) == before


def test_a_graph_for_each_kind_of_inputs(scaled: Scaled) -> None:
    capture = Tapes()
    cases: list[Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]] = [
        lambda seed: ((x_of(seed),), {}),
        lambda seed: ((x_of(seed, 5, 64),), {}),
        lambda seed: ((x_of(seed),), {"times": 3}),
        lambda seed: ((), {"x": x_of(seed)}),
        lambda seed: ((x_of(seed), {"added": [x_of(seed + 9), x_of(seed + 8, 1, 64)]}), {}),
        lambda seed: ((x_of(seed, 64, 3).T,), {}),
    ]
    with replayed(scaled, capture):
        for seed in range(5):
            for case in cases:
                args, kwargs = case(seed)
                assert_same_bytes(called(scaled, *args, **kwargs), expected(scaled, *args, **kwargs))
    assert (capture.captures, capture.replays) == (len(cases), 4 * len(cases))


def test_expanded_inputs(scaled: Scaled) -> None:
    """As a pipeline's timestep, for each of a batch."""
    capture = Tapes()
    with replayed(scaled, capture):
        for seed in range(4):
            x = x_of(seed, 1, 64).expand(3, 64)
            assert_same_bytes(called(scaled, x), expected(scaled, x))
    assert (capture.captures, capture.replays) == (1, 3)


def test_one_timestep_of_many(scaled: Scaled) -> None:
    """They lie one behind another, so none of the others is aligned."""
    capture, times = Tapes(), torch.arange(10.0).to(torch.bfloat16)
    with replayed(scaled, capture):
        for x, time in zip(map(x_of, range(10)), times, strict=True):
            more = {"added": [time, time.expand(64)]}
            assert_same_bytes(called(scaled, x, more), expected(scaled, x, more))
    assert (capture.captures, capture.replays) == (1, 9)


def test_inputs_with_gaps(scaled: Scaled) -> None:
    capture = Tapes()
    with replayed(scaled, capture):
        for seed in range(4):
            x = x_of(seed, 3, 128)[:, :64]
            assert_same_bytes(called(scaled, x), expected(scaled, x))
    assert (capture.captures, capture.replays) == (1, 3)


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (lambda: x_of(0, 4 * 64)[3 : 3 + 3 * 64].view(3, 64), "begins in the middle"),
        (lambda: x_of(0).requires_grad_(), "has requires_grad"),
        (lambda: torch.empty(3, 64, dtype=torch.bfloat16, device="meta"), "is on meta, the model on cpu"),
        (lambda: torch.eye(64, dtype=torch.bfloat16).to_sparse(), "sparse"),
    ],
)
def test_inputs_that_cannot_be_replayed(
    scaled: Scaled, x: Callable[[], torch.Tensor], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    def forward(x: torch.Tensor) -> int:
        return 7

    vars(scaled)["forward"] = forward
    with replayed(scaled, refuse), torch.no_grad():
        assert [scaled(x()) for _ in range(4)] == [7] * 4
    assert vars(scaled)["forward"] is forward
    assert words in caplog.records[0].message
    assert "nothing was replayed" in caplog.records[-1].message
    assert len(caplog.records) == 2


def refuse(run: Callable[[], Any]) -> Callable[[], Any]:
    pytest.fail("captured")


def test_with_gradients_it_runs_as_it_is(scaled: Scaled) -> None:
    with replayed(scaled, refuse):
        for _ in range(4):
            scaled(x_of(0))["y"].sum().backward()
    assert scaled.linear.weight.grad is not None


CHANGES: dict[str, Callable[[Scaled], object]] = {
    "an attribute": lambda model: setattr(model, "shift", 1.5),
    "a scale": lambda model: model.scaling.update(default=4.0),
    "a weight": lambda model: setattr(model.linear, "weight", nn.Parameter(model.linear.weight.detach() * 2)),
    "a weight in place": lambda model: model.linear.weight.detach().mul_(2),
    "a weight's memory": lambda model: setattr(model.linear.weight, "data", model.linear.weight.data * 2),
    "a layer": lambda model: setattr(model, "linear", nn.Linear(64, 64, dtype=torch.bfloat16)),
    "a hook": lambda model: model.linear.register_forward_hook(lambda module, args, y: y + 1),
    "packed": lambda model: samebits.compress(model, min_weights=1),
    "a processor": lambda model: setattr(model.processor, "power", 2),
    "what a processor has": lambda model: model.processor.scales.append(model.processor.scales.pop() / 2),
    "another attribute": lambda model: setattr(model, "more", 1),
    "training": lambda model: model.eval(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_changed_is_captured_anew(scaled: Scaled, change: str) -> None:
    """Tensors are compared before a replay, which reads them, all else meanwhile, and the replay is thrown away."""
    capture = Tapes()
    with replayed(scaled, capture):
        for seed in range(3):
            called(scaled, x_of(seed))
        CHANGES[change](scaled)
        for seed in range(4):
            assert_same_bytes(called(scaled, x_of(seed)), expected(scaled, x_of(seed)))
    assert (capture.captures, capture.replays) == (2, 5 + ("in place" not in change and "memory" not in change))


@pytest.mark.parametrize("setting", ["autocast", "inference", "attention"])
def test_settings_have_graphs_of_their_own(scaled: Scaled, setting: str) -> None:
    capture = Tapes()
    contexts: dict[str, Callable[[], Any]] = {
        "autocast": lambda: torch.autocast("cpu", torch.float16),
        "inference": torch.inference_mode,
        "attention": lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    }
    with replayed(scaled, capture), torch.no_grad():
        for seed in range(3):
            scaled(x_of(seed))
            with contexts[setting]():
                y = scaled(x_of(seed))["y"]
                assert_same_bytes(y, Scaled.forward(scaled, x_of(seed))["y"])
    assert (capture.captures, capture.replays) == (2, 4)


def test_a_module_that_counts_its_calls(scaled: Scaled, caplog: pytest.LogCaptureFixture) -> None:
    scaled.counts = True
    with replayed(scaled, refuse):
        for seed in range(4):
            called(scaled, x_of(seed))
    assert scaled.calls == 4
    assert "changes what its modules hold" in caplog.records[0].message


@pytest.mark.parametrize(
    "change",
    [
        lambda x, more: x.add_(0),
        lambda x, more: more["added"].append(torch.zeros(64, dtype=torch.bfloat16)),
        lambda x, more: more.update(times=more.get("times", 0) + 1),
    ],
)
def test_a_module_that_changes_what_it_is_given(
    scaled: Scaled, change: Callable[[torch.Tensor, dict[str, Any]], object], caplog: pytest.LogCaptureFixture
) -> None:
    """As caches are filled."""
    forward = scaled.forward

    def changing(x: torch.Tensor, more: dict[str, Any]) -> Any:
        change(x, more)
        return forward(x)

    vars(scaled)["forward"] = changing
    with replayed(scaled, refuse):
        for seed in range(4):
            assert_same_bytes(called(scaled, x_of(seed), {"added": []}), expected(scaled, x_of(seed)))
    assert {"it changes what it is given" in record.message for record in caplog.records[:-1]} == {True}


def test_arguments_that_may_change(scaled: Scaled, caplog: pytest.LogCaptureFixture) -> None:
    with replayed(scaled, refuse):
        for seed in range(4):
            called(scaled, x_of(seed), {"cache": SimpleNamespace()})
    assert "an argument is a SimpleNamespace" in caplog.records[0].message


def fail(run: Callable[[], Any]) -> Callable[[], Any]:
    raise RuntimeError("operation not permitted")


def test_what_cannot_be_captured(scaled: Scaled, caplog: pytest.LogCaptureFixture) -> None:
    with replayed(scaled, fail):
        for seed in range(4):
            assert_same_bytes(called(scaled, x_of(seed)), expected(scaled, x_of(seed)))
    assert "it cannot be captured: operation not permitted" in caplog.records[0].message


def test_no_more_graphs_than_there_is_room_for(scaled: Scaled) -> None:
    capture = Tapes()
    with replayed(scaled, capture):
        for rows in range(1, MAX_GRAPHS + 3):
            for seed in range(3):
                called(scaled, x_of(seed, rows, 64))
        stands_for = vars(scaled)["forward"]
        assert len(stands_for._graphs) == MAX_GRAPHS
        called(scaled, x_of(0, MAX_GRAPHS + 2, 64))
    assert (capture.captures, capture.replays) == (MAX_GRAPHS + 2, 2 * (MAX_GRAPHS + 2) + 1)


def test_plans_are_found_before(scaled: Scaled, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[nn.Module] = []
    monkeypatch.setattr(module, "prepare", lambda model, call: (seen.append(model), call()))
    with replayed(scaled, Tapes()):
        for times in (1, 2):  # of it, and of it packed
            for seed in range(3):
                called(scaled, x_of(seed))
                assert len(seen) == times - (seed == 0)
            samebits.compress(scaled, min_weights=1)


def test_an_error_inside(scaled: Scaled) -> None:
    def fail() -> None:
        with replayed(scaled, Tapes()):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert "forward" not in vars(scaled)


def test_nothing_happens_on_a_cpu(scaled: Scaled, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with samebits.cuda_graphs(scaled):
        assert "forward" not in vars(scaled)
    assert not [record for record in caplog.records if record.name.startswith("samebits")]


def test_offloaded_models(scaled: Scaled, caplog: pytest.LogCaptureFixture) -> None:
    """As enable_model_cpu_offload leaves them."""
    scaled._hf_hook = object()  # type: ignore[assignment]
    with samebits.cuda_graphs(scaled):
        assert "forward" not in vars(scaled)
    assert "in main memory between its calls" in caplog.text


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_diffusion_models(name: str, tmp_path: Any, config: samebits.SamebitsConfig) -> None:
    reference, capture = make(name, tmp_path), Tapes()
    model = reference.load(quantization_config=config)
    own = inputs(name, torch.bfloat16)
    first = next(iter(own))
    with replayed(model, fail if name == ROUTED else capture), torch.no_grad():
        for _ in range(4):
            others = own | {first: torch.randn_like(own[first])}
            assert_same_bytes(model(**others).sample, reference.model(**others).sample)
            assert_same_bytes(model(**others, return_dict=False)[0], reference.model(**others).sample)
    assert (capture.captures, capture.replays) == ((0, 0) if name == ROUTED else (2, 6))


def test_a_pipeline(plain: Any, config: samebits.SamebitsConfig) -> None:  # noqa: F811
    """Two images of two steps, the second one with replays only."""
    pipeline, capture = load(plain), Tapes()
    before = [drawn(pipeline) for _ in range(2)]
    samebits.compress(pipeline.transformer, min_weights=1024)
    with replayed(pipeline.transformer, capture):
        after = [drawn(pipeline) for _ in range(2)]
    for left, right in zip(before, after, strict=True):
        assert_same_bytes(left, right)
    assert (capture.captures, capture.replays) == (1, 3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_replays_of_a_gpu(
    name: str, tmp_path: Any, config: samebits.SamebitsConfig, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(name, tmp_path).load(quantization_config=config, device_map="cuda")
    own = {key: value.to("cuda") if isinstance(value, torch.Tensor) else value
           for key, value in inputs(name, torch.bfloat16).items()}  # fmt: skip
    if "added_cond_kwargs" in own:
        own["added_cond_kwargs"] = {key: value.to("cuda") for key, value in own["added_cond_kwargs"].items()}
    own.pop("encoder_hidden_states_mask", None)  # pipelines give it where prompts differ in length, see below
    first = next(iter(own))
    every = [own | {first: torch.randn_like(own[first])} for _ in range(5)]
    with torch.no_grad():
        usual = [model(**others, return_dict=False)[0] for others in every]
        with samebits.cuda_graphs(model):
            stands_for = vars(model)["forward"]
            again = [model(**others, return_dict=False)[0] for others in every]
    for left, right in zip(usual, again, strict=True):
        assert_same_bytes(left, right)
    assert stands_for.count == (0 if name == ROUTED else 4)
    assert ("cannot be captured" in caplog.text) is (name == ROUTED)


@pytest.mark.gpu
def test_what_copies_a_number_to_the_gpu_runs_as_it_is(
    tmp_path: Any, config: samebits.SamebitsConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """Qwen-Image makes a tensor of a text's length, where it is given a mask."""
    model = make("qwen-image", tmp_path).load(quantization_config=config, device_map="cuda")
    own = {key: value.to("cuda") if isinstance(value, torch.Tensor) else value
           for key, value in inputs("qwen-image", torch.bfloat16).items()}  # fmt: skip
    with torch.no_grad():
        usual = model(**own, return_dict=False)[0]
        with samebits.cuda_graphs(model):
            for _ in range(3):
                assert_same_bytes(model(**own, return_dict=False)[0], usual)
    assert "cannot be captured: Cannot copy between CPU and CUDA tensors" in caplog.text
