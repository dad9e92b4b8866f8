"""Bytes of forward passes on the meta device against those of real ones on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import samebits
from samebits.integrations import forward_memory
from samebits.integrations.forward_memory import ForwardMemory
from samebits.integrations.model_shapes import meta_model
from samebits.nn.packed_module import packed_parameters
from samebits.plans.planner import FEW_TOKENS
from tests.integrations.models import MIN_WEIGHTS, make

MANY = FEW_TOKENS + 32
LARGE = {"max_position_embeddings": 2 * MANY, "hidden_size": 512, "intermediate_size": 1024}
ELEMENTS = 2  # bytes


def followed(folder: Path, packed: dict[str, list[str]] | None = None) -> tuple[Any, ForwardMemory]:
    """A model on the meta device, and its forward passes with these weights packed, by module."""
    model = meta_model(folder).eval()
    modules = {model.get_submodule(name): own for name, own in (packed or {}).items()}
    return model, ForwardMemory(model, {module: [getattr(module, own) for own in names]
                                        for module, names in modules.items()})  # fmt: skip


@torch.inference_mode()
def measured(model: Any, tokens: int, batch: int, before: int = 0) -> int:
    """The most that tensors take while a real model runs, its cache included."""
    live = forward_memory._Live(model)

    def run(tokens: int, cache: Any) -> Any:
        ids = torch.zeros(batch, tokens, dtype=torch.int64)
        return model(ids, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values

    with forward_memory._as_kernels(model), live:
        cache = run(before, None) if before else None
        live.restart()
        run(tokens, cache)
    return live.most.plain


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "mixtral", "qwen3-moe", "phi"])
def test_activations_and_cache_are_those_of_a_real_model(name: str, tmp_path: Path) -> None:
    reference = make(name, tmp_path, **LARGE)
    _, passes = followed(tmp_path)
    prompt, step = passes.prompt(MANY, 2), passes.step(MANY, 2)
    assert prompt.packed == prompt.plain == measured(reference.model, MANY, 2)
    assert step.packed == step.plain == measured(reference.model, 1, 2, MANY - 1)
    assert passes.prompt(MANY, 2) is prompt


def test_a_cache_is_copied_as_it_grows(tmp_path: Path) -> None:
    """One layer's keys, and the token's own, while the last token is made."""
    make("llama", tmp_path, **LARGE)
    _, passes = followed(tmp_path)
    long, short = passes.step(16 * MANY, 4), passes.step(8 * MANY, 4)
    keys = 4 * 2 * 128 * ELEMENTS  # of a token of all sequences in a layer
    grown = (long.plain - long.cache) - (short.plain - short.cache)
    assert grown == pytest.approx(8 * MANY * keys, rel=0.02)


def test_what_a_pass_decodes(tmp_path: Path) -> None:
    """Gate and up at once, as soon as there are many tokens; the head of the last tokens alone never."""
    make("llama", tmp_path, **LARGE)
    names = [f"model.layers.{layer}.mlp.{kind}_proj" for layer in (0, 1) for kind in ("gate", "up", "down")]
    one = 512 * 1024 * ELEMENTS

    def beside(packed: list[str], tokens: int) -> int:
        found = followed(tmp_path, {name: ["weight"] for name in packed})[1].prompt(tokens, 1)
        return found.packed - found.plain

    assert beside(names, FEW_TOKENS) == beside(["lm_head"], MANY) == 0
    gate, both = beside([names[0], names[3]], MANY), beside([*names[:2], *names[3:5]], MANY)
    assert 0 < gate < one
    assert one < both <= 2 * one
    assert beside(names, MANY) == both


@pytest.mark.parametrize(("hidden", "tokens", "are_decoded"), [(512, 1, True), (1024, 1, False), (1024, 513, True)])
def test_experts(hidden: int, tokens: int, are_decoded: bool, tmp_path: Path) -> None:
    """The larger stack, if there is no kernel for its rows, or each of two experts has many tokens."""
    make("mixtral", tmp_path, **LARGE | {"hidden_size": hidden, "max_position_embeddings": 1024})
    _, passes = followed(tmp_path, {"model.layers.0.mlp.experts": ["gate_up_proj", "down_proj"]})
    found, larger = passes.prompt(tokens, 1), 4 * 2 * hidden * 1024 * ELEMENTS
    decoded = found.packed - found.plain
    assert larger / 2 < decoded <= larger if are_decoded else decoded == 0


@pytest.mark.parametrize(("hidden", "are_decoded"), [(512, True), (1024, False)])
def test_experts_behind_the_prompt(hidden: int, are_decoded: bool, tmp_path: Path) -> None:
    """BF16 copies two experts' matrices for each token; compressed, what has no kernel is decoded so."""
    make("mixtral", tmp_path, **LARGE | {"hidden_size": hidden})
    _, passes = followed(tmp_path, {"model.layers.0.mlp.experts": ["gate_up_proj", "down_proj"]})
    found, one = passes.step(4, 3), 3 * 2 * hidden * 1024 * ELEMENTS  # in each of three sequences two of these
    assert found.plain - found.cache == pytest.approx(3 * one, rel=0.02)
    assert found.packed - found.cache == pytest.approx(2 * one if are_decoded else 0, rel=0.02, abs=1 << 18)


def test_a_router_is_not_decoded_in_the_experts_place(tmp_path: Path) -> None:
    """Though its input is theirs: theirs is decoded while they run."""
    make("mixtral", tmp_path, **LARGE)
    experts = {"model.layers.0.mlp.experts": ["gate_up_proj", "down_proj"]}
    alone, both = (
        followed(tmp_path, each)[1] for each in (experts, {"model.layers.0.mlp.gate": ["weight"], **experts})
    )
    assert both.prompt(MANY, 1).packed >= alone.prompt(MANY, 1).packed


def test_stacks_that_are_no_routed_experts(tmp_path: Path) -> None:
    """A module holds all that it has decoded, and copies none."""
    config = transformers.Llama4TextConfig(
        vocab_size=300, hidden_size=512, intermediate_size=512, intermediate_size_mlp=96, num_local_experts=4,
        num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, head_dim=64,
    )  # fmt: skip
    config.architectures = ["Llama4ForCausalLM"]
    config.save_pretrained(tmp_path)
    _, passes = followed(tmp_path, {"model.layers.0.feed_forward.experts": ["gate_up_proj", "down_proj"]})
    found, weights = passes.step(4, 1), 4 * 3 * 512 * 512 * ELEMENTS
    assert found.packed - found.plain == pytest.approx(weights, rel=0.02)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_no_compressed_model_takes_more(name: str, tmp_path: Path) -> None:
    """On a CPU, where each weight is decoded by itself, and those of few tokens as well."""
    reference = make(name, tmp_path, **LARGE)
    samebits.compress(reference.model, min_weights=MIN_WEIGHTS, exclude=["lm_head*"])
    meta = meta_model(tmp_path).eval()
    packed: dict[nn.Module, list[nn.Parameter]] = {}
    for path, _, own in packed_parameters(reference.model):
        module = meta.get_submodule(path.rpartition(".")[0])
        if not isinstance(module, nn.Embedding):
            packed.setdefault(module, []).append(getattr(module, own))
    assert packed
    found, real = ForwardMemory(meta, packed).prompt(MANY, 2), measured(reference.model, MANY, 2)
    assert real <= found.packed
    assert found.plain < found.packed < 1.5 * real


def test_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    make("mixtral", tmp_path)
    model, passes = followed(tmp_path, {"lm_head": ["weight"]})
    before = model.config._experts_implementation
    passes.prompt(4, 1)
    assert model.config._experts_implementation == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
