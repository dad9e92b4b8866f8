"""Predicted bytes against those of real models, on the CPU: weights, buffers and caches exactly."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import samebits
from samebits.errors import InputError
from samebits.format.container import Checkpoint
from samebits.integrations import model_memory
from samebits.integrations.model_memory import MOST_TOKENS, CacheLayer, ModelMemory, Weights, longest
from samebits.jobs.estimate import estimate
from samebits.jobs.options import CompressOptions
from samebits.kernels.tables import MAX_TABLE_BYTES
from samebits.nn.packed_module import packed_parameters
from samebits.nn.selection import Selection
from tests.integrations.models import MIN_WEIGHTS, compress_folder, make

SELECTION = Selection(MIN_WEIGHTS)
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
SMALL = {"vocab_size": 300, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
# By model_type: caches of other kinds than those of tests/integrations/models.py.
OTHERS: dict[str, dict[str, Any]] = {
    "falcon": SMALL,  # one key and value head for all
    "deepseek_v3": {**SMALL, **LATENT, **ROUTED, "num_key_value_heads": 4, "moe_intermediate_size": 48},
    "deepseek_v32": {**SMALL, **LATENT, **ROUTED, "num_key_value_heads": 4, "index_topk": 8, "index_head_dim": 16},
    "deepseek_v4": {  # one entry of four tokens, and of eight
        **SMALL,
        **LATENT,
        "head_dim": 16,
        "moe_intermediate_size": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 16,
        "index_head_dim": 16,
        "layer_types": ["compressed_sparse_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
    },
    "lfm2": {**SMALL, "num_key_value_heads": 2, "layer_types": ["conv", "full_attention"]},
    "bamba": {
        **SMALL,
        "num_key_value_heads": 2,
        "mamba_n_heads": 8,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
        "attn_layer_indices": [1],
    },
}


def tensor_bytes(model: torch.nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


@torch.inference_mode()
def cache_bytes(model: Any, context: int, batch: int) -> int:
    """Of all tensors in a cache after a run over ``context`` tokens, as a pickle finds them."""
    cache = model(input_ids=torch.zeros(batch, context, dtype=torch.int64), use_cache=True).past_key_values
    found: dict[int, torch.Tensor] = {}

    class Finder(pickle.Pickler):
        def persistent_id(self, value: Any) -> int | None:
            if not isinstance(value, torch.Tensor):
                return None
            found[id(value)] = value
            return id(value)

    Finder(io.BytesIO()).dump([vars(layer) for layer in cache.layers])
    return sum(tensor.numel() * tensor.element_size() for tensor in found.values() if tensor.dim())


@pytest.mark.parametrize("name", ["llama", "llama-tied", "gemma3", "mixtral"])
def test_equal_to_what_a_model_takes(name: str, tmp_path: Path) -> None:
    reference = make(name, tmp_path / "bf16")
    folder = compress_folder(tmp_path / "bf16", tmp_path / "packed")
    memory = model_memory.model_memory(folder, Selection(), Weights.stored(Checkpoint.open(folder)))
    model = reference.load(folder)
    assert memory.resident == tensor_bytes(model) + memory.tables
    packed = {tuple(map(id, module.sb_data(name))) for _, module, name in packed_parameters(model)}  # tied ones once
    assert memory.tables == MAX_TABLE_BYTES * sum(map(len, packed))
    assert memory.weights.plain + memory.buffers == tensor_bytes(reference.model)
    for context, batch in ((1, 1), (15, 1), (16, 2), (40, 3)):  # the sliding window is 16
        assert memory.cache(context, batch) == cache_bytes(model, context, batch)
    options = CompressOptions(min_weights=MIN_WEIGHTS)
    before = Weights.estimated(estimate(Checkpoint.open(tmp_path / "bf16"), options, exact=True))
    assert before == memory.weights
    supposed = model_memory.model_memory(folder, SELECTION, None)
    assert supposed.decoded == memory.decoded
    assert supposed.tables == MAX_TABLE_BYTES * len(packed)  # experts are in one there


@pytest.mark.parametrize("name", OTHERS)
def test_caches_of_all_kinds(name: str, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(name, **OTHERS[name])
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16).eval()
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    memory = model_memory.model_memory(tmp_path, SELECTION, None)
    for context, batch in ((7, 1), (31, 2)):  # one less than a whole entry
        assert memory.cache(context, batch) == cache_bytes(model, context, batch)
    if name == "deepseek_v4":
        assert 0 < memory.cache(32, 2) - cache_bytes(model, 32, 2) < 2 * 7 * memory.cache(1, 1)
    packed = samebits.PackedCache(model.config)
    with torch.no_grad():
        model(torch.zeros(2, 7, dtype=torch.int64), past_key_values=packed)
    assert packed.nbytes == cache_bytes(model, 7, 2)


def test_a_config_alone(tmp_path: Path) -> None:
    reference = make("llama", tmp_path)
    memory = model_memory.model_memory(tmp_path, SELECTION, None)
    assert memory.weights.plain + memory.buffers == tensor_bytes(reference.model)
    report = samebits.compress(reference.model, min_weights=MIN_WEIGHTS)
    words = sum(size.words for size in report.packed.values())
    assert memory.weights.packed == round(words * model_memory.BITS_PER_WEIGHT / 8)
    assert memory.weights.other == memory.weights.plain - 2 * words


def test_the_decoded_layer_is_the_largest_that_is_no_embedding(tmp_path: Path) -> None:
    for name in ("llama", "llama-tied"):  # the head decodes its weight in either
        make(name, tmp_path / name)
        assert model_memory.model_memory(tmp_path / name, SELECTION, None).decoded == 2 * 300 * 64
    make("mixtral", tmp_path / "mixtral")
    assert model_memory.model_memory(tmp_path / "mixtral", SELECTION, None).decoded == 2 * 4 * 2 * 64 * 96


def test_without_a_forward_pass_one_layer_counts() -> None:
    weights = Weights(100, 10, 160)
    memory = ModelMemory(weights, 3, 5, (CacheLayer(3, 1 << 60, 0, 0), CacheLayer(2, 10, 7, 0)), 20)
    assert memory.peak(100, 2) == memory.needed(100, 2) == 100 + 3 + 10 + 5 + 20 + 2 * (300 + 20 + 7)
    assert memory.plain_peak(100, 2) == 160 + 5 + 2 * (300 + 20 + 7)


def test_a_peak_is_at_the_prompt_or_at_the_last_token(tmp_path: Path) -> None:
    make("llama", tmp_path)
    memory = model_memory.model_memory(tmp_path, SELECTION, None)
    passes = memory.forward
    assert passes is not None
    prompt, step = passes.prompt(200, 3), passes.step(4000, 3)
    assert memory.peak(200, 3) == memory.peak(200, 3, 999) == memory.resident + prompt.packed
    assert memory.plain_peak(200, 3) == memory.weights.plain + memory.buffers + prompt.plain
    assert memory.peak(4000, 3, 200) == memory.resident + max(prompt.packed, step.packed)
    assert memory.plain_peak(4000, 3, 1) == memory.weights.plain + memory.buffers + step.plain
    assert memory.needed(4000, 3, 1) == memory.resident + step.cache + max(step.packed - step.cache, memory.decoded)
    of_cache = memory.packed_cache(4000, 3) - memory.cache(4000, 3)
    assert memory.packed_cache_peak(4000, 3, 1) == memory.peak(4000, 3, 1) + of_cache


@pytest.mark.parametrize(
    "needed",
    [
        lambda tokens: 10 + 3 * tokens,
        lambda tokens: 10 + 3 * tokens + (5000 if tokens > 128 else 0),
        lambda tokens: 10 + tokens + max(0, 7 * (tokens - 2000)) + tokens * tokens // 1000,
        lambda tokens: 10 + 4 * min(tokens, 1000) + tokens // 50,
        lambda tokens: 10 + tokens // 100,
    ],
    ids=["line", "step", "convex", "concave", "stairs"],
)
@pytest.mark.parametrize("limit", [12, 14, 99, 12_345, 77_777, 9_999_999])
def test_the_longest_context(needed: Any, limit: int) -> None:
    calls = []

    def counted(tokens: int) -> int:
        calls.append(tokens)
        return int(needed(tokens))

    found = longest(counted, limit)
    if found is None:
        assert needed(MOST_TOKENS) <= limit
    elif found < 0:
        assert needed(1) > limit
    else:
        assert needed(found) <= limit < needed(found + 1)
    assert len(calls) < 50
    assert max(calls) <= MOST_TOKENS


def test_a_cache_that_does_not_grow() -> None:
    memory = ModelMemory(Weights(100, 10, 160), 3, 5, (CacheLayer(2, 10, 0, 0),), 20)
    assert longest(lambda context: memory.peak(context, 1), 138 + 20) is None
    assert longest(lambda context: memory.peak(context, 1), 138 + 19) == 9
    assert longest(lambda context: memory.peak(context, 1), 138 + 1) == -1


def test_a_packed_cache() -> None:
    """Two layers of 4 KB a token that are packed, and a window."""
    layers = (CacheLayer(4096, 1 << 60, 0, 1024), CacheLayer(4096, 1 << 60, 0, 1024), CacheLayer(2, 10, 7, 0))
    memory = ModelMemory(Weights(100, 10, 160), 3, 5, layers, 20)
    assert memory.packed_cache(500, 1) == memory.cache(500, 1) + 500 * 4096
    assert memory.packed_cache_peak(500, 1) == memory.peak(500, 1) + 500 * 4096
    for tokens, batch in ((50_000, 1), (9_000, 4)):
        room, packed = 1024 // batch + 15, (tokens - 16) * model_memory.BITS_PER_WEIGHT / 16
        expected = batch * (tokens * 4096 + 2 * (room + packed) * 4096 + 20 + 7)
        assert memory.packed_cache(tokens, batch) == pytest.approx(expected, rel=1e-9)
        limit = memory.packed_cache_peak(tokens, batch)
        assert longest(lambda context, batch=batch: memory.packed_cache_peak(context, batch), limit) == tokens
    bytes_of = [layers[0].packed_nbytes(tokens, 4) for tokens in range(3000)]
    assert bytes_of == sorted(bytes_of)


@pytest.mark.parametrize(("sequences", "step"), [(1, 7), (1, 40), (2, 700)])
def test_no_packed_cache_takes_more(sequences: int, step: int) -> None:
    """However many tokens come at a time, and not much less: words that take fewer bits than are supposed."""
    heads, channels, layers = 64, 128, 3
    sizes = CacheLayer(4 * heads * channels, 1 << 60, 0, heads * channels)
    cache = samebits.PackedCache()
    states = torch.randn(sequences, heads, step, channels).bfloat16()
    seen = []
    for tokens in range(step, 1500, step):
        for layer in range(layers):
            cache.update(states, states, layer)
        seen.append(cache.nbytes / (layers * sizes.packed_nbytes(tokens, sequences)))
    assert 0.75 < min(seen) <= max(seen) <= 1
    assert seen[-1] > 0.93


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_what_is_packed_of_a_cache(name: str, tmp_path: Path) -> None:
    """The bytes of a PackedCache, as far as they are certain: a model's random states take what they take."""
    reference = make(name, tmp_path)
    memory = model_memory.model_memory(tmp_path, SELECTION, None)
    assert [layer.packs for layer in memory.cache_layers] == [32 if name == "llama" else 0, 32]
    cache = samebits.PackedCache(reference.model.config)
    with torch.no_grad():
        reference.model(reference.tokens, past_key_values=cache)
    sequences, tokens = reference.tokens.shape
    assert sum(layer.packed_nbytes(tokens, sequences) for layer in memory.cache_layers) == cache.nbytes


@pytest.mark.parametrize("architecture", [None, "BertForMaskedLM", "T5ForConditionalGeneration", "NoSuchModel"])
def test_models_without_such_a_cache(architecture: str | None, tmp_path: Path) -> None:
    kind = "t5" if architecture == "T5ForConditionalGeneration" else "bert"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "architectures": [architecture or ""]}))
    with pytest.raises(InputError, match="not a decoder-only language model"):
        model_memory.model_memory(tmp_path, SELECTION, None)


def test_no_config(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        model_memory.model_memory(tmp_path, SELECTION, None)


def test_a_diffusers_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    with pytest.raises(InputError, match="FluxTransformer2DModel has no context; give a language model's folder"):
        model_memory.model_memory(tmp_path, SELECTION, None)


def test_a_cache_that_cannot_be_measured(tmp_path: Path) -> None:
    config = {"model_type": "jetmoe", "architectures": ["JetMoeForCausalLM"], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match="cannot be measured without weights"):
        model_memory.model_memory(tmp_path, SELECTION, None)


def test_a_model_that_gives_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.LlamaConfig(num_hidden_layers=1, hidden_size=64, architectures=["LlamaForCausalLM"])
    config.save_pretrained(tmp_path)
    output = transformers.modeling_outputs.CausalLMOutputWithPast(logits=torch.zeros(1))
    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", lambda self, **arguments: output)
    with pytest.raises(InputError, match="no cache to measure"):
        model_memory.model_memory(tmp_path, SELECTION, None)
