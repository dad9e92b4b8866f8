"""Embeddings and heads: which are packed, and how they share a parameter, however a model makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

from samebits.bf16 import same_words
from samebits.integrations.vllm.config import SamebitsQuantization
from samebits.integrations.vllm.embeddings import choose
from tests.serving.conftest import HAS_GPU

ROWS, COLUMNS = 256, 64


@pytest.fixture(autouse=True)
def prepared(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Weights that vLLM's own method got when they were loaded."""
    got: list[torch.Tensor] = []
    monkeypatch.setattr(
        UnquantizedEmbeddingMethod, "process_weights_after_loading", lambda self, layer: got.append(layer.weight)
    )
    return got


def made(kind: type[VocabParallelEmbedding]) -> Any:
    """A layer with weights as they are behind loading, which a model has told nothing of its quantization."""
    layer: Any = kind.__new__(kind)
    nn.Module.__init__(layer)
    layer.quant_method = UnquantizedEmbeddingMethod()
    layer.quant_method.create_weights(layer, COLUMNS, [ROWS], COLUMNS, ROWS, torch.bfloat16)
    nn.init.normal_(layer.weight)
    return layer


def pair(*, is_tied: bool) -> nn.Module:
    model = nn.ModuleDict({"embedding": made(VocabParallelEmbedding), "head": made(ParallelLMHead)})
    if is_tied:
        model["head"].weight = model["embedding"].weight
    return model


def packed(model: nn.Module, *, keeps_lookups: bool = False, head_first: bool = False, **choices: Any) -> set[str]:
    """Names of the layers that are packed, when all process their weights."""
    choose(model, SamebitsQuantization(1, **choices), keeps_lookups=keeps_lookups)
    named = list(model.named_children())
    for _, layer in reversed(named) if head_first else named:
        layer.quant_method.process_weights_after_loading(layer)
        layer.quant_method.process_weights_after_loading(layer)  # as vLLM may do
    return {name for name, layer in named if hasattr(layer, "sb_packed")}


@pytest.mark.parametrize("head_first", [False, True])
def test_packed_once_for_both(head_first: bool) -> None:
    model: Any = pair(is_tied=True)
    embedding, head = model["embedding"], model["head"]
    expected = embedding.weight.detach().clone()
    assert packed(model, head_first=head_first) == {"embedding", "head"}
    assert head.sb_packed is embedding.sb_packed
    assert head.sb_handle is not embedding.sb_handle
    for layer in (head, embedding):
        assert same_words(layer.weight.clone(), expected)
        assert not layer.use_fused_embedding
    ids = torch.tensor([3, ROWS - 1])
    assert same_words(embedding.quant_method.embedding(embedding, ids), expected[ids])


@pytest.mark.skipif(HAS_GPU, reason="on GPUs nothing is prepared")
def test_prepared_while_loading(prepared: list[torch.Tensor]) -> None:
    """As vLLM's own are on CPUs, where oneDNN asks the system for AMX then, which attention takes for granted."""
    model: Any = nn.ModuleDict({"head": made(ParallelLMHead)})
    expected = model["head"].weight.detach().clone()
    assert packed(model) == {"head"}
    [weight] = prepared
    assert same_words(weight.detach(), expected)


@pytest.mark.parametrize(("is_tied", "which"), [(False, {"head"}), (True, set())])
def test_look_ups_of_compiled_models_stay(is_tied: bool, which: set[str]) -> None:
    """And what is tied to them."""
    assert packed(pair(is_tied=is_tied), keeps_lookups=True) == which


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    ("choices", "which"), [({"exclude": ["embedding.*"]}, {"head"}), ({"include": ["embedding.*"]}, {"embedding"})]
)
def test_choices(choices: dict[str, Any], which: set[str], is_tied: bool) -> None:
    """One that is to stay has what it shares stay, too: there would be two of it."""
    assert packed(pair(is_tied=is_tied), **choices) == (set() if is_tied else which)


def test_a_layer_under_two_names() -> None:
    model: Any = nn.ModuleDict({"embedding": made(VocabParallelEmbedding)})
    model["head"] = model["embedding"]
    assert packed(model, exclude=["head.*"]) == set()
    assert packed(model) == {"embedding"}


def test_an_embedding_that_a_kernel_reads_stays() -> None:
    model: Any = nn.ModuleDict({"embed_tokens": made(VocabParallelEmbedding), "head": made(ParallelLMHead)})
    model.replicated_embed = True
    assert packed(model) == {"head"}


def test_parts_of_other_layers_stay() -> None:
    """As of one that reads the memory of its weights."""
    model: Any = pair(is_tied=False)
    model["other"] = nn.Embedding(ROWS, COLUMNS)
    model["other"].weight = model["embedding"].weight
    model["other"].quant_method = UnquantizedEmbeddingMethod()
    assert packed(model) == {"head"}
    assert model["other"].weight is model["embedding"].weight
