"""What engine.py and those who start it share, and what vLLM's workers, who import it, are asked about a model."""

from __future__ import annotations

from typing import Any

MARK = "GAVE "  # in front of what an engine gave


def weights(model: Any) -> dict[str, list[Any]]:
    """Dtype and bytes of each parameter."""
    return {name: [str(parameter.dtype), parameter.nbytes] for name, parameter in model.named_parameters()}


def read_weights(model: Any) -> dict[str, int]:
    """Of each packed layer, how many finite values its weight has, which can be read as any other."""
    layers = [(name, layer) for name, layer in model.named_modules() if "weight" in getattr(layer, "sb_weights", {})]
    return {name: int(layer.weight.float().isfinite().sum()) for name, layer in layers}
