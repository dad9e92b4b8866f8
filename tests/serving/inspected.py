"""What vLLM's workers are asked about their model; they import it by name."""

from __future__ import annotations

from typing import Any


def weights(model: Any) -> dict[str, list[Any]]:
    """Dtype and bytes of each parameter."""
    return {name: [str(parameter.dtype), parameter.nbytes] for name, parameter in model.named_parameters()}


def read_weights(model: Any) -> dict[str, int]:
    """Of each packed layer, how many finite values its weight has, which can be read as any other."""
    layers = [(name, layer) for name, layer in model.named_modules() if "weight" in getattr(layer, "sb_weights", {})]
    return {name: int(layer.weight.float().isfinite().sum()) for name, layer in layers}
