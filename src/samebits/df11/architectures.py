"""What the layout leaves to be known of a model: which matrices its units hold, and how they are shaped.

Both are read from the checkpoint where it says them: see config.py and shapes.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Patterns = Mapping[str, Sequence[str]]

_ATTENTION = [f"self_attn.{name}_proj" for name in "qkvo"]
_MLP = [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
_ENDS: Patterns = {"lm_head": [], r"model\.embed_tokens": []}

PATTERNS: Mapping[str, Patterns] = {
    "Llama, Mistral, Qwen 2.5, Qwen 3": {**_ENDS, r"model\.layers\.\d+": [*_ATTENTION, *_MLP]},
    "Phi-4": {
        **_ENDS,
        r"model\.layers\.\d+": ["self_attn.o_proj", "self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"],
    },
    "Gemma 3": {r"language_model\.model\.layers\.\d+": [*_ATTENTION, *_MLP]},
    "FLUX.1": {
        r"transformer_blocks\.\d+": [
            "norm1.linear", "norm1_context.linear", "attn.to_q", "attn.to_k", "attn.to_v", "attn.add_k_proj",
            "attn.add_v_proj", "attn.add_q_proj", "attn.to_out.0", "attn.to_add_out", "ff.net.0.proj", "ff.net.2",
            "ff_context.net.0.proj", "ff_context.net.2",
        ],
        r"single_transformer_blocks\.\d+": ["norm.linear", "proj_mlp", "proj_out", "attn.to_q", "attn.to_k",
                                            "attn.to_v"],
    },
}  # fmt: skip

# Modules of language models with as many columns, or rows, as a hidden state has values.
HIDDEN_COLUMNS = frozenset(
    {"lm_head", "embed_tokens", "q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj"}
)
HIDDEN_ROWS = frozenset({"o_proj", "down_proj"})
