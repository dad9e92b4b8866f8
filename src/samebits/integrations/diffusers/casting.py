"""diffusers' layerwise casting converts one layer after the other: it is refused before the first has changed."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from diffusers.hooks import layerwise_casting
from torch import nn

from samebits.errors import InputError
from samebits.nn.packed_module import packed_parameters

# Those that every way leads through, of models and of functions that others may have imported already.
_FUNCTIONS = ("_apply_layerwise_casting", "apply_layerwise_casting_hook")


def register() -> None:
    """Wrap the functions."""
    for name in _FUNCTIONS:
        setattr(layerwise_casting, name, _refusing(getattr(layerwise_casting, name)))


def _refusing(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def cast_layers(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """
        Raises:
            InputError: the module is compressed.
        """
        if next(packed_parameters(module), None) is not None:
            mend = "leave it compressed without casting, or call samebits.decompress on it first"
            raise InputError("a compressed model's layers cannot be cast to another dtype", mend=mend)
        original(module, *args, **kwargs)

    return cast_layers


register()
