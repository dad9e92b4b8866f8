"""PEFT: what its adapters need of a compressed base beyond what packed modules do by themselves.

Adapters call the layers below them, and read weights, as ever. A packed weight cannot be written to, so merging and
unmerging are refused, before anything has changed. Some things PEFT does to parameters do not reach packed ones:
freezing, training a copy of a whole module, transposing them for DoRA, looking for one by its name or its size.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import peft
import torch
from peft import PeftModel
from peft.import_utils import is_transformers_ge_v5
from peft.tuners import tuners_utils
from peft.tuners.lora import dora
from peft.tuners.lora.layer import MultiheadAttention
from peft.tuners.mixed import MixedModel
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import other, save_and_load
from peft.utils.other import ModulesToSaveWrapper
from torch import nn

from samebits.api import encode
from samebits.errors import InputError
from samebits.format.names import stored_name
from samebits.nn.convert import decompress, hidden_weights
from samebits.nn.df11 import holds_units
from samebits.nn.lazy import LazyTensor
from samebits.nn.packed_module import PackedModule, packed_parameters
from samebits.nn.selection import held
from samebits.nn.state import as_plain


def register() -> None:
    """Put the methods in their place."""
    BaseTuner.inject_adapter = _freezing(BaseTuner.inject_adapter)
    BaseTuner._check_merge_allowed = _refusing(BaseTuner._check_merge_allowed)
    BaseTuner._unload_and_optionally_merge = _comparing_ties(BaseTuner._unload_and_optionally_merge)
    MixedModel._unload_and_optionally_merge = _checking_first(MixedModel._unload_and_optionally_merge)
    for layer in _subclasses(BaseTunerLayer):
        if "unmerge" in layer.__dict__:
            layer.unmerge = _keeping_merged(layer.unmerge)
    PeftModel._setup_prompt_encoder = _knowing_embeddings(PeftModel._setup_prompt_encoder)
    ModulesToSaveWrapper.update = _with_plain_copies(ModulesToSaveWrapper.update)
    MultiheadAttention.__init__ = _of_plain_modules(MultiheadAttention.__init__)
    dora.transpose = _also_of_packed(dora.transpose)
    other._get_module_names_tied_with_embedding = tied = _knowing_ties(other._get_module_names_tied_with_embedding)
    tuners_utils._get_module_names_tied_with_embedding = tied
    PeftModel.get_nb_trainable_parameters = _counting(PeftModel.get_nb_trainable_parameters)
    for name, wrap in (("get_peft_model_state_dict", _saving_plain), ("set_peft_model_state_dict", _loading_plain)):
        wrapped = wrap(getattr(save_and_load, name))
        for module in (save_and_load, peft.utils, peft.peft_model, peft):
            setattr(module, name, wrapped)
    prepare = _of_plain_models(
        other.prepare_model_for_kbit_training,
        "a compressed model trains in BF16, and cannot be prepared for training in float32",
        "leave it out; gradient_checkpointing_enable() and enable_input_require_grads() do the rest of it",
    )
    cast = _of_plain_models(
        other.cast_mixed_precision_params,
        "a compressed model's packed bytes cannot be cast",
        "leave it out: adapters are float32 by themselves, and the base is BF16",
    )
    for module in (other, peft.utils, peft):
        module.prepare_model_for_kbit_training, module.cast_mixed_precision_params = prepare, cast
    if is_transformers_ge_v5:  # with others PEFT does without, and it cannot be imported
        from peft.utils import transformers_weight_conversion as weights

        weights.convert_peft_config_for_transformers = _knowing_targets(weights.convert_peft_config_for_transformers)


def _freezing(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @wraps(original)
    def inject_adapter(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Packed weights are frozen as all others of the base are: decompressed later, they are not trained either.

        Raises:
            InputError: the model keeps DFloat11's layout, or is split over devices, or a parameter is packed that an
                adapter is for.
        """
        call = signature.bind(self, model, *args, **kwargs)
        if holds_units(model):
            mend = "load it without keep_format, and its weights are packed anew"
            raise InputError("adapters need weights of their own, which DFloat11's layout does not have", mend=mend)
        _refuse_parts(model)
        _refuse_targets(self.peft_config[call.arguments["adapter_name"]], model)
        result = original(self, model, *args, **kwargs)
        for _, module, name in packed_parameters(model):
            module.sb_change(name, requires_grad=False)
        return result

    return inject_adapter


def _refuse_parts(model: nn.Module) -> None:
    """An adapter is as large as its layer says it is, and a split one's packed part computes with less.

    Raises:
        InputError: there are such parts.
    """
    for full_name, module, _ in packed_parameters(model):
        if getattr(module, "_hf_quantized_needs_local_tp", False):  # as transformers is told to run it on its part
            what = "adapters cannot be put on a compressed model that is split over devices"
            mend = "load it with device_map='auto' instead of tp_size, or uncompressed"
            raise InputError(what, where=full_name, mend=mend)


def _refuse_targets(config: Any, model: nn.Module) -> None:
    """Adapters of parameters, not of modules, are put on them as parametrizations.

    Raises:
        InputError: ``config`` is for packed ones.
    """
    found: dict[str, str] = {}
    for full_name, _, _ in packed_parameters(model):
        name = full_name.replace(".base_layer", "")  # PEFT too looks below the adapters that are there already
        for target in getattr(config, "target_parameters", None) or ():
            if name == target or name.endswith(f".{target}"):
                found.setdefault(target if name == target else f"*.{target}", full_name)
    if found:
        patterns = sorted(found)
        others = "list other target_modules, such as those of attention"
        mend = f"load the model with SamebitsConfig(exclude={patterns}), or {others}"
        raise InputError("PEFT cannot put an adapter on a packed parameter", where=found[patterns[0]], mend=mend)


def _of_plain_models(original: Callable[..., Any], what: str, mend: str) -> Callable[..., Any]:
    """``original``, whose first argument is a model; a compressed one is refused."""

    @wraps(original)
    def of_plain_models(model: Any, *args: Any, **kwargs: Any) -> Any:
        if next(packed_parameters(model), None) is not None:
            raise InputError(what, mend=mend)
        return original(model, *args, **kwargs)

    return of_plain_models


def _counting(original: Callable[..., tuple[int, int]]) -> Callable[..., tuple[int, int]]:
    @wraps(original)
    def get_nb_trainable_parameters(self: Any) -> tuple[int, int]:
        """Weights count for packed bytes."""
        trainable, every = original(self)
        return trainable, every + hidden_weights(self)

    return get_nb_trainable_parameters


def _saving_plain(original: Callable[..., dict[str, torch.Tensor]]) -> Callable[..., dict[str, torch.Tensor]]:
    @wraps(original)
    def get_peft_model_state_dict(*args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """With an adapter on an embedding PEFT saves that, too: plain, so that it loads on any base."""
        return dict(as_plain(*item) for item in original(*args, **kwargs).items())

    return get_peft_model_state_dict


def _loading_plain(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @wraps(original)
    def set_peft_model_state_dict(*args: Any, **kwargs: Any) -> Any:
        """The same embedding is packed where the base's is."""
        call = signature.bind(*args, **kwargs)
        model, state = call.arguments["model"], call.arguments["peft_model_state_dict"]
        packed = {full_name for full_name, _, _ in packed_parameters(model)}
        call.arguments["peft_model_state_dict"] = dict(
            _packed(name, tensor) if name in packed else (name, tensor) for name, tensor in state.items()
        )
        return original(*call.args, **call.kwargs)

    return set_peft_model_state_dict


def _packed(name: str, weight: torch.Tensor) -> tuple[str, torch.Tensor]:
    """
    Raises:
        InputError: it does not get smaller, so that there is nothing to put in the place of the base's.
    """
    packed = encode(weight.to(torch.bfloat16))  # as it would be copied to the base's
    if packed.is_raw:
        mend = "exclude it from samebits.compress, then load the adapter"
        raise InputError("the adapter's own weight gets no smaller, and the base's is packed", where=name, mend=mend)
    return stored_name(name), packed.data


def _knowing_targets(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def convert_peft_config_for_transformers(peft_config: Any, model: Any, conversions: Any) -> None:
        """Modules that a model no longer has, such as each expert's, become ``target_parameters`` here.

        Raises:
            InputError: one of these is packed; ``peft_config`` is as it was.
        """
        if next(packed_parameters(model), None) is None:
            original(peft_config, model, conversions)
            return
        with _plain_names(model):
            converted = copy.deepcopy(peft_config)
            original(converted, model, conversions)
            _refuse_targets(converted, model)
            original(peft_config, model, conversions)

    return convert_peft_config_for_transformers


def _knowing_ties(original: Callable[..., list[str]]) -> Callable[..., list[str]]:
    @wraps(original)
    def _get_module_names_tied_with_embedding(model: Any) -> list[str]:
        """PEFT looks for the names of tied weights among those of parameters."""
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        base = base.model if hasattr(base, "tuner_layer_cls") else base
        if next(packed_parameters(base), None) is None:
            return original(model)
        with _plain_names(base):
            return original(model)

    return _get_module_names_tied_with_embedding


@contextmanager
def _plain_names(model: Any) -> Iterator[None]:
    """Within, ``model`` calls its packed parameters what they are called in a plain one."""
    names: dict[str, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, recipe in module.sb_recipes.items() if isinstance(module, PackedModule) else ():
            names |= {f"{prefix}.{slot}".lstrip("."): f"{prefix}.{name}".lstrip(".") for slot in recipe.slots}
    find = model.named_parameters
    model.named_parameters = lambda **kwargs: ((names.get(name, name), data) for name, data in find(**kwargs))
    try:
        yield
    finally:
        del model.named_parameters


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


def _comparing_ties(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _unload_and_optionally_merge(self: Any, merge: bool = True, *args: Any, **kwargs: Any) -> Any:
        """At the end PEFT compares where the weights of both embeddings are, and packed ones are nowhere."""
        model = self.model
        if not merge or next(packed_parameters(model), None) is None:
            return original(self, merge, *args, **kwargs)
        model.get_output_embeddings = lambda: None
        try:
            merged = original(self, merge, *args, **kwargs)
        finally:
            del model.get_output_embeddings
        if self.get_model_config(model).get("tie_word_embeddings") and not _are_tied(model):
            model.config.tie_word_embeddings = False
            warnings.warn("the embeddings are not tied any more: tie_word_embeddings is False now", stacklevel=2)
        return merged

    return _unload_and_optionally_merge


def _are_tied(model: Any) -> bool:
    """Whether the embeddings of a model have one weight; also of one that does not say what they are."""
    try:
        both = model.get_input_embeddings(), model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return True
    weights = [getattr(each, "weight", None) for each in both]
    if any(weight is None for weight in weights):
        return True
    if any(isinstance(weight, LazyTensor) for weight in weights):
        first, second = (held(("", each, "weight")) for each in both)
        return first == second
    return bool(weights[0].data_ptr() == weights[1].data_ptr())  # type: ignore[union-attr]


def _checking_first(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _unload_and_optionally_merge(self: Any, merge: bool = True, *args: Any, **kwargs: Any) -> Any:
        """Adapters of several kinds are merged without PEFT asking whether they may be."""
        if merge:
            refuse_merging(self.model)
        return original(self, merge, *args, **kwargs)

    return _unload_and_optionally_merge


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
