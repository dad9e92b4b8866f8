"""Model families of transformers, packed: do they load, save and say the same, bit for bit?

    python benchmarks/families.py [--name families]        all of them, to results/<name>.json
    python benchmarks/families.py llama t5                 only these, printed

Each is a small model with random weights, every eligible tensor packed. It is compressed in three ways (while
from_pretrained loads it, saved by save_pretrained and loaded again, and by ``samebits compress``), and each time its
logits, and the tokens that it generates greedily and by sampling, are compared with the BF16 model's as bytes. So are
the logits of what it generates, loaded, with samebits.PackedCache, BF16 with transformers' DynamicCache, where the
model has layers that keep all tokens.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import transformers

import samebits
from common import PACKAGES, cpu_name, write_results
from samebits.errors import SamebitsError
from samebits.format.container import Checkpoint
from samebits.integrations.transformers.cache import PackedLayer
from samebits.jobs.compress import Compression
from samebits.jobs.options import CompressOptions, RunOptions

MIN_WEIGHTS = 1024  # so that every matrix of these small models counts
VOCABULARY = 300
TOKENS = 12  # generated
BLOCK, CACHED_TOKENS = 4, 20  # of a packed cache: tokens packed at a time, and generated
SMALL = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
HEADS = {"head_dim": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
SEQUENCE = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "decoder_start_token_id": 2,
}  # fmt: skip
T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}


@dataclass(frozen=True)
class Family:
    """How a small model is made.

    Attributes:
        kind: dense, mixture of experts, ...
        auto: which of transformers' auto classes loads it.
        options: of its config, besides SMALL.
    """

    kind: str
    options: dict[str, Any] = field(default_factory=dict)
    auto: str = "AutoModelForCausalLM"


def sequence(**options: Any) -> Family:
    return Family("encoder-decoder", {**options}, "AutoModelForSeq2SeqLM")


def encoder(**options: Any) -> Family:
    return Family("encoder", {**options}, "AutoModelForMaskedLM")


# By the model_type that a config.json names.
FAMILIES: dict[str, Family] = {
    "llama": Family("dense"),
    "mistral": Family("dense", HEADS),
    "ministral3": Family("dense", HEADS),
    "qwen2": Family("dense"),
    "qwen3": Family("dense", HEADS),
    "gemma": Family("dense", HEADS),
    "gemma2": Family("dense", {**HEADS, **SLIDING}),
    "gemma3_text": Family("dense", {**HEADS, **SLIDING}),
    "phi": Family("dense"),
    "phi3": Family("dense"),
    "gpt2": Family("dense", {"n_inner": 96}),
    "openai-gpt": Family("dense"),
    "gpt_neo": Family("dense", {"attention_types": [[["global", "local"], 1]]}),
    "gpt_neox": Family("dense"),
    "gptj": Family("dense", {"rotary_dim": 8}),
    "gpt_bigcode": Family("dense"),
    "codegen": Family("dense", {"rotary_dim": 8}),
    "opt": Family("dense", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "bloom": Family("dense"),
    "falcon": Family("dense"),
    "mpt": Family("dense"),
    "persimmon": Family("dense"),
    "stablelm": Family("dense"),
    "olmo": Family("dense"),
    "olmo2": Family("dense"),
    "olmo3": Family("dense", SLIDING),
    "starcoder2": Family("dense"),
    "cohere": Family("dense"),
    "cohere2": Family("dense", {**HEADS, **SLIDING}),
    "glm": Family("dense", HEADS),
    "glm4": Family("dense", HEADS),
    "smollm3": Family("dense"),
    "granite": Family("dense"),
    "nemotron": Family("dense", HEADS),
    "helium": Family("dense", HEADS),
    "exaone4": Family("dense", SLIDING),
    "ernie4_5": Family("dense", HEADS),
    "hunyuan_v1_dense": Family("dense", HEADS),
    "seed_oss": Family("dense", HEADS),
    "apertus": Family("dense"),
    "arcee": Family("dense"),
    "biogpt": Family("dense"),
    "xglm": Family("dense", {"d_model": 64, "ffn_dim": 96, "num_layers": 2, "attention_heads": 4}),
    "mixtral": Family("experts", {"num_local_experts": 4}),
    "qwen2_moe": Family("experts", {**EXPERTS, "shared_expert_intermediate_size": 96, "decoder_sparse_step": 1}),
    "qwen3_moe": Family("experts", {**EXPERTS, **HEADS, "decoder_sparse_step": 1}),
    "olmoe": Family("experts", {"num_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v2": Family("experts", {**ROUTED, **LATENT, "first_k_dense_replace": 1, "num_key_value_heads": 4}),
    "deepseek_v3": Family("experts", {**ROUTED, **LATENT, "first_k_dense_replace": 1, "num_key_value_heads": 4}),
    "glm4_moe": Family("experts", {**ROUTED, **HEADS, "first_k_dense_replace": 1}),
    "gpt_oss": Family("experts", {**HEADS, **SLIDING, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "phimoe": Family("experts", {"num_local_experts": 4}),
    "granitemoe": Family("experts", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "dbrx": Family("experts", {
        "d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 64,
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    }),
    "jetmoe": Family("experts", {"num_local_experts": 4, "kv_channels": 16, "num_key_value_heads": 2}),
    "ernie4_5_moe": Family("experts", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 48}),
    "llama4_text": Family("experts", {**HEADS, "num_local_experts": 4, "intermediate_size_mlp": 96}),
    "qwen3_next": Family("linear attention and experts", {
        **EXPERTS, **HEADS, "shared_expert_intermediate_size": 48, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
    }),
    "lfm2": Family("convolution and attention", {"layer_types": ["conv", "full_attention"]}),
    "mamba": Family("state space", {"state_size": 8}),
    "mamba2": Family("state space", {"state_size": 16, "num_heads": 8, "head_dim": 16, "n_groups": 1}),
    "falcon_mamba": Family("state space", {"state_size": 8}),
    "bamba": Family("state space and attention", {
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "attn_layer_indices": [1],
    }),
    "jamba": Family("state space and experts", {
        "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 8, "attn_layer_period": 2, "attn_layer_offset": 1,
        "expert_layer_period": 2, "expert_layer_offset": 1, "use_mamba_kernels": False,
    }),
    "recurrent_gemma": Family("recurrent", {"lru_width": 64, "block_types": ["recurrent", "attention"]}),
    "rwkv": Family("recurrent", {"attention_hidden_size": 64}),
    "t5": sequence(**T5),
    "mt5": sequence(**T5),
    "switch_transformers": sequence(
        **T5, num_decoder_layers=2, num_experts=4, num_sparse_encoder_layers=1, num_sparse_decoder_layers=1,
    ),
    "bart": sequence(**SEQUENCE),
    "mbart": sequence(**SEQUENCE),
    "pegasus": sequence(**SEQUENCE),
    "marian": sequence(**SEQUENCE, decoder_vocab_size=VOCABULARY),
    "m2m_100": sequence(**SEQUENCE),
    "bert": encoder(),
    "roberta": encoder(),
    "xlm-roberta": encoder(),
    "electra": encoder(embedding_size=64),
    "albert": encoder(embedding_size=64),
    "distilbert": encoder(hidden_dim=96),
    "modernbert": encoder(global_attn_every_n_layers=2, local_attention=8),
    "deberta-v2": encoder(),
}  # fmt: skip


def build(name: str) -> Any:
    """The small model, random weights in bfloat16."""
    family = FAMILIES[name]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(name, **{**SMALL, **family.options})
    return getattr(transformers, family.auto).from_config(config).to(torch.bfloat16).eval()


@torch.inference_mode()
def outputs(model: Any) -> dict[str, torch.Tensor]:
    """Logits, and generated tokens with the logits of each where the model generates.

    Of random weights, many a model writes one token again and again, or ends at once; logits differ all the same.
    """
    tokens = torch.randint(3, VOCABULARY, (2, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    decoder = {"decoder_input_ids": tokens[:, :5]} if model.config.is_encoder_decoder else {}
    found = {"logits": model(input_ids=tokens, attention_mask=mask, **decoder).logits}
    if model.can_generate():
        for how, sampling in (("greedy", False), ("sampled", True)):
            torch.manual_seed(2)
            output = model.generate(
                tokens, attention_mask=mask, min_new_tokens=TOKENS, max_new_tokens=TOKENS, do_sample=sampling,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
            found[how] = output.sequences
            found[f"{how} tokens' logits"] = torch.stack(output.logits)
    return found


def cached_logits(model: Any, cache: transformers.DynamicCache) -> torch.Tensor:
    """Of CACHED_TOKENS tokens that are generated."""
    tokens = torch.randint(3, VOCABULARY, (2, 30), generator=torch.Generator().manual_seed(1))
    output = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=CACHED_TOKENS, min_new_tokens=CACHED_TOKENS,
        do_sample=False, past_key_values=cache, output_logits=True, return_dict_in_generate=True,
    )  # fmt: skip
    return torch.stack(output.logits)


def same_with_packed_cache(plain: Any, model: Any) -> bool | None:
    """None where there is nothing to pack."""
    if model.config.is_encoder_decoder or "past_key_values" not in signature(model.forward).parameters:
        return None
    cache = samebits.PackedCache(model.config, block_tokens=BLOCK)
    found = cached_logits(model, cache)
    if not any(isinstance(layer, PackedLayer) and layer.nbytes for layer in cache.layers):
        return None
    return same(found, cached_logits(plain, transformers.DynamicCache(config=plain.config)))


def compressed(model_class: Any, original: Path, folder: Path) -> Iterator[tuple[str, Any]]:
    """The model in ``original`` compressed in each of the ways."""
    config = samebits.SamebitsConfig(min_weights=MIN_WEIGHTS)
    model = model_class.from_pretrained(original, quantization_config=config)
    yield "compressed while loading", model
    model.save_pretrained(folder / "saved")
    yield "saved and loaded", model_class.from_pretrained(folder / "saved")
    options, run = CompressOptions(min_weights=MIN_WEIGHTS), RunOptions(workers=1, device="cpu")
    Compression(Checkpoint.open(original), folder / "packed", options, run).run()
    yield "samebits compress", model_class.from_pretrained(folder / "packed")


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Compared as bytes."""
    flat = [tensor.contiguous().view(-1).view(torch.uint8) for tensor in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*flat)


def prove(name: str, folder: Path) -> dict[str, Any]:
    """One family's row; working files go to ``folder``."""
    row: dict[str, Any] = {"table": "families", "family": name, "kind": FAMILIES[name].kind}
    made = build(name)
    made.save_pretrained(folder / "bf16")
    plain = type(made).from_pretrained(folder / "bf16")
    assert plain.dtype == torch.bfloat16
    expected = outputs(plain)
    total = sum(parameter.numel() for parameter in plain.parameters())
    row |= {"class": type(made).__name__, "packed_tensors": None, "packed_of_weights": None, "packed_cache": None}
    differing: dict[str, str] = {}
    try:
        for way, model in compressed(type(made), folder / "bf16", folder):
            if way == "compressed while loading":
                report = model.hf_quantizer.report
                row["packed_tensors"] = len(report.packed)
                row["packed_of_weights"] = sum(size.words for size in report.packed.values()) / total
                note = unpacked(plain, report)
            found = outputs(model)
            for what in expected:
                if not same(found[what], expected[what]):
                    differing.setdefault(what.partition(" ")[0], f"{what} differ: {way}")
            if way == "saved and loaded":
                row["packed_cache"] = same_with_packed_cache(plain, model)
    except SamebitsError as error:
        return row | {"logits": None, "greedy": None, "sampled": None, "note": f"does not run: {error}"}
    row |= {what: what not in differing if what in expected else None for what in ("logits", "greedy", "sampled")}
    return row | {"note": "; ".join(differing.values()) or note}


def unpacked(plain: Any, report: Any) -> str | None:
    """Large parameters that were left as they are, and why."""
    large = {name for name, parameter in plain.named_parameters() if parameter.numel() >= MIN_WEIGHTS}
    return "; ".join(f"{name} left: {why}" for name, why in report.raw.items() if name in large) or None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("families", nargs="*", metavar="family")
    parser.add_argument("--name", default="families")
    options = parser.parse_args()
    if unknown := sorted({*options.families} - {*FAMILIES}):
        parser.error(f"unknown family {unknown[0]!r}")
    rows = []
    for name in options.families or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(prove(name, Path(folder)))
        print(rows[-1], flush=True)
    if not options.families:
        print(write_results(options.name, cpu_name(), rows, (*PACKAGES, "transformers")))
    return int(any(row[what] is False for row in rows for what in ("logits", "greedy", "sampled", "packed_cache")))


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    sys.exit(main())
