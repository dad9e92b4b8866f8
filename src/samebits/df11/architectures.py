"""Architectures whose matrices are known: which of them make up a unit, and how they are shaped.

A checkpoint that says either itself is believed: see config.py and shapes.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

Blocks = Mapping[str, tuple[str, ...]]  # list of blocks -> attributes that some of them have; a module itself -> none

_ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
_DECODER = (*_ATTENTION, "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_PHI = ("self_attn.o_proj", "self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj")
_ENDS: Blocks = {"lm_head": (), "model.embed_tokens": ()}
_LLAMA: Blocks = {**_ENDS, "model.layers": _DECODER}
_JOINT_ATTENTION = (
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.add_k_proj", "attn.add_v_proj", "attn.add_q_proj", "attn.to_out.0",
    "attn.to_add_out",
)  # fmt: skip
_FEED_FORWARDS = ("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2")
_SECOND_ATTENTION = ("attn2.to_q", "attn2.to_k", "attn2.to_v")

# By model_type or, for diffusers, _class_name. From Qwen-Image on, no published checkpoint says the order.
ARCHITECTURES: dict[str, Blocks] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "phi3": {**_ENDS, "model.layers": _PHI},  # Phi-4 too
    "gemma3": {"language_model.model.layers": _DECODER, "model.language_model.layers": _DECODER},
    "gemma3_text": {"model.layers": _DECODER},
    "FluxTransformer2DModel": {
        "transformer_blocks": ("norm1.linear", "norm1_context.linear", *_JOINT_ATTENTION, *_FEED_FORWARDS),
        "single_transformer_blocks": ("norm.linear", "proj_mlp", "proj_out", "attn.to_q", "attn.to_k", "attn.to_v"),
    },
    "QwenImageTransformer2DModel": {
        "transformer_blocks": (
            "img_mod.1", *_JOINT_ATTENTION, "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mod.1", "txt_mlp.net.0.proj",
            "txt_mlp.net.2",
        ),
    },
    "WanTransformer3DModel": {
        "blocks": (
            "attn1.to_q", "attn1.to_k", "attn1.to_v", "attn1.to_out.0", *_SECOND_ATTENTION, "attn2.add_k_proj",
            "attn2.add_v_proj", "attn2.to_out.0", "ffn.net.0.proj", "ffn.net.2",
        ),
    },
    "SD3Transformer2DModel": {
        "transformer_blocks": (
            "norm1.linear", "norm1_context.linear", *_JOINT_ATTENTION, *_SECOND_ATTENTION, "attn2.to_out.0",
            *_FEED_FORWARDS,
        ),
    },
}  # fmt: skip

_PUBLISHED = ("llama", "phi3", "gemma3", "FluxTransformer2DModel")  # grouped and ordered as these checkpoints are


def _patterns(blocks: Blocks) -> dict[str, Sequence[str]]:
    """As a dfloat11_config has them."""
    return {re.escape(path) + (r"\.\d+" if attributes else ""): attributes for path, attributes in blocks.items()}


# What a unit may hold that no dfloat11_config describes. For reading: so only what is published is in it.
PUBLISHED: Mapping[str, Mapping[str, Sequence[str]]] = {name: _patterns(ARCHITECTURES[name]) for name in _PUBLISHED}

# Modules of language models with as many columns, or rows, as a hidden state has values.
HIDDEN_COLUMNS = frozenset(
    {"lm_head", "embed_tokens", "q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj"}
)
HIDDEN_ROWS = frozenset({"o_proj", "down_proj"})
