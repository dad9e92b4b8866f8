"""The benchmarks of whole language models on a GPU, with a model that is small and has layers for fused products."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import generate
import longest
import models
import samebits
import token_profile
from samebits.integrations import graphs as cuda_graphs
from samebits.nn import packed_states
from samebits.verify import repeatable_attention

pytestmark = pytest.mark.gpu

SMALL = models.LLAMA | {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 2, "vocab_size": 8192, "max_position_embeddings": 4096,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(models.MODELS, "small", ("llama", SMALL))


@pytest.mark.parametrize("way", [way for way in generate.WAYS if way != "preferred"])
def test_tokens_are_those_of_bf16(way: str) -> None:
    settings = [generate.Setting(way, batch, 200, 12) for batch in (1, 4)]
    found = list(generate.rows("small", settings, "cuda", 1e9))
    assert [row["same_tokens"] for row in found] == [True, True]
    assert all(row["samebits_peak_bytes"] and row["bf16_first_token_seconds"] > 0 for row in found)


@pytest.mark.parametrize("way", ["eager", "graphs"])
def test_many_sequences_repeat_themselves(way: str) -> None:
    """With cuDNN's attention they would not."""
    [row] = generate.rows("small", [generate.Setting(way, 16, 200, 24)], "cuda", 1e9)
    assert (row["bf16_repeats"], row["samebits_repeats"], row["same_tokens"]) == (True, True, True)


def test_a_replayed_step_is_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build("small", "cuda", True)
    samebits.prepare(model, [2])
    setting = generate.Setting("graphs", 2, 50, 20)
    replayed = generate.measure(model, setting, "cuda")
    monkeypatch.setattr(cuda_graphs, "captured", lambda device, run: run)
    called = generate.measure(model, setting, "cuda")
    assert replayed.tokens == called.tokens


def test_windows_are_replayed(monkeypatch: pytest.MonkeyPatch, graphs: list[Any]) -> None:
    """By one graph before they are full and another one then, in each of two runs."""
    windowed = SMALL | {"architectures": ["MistralForCausalLM"], "sliding_window": 64}
    monkeypatch.setitem(models.MODELS, "small", ("mistral", windowed))
    model = models.build("small", "cuda", True)
    samebits.prepare(model, [2])
    setting = generate.Setting("graphs", 2, 50, 40)
    replayed = generate.measure(model, setting, "cuda")
    assert len(graphs) == 4
    monkeypatch.setattr(cuda_graphs, "captured", lambda device, run: run)
    called = generate.measure(model, setting, "cuda")
    assert replayed.tokens == called.tokens


def test_the_steps_work_is_found() -> None:
    found = [row for row in token_profile.rows(["small"], [1], "cuda") if row["table"] == "steps"]
    for row in found:
        product = "fused" if row["form"] == "samebits" else "bf16_product"
        assert row[f"{product}_milliseconds"] > 0
        assert row["attention_milliseconds"] > 0
        assert row["other_milliseconds"] > 0


def test_memory_ends_at_the_cap() -> None:
    model = models.build("small", "cuda", True, tight=True)
    longest.forget("cuda")
    cap = torch.cuda.memory_allocated() + longest.ROOM + (64 << 20)
    tokens = longest.longest_under(cap, model, 1, "cuda")
    bytes_per_token = longest.predicted("small").cache(1, 1)
    assert tokens is not None
    assert 0.6 * longest.ROOM < tokens * bytes_per_token < longest.ROOM + (64 << 20)
    torch.empty(2 * longest.ROOM, dtype=torch.uint8, device="cuda")  # there is no cap any more
    assert longest.longest_under(torch.cuda.memory_allocated() + longest.ROOM - 1, model, 1, "cuda") is None


def test_a_packed_cache_gives_the_same_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a compressed model and in BF16."""
    monkeypatch.setattr(packed_states, "BLOCK_WORDS", 1 << 17)
    for packed in (True, False):
        row = longest.cache_row("small", models.build("small", "cuda", packed), 7000, "cuda")
        assert row["same_logits"] is True
        assert 0.6 < row["ratio"] < 0.8


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 3}], ids=str)
def test_a_packed_cache_in_generate(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_states, "BLOCK_WORDS", 1 << 14)  # whatever code that takes
    model = models.build("small", "cuda", True)
    prompt = models.random_prompt(model, 2, 300, "cuda")
    found = []
    for cache in (DynamicCache(config=model.config), samebits.PackedCache(model.config)):
        torch.manual_seed(0)
        with repeatable_attention():
            output = model.generate(
                prompt, attention_mask=torch.ones_like(prompt), past_key_values=cache, max_new_tokens=100, **options
            )
        found.append(output.tolist())
    assert found[0] == found[1]
    assert len(cache.layers[0]._keys._blocks) > 1
