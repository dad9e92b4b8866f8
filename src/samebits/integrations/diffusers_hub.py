"""Which of a pipeline's files diffusers fetches from the hub: compressed weights too, whose names it does not know."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from diffusers.pipelines import pipeline_loading_utils, pipeline_utils

from samebits.format.folder import KEY, STEM
from samebits.integrations import diffusers_parts


def register() -> None:
    """Wrap the two functions that go by names, and what else there is of pipelines; again is no change."""
    if hasattr(pipeline_utils.variant_compatible_siblings, KEY):
        return
    pipeline_utils.variant_compatible_siblings = _choosing(pipeline_utils.variant_compatible_siblings)
    setattr(pipeline_utils.variant_compatible_siblings, KEY, True)
    checking = _checking(pipeline_loading_utils.is_safetensors_compatible)
    pipeline_loading_utils.is_safetensors_compatible = checking
    diffusers_parts.register()


def _choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def variant_compatible_siblings(filenames: Iterable[str], *args: Any, **kwargs: Any) -> tuple[set[str], set[str]]:
        names = {_usual(name): name for name in sorted(filenames)}
        usable, variants = original(set(names), *args, **kwargs)
        return {names[name] for name in usable}, {names[name] for name in variants}

    return variant_compatible_siblings


def _checking(original: Callable[..., bool]) -> Callable[..., bool]:
    @wraps(original)
    def is_safetensors_compatible(filenames: Iterable[str], *args: Any, **kwargs: Any) -> bool:
        return original({_usual(name) for name in filenames}, *args, **kwargs)

    return is_safetensors_compatible


def _usual(name: str) -> str:
    """What a file of weights would be called if it were not compressed."""
    folder, slash, file = name.rpartition("/")
    return f"{folder}{slash}model{file.removeprefix(STEM)}" if file.startswith((f"{STEM}.", f"{STEM}-")) else name


register()
