"""What compressed models need of transformers' PreTrainedModel: a few members, which act as before on other models."""

from __future__ import annotations

import inspect
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import modeling_utils
from transformers.modeling_utils import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_NAME

from samebits.errors import InputError, SamebitsError
from samebits.format.folder import CONFIG, read_json
from samebits.integrations.transformers import parallel, state
from samebits.integrations.transformers.quantizer import SamebitsConfig, SamebitsQuantizer
from samebits.integrations.transformers.source import KEEP_FORMAT, loading, make_plain, says_compressed
from samebits.integrations.weight_files import publish, remove_packed, write_weights
from samebits.nn.convert import counting_weights
from samebits.nn.df11 import holds_units
from samebits.nn.lazy import LazyWeight
from samebits.nn.offload import offload, refuse_grouped
from samebits.nn.packed_module import PackedModule, check_dtype, packed_parameters, share_ties

GPU_MEMORY = "gpu_memory"  # of from_pretrained: see samebits.offload


def register() -> None:
    """Put the members in their place."""
    PreTrainedModel._apply = _apply
    PreTrainedModel.dtype = _dtype(PreTrainedModel.dtype.fget)
    PreTrainedModel.tie_weights = _tying(PreTrainedModel.tie_weights)
    PreTrainedModel._adjust_bias = _adjusting(PreTrainedModel._adjust_bias)
    PreTrainedModel.num_parameters = counting_weights(PreTrainedModel.num_parameters)
    PreTrainedModel.save_pretrained = _saving(PreTrainedModel.save_pretrained)
    PreTrainedModel.from_pretrained = classmethod(_loading(PreTrainedModel.from_pretrained.__func__))
    modeling_utils.maybe_load_adapters = _following(modeling_utils.maybe_load_adapters)
    modeling_utils.accelerate_dispatch = _dispatching(modeling_utils.accelerate_dispatch)


def _loading(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, *args: Any, **kwargs: Any) -> Any:
        """The quantizer cannot learn otherwise what is loaded, and must to find its files."""
        budget = kwargs.pop(GPU_MEMORY, None)
        if budget is not None and kwargs.get("device_map") is not None:
            raise InputError(f"{GPU_MEMORY} places the model itself", mend="leave device_map out")
        token = loading.set((str(pretrained_model_name_or_path), dict(kwargs)))
        kwargs.pop(KEEP_FORMAT, None)
        try:
            loaded = original(cls, pretrained_model_name_or_path, *args, **kwargs)
            if budget is not None:
                offload(loaded[0] if isinstance(loaded, tuple) else loaded, budget)
            return loaded
        except SamebitsError as error:
            raise (error if error.where else error.at(str(pretrained_model_name_or_path))) from None
        finally:
            loading.reset(token)

    return from_pretrained


def _following(original: Callable[..., tuple[Any, Any, Any]]) -> Callable[..., tuple[Any, Any, Any]]:
    @wraps(original)
    def maybe_load_adapters(path: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """An adapter's folder names its base, which is what is loaded then."""
        adapter, base, left = original(path, *args, **kwargs)
        if base != path:
            _, options = loading.get()
            loading.set((str(base), options))  # until from_pretrained resets it
        return adapter, base, left

    return maybe_load_adapters


def _apply(self: Any, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """Refuse another dtype before any part of the model is converted to it."""
    if next(packed_parameters(self), None) is not None or holds_units(self):
        check_dtype(fn)
    return super(PreTrainedModel, self)._apply(fn, recurse)


def _dtype(original: Callable[[Any], torch.dtype]) -> property:
    def dtype(self: Any) -> torch.dtype:
        """That of the first floating-point parameter, packed or not."""
        return next(_dtypes(self), None) or original(self)

    return property(dtype)


def _dtypes(model: torch.nn.Module) -> Iterator[torch.dtype]:
    for module in model.modules():
        recipes = module.sb_recipes.values() if isinstance(module, PackedModule) else ()
        of_slots = {slot: recipe.dtype for recipe in recipes for slot in recipe.slots}
        for slot, parameter in module._parameters.items():
            if parameter is not None and (slot in of_slots or parameter.is_floating_point()):
                yield of_slots.get(slot, parameter.dtype)


def _tying(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def tie_weights(self: Any, *args: Any, **kwargs: Any) -> None:
        """A packed weight is assigned to modules that are still plain."""
        original(self, *args, **kwargs)
        share_ties(self)

    return tie_weights


def _adjusting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _adjust_bias(self: Any, output_embeddings: Any, input_embeddings: Any) -> None:
        """A packed bias cannot be padded, and need not be where it is as long as the tied weight."""
        bias = getattr(output_embeddings, "bias", None)
        if not isinstance(bias, LazyWeight) or len(bias) != len(getattr(output_embeddings, "weight", ())):
            original(self, output_embeddings, input_embeddings)

    return _adjust_bias


def _dispatching(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @wraps(original)
    def accelerate_dispatch(*args: Any, **kwargs: Any) -> Any:
        """What is tied lies on disk once: transformers finds it there by its other names unless it is packed."""
        call = signature.bind(*args, **kwargs)
        index, model = call.arguments["offload_index"] or {}, call.arguments["model"]
        names: defaultdict[int, list[str]] = defaultdict(list)
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names[id(parameter)].append(name)
        for tied in names.values():
            for found in [index[name] for name in tied if name in index][:1]:
                index.update({name: found for name in tied if name not in index})
        return original(*args, **kwargs)

    return accelerate_dispatch


def _saving(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @wraps(original)
    def save_pretrained(self: Any, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """transformers writes all but the weights, into a folder of its own; then everything moves."""
        parallel.restore(self)
        call = signature.bind(self, save_directory, *args, **kwargs)
        if getattr(self, "_hf_peft_config_loaded", False):
            original(*call.args, **call.kwargs)
            return
        if not _is_compressed(self):
            with _with_own_config(self):
                original(*call.args, **call.kwargs)
            if not call.arguments.get("variant") and call.arguments.get("is_main_process", True):
                remove_packed(Path(save_directory))
            return
        refuse_grouped(self, on_disk=True)
        for option in ("variant", "distributed_checkpoint"):
            if call.arguments.get(option):
                raise InputError(f"a compressed model cannot be saved with {option}", mend="save it without")
        push, writes = call.arguments.pop("push_to_hub", False), call.arguments.get("is_main_process", True)
        given = ("token", "max_shard_size")
        options: dict[str, Any] = {name: call.arguments[name] for name in given if name in call.arguments}
        options |= call.arguments.get("kwargs", {})  # of pushing
        is_split = parallel.is_split(self.config)
        if is_split and push:
            mend = "save it, then upload the folder from one process"
            raise InputError("a compressed model that is split over devices cannot be pushed", mend=mend)
        if is_split:
            writes = self.should_save_on_this_rank(writes)
        destination = Path(save_directory)
        destination.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".samebits-", dir=destination) as staging:
            call.arguments["save_directory"] = staging
            original(*call.args, **call.kwargs)
            _set_dtype(Path(staging) / CONFIG)
            gathered = parallel.gather(self, writes) if is_split else {}
            if writes:
                call.apply_defaults()
                (Path(staging) / SAFE_WEIGHTS_NAME).unlink(missing_ok=True)  # an empty one
                min_weights = self.hf_quantizer.quantization_config.min_weights
                tensors = state.checkpoint_tensors(self, min_weights, call.arguments["state_dict"], gathered)
                write_weights(tensors, Path(staging), call.arguments["max_shard_size"])
                publish(Path(staging), destination)
        if is_split:
            self.barrier_after_gathered_checkpoint_save(self.config.distributed_config)
        if push and writes:
            self.push_to_hub(options.pop("repo_id", destination.name), **options)

    return save_pretrained


def _set_dtype(config: Path) -> None:
    """transformers writes that of the first parameter, which a model may keep in float32; others are loaded with it."""
    if config.exists():  # where this process writes one
        values = read_json(config)
        config.write_text(json.dumps(values | {"dtype": "bfloat16"}, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextmanager
def _with_own_config(model: Any) -> Iterator[None]:
    """Inside, the config of a plain model does not say what that of a compressed one does from which it was made."""
    shared = model.config
    if not says_compressed(shared):
        yield
        return
    model.config = deepcopy(shared)
    make_plain(model.config)
    try:
        yield
    finally:
        model.config = shared


def _is_compressed(model: Any) -> bool:
    """Whether it has packed weights; what it says of itself is brought in line with that."""
    quantizer = getattr(model, "hf_quantizer", None)
    if next(packed_parameters(model), None) is None:
        if isinstance(quantizer, SamebitsQuantizer):
            quantizer.sb_decompressed(model)
        return False
    if quantizer is None:  # compressed by samebits.compress
        model.hf_quantizer = SamebitsQuantizer(SamebitsConfig())
        model.is_quantized, model.quantization_method = True, model.hf_quantizer.quantization_config.quant_method
        model.hf_quantizer.postprocess_model(model)
    return True


register()
