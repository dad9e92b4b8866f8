"""Which plans are looked for before a GPU's engine starts, as far as that needs no GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

import samebits
from samebits.format.header import Header
from samebits.integrations.vllm import layers, plans
from samebits.integrations.vllm.weights import HELD, PackedWeight
from samebits.kernels.linear.products import LinearPlan
from samebits.kernels.residents import resident
from samebits.plans.key import PlanKey
from samebits.plans.planner import Planner
from samebits.plans.store import Outcome

CAPTURED = [1, 8, 256, 512]
MOST = 512  # tokens of a fused product


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[PlanKey, Header]]:
    """What plans were looked for; there is one for all but 512 tokens."""
    seen: list[tuple[PlanKey, Header]] = []

    class FakePlanner:
        def outcomes(self, wanted: Sequence[tuple[PlanKey, Header]]) -> Iterator[Outcome]:
            for key, header in wanted:
                seen.append((key, header))
                yield Outcome(None if key.tokens == MOST else LinearPlan(1))

    monkeypatch.setattr(Planner, "of", lambda device: FakePlanner())
    monkeypatch.setattr(plans, "is_supported", lambda header, tokens, device: tokens <= MOST)
    monkeypatch.setattr(plans, "blas_state", lambda: "state")
    return seen


def layer(rows: int, columns: int, *, kind: type[nn.Module] = nn.Module, fused: bool = True, **attributes: Any) -> Any:
    """A layer of vLLM's whose weight is packed."""
    made: Any = kind.__new__(kind)
    nn.Module.__init__(made)
    packed = samebits.encode(torch.randn(rows, columns).to(torch.bfloat16))
    made.__dict__[HELD] = {"weight": PackedWeight(packed, layers._fused if fused else lambda *factors: factors[1])}
    made.__dict__.update(attributes)
    return made


def planned(layer: Any) -> set[int]:
    known = resident(layer.__dict__[HELD]["weight"].packed.data)
    assert known is not None
    return known.planned


def test_all_that_is_captured(asked: list[tuple[PlanKey, Header]]) -> None:
    """Each kind once, with the numbers of tokens that it gets; heads get others."""
    bias = nn.Parameter(torch.zeros(64))
    first, again = layer(64, 128, bias=bias), layer(64, 128, bias=bias)
    left = layer(64, 128, bias=bias, skip_bias_add=True)
    summed = [layer(128, 64, kind=RowParallelLinear, bias=bias, skip_bias_add=False, tp_rank=rank) for rank in (0, 1)]
    head = layer(256, 64, kind=ParallelLMHead, bias=None)
    plain, elsewhere = nn.Linear(8, 8), layer(64, 256, fused=False)
    plans.find(nn.ModuleList([first, again, left, *summed, head, plain, elsewhere]), CAPTURED, 3, False)
    keys = [key for key, _ in asked]
    assert keys == [
        PlanKey(rows, columns, tokens, has_bias, "state")
        for rows, columns, biases, numbers in (
            (64, 128, (False, True), CAPTURED), (128, 64, (False, True), CAPTURED), (256, 64, (False,), [1, 2, 3]),
        )
        for tokens in numbers
        for has_bias in biases
    ]  # fmt: skip
    assert all(header.shape == (key.rows, key.columns) for key, header in asked)
    assert [planned(each) for each in (first, again, left, *summed)] == [{256}] * 5
    assert not planned(head)
    assert not planned(elsewhere)


def test_a_head_gets_as_many_tokens_as_plans_are_looked_for_at_once(asked: list[tuple[PlanKey, Header]]) -> None:
    plans.find(layer(64, 128, kind=ParallelLMHead), CAPTURED, 1024, False)
    assert [key.tokens for key, _ in asked] == list(range(1, 129))


@pytest.mark.parametrize("which", ["nothing is captured", "nothing is packed", "settings without plans"])
def test_nothing_is_looked_for(
    which: str, asked: list[tuple[PlanKey, Header]], monkeypatch: pytest.MonkeyPatch
) -> None:
    if which == "settings without plans":
        monkeypatch.setattr(plans, "blas_state", lambda: None)
    model = nn.Linear(8, 8) if which == "nothing is packed" else layer(64, 128)
    plans.find(model, () if which == "nothing is captured" else CAPTURED, 4, False)
    assert not asked


def test_in_front_of_what_measures_memory(asked: list[tuple[PlanKey, Header]]) -> None:
    order: list[Any] = []

    class Choices:
        def of(self, tokens: int, *, ahead: bool) -> None:
            order.append(tokens)

        def rungs(self, most: int) -> list[int]:
            return [128, 256, most]

        def find_rung(self, tokens: int) -> None:
            order.append(("rung", tokens))

        def forget_probes(self) -> None:
            order.append("forgotten")

        def climb(self) -> None:
            order.append("climbed")

    mixture = layer(64, 128)
    mixture.__dict__["sb_choices"] = Choices()
    worker = SimpleNamespace(
        load_config=SimpleNamespace(use_tqdm_on_load=False),
        scheduler_config=SimpleNamespace(max_num_seqs=4, max_num_batched_tokens=300),
        vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(cudagraph_capture_sizes=CAPTURED)),
        get_model=lambda: order.append("model") or mixture,
    )  # fmt: skip
    measure = plans.finding_plans(lambda self: order.append("measured") or 5)
    assert measure(worker) == 5
    numbers = [*sorted(CAPTURED), ("rung", 128), ("rung", 256), ("rung", 300)]
    assert sorted(order[1:-3], key=str) == sorted(numbers, key=str)
    assert order[:1] + order[-3:] == ["model", "forgotten", "measured", "climbed"]
    assert len(asked) == len(CAPTURED)
