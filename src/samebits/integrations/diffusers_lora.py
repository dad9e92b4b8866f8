"""FLUX's load_lora_weights looks for the weights that a LoRA is for in the transformer's state dict, by their names."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from diffusers.loaders.lora_pipeline import FluxLoraLoaderMixin

from samebits.nn.state import name_as_before


def register() -> None:
    """Put the method in its place; again is no change."""
    method = FluxLoraLoaderMixin._maybe_expand_lora_state_dict.__func__
    if not hasattr(method, "__wrapped__"):
        FluxLoraLoaderMixin._maybe_expand_lora_state_dict = classmethod(_naming(method))


def _naming(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _maybe_expand_lora_state_dict(cls: Any, transformer: Any, *args: Any, **kwargs: Any) -> Any:
        """Under these names it finds packed weights too; it asks for their shapes and device."""
        hook = transformer.register_state_dict_post_hook(name_as_before)
        try:
            return original(cls, transformer, *args, **kwargs)
        finally:
            hook.remove()

    return _maybe_expand_lora_state_dict


register()
