"""Routed experts on a GPU, as far as that needs none: what vLLM's own method is handed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from torch import nn
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

from samebits.bf16 import same_words
from samebits.integrations.vllm import experts, routed
from samebits.integrations.vllm.experts import PackedExpertsMethod
from samebits.plans.store import ExpertsOutcome, PlanStore
from tests.plans.conftest import ENVIRONMENT

EXPERTS, ROWS, COLUMNS = 8, 64, 128


class Layer(nn.Module):
    """Routed experts."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name in ("w13_weight", "w2_weight"):
            values = torch.randn(EXPERTS, ROWS, COLUMNS, generator=generator).to(torch.bfloat16)
            self.register_parameter(name, nn.Parameter(values, requires_grad=False))
        self.expert_map: torch.Tensor | None = None
        self.activation = "silu"
        parallel = SimpleNamespace(dp_size=1, pcp_size=1, is_sequence_parallel=False)
        self.moe_config = SimpleNamespace(moe_parallel_config=parallel)


@pytest.fixture
def method(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Whose base gives back what it is handed."""
    monkeypatch.setattr(UnquantizedFusedMoEMethod, "process_weights_after_loading", lambda self, layer: None)
    monkeypatch.setattr(UnquantizedFusedMoEMethod, "apply", lambda self, layer, *args, **kwargs: layer)
    monkeypatch.setattr(UnquantizedFusedMoEMethod, "apply_monolithic", lambda self, layer, *args, **kwargs: layer)
    monkeypatch.setattr(experts, "check_loaded", lambda layer: None)
    monkeypatch.setattr(experts.current_platform, "is_cuda", lambda: False, raising=False)  # though there be a GPU
    made = PackedExpertsMethod.__new__(PackedExpertsMethod)
    nn.Module.__init__(made)
    made.min_weights, made.unquantized_backend = 1, UnquantizedMoeBackend.TRITON
    return made


def packed(method: Any) -> tuple[Layer, dict[str, torch.Tensor]]:
    layer = Layer()
    plain = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    method.process_weights_after_loading(layer)
    method.process_weights_after_loading(layer)  # as vLLM does
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.uint8}
    return layer, plain


@pytest.mark.parametrize("backend", [UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.FLASHINFER_CUTLASS])
@pytest.mark.parametrize("by_name", [True, False])
def test_routed_experts_are_plain(method: Any, backend: UnquantizedMoeBackend, by_name: bool) -> None:
    method.unquantized_backend = backend
    layer, plain = packed(method)
    ids = torch.tensor([[1, 6], [6, 3], [-1, -1]], dtype=torch.int32)  # the last token is none
    operands = {"topk_weights": torch.ones(3, 2), "topk_ids": ids}
    x = torch.ones(3, COLUMNS)
    seen = method.apply(layer, x, **operands) if by_name else method.apply(layer, x, *operands.values())
    for name, expected in plain.items():
        given = getattr(seen, name)
        assert given.shape == expected.shape
        assert given.stride() == expected.stride()
        assert same_words(given[[1, 3, 6]], expected[[1, 3, 6]])
    assert seen.activation == "silu"


@pytest.mark.parametrize("case", ["many tokens", "expert parallel", "data parallel", "monolithic"])
def test_all_experts_are_plain(method: Any, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nearly all are used, or tokens of other ranks come, too, or their numbers are not known."""
    monkeypatch.setattr(routed, "decode_experts", None)
    layer, plain = packed(method)
    ids = torch.zeros(64 if case == "many tokens" else 1, 2, dtype=torch.int32)
    layer.expert_map = torch.arange(EXPERTS) if case == "expert parallel" else None
    layer.moe_config.moe_parallel_config.dp_size = 2 if case == "data parallel" else 1
    x = torch.ones(len(ids), COLUMNS)
    if case == "monolithic":
        seen = method.apply_monolithic(layer, x, torch.ones(1, EXPERTS))
    else:
        seen = method.apply(layer, x, torch.ones(len(ids), 2), ids)
    assert all(same_words(getattr(seen, name), expected) for name, expected in plain.items())


def test_layers_that_are_alike_share_choices(method: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kept for other processes that have the same vLLM, and as many experts of a token."""
    store, config = PlanStore(ENVIRONMENT, tmp_path), SimpleNamespace()
    monkeypatch.setattr(experts.current_platform, "is_cuda", lambda: True, raising=False)
    monkeypatch.setattr(experts, "are_supported", lambda packed: len(packed) == 2)
    monkeypatch.setattr(experts, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(experts.Planner, "of", lambda device: SimpleNamespace(store=store))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    method.moe = SimpleNamespace(has_bias=False)
    layers = [Layer() for _ in range(3)]
    for layer, activation, each in zip(layers, ("silu", "silu", "gelu"), (2, 2, 2), strict=True):
        layer.activation, layer.top_k, layer.apply_router_weight_on_input = activation, each, False
        method.process_weights_after_loading(layer)
    first, second, third = (layer.__dict__["sb_choices"] for layer in layers)
    assert first is second
    assert first is not third
    key = first._key(first._packed[0], 3, "first")
    assert key[:5] == ("vLLM", EXPERTS, ROWS, COLUMNS, 6)
    assert key.state == f"vllm={vllm.__version__} experts_of_a_token=2 layer=silu False product=first"
    store.add_experts(key, ExpertsOutcome(None, "too slow"))
    store.add_experts(first._key(first._packed[1], 3, "second"), ExpertsOutcome(None, "too slow"))
    assert first.of(3) is None
    assert first.known == {3: None}


def test_experts_of_other_ranks_come_later(method: Any) -> None:
    """When this rank's are packed; vLLM asks the weight, by its name, to load those as well."""
    layer, plain = packed(method)
    weight: Any = layer.w13_weight
    assert not weight.weight_loader(
        param=weight, loaded_weight=torch.ones(ROWS, COLUMNS), weight_name="w13_weight", shard_id="w1", expert_id=9,
        return_success=True,
    )  # fmt: skip
    assert same_words(weight.clone(), plain["w13_weight"])


def test_small_ones_stay(method: Any) -> None:
    method.min_weights = 2 * EXPERTS * ROWS * COLUMNS
    layer = Layer()
    method.process_weights_after_loading(layer)
    assert {parameter.dtype for parameter in layer.parameters()} == {torch.bfloat16}
    seen = method.apply(layer, torch.ones(1, COLUMNS), torch.ones(1, 2), torch.zeros(1, 2, dtype=torch.int32))
    assert seen.w13_weight is layer.w13_weight
