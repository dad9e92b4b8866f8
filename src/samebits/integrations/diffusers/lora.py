"""FLUX's load_lora_weights looks for the weights that a LoRA is for in the transformer's state dict, by their names.

It replaces layers by wider ones if a control LoRA needs that, and unload_lora_weights puts them back.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from diffusers.loaders.lora_pipeline import FluxLoraLoaderMixin

from samebits.nn.lazy import LazyWeight
from samebits.nn.packed_module import pack
from samebits.nn.state import name_as_before


def register() -> None:
    """Put the methods in their place."""
    method = FluxLoraLoaderMixin._maybe_expand_lora_state_dict.__func__
    FluxLoraLoaderMixin._maybe_expand_lora_state_dict = classmethod(_naming(method))
    FluxLoraLoaderMixin.unload_lora_weights = _packing_again(FluxLoraLoaderMixin.unload_lora_weights)


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


def _packing_again(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def unload_lora_weights(self: Any, reset_to_overwritten_params: bool = False) -> Any:
        """The weights that diffusers kept for this are lazy: it gets plain ones, and the layers become packed again."""
        transformer = getattr(self, self.transformer_name)
        kept = getattr(transformer, "_overwritten_params", None)
        if not reset_to_overwritten_params or kept is None:
            return original(self, reset_to_overwritten_params)
        lazy = {name: weight for name, weight in kept.items() if isinstance(weight, LazyWeight)}
        transformer._overwritten_params = {**kept, **{name: weight.decode() for name, weight in lazy.items()}}
        try:
            result = original(self, reset_to_overwritten_params)
        finally:
            transformer._overwritten_params = kept
        for name, weight in lazy.items():
            path, _, leaf = name.rpartition(".")
            pack(transformer.get_submodule(path), leaf, weight.recipe, weight.packed)
        return result

    return unload_lora_weights


register()
