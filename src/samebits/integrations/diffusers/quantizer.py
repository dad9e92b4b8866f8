"""diffusers: a quantizer "samebits", which loads compressed folders and compresses checkpoints while loading them.

A model gives the bits that the same call of from_pretrained gives without compression: a packed weight is decoded to
BF16 and converted to the dtype that the model was asked for.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from diffusers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from diffusers.quantizers.base import DiffusersQuantizer
from torch import nn

from samebits.errors import DtypeError, FormatError, InputError
from samebits.format.container import Checkpoint, Entry
from samebits.format.folder import KEY
from samebits.format.names import original_name, stored_name
from samebits.integrations.transformers.load import find_parameter
from samebits.integrations.transformers.quantizer import SamebitsConfig, align_packed
from samebits.nn.convert import Report, decompress, encode_parameter, report
from samebits.nn.packed_module import pack, packed_parameters, slot_name, whole
from samebits.nn.recipe import Piece, Recipe
from samebits.nn.selection import Selection
from samebits.nn.spared import spare
from samebits.nn.state import as_plain

# Whether the model that is being loaded is a compressed one.
compressed: ContextVar[bool] = ContextVar("samebits_compressed", default=False)
# Whether from_single_file loads it.
single_file: ContextVar[bool] = ContextVar("samebits_single_file", default=False)

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_NOT_BF16 = "has values that are not BF16"
_KEY = "quantization_config"  # of a model's config
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelSelection(Selection):
    """Of a diffusers model's parameters.

    Attributes:
        asked: names of parameters whose dtype the model's code asks for (as that of a module's first parameter).
    """

    asked: frozenset[str] = field(default_factory=frozenset)

    def reason_against(self, module: nn.Module, name: str, full_name: str) -> str | None:
        if full_name in self.asked:
            return "tells the model's code the dtype to compute with"
        return super().reason_against(module, name, full_name)


def select(model: nn.Module, selection: Selection) -> ModelSelection:
    """A model's first parameter, and those that embed the time step, are asked for their dtype."""
    spare(model)
    names = [name for name, _ in model.named_parameters()]
    asked = {*names[:1], *(name for name in names if _embeds_time(name))}
    return ModelSelection(selection.min_weights, selection.include, selection.exclude, frozenset(asked))


def _embeds_time(name: str) -> bool:
    return any("time" in owner and "embed" in owner for owner in name.split(".")[:-1])


class SamebitsQuantizer(DiffusersQuantizer):  # type: ignore[misc]
    """What diffusers calls while it loads, saves and dequantizes.

    Attributes:
        report: what was packed while loading.
    """

    pre_quantized: bool
    supports_parallel_loading = False  # a module's weight and bias may be in different files
    is_serializable = True
    is_trainable = True  # adapters on top
    is_compileable = True

    def __init__(self, quantization_config: SamebitsConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        compressed.set(self.pre_quantized)
        self.report = Report()
        self._dtype = torch.bfloat16
        self._selection = ModelSelection()
        # only while loading:
        self._in_float32: Sequence[str] = ()  # names that mark parameters to be kept so
        self._files: list[str] = []
        self._keys: list[str] = []
        self._names: dict[str, str] = {}  # of packed tensors' parameters, where the model has another, by stored name
        self._slots: dict[str, str] = {}  # of packed tensors that stay packed: their parameter, by stored name
        self._rounded: dict[str, str] = {}  # reasons by name

    # Before the model exists

    @property
    def use_keep_in_fp32_modules(self) -> bool:
        """As without a quantizer. from_single_file asks whether there is such an attribute, not for its value.

        Raises:
            AttributeError: from_single_file asks.
        """
        if single_file.get():
            raise AttributeError("use_keep_in_fp32_modules")
        return True

    def validate_environment(self, device_map: Any = None, **kwargs: Any) -> None:
        if not self.pre_quantized and isinstance(device_map, dict) and "disk" in device_map.values():
            mend = "compress first with `samebits compress` or save_pretrained, and load that folder"
            raise InputError("weights cannot be compressed while they are offloaded to disk", mend=mend)

    def update_torch_dtype(self, torch_dtype: torch.dtype | None) -> torch.dtype:
        """Without a dtype diffusers would make everything float32: a compressed model is then BF16."""
        if torch_dtype is not None and torch_dtype not in _DTYPES:
            mend = "pass dtype=torch.bfloat16"
            raise DtypeError(f"a compressed model cannot be loaded as {torch_dtype}", mend=mend)
        self._dtype = torch_dtype or torch.bfloat16
        return self._dtype

    def get_cuda_warm_up_factor(self) -> int:
        """Elements to be loaded for one of the model's dtype to allocate ahead: packed ones are bytes."""
        return 2

    # Between the model's making and the loading of its weights

    def maybe_update_loaded_keys(self, loaded_keys: list[str], checkpoint_files: list[str]) -> list[str]:
        """The list that is returned gets the names in the model as soon as there is one."""
        self._files, self._keys = checkpoint_files, loaded_keys
        return self._keys

    def _process_model_before_weight_loading(
        self, model: Any, keep_in_fp32_modules: Sequence[str] = (), **kwargs: Any
    ) -> None:
        self._in_float32 = keep_in_fp32_modules or ()
        self._selection = select(model, self.quantization_config.selection)
        if not self._files:  # from_single_file, which calls all files quantized; what is packed there is decoded by now
            self.pre_quantized = False
        if self.pre_quantized:
            entries = {entry.name: entry for entry in Checkpoint.open(Path(self._files[0]).parent)}
            for full_name, entry in model._fix_state_dict_keys_on_load(entries).items():  # attention had others once
                entry.check()
                if entry.header is not None:
                    self._place(model, full_name, entry)
            names = self._names | self._slots
            self._keys[:] = [names.get(name) or original_name(name) or name for name in self._keys]

    def _place(self, model: Any, full_name: str, entry: Entry) -> None:
        """Make a parameter a packed one, still on the meta device, if its module can hold it."""
        found = find_parameter(model, full_name)
        if found is None or entry.header is None:
            return  # diffusers reports it
        if full_name != entry.name:
            self._names[stored_name(entry.name)] = full_name
        module, leaf, parameter = found
        if tuple(parameter.shape) != entry.shape:
            what = f"shape {list(entry.shape)} where the model has {list(parameter.shape)}"
            raise FormatError(what, where=entry.where, mend="these weights do not belong to this config.json")
        if replace(self._selection, min_weights=1, include=(), exclude=()).reason_against(module, leaf, full_name):
            return
        recipe = Recipe(entry.shape, (Piece(slot_name(leaf), entry.header),), self._dtype_of(full_name))
        pack(module, leaf, recipe, [torch.empty(entry.nbytes, dtype=torch.uint8, device="meta")])
        self._slots[stored_name(entry.name)] = full_name.removesuffix(leaf) + recipe.slots[0]

    def _dtype_of(self, name: str) -> torch.dtype:
        """Of a parameter in the model, by diffusers' rule."""
        return torch.float32 if any(part in self._in_float32 for part in name.split(".")) else self._dtype

    # While weights are loaded

    def maybe_update_state_dict(self, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """A file's tensors under the model's names, decoded where the model cannot hold them packed."""
        return dict(self._in_model(*item) for item in state_dict.items()) if self.pre_quantized else state_dict

    def _in_model(self, name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
        if name in self._slots:
            return self._slots[name], tensor
        original, plain = as_plain(name, tensor)
        return self._names.get(name, original), plain

    def check_if_quantized_param(
        self, model: Any, param_value: torch.Tensor, param_name: str, *args: Any, **kwargs: Any
    ) -> bool:
        found = None if self.pre_quantized else find_parameter(model, param_name)
        return found is not None and self._selection.reason_against(found[0], found[1], param_name) is None

    def create_quantized_param(
        self,
        model: Any,
        param_value: torch.Tensor,
        param_name: str,
        target_device: Any,
        state_dict: dict[str, torch.Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Encode a weight on its device.

        Args:
            param_value: converted to the model's dtype already.
            state_dict: of the checkpoint.
        """
        from samebits.bf16 import is_bf16

        stored = state_dict[param_name].to(target_device)
        module, leaf, parameter = cast("tuple[nn.Module, str, nn.Parameter]", find_parameter(model, param_name))
        exact = is_bf16(stored)
        packed = encode_parameter(stored.to(torch.bfloat16), param_name) if exact else None
        if not exact:
            self._rounded[param_name] = f"{stored.dtype}, {_NOT_BF16}"
        if packed is None:
            module._parameters[leaf] = nn.Parameter(param_value.to(target_device), parameter.requires_grad)
            return
        recipe = replace(whole(packed, leaf, parameter), dtype=self._dtype_of(param_name))
        pack(module, leaf, recipe, [packed.data])

    # After loading

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        self.report = report(model, self._selection)
        self.report.raw.update(self._rounded)
        if self._rounded:
            name, reason = next(iter(self._rounded.items()))
            mend = "rounding them to BF16 first (samebits compress --cast bf16) would lose bits"
            count = len(self._rounded)
            _log.warning(
                "%d weights of %s stay as they are (%s: %s): %s", count, type(model).__name__, name, reason, mend
            )
        self._files, self._keys, self._rounded = [], [], {}
        self._names, self._slots = {}, {}
        if single_file.get():
            convert(model, self._dtype)
        align_packed(model)
        return model

    def get_state_dict_and_metadata(
        self, state_dict: dict[str, Any], safe_serialization: bool = False
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Nothing for diffusers to write: see model.py."""
        return {}, {}

    def dequantize(self, model: Any) -> Any:
        decompress(model)
        return model

    def sb_decompressed(self, model: Any) -> None:
        """samebits.decompress has made the model plain."""
        del model.hf_quantizer
        model.is_quantized = False
        forget(model)


def convert(model: nn.Module, dtype: torch.dtype) -> None:
    """As ``model.to(dtype)`` of a plain model does: all that is floating point, buffers too."""
    for _, owner, name in packed_parameters(model):
        owner.sb_change(name, dtype=dtype)
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None and parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(dtype)


def forget(model: Any) -> None:
    """Remove from a model's config what it no longer is, in place: some values it has as attributes alone."""
    OrderedDict.pop(model.config, _KEY, None)
    vars(model.config).pop(_KEY, None)


def is_left_alone(part: str) -> bool:
    """Whether a part of a pipeline, by its name, is an autoencoder or an image encoder: they are small, run once, and
    pipelines convert them to other dtypes or ask their first parameter for its dtype."""
    return "vae" in part or "vq" in part or part == "image_encoder"


def is_compressed(model: Any) -> bool:
    """Whether it has packed weights; what it says of itself is brought in line with that."""
    quantizer = getattr(model, "hf_quantizer", None)
    if next(packed_parameters(model), None) is None:
        if isinstance(quantizer, SamebitsQuantizer):
            quantizer.sb_decompressed(model)
        elif isinstance(model.config.get(_KEY), SamebitsConfig):  # made from a compressed one's config
            forget(model)
        return False
    if quantizer is None:  # compressed by samebits.compress
        model.hf_quantizer = SamebitsQuantizer(SamebitsConfig(), pre_quantized=False)
    config = model.hf_quantizer.quantization_config
    model.is_quantized, model.quantization_method = True, config.quant_method
    OrderedDict.__setitem__(model.config, _KEY, config)  # in place, as above
    vars(model.config)[_KEY] = config
    return True


def register() -> None:
    """Make the quantizer known to diffusers."""
    AUTO_QUANTIZER_MAPPING[KEY] = SamebitsQuantizer
    AUTO_QUANTIZATION_CONFIG_MAPPING[KEY] = SamebitsConfig


register()
