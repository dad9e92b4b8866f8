"""benchmarks/longest.py in small, on the CPU, where memory ends when a test says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import longest
import models
from samebits.nn import packed_states


class Capped:
    """A model that is out of memory with more than ``most`` tokens in the cache."""

    def __init__(self, model: Any, most: int) -> None:
        self.model, self.config, self.most = model, model.config, most

    def __call__(self, **arguments: Any) -> Any:
        output = self.model(**arguments)
        if arguments["past_key_values"].get_seq_length() > self.most:
            raise torch.OutOfMemoryError
        return output


@pytest.mark.parametrize(
    ("most", "held"),
    [
        (longest.PROMPT - 1, 0),
        (longest.PROMPT, longest.PROMPT),
        (longest.PROMPT + 3 * longest.STEP - 1, longest.PROMPT + 2 * longest.STEP),
    ],
)
def test_counts_what_the_last_step_held(most: int, held: int) -> None:
    model = models.build("tiny", "cpu", False)
    assert longest.longest(Capped(model, most), 2, "cpu") == held


def test_rows() -> None:
    peak, cached, most = longest.rows("tiny", longest.TABLES, 64, "cpu", "default")
    parts = sum(peak[f"{part}_bytes"] for part in ("weights", "cache", "beside"))
    assert peak["predicted_bytes"] == parts
    assert peak["measured_bytes"] is None
    assert most["bf16_tokens"] == most["samebits_tokens"] == 2 * (longest.PROMPT + 2 * longest.STEP)
    assert (cached["context"], cached["same_logits"]) == (512, True)
    assert most["packed_cache_tokens"] == most["samebits_tokens"]
    assert most["ratio"] == most["packed_cache_ratio"] == 1
    assert most["predicted_tokens"] > 0
    assert most["allocator"] == "default"
    assert most["bf16_predicted_tokens"] > 0


def test_a_packed_model_is_predicted_to_hold_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """In memory for which the tables of a tiny model's weights do not count: a fifth of a model, and of its card."""
    kind, config = models.MODELS["Mistral Nemo 12B"]
    cap, batch, _ = longest.CASES["Mistral Nemo 12B"]
    fifth = {name: config[name] // 5 for name in ("num_hidden_layers", "vocab_size")}
    monkeypatch.setitem(models.MODELS, "fifth", (kind, config | fifth))
    tokens = longest.predicted_tokens(longest.predicted("fifth"), cap // 5, batch)
    assert tokens["predicted_tokens"] > 6 * tokens["bf16_predicted_tokens"] > 0


def test_no_ratio_where_bf16_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(longest.CASES, "tiny", (longest.GIB // 2, 1, None))
    [most] = longest.rows("tiny", ["longest"], 64, "cpu", "default")
    assert (most["bf16_tokens"], most["ratio"], most["packed_cache_ratio"]) == (None, None, None)
    assert most["samebits_tokens"]


def test_a_step_with_a_packed_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_states, "BLOCK_WORDS", 1 << 17)
    row = longest.cache_row("tiny", models.build("tiny", "cpu", True), 14000, "cpu")
    assert row["same_logits"] is True
    assert row["packed_cache_bytes"] == pytest.approx(row["ratio"] * row["dynamic_cache_bytes"], rel=0.01)
    assert 0.6 < row["ratio"] < 0.8
    assert row["packed_cache_milliseconds"] > 0
