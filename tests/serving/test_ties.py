"""Embeddings and heads that share a parameter, however a model makes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from samebits.bf16 import same_words
from samebits.integrations.vllm.layers import PackedEmbeddingMethod

ROWS, COLUMNS = 256, 64


@pytest.fixture
def method(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(UnquantizedEmbeddingMethod, "process_weights_after_loading", lambda self, layer: None)
    return PackedEmbeddingMethod(min_weights=1)


def made(method: Any) -> nn.Module:
    """A layer with weights as they are behind loading."""
    layer = nn.Module()
    method.create_weights(layer, COLUMNS, [ROWS], COLUMNS, ROWS, torch.bfloat16)
    nn.init.normal_(layer.weight)
    return layer


@pytest.mark.parametrize("assigned", [False, True])
@pytest.mark.parametrize("head_first", [False, True])
def test_packed_once_for_both(method: Any, assigned: bool, head_first: bool) -> None:
    embedding, head = made(method), made(method)
    expected = embedding.weight.detach().clone()
    if assigned:
        head.weight = embedding.weight
    else:
        assert method.tie_weights(head, embedding) is head
    for layer in (head, embedding) if head_first else (embedding, head):
        method.process_weights_after_loading(layer)
        method.process_weights_after_loading(layer)  # as vLLM does
    assert head.sb_packed is embedding.sb_packed
    assert head.sb_handle is not embedding.sb_handle
    for layer in (head, embedding):
        assert same_words(layer.weight.clone(), expected)
    ids = torch.tensor([3, ROWS - 1])
    assert same_words(method.embedding(embedding, ids), expected[ids])


def test_prepared_while_loading(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's own are on CPUs, where oneDNN asks the system for AMX then, which attention takes for granted."""
    prepared: list[torch.Tensor] = []
    monkeypatch.setattr(
        UnquantizedEmbeddingMethod, "process_weights_after_loading", lambda self, layer: prepared.append(layer.weight)
    )
    layer = made(method)
    expected = layer.weight.detach().clone()
    method.process_weights_after_loading(layer)
    [weight] = prepared
    assert same_words(weight.detach(), expected)


def test_parts_of_other_layers_stay(method: Any) -> None:
    """As a plain embedding's, to which a head is tied."""
    embedding, head = nn.Module(), made(method)
    UnquantizedEmbeddingMethod().create_weights(embedding, COLUMNS, [ROWS], COLUMNS, ROWS, torch.bfloat16)
    method.tie_weights(head, embedding)
    method.process_weights_after_loading(head)
    assert head.weight is embedding.weight
    assert not hasattr(head, "sb_packed")
