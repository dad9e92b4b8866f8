"""What engine.py and those who start it share, and what vLLM's workers, who import it, are asked about a model."""

from __future__ import annotations

from typing import Any

MARK = "GAVE "  # in front of what an engine gave


def weights(model: Any) -> dict[str, list[Any]]:
    """Dtype and bytes of each parameter."""
    return {name: [str(parameter.dtype), parameter.nbytes] for name, parameter in model.named_parameters()}


def fused_experts(model: Any) -> list[int]:
    """With which numbers of tokens products of routed experts are fused."""
    choices = {id(each): each for layer in model.modules() if (each := getattr(layer, "sb_choices", None))}
    return sorted({tokens for each in choices.values() for tokens, chosen in each.known.items() if chosen})


def read_weights(model: Any) -> dict[str, int]:
    """Of each packed layer, how many finite values its weight has, which can be read as any other."""
    layers = [(name, layer) for name, layer in model.named_modules() if "weight" in getattr(layer, "sb_weights", {})]
    return {name: int(layer.weight.float().isfinite().sum()) for name, layer in layers}
