"""What compressed models need of diffusers' ModelMixin and pipelines; all others are treated as before."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import wraps
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin
from diffusers.models import modeling_utils
from diffusers.models.modeling_utils import ModelMixin
from diffusers.quantizers.pipe_quant_config import PipelineQuantizationConfig
from diffusers.utils import SAFETENSORS_WEIGHTS_NAME
from transformers.integrations.accelerate import load_offloaded_parameter

from samebits.df11.config import KEY as DF11_KEY
from samebits.errors import InputError, SamebitsError
from samebits.format.folder import INDEX_SUFFIX, STEM, Folder
from samebits.format.names import stored_name
from samebits.format.safetensors_file import SUFFIX
from samebits.integrations.diffusers.quantizer import compressed, is_compressed, is_left_alone
from samebits.integrations.transformers.quantizer import SamebitsConfig
from samebits.integrations.weight_files import publish, remove_packed, write_weights
from samebits.nn.convert import counting_weights
from samebits.nn.offload import refuse_grouped
from samebits.nn.packed_module import check_dtype, packed_parameters

_is_loading: ContextVar[bool] = ContextVar("samebits_is_loading", default=False)  # by from_pretrained
_DTYPE = "get_parameter_dtype"  # a function that other modules of diffusers may have imported already


def register() -> None:
    """Put the methods in their place."""
    ModelMixin._apply = _apply
    ModelMixin.to = _converting(ModelMixin.to)
    ModelMixin.num_parameters = counting_weights(ModelMixin.num_parameters)
    ModelMixin.save_pretrained = _saving(ModelMixin.save_pretrained)
    ConfigMixin.load_config = classmethod(_refusing_df11(ConfigMixin.load_config.__func__))
    ModelMixin.from_pretrained = classmethod(_loading(ModelMixin.from_pretrained.__func__))
    modeling_utils._fetch_index_file = _finding_index(modeling_utils._fetch_index_file, modeling_utils._get_model_file)
    modeling_utils._get_model_file = _finding_file(modeling_utils._get_model_file)
    PipelineQuantizationConfig._resolve_quant_config = _resolving(PipelineQuantizationConfig._resolve_quant_config)
    original, wrapped = modeling_utils.get_parameter_dtype, _of_dtype(modeling_utils.get_parameter_dtype)
    for name, module in list(sys.modules.items()):
        if name.startswith("diffusers.") and vars(module).get(_DTYPE) is original:
            setattr(module, _DTYPE, wrapped)


def _apply(self: Any, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    """Refuse another dtype before any part of the model is converted to it. BF16 is none, whatever it was loaded as."""
    if next(packed_parameters(self), None) is not None:
        check_dtype(fn)
        if fn(torch.empty(0, dtype=torch.float32, device="cpu")).dtype == torch.bfloat16:
            for _, module, name in packed_parameters(self):
                module.sb_change(name, dtype=torch.bfloat16)
    return super(ModelMixin, self)._apply(fn, recurse)


def _converting(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        """diffusers refuses any dtype for a quantized model, and None: for a compressed one _apply decides."""
        if next(packed_parameters(self), None) is None or not getattr(self, "is_quantized", False):
            return original(self, *args, **kwargs)
        self.is_quantized = False
        try:
            return original(self, *args, **kwargs)
        finally:
            self.is_quantized = True

    return to


def _of_dtype(original: Callable[..., torch.dtype]) -> Callable[..., torch.dtype]:
    @wraps(original)
    def get_parameter_dtype(parameter: torch.nn.Module) -> torch.dtype:
        """Where no parameter is floating point, that of the first packed one."""
        dtype = original(parameter)
        if dtype == torch.uint8:
            return next((module.sb_recipes[name].dtype for _, module, name in packed_parameters(parameter)), dtype)
        return dtype

    return get_parameter_dtype


def _resolving(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _resolve_quant_config(self: Any, is_diffusers: bool = True, module_name: str = "") -> Any:
        """Autoencoders and image encoders are left alone, unless they are asked for by name."""
        config = original(self, is_diffusers=is_diffusers, module_name=module_name)
        named = module_name in (self.quant_mapping or ()) or module_name in (self.components_to_quantize or ())
        return None if isinstance(config, SamebitsConfig) and is_left_alone(module_name) and not named else config

    return _resolve_quant_config


def _loading(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def from_pretrained(cls: Any, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """What is being loaded is not a compressed model until its quantizer says so."""
        token, loads = compressed.set(False), _is_loading.set(True)
        try:
            return original(cls, pretrained_model_name_or_path, **kwargs)
        except SamebitsError as error:
            raise (error if error.where else error.at(str(pretrained_model_name_or_path))) from None
        finally:
            compressed.reset(token)
            _is_loading.reset(loads)

    return from_pretrained


def _refusing_df11(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load_config(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """diffusers would leave the weights of DFloat11's units as they are made, or without memory."""
        loaded = original(cls, *args, **kwargs)
        config = loaded[0] if isinstance(loaded, tuple) else loaded
        if _is_loading.get() and DF11_KEY in config and "quantization_config" not in config:
            what = "a checkpoint in DFloat11's layout, which diffusers cannot load"
            mend = "give it to `samebits compress` or `samebits decompress`, and load the folder that these write"
            raise InputError(what, mend=mend)
        return loaded

    return load_config


def _finding_file(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _get_model_file(path: Any, *, weights_name: str, **options: Any) -> Any:
        """A compressed model's weights have a name of their own."""
        if compressed.get():
            try:
                return original(path, weights_name=STEM + SUFFIX, **options)
            except OSError:
                pass  # they were given the usual one
        return original(path, weights_name=weights_name, **options)

    return _get_model_file


def _finding_index(original: Callable[..., Any], get_model_file: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _fetch_index_file(**options: Any) -> Any:
        """Of a compressed folder, what diffusers is to load is what is checked.

        Raises:
            FormatError, InputError: a local folder without weights, with a damaged index, or with shards missing.
        """
        if compressed.get() and options["is_local"]:
            file = Folder.scan(Path(options["pretrained_model_name_or_path"], options["subfolder"])).to_open
            return file if file.name.endswith(INDEX_SUFFIX) else None
        if compressed.get():
            others = ("is_local", "pretrained_model_name_or_path", "use_safetensors", "variant")
            rest = {key: value for key, value in options.items() if key not in others}
            try:
                path = options["pretrained_model_name_or_path"]
                return Path(get_model_file(path, weights_name=STEM + INDEX_SUFFIX, **rest))
            except OSError:
                pass
        return original(**options)

    return _fetch_index_file


def _saving(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @wraps(original)
    def save_pretrained(self: Any, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """diffusers writes all but the weights, into a folder of its own; then everything moves."""
        call = signature.bind(self, save_directory, *args, **kwargs)
        call.apply_defaults()
        if not is_compressed(self):
            original(self, save_directory, *args, **kwargs)
            if call.arguments["is_main_process"] and not call.arguments["variant"]:
                remove_packed(Path(save_directory))
            return
        check_saving(call.arguments)
        refuse_grouped(self, on_disk=True)
        push, call.arguments["push_to_hub"] = call.arguments["push_to_hub"], False
        destination = Path(save_directory)
        destination.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=".samebits-", dir=destination) as staging:
            call.arguments["save_directory"] = staging
            original(*call.args, **call.kwargs)
            if call.arguments["is_main_process"]:
                (Path(staging) / SAFETENSORS_WEIGHTS_NAME).unlink(missing_ok=True)  # an empty one
                write_weights(_tensors(self), Path(staging), call.arguments["max_shard_size"])
                publish(Path(staging), destination)
        if push:
            options = call.arguments["kwargs"]
            self.push_to_hub(options.pop("repo_id", destination.name), **options)

    return save_pretrained


def check_saving(options: Mapping[str, Any]) -> None:
    """
    Raises:
        InputError: a compressed model cannot be saved with one of the options.
    """
    for option, usual in (("variant", None), ("safe_serialization", True), ("use_flashpack", False)):
        if options.get(option) not in (usual, None):
            what = f"a compressed model cannot be saved with {option}={options[option]!r}"
            raise InputError(what, mend="save it without")


def _tensors(model: Any) -> dict[str, torch.Tensor]:
    """A model's tensors under the names of FORMAT.md 7.2."""
    tensors = {
        name: load_offloaded_parameter(model, name) if tensor.device.type == "meta" else tensor
        for name, tensor in model.state_dict().items()
    }
    for full_name, module, name in packed_parameters(model):
        slot = full_name.removesuffix(name) + module.sb_recipes[name].slots[0]
        tensors[stored_name(full_name)] = tensors.pop(slot)
    return tensors


register()
