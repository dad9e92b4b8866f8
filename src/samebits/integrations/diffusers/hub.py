"""Whole pipelines: what of them diffusers fetches from the hub, compressed weights too, whose names it does not know;
what it refuses of them, and when."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

import torch
from diffusers.pipelines import pipeline_loading_utils, pipeline_utils
from torch import nn

from samebits.errors import DtypeError
from samebits.format.folder import STEM
from samebits.integrations.diffusers.model import check_saving
from samebits.nn.offload import refuse_grouped
from samebits.nn.packed_module import check_dtype, packed_parameters


def register() -> None:
    """Wrap the two functions that go by names, and what else there is of pipelines."""
    pipeline_utils.variant_compatible_siblings = _choosing(pipeline_utils.variant_compatible_siblings)
    checking = _checking(pipeline_loading_utils.is_safetensors_compatible)
    pipeline_loading_utils.is_safetensors_compatible = checking
    pipeline = pipeline_utils.DiffusionPipeline
    pipeline.save_pretrained = _saving(pipeline.save_pretrained)
    pipeline.to = _moving(pipeline.to)
    pipeline.from_pipe = classmethod(_converting(pipeline.from_pipe.__func__))


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


def _saving(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    @wraps(original)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> None:
        """What one part refuses is refused before another one is written."""
        packed = _packed_parts(self)
        if packed:
            check_saving(signature.bind(self, *args, **kwargs).arguments)
        for part in packed:
            refuse_grouped(part, on_disk=True)
        original(self, *args, **kwargs)

    return save_pretrained


def _moving(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        """What one part refuses is refused before another one is converted."""
        dtypes = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.dtype)]
        if dtypes and _packed_parts(self):
            check_dtype(lambda tensor: tensor.to(dtypes[0]) if tensor.is_floating_point() else tensor)
        return original(self, *args, **kwargs)

    return to


def _converting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def from_pipe(cls: Any, pipeline: Any, **kwargs: Any) -> Any:
        """Without a dtype diffusers converts everything to float32, part by part."""
        if _packed_parts(pipeline) and kwargs.get("dtype") is None and kwargs.get("torch_dtype") is None:
            what = "from_pipe without a dtype converts to float32, which a compressed model refuses"
            raise DtypeError(what, mend="pass dtype=torch.bfloat16, which parts in float32 become as well")
        return original(cls, pipeline, **kwargs)

    return from_pipe


def _packed_parts(pipeline: Any) -> list[nn.Module]:
    """Those parts of a pipeline that are compressed."""
    parts = (part for part in vars(pipeline).values() if isinstance(part, nn.Module))
    return [part for part in parts if next(packed_parameters(part), None)]


def _usual(name: str) -> str:
    """What a file of weights would be called if it were not compressed."""
    folder, slash, file = name.rpartition("/")
    return f"{folder}{slash}model{file.removeprefix(STEM)}" if file.startswith((f"{STEM}.", f"{STEM}-")) else name


register()
