"""diffusers' fuse_lora writes into weights, layer by layer: it is refused before the first one has changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from diffusers.loaders.lora_base import LoraBaseMixin
from diffusers.loaders.peft import PeftAdapterMixin
from torch import nn

from samebits.nn.packed_module import packed_parameters


def register() -> None:
    """Put the methods in their place."""
    PeftAdapterMixin.fuse_lora = _of_a_model(PeftAdapterMixin.fuse_lora)
    LoraBaseMixin.fuse_lora = _of_a_pipeline(LoraBaseMixin.fuse_lora)


def _of_a_model(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def fuse_lora(self: Any, *args: Any, **kwargs: Any) -> Any:
        _refuse([self])
        return original(self, *args, **kwargs)

    return fuse_lora


def _of_a_pipeline(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def fuse_lora(self: Any, components: Sequence[str] = (), *args: Any, **kwargs: Any) -> Any:
        _refuse([getattr(self, name, None) for name in components])
        return original(self, components, *args, **kwargs)

    return fuse_lora


def _refuse(models: Sequence[Any]) -> None:
    """
    Raises:
        InputError: a layer with an adapter is packed.
    """
    for model in models:
        if isinstance(model, nn.Module) and next(packed_parameters(model), None) is not None:
            from samebits.integrations.peft import refuse_merging  # diffusers can be there without PEFT

            refuse_merging(model)


register()
