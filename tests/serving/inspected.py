"""What engine.py and those who start it share, and what vLLM's workers, who import it, are asked about a model."""

from __future__ import annotations

from typing import Any

import torch

MARK = "GAVE "  # in front of what an engine gave


def weights(model: Any) -> dict[str, list[Any]]:
    """Dtype and bytes of each parameter."""
    return {name: [str(parameter.dtype), parameter.nbytes] for name, parameter in model.named_parameters()}


def waiting(model: Any) -> list[str]:
    """Linear layers that are to be packed and have not all that belongs to them, as vLLM counts it."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    layers = [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "quant_method")]
    ours = [(name, layer) for name, layer in layers if getattr(layer.quant_method, "uses_meta_device", False)]
    return [name for name, layer in ours if get_layerwise_info(layer).can_load()]


def update(model: Any) -> None:
    """As those do who train a model between requests; of a part of a fused layer."""
    name = "model.layers.0.self_attn.q_proj.weight"
    rows, columns = model.config.num_attention_heads * model.config.head_dim, model.config.hidden_size
    model.load_weights([(name, torch.zeros(rows, columns, dtype=torch.bfloat16))])


def fused_experts(model: Any) -> list[int]:
    """With which numbers of tokens products of routed experts are fused."""
    choices = {id(each): each for layer in model.modules() if (each := getattr(layer, "sb_choices", None))}
    return sorted({tokens for each in choices.values() for tokens, chosen in each.known.items() if chosen})


def read_weights(model: Any) -> dict[str, int]:
    """Of each packed layer, how many finite values its weight has, which can be read as any other."""
    layers = [(name, layer) for name, layer in model.named_modules() if "weight" in getattr(layer, "sb_weights", {})]
    return {name: int(layer.weight.float().isfinite().sum()) for name, layer in layers}
