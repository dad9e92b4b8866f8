"""PEFT: what its adapters need of a compressed base beyond what packed modules do by themselves.

Adapters call the layers below them, and read weights, as ever. A packed weight cannot be written to, so merging and
unmerging are refused, before anything has changed. Some things PEFT does to parameters do not reach packed ones:
freezing, training a copy of a whole module, transposing them for DoRA, looking for one of the vocabulary's size.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import wraps
from typing import Any

import torch
from peft import PeftModel
from peft.tuners.lora import dora
from peft.tuners.lora.layer import MultiheadAttention
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

from samebits.errors import InputError
from samebits.nn.convert import decompress
from samebits.nn.df11 import holds_units
from samebits.nn.lazy import LazyTensor
from samebits.nn.packed_module import packed_parameters


def register() -> None:
    """Put the methods in their place; again is no change."""
    if hasattr(BaseTuner.inject_adapter, "__wrapped__"):
        return
    BaseTuner.inject_adapter = _freezing(BaseTuner.inject_adapter)
    BaseTuner._check_merge_allowed = _refusing(BaseTuner._check_merge_allowed)
    for layer in _subclasses(BaseTunerLayer):
        if "unmerge" in layer.__dict__:
            layer.unmerge = _keeping_merged(layer.unmerge)
    PeftModel._setup_prompt_encoder = _knowing_embeddings(PeftModel._setup_prompt_encoder)
    ModulesToSaveWrapper.update = _with_plain_copies(ModulesToSaveWrapper.update)
    MultiheadAttention.__init__ = _of_plain_modules(MultiheadAttention.__init__)
    dora.transpose = _also_of_packed(dora.transpose)


def _freezing(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @wraps(original)
    def inject_adapter(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Packed weights are frozen as all others of the base are: decompressed later, they are not trained either.

        Raises:
            InputError: the model keeps DFloat11's layout, or a parameter is packed that an adapter is for.
        """
        call = signature.bind(self, model, *args, **kwargs)
        if holds_units(model):
            mend = "load it without keep_format, and its weights are packed anew"
            raise InputError("adapters need weights of their own, which DFloat11's layout does not have", mend=mend)
        _refuse_targets(self.peft_config[call.arguments["adapter_name"]], model)
        result = original(self, model, *args, **kwargs)
        for _, module, name in packed_parameters(model):
            module.sb_recipes[name] = replace(module.sb_recipes[name], requires_grad=False)
        return result

    return inject_adapter


def _refuse_targets(config: Any, model: nn.Module) -> None:
    """Adapters of parameters, not of modules, are put on them as parametrizations."""
    targets = getattr(config, "target_parameters", None) or ()
    for full_name, _, _ in packed_parameters(model):
        if any(full_name == target or full_name.endswith(f".{target}") for target in targets):
            mend = "load the model with it excluded (SamebitsConfig(exclude=...)), or give target_modules"
            raise InputError("PEFT cannot put an adapter on a packed parameter", where=full_name, mend=mend)


def _knowing_embeddings(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def _setup_prompt_encoder(self: Any, adapter_name: str) -> None:
        """PEFT asks for them by one name, then for a parameter as long as the vocabulary: packed bytes are longer."""
        base = self.base_model
        embeddings = base.get_input_embeddings() if hasattr(base, "get_input_embeddings") else None
        if embeddings is None or next(packed_parameters(embeddings), None) is None:
            original(self, adapter_name)
            return
        find = base.get_submodule
        base.get_submodule = lambda name: embeddings if name == "embeddings.word_embeddings" else find(name)
        try:
            original(self, adapter_name)
        finally:
            del base.get_submodule

    return _setup_prompt_encoder


def _refusing(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _check_merge_allowed(self: Any) -> None:
        """PEFT asks this before it merges."""
        original(self)
        refuse_merging(self.model)

    return _check_merge_allowed


def refuse_merging(model: nn.Module) -> None:
    """
    Raises:
        InputError: a layer of ``model`` that has an adapter is packed.
    """
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer) and next(packed_parameters(module), None) is not None:
            mend = "call samebits.decompress on the model first, and samebits.compress after merging"
            raise InputError("an adapter cannot be merged into a packed weight", where=name, mend=mend)


def _keeping_merged(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def unmerge(self: Any) -> None:
        """PEFT notes that an adapter is unmerged before it tries.

        Raises:
            InputError: the layer was compressed with an adapter merged into it.
        """
        if self.merged and next(packed_parameters(self), None) is not None:
            mend = "call samebits.decompress on the model first"
            raise InputError("an adapter cannot be unmerged from a packed weight", mend=mend)
        original(self)

    return unmerge


def _of_plain_modules(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def __init__(self: Any, base_layer: nn.Module, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        """Adapters of torch's attention are merged whenever it runs.

        Raises:
            InputError: it is packed.
        """
        if next(packed_parameters(base_layer), None) is not None:
            mend = "exclude it from samebits.compress, or call samebits.decompress on it"
            raise InputError("PEFT cannot put an adapter on a packed nn.MultiheadAttention", mend=mend)
        original(self, base_layer, *args, **kwargs)

    return __init__


def _also_of_packed(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @wraps(original)
    def transpose(weight: torch.Tensor, fan_in_fan_out: bool) -> torch.Tensor:
        """A parameter's is a new parameter, with a gradient: what is packed has none."""
        return weight.T if fan_in_fan_out and isinstance(weight, LazyTensor) else original(weight, fan_in_fan_out)

    return transpose


def _subclasses(cls: Any) -> Iterator[Any]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)


def _with_plain_copies(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def update(self: Any, adapter_name: str, tied_module: Any = None, **kwargs: Any) -> Any:
        """A module of ``modules_to_save`` is copied to be trained, or to get weights that were: its copy is plain."""
        if tied_module is None and adapter_name not in self.modules_to_save:
            plain = copy.deepcopy(self.original_module)
            decompress(plain)
            self.modules_to_save[adapter_name] = plain
        return original(self, adapter_name, tied_module=tied_module, **kwargs)

    return update


register()
