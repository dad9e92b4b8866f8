"""The operator samebits::linear: which way each product takes, and that torch may do with it what it likes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

import samebits
from samebits.format.packed import PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.linear.products import LinearPlan
from samebits.kernels.ops import fields_of
from samebits.kernels.residents import MAX_SHAPES, resident
from samebits.plans import call, dispatch, key, planner
from samebits.plans.planner import Planner
from tests.plans.conftest import FakeGpu, new_planner
from tests.plans.sums import normal, split_linear

N, K = 64, 512


WEIGHT = (normal(N, K) / 8).clone()
BIAS = normal(N, seed=1)


@pytest.fixture
def packed() -> PackedTensor:
    return samebits.encode(WEIGHT)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and torch.equal(left.view(torch.int16), right.view(torch.int16))


@pytest.mark.parametrize("bias", [None, BIAS], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", [(1, K), (5, K), (1, 1, K), (4, 1, K), (2, 3, K)], ids=str)
def test_fused_under_a_plan(gpu: FakeGpu, packed: PackedTensor, shape: tuple[int, ...], bias: torch.Tensor) -> None:
    x = normal(*shape)
    dispatch.linear(x, packed, bias)
    gpu.fused_calls.clear()
    assert same(dispatch.linear(x, packed, bias), split_linear(x, WEIGHT, bias, 3))
    assert gpu.fused_calls == [LinearPlan(3, 1)]


INPUTS: dict[str, Callable[[], torch.Tensor]] = {
    "one dimension": lambda: normal(K),
    "four dimensions": lambda: normal(1, 1, 2, K),
    "too many tokens": lambda: normal(129, K),
    "no tokens": lambda: normal(0, K),
    "gaps": lambda: normal(3, 2 * K)[:, :K],
    "last token": lambda: normal(1, 3, K)[:, -1:],
    "misaligned": lambda: normal(2 * K + 1)[1:].view(2, K),
}


@pytest.mark.parametrize("name", INPUTS)
def test_decoded_first_outside_of_plans(gpu: FakeGpu, packed: PackedTensor, name: str) -> None:
    """F.linear gets the very tensor, of the same shape and strides."""
    seen: list[torch.Tensor] = []

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        seen.append(x)
        assert same(weight, WEIGHT)
        assert bias is BIAS
        return F.linear(x, weight, bias)

    gpu.linear = linear
    x = INPUTS[name]()
    assert same(dispatch.linear(x, packed, BIAS), F.linear(x, WEIGHT, BIAS))
    assert len(seen) == 1
    assert seen[0] is x
    assert not gpu.fused_calls


def test_decoded_first_without_a_plan(gpu: FakeGpu, packed: PackedTensor) -> None:
    gpu.times = [9.0, 9.0, 1.0]
    x = normal(2, K)
    dispatch.linear(x, packed, None)
    gpu.fused_calls.clear()
    assert same(dispatch.linear(x, packed, None), split_linear(x, WEIGHT, None, 3))
    assert not gpu.fused_calls


@pytest.fixture
def known(gpu: FakeGpu, packed: PackedTensor, monkeypatch: pytest.MonkeyPatch) -> PackedTensor:
    """A weight of which a product with an input [2, K] and without bias was made before, as modules ask for it."""
    monkeypatch.setattr(nvrtc, "where", lambda device: nvrtc.Where(7, 0))
    for seed in range(2):
        x = normal(2, K, seed=seed)
        assert same(dispatch.linear_of_module(x, packed, None), split_linear(x, WEIGHT, None, 3))
    assert gpu.fused_calls[-1] == LinearPlan(3, 1)
    gpu.fused_calls.clear()
    return packed


def test_what_is_known_is_not_asked_again(gpu: FakeGpu, known: PackedTensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "key_of", None)
    x = normal(2, K, seed=5)
    assert same(dispatch.linear_of_module(x, known, None), split_linear(x, WEIGHT, None, 3))
    assert gpu.fused_calls == [LinearPlan(3, 1)]


@pytest.mark.parametrize("name", ["gaps", "misaligned"])
def test_what_is_known_holds_for_its_like(gpu: FakeGpu, known: PackedTensor, name: str) -> None:
    x = INPUTS[name]()[:2]
    assert x.shape == (2, K)
    assert same(dispatch.linear_of_module(x, known, None), split_linear(x, WEIGHT, None, 3))
    assert not gpu.fused_calls


def test_what_is_known_holds_for_its_bias(gpu: FakeGpu, known: PackedTensor) -> None:
    x, bias = normal(2, K), BIAS.clone()
    for changed in range(3):
        for other in (None, bias, BIAS[:], bias):
            y = dispatch.linear_of_module(x, known, other)
            assert same(y, split_linear(x, WEIGHT, other, 3))
        bias.add_(changed)
    misaligned = torch.cat([BIAS[:1], BIAS])[1:]
    gpu.fused_calls.clear()
    assert same(dispatch.linear_of_module(x, known, misaligned), split_linear(x, WEIGHT, misaligned, 3))
    assert not gpu.fused_calls
    with torch.inference_mode():
        unversioned = bias.clone()
    for _ in range(2):
        assert same(dispatch.linear_of_module(x, known, unversioned), split_linear(x, WEIGHT, unversioned, 3))
    assert len(gpu.fused_calls) == 2


def test_what_is_known_holds_for_torchs_settings(
    gpu: FakeGpu, known: PackedTensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = normal(2, K)
    for state, fused in ((None, 0), ("another", 1), (None, 0)):
        for module in (call, key):
            monkeypatch.setattr(module, "blas_state", lambda state=state: state)
        dispatch.linear_of_module(x, known, None)  # looks for a plan, if any is to be trusted
        gpu.fused_calls.clear()
        assert same(dispatch.linear_of_module(x, known, None), split_linear(x, WEIGHT, None, 3))
        assert len(gpu.fused_calls) == fused
    assert "another" in {known.state for known in Planner.of(0).known}


def test_few_shapes_are_known(known: PackedTensor) -> None:
    for tokens in range(1, 2 * MAX_SHAPES):
        dispatch.linear_of_module(normal(tokens, K), known, None)
    kept = resident(known.data)
    assert kept is not None
    assert 0 < len(kept.calls) <= MAX_SHAPES


def test_misaligned_bytes_are_decoded_first(gpu: FakeGpu, packed: PackedTensor) -> None:
    room = torch.empty(packed.nbytes + 16, dtype=torch.uint8)
    start = -room.data_ptr() % 16 + 1
    moved = PackedTensor(packed.header, room[start : start + packed.nbytes].copy_(packed.data))
    assert call.plan_of(normal(2, K), packed, None) is not None
    assert call.plan_of(normal(2, K), moved, None) is None


def test_captured_calls_never_look_for_plans(gpu: FakeGpu, packed: PackedTensor) -> None:
    gpu.is_capturing = True
    x = normal(2, K)
    assert same(dispatch.linear(x, packed, None), split_linear(x, WEIGHT, None, 3))
    assert not gpu.fused_calls
    assert not Planner.of(0).known


def test_torchs_own_errors(packed: PackedTensor) -> None:
    arguments = list(packed.shape), fields_of(packed.header)
    for x, bias in ((normal(2, K + 64), None), (normal(2, K).float(), None), (normal(2, K), normal(N + 8))):
        with pytest.raises(RuntimeError):
            torch.ops.samebits.linear(x, packed.data, bias, *arguments)


@pytest.mark.parametrize("bias", [None, BIAS], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", [(K,), (2, K), (2, 3, K)], ids=str)
def test_operator_keeps_torchs_rules(packed: PackedTensor, shape: tuple[int, ...], bias: torch.Tensor | None) -> None:
    x, arguments = normal(*shape), (packed.data, bias, list(packed.shape), fields_of(packed.header))
    torch.library.opcheck(torch.ops.samebits.linear.default, (x, *arguments))
    assert same(torch.ops.samebits.linear(x, *arguments), F.linear(x, WEIGHT, bias))


def test_operator_inside_torch_compile(packed: PackedTensor) -> None:
    shape, fields = packed.header.shape, fields_of(packed.header)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return torch.ops.samebits.linear(x, packed.data, BIAS, shape, fields) * 2

    assert same(doubled(normal(2, 3, K)), F.linear(normal(2, 3, K), WEIGHT, BIAS) * 2)


def test_a_bias_that_changes_unseen_is_not_known(gpu: FakeGpu, packed: PackedTensor) -> None:
    with torch.inference_mode():
        bias = BIAS.clone()
    x, kept = normal(2, K), resident(packed.data)
    assert same(dispatch.linear(x, packed, bias), split_linear(x, WEIGHT, bias, 3))
    assert kept is resident(packed.data)
    assert kept is not None
    assert not kept.calls
    gpu.split = 2  # of products without a bias, whose plan is another
    assert same(dispatch.linear(x, packed, None), split_linear(x, WEIGHT, None, 2))


def test_what_is_known_holds_for_its_header_device_and_dtype(gpu: FakeGpu, packed: PackedTensor) -> None:
    x = normal(2, K)
    made = call.call_of(x, packed, None)
    assert made is not None
    assert made.is_like(x, packed, None)
    assert not made.is_like(x, replace(packed, header=replace(packed.header)), None)
    assert not made.is_like(x.half(), packed, None)
    assert not made._replace(device=made.device + 1).is_like(x, packed, None)


def test_why_many_tokens_are_decoded_first(gpu: FakeGpu, packed: PackedTensor) -> None:
    """Of another dtype than the weight's, torch refuses the product, and what is found holds for nothing."""
    x = normal(call.MAX_HOPPER_TOKENS + 1, K)
    assert call.decoding(x, packed, None) == call.Decoding(None, True)
    assert call.decoding(x.half(), packed, None) == call.Decoding(None, False)


@pytest.mark.parametrize(("tokens", "counts"), [(128, True), (129, False)])
def test_settings_that_a_weight_decoded_first_depends_on(
    gpu: FakeGpu, packed: PackedTensor, tokens: int, counts: bool
) -> None:
    state, is_final = call.decoding(normal(tokens, K), packed, None)
    assert (state is not None, is_final) == (counts, not counts)


@pytest.fixture
def few_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "FEW_TOKENS", 2)


def have_plans(packed: PackedTensor, *tokens: int) -> list[bool]:
    return [call.call_of(normal(number, K), packed, None) is not None for number in tokens]


def test_many_tokens_wait_until_their_number_comes_back(gpu: FakeGpu, packed: PackedTensor, few_are_many: None) -> None:
    """Eight times of sixteen; whatever others of the same shape are asked for."""
    assert have_plans(packed, 2) == [True]
    assert have_plans(packed, *(3, 4) * 8) == [False] * 14 + [True, True]
    other = samebits.encode(WEIGHT)
    assert have_plans(other, *range(5, 12)) == [False] * 7
    assert have_plans(other, 3, 4) == [True, True]


def test_numbers_of_tokens_that_change_from_call_to_call(
    gpu: FakeGpu, packed: PackedTensor, few_are_many: None
) -> None:
    """Nothing is looked for; what was is used."""
    assert not any(have_plans(packed, 3, 4, 5, 6, *[7] * 12))
    assert gpu.compiled == []
    known = key.key_of(normal(7, K), packed.shape, None)
    assert known is not None
    Planner.of(-1).outcome(known)
    assert have_plans(packed, 7, 8) == [True, False]


def test_numbers_of_tokens_that_have_stopped_changing(gpu: FakeGpu, packed: PackedTensor, few_are_many: None) -> None:
    assert have_plans(packed, 3, 4, 5, 6, *[7] * 18) == [False] * 19 + [True] * 3


def test_many_tokens_do_not_wait_where_nothing_is_looked_for(
    gpu: FakeGpu, packed: PackedTensor, few_are_many: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = key.key_of(normal(3, K), packed.shape, None)
    assert known is not None
    Planner.of(-1).outcome(known)
    monkeypatch.setenv(planner.MODE_VARIABLE, "cached")
    planner.mode.cache_clear()
    monkeypatch.setattr(Planner, "of", new_planner())
    assert have_plans(packed, 3, 4) == [True, False]
