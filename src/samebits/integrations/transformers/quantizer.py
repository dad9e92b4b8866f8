"""transformers: a quantizer "samebits", which loads compressed folders and compresses while loading BF16 checkpoints.

Its hooks have changed between the versions 5.17 and 5.23; those here take what each of them passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from samebits.errors import DtypeError, FormatError, InputError, SamebitsError
from samebits.integrations import INSTALL_TRANSFORMERS, MINIMUM

try:
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.core_model_loading import ConversionOps, WeightConverter
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    what = f"transformers {MINIMUM['transformers']} or newer is not installed"
    raise InputError(what, mend=INSTALL_TRANSFORMERS) from error

from samebits.format.folder import KEY, VERSION, check_version
from samebits.format.names import MIN_WEIGHTS
from samebits.format.packed import PackedTensor
from samebits.integrations.transformers import parallel
from samebits.integrations.transformers.load import (
    PACK_AFTERWARDS,
    another_shape,
    check_dtypes,
    find_parameter,
    place_packed,
)
from samebits.integrations.transformers.names import DecodingConverter, dtype_in_model
from samebits.integrations.transformers.source import FILE, loading, weights_file
from samebits.nn.convert import Report, decompress, encode_parameter, report
from samebits.nn.join import join_stacks
from samebits.nn.packed_module import pack, packed_parameters, whole
from samebits.nn.selection import Selection
from samebits.nn.spared import spare

_Shapes = dict[nn.Module, dict[str, torch.Size]]  # of each module's own parameters
_ALIGNMENT = 16  # of packed tensors in memory, in bytes
_PACKED_BYTES_PER_WEIGHT = 1.5  # more than packed weights take; for device maps


class Method(StrEnum):
    """What ``quant_method`` is: text for transformers, and an enumeration for diffusers."""

    SAMEBITS = KEY


class SamebitsConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Which parameters from_pretrained packs. It cannot be changed once made.

    Args:
        min_weights: smaller parameters stay as they are.
        include: shell patterns of full parameter names; empty: all.
        exclude: shell patterns of parameters to leave alone.

    Raises:
        InputError: ``min_weights`` is no whole number from 1 on, or patterns are no strings.
    """

    def __init__(
        self, min_weights: int = MIN_WEIGHTS, include: Sequence[str] = (), exclude: Sequence[str] = ()
    ) -> None:
        selection = asdict(Selection(min_weights, include, exclude))
        self.__dict__.update(quant_method=Method.SAMEBITS, version=VERSION, **selection)

    def __setattr__(self, name: str, value: object) -> None:
        raise InputError(f"a SamebitsConfig cannot be changed ({name})", mend="make a new one")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SamebitsConfig) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.values()))

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> SamebitsConfig | tuple[SamebitsConfig, dict[str, Any]]:
        """The ``quantization_config`` of a config.json (FORMAT.md 7.4).

        Raises:
            VersionError, FormatError: of a later version, or of none.
            InputError: an unknown key.
        """
        options = dict(config_dict)
        if "version" not in options:
            mend = (
                "pass samebits.SamebitsConfig() to compress while loading; config.json of a compressed folder has one"
            )
            raise FormatError("quantization_config has no version", mend=mend)
        check_version(options.pop("version"))
        options.pop("quant_method", None)
        unknown = sorted(options.keys() - {"min_weights", "include", "exclude"})
        if unknown:
            raise InputError(
                f"quantization_config has an unknown key {unknown[0]!r}", mend="remove it from config.json"
            )
        config = cls(**options)
        return (config, kwargs) if return_unused_kwargs else config

    def to_dict(self) -> dict[str, Any]:
        lists = {"include": list(self.include), "exclude": list(self.exclude)}
        return {**self.__dict__, "quant_method": KEY, **lists}

    @property
    def selection(self) -> Selection:
        return Selection(self.min_weights, self.include, self.exclude)


class SamebitsQuantizer(HfQuantizer):  # type: ignore[misc]
    """What transformers calls while it loads, saves and dequantizes.

    Attributes:
        report: what was packed while loading.
        reads_parts: whether the files are compressed and each rank is to load its own part of what they stand for.
    """

    pre_quantized: bool
    requires_calibration = False
    is_trainable = True  # adapters on top
    is_compileable = True

    def __init__(self, quantization_config: SamebitsConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.report = Report()
        self.reads_parts = False
        self._model: Any = None  # only while loading
        self._files: list[str] = []
        self._shapes: _Shapes = {}
        self._selection: Selection = quantization_config.selection
        self._settled: set[str] = set()
        self._failure: SamebitsError | None = None

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    # Before the model exists

    def update_attn_implementation(self, config: Any) -> Any:
        """Called early from 5.18 on; up to 5.20 update_tp_plan is."""
        parallel.is_split(config)
        if self.pre_quantized:
            setattr(config, FILE, weights_file())
        return config

    update_tp_plan = update_attn_implementation

    def update_ep_plan(self, config: Any) -> Any:
        return config

    def update_parallel_plan(self, model: Any, plan: Any) -> None:
        """It is that of the plain model."""

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        if dtype != torch.bfloat16 and dtype.is_floating_point:
            cast = "`samebits compress --cast bf16` converts others, and says whether that loses bits"
            plain = f"pass dtype=torch.bfloat16 if the weights are BF16; {cast}; or {PACK_AFTERWARDS}"
            mend = "pass dtype=torch.bfloat16" if self.pre_quantized else plain
            raise DtypeError(f"the model is to be loaded as {dtype}, samebits models are bfloat16", mend=mend)
        return torch.bfloat16

    # Between the model's making and the loading of its weights

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: list[str] | None = None, **kwargs: Any
    ) -> None:
        self._model, self._files = model, checkpoint_files or []
        self._shapes = {module: _shapes(module) for module in model.modules()}
        spare(model)
        if parallel.is_split(model.config):
            parallel.bind_late(model)
            self._selection = parallel.select(model, self._selection)

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        model = self._model if model is None else model
        if self.pre_quantized and parallel.is_split(model.config):
            self.reads_parts, self.pre_quantized = True, False
            return weight_conversions
        if self.pre_quantized:
            _, options = loading.get()
            takes_other_shapes = bool(options.get("ignore_mismatched_sizes"))
            return place_packed(model, weight_conversions, [Path(file) for file in self._files], takes_other_shapes)
        check_dtypes(model, weight_conversions, self._files, self.selects)
        for conversion in weight_conversions:
            if isinstance(conversion, WeightConverter) and len(conversion.target_patterns) > 1:
                conversion.__class__ = DecodingConverter
        return weight_conversions

    # While weights are loaded

    def selects(self, model: Any, name: str) -> bool:
        """Whether the model's parameter ``name`` is to be packed."""
        found = find_parameter(model, name)
        if found is None or dtype_in_model(model, name, found[2]) != torch.bfloat16:
            return False
        return self._selection.reason_against_tied(_owned(model, name)) is None

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        return not self.pre_quantized and param_name not in self._settled and self.selects(model, param_name)

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        if self.param_needs_quantization(model, param_name):
            return _PACKED_BYTES_PER_WEIGHT
        return param.element_size()

    def get_quantize_ops(self) -> ConversionOps:
        return _Pack(self)

    def pack(self, model: Any, weights: Mapping[str, Any], missing: set[str] | None) -> dict[str, Any]:
        """Encode loaded weights where selected: what transformers is then to place, by the name of its parameter."""
        result: dict[str, Any] = {}
        for name, tensors in weights.items():
            packed = self._encode(model, name, tensors[0] if isinstance(tensors, list) else tensors)
            if packed is None:
                result[name] = tensors
            else:
                (missing or set()).discard(name)
                result[_pack_without_bytes(model, name, packed)] = packed.data
        return result

    def _encode(self, model: Any, name: str, weight: torch.Tensor) -> PackedTensor | None:
        found = find_parameter(model, name) if self.selects(model, name) else None
        self._settled.add(name)  # from here on transformers is to check it
        return encode_parameter(weight, name) if found and found[2].shape == weight.shape else None

    def fail(self, error: SamebitsError) -> None:
        """transformers would hide an error that is raised while it converts weights."""
        self._failure = self._failure or error

    # After loading

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        shapes = {} if parallel.is_split(model.config) else self._shapes
        self._model, self._settled, self._shapes = None, set(), {}
        if self._failure:
            raise self._failure
        _check_shapes(model, shapes)
        _leave_inference_mode(model)
        compute_as_plain(model)
        parallel.unbind(model)
        self.report = report(model, self._selection)
        if not self.pre_quantized:
            self.report.warn()
        align_packed(model)
        join_stacks(model)
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor] | None, dict[str, str]]:
        """Nothing for transformers to write if weights are packed: see model.py."""
        adapters = getattr(model, "_hf_peft_config_loaded", False)
        return (None if adapters or next(packed_parameters(model), None) is None else {}), {}

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        """The dtype is a name if it comes from a config that was saved."""
        decompress(model)
        parallel.restore(model)
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        return model if dtype in (None, torch.bfloat16) else model.to(dtype)

    def sb_decompressed(self, model: Any) -> None:
        """samebits.decompress has made the model plain."""
        self.remove_quantization_config(model)


def _leave_inference_mode(model: nn.Module) -> None:
    """What was loaded in it, and not packed, is as transformers would leave it without a quantizer."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # of those that are tied one
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_inference():
                if parameter not in made:
                    with torch.inference_mode(False):
                        made[parameter] = nn.Parameter(parameter.clone(), parameter.requires_grad)
                module._parameters[name] = made[parameter]


class _Pack(ConversionOps):  # type: ignore[misc]
    """The last operation on a weight that is to be packed while loading."""

    def __init__(self, quantizer: SamebitsQuantizer) -> None:
        self.quantizer = quantizer

    def convert(
        self, input_dict: dict[str, Any], *args: Any, model: Any = None, missing_keys: Any = None, **kwargs: Any
    ) -> dict[str, Any]:
        try:
            return self.quantizer.pack(model, input_dict, missing_keys)
        except SamebitsError as error:
            self.quantizer.fail(error)
            return {}


def _pack_without_bytes(model: Any, name: str, packed: PackedTensor) -> str:
    """Make a parameter a packed one, still on the meta device; the name under which its bytes belong."""
    module, leaf, parameter = cast("tuple[torch.nn.Module, str, torch.nn.Parameter]", find_parameter(model, name))
    recipe = whole(packed, leaf, parameter)
    parallel.remember(module, leaf, module._parameters[leaf])
    pack(module, leaf, recipe, [packed.data.to("meta")])
    return name.removesuffix(leaf) + recipe.slots[0]


def _owned(model: Any, name: str) -> list[tuple[str, torch.nn.Module, str]]:
    """The parameter ``name`` and those that will be tied to it, each with its module and its name there."""
    ties: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    source = ties.get(name, name)
    others = {source, *(target for target, its_source in ties.items() if its_source == source)} - {name}
    found = ((each, find_parameter(model, each)) for each in (name, *sorted(others)))
    return [(each, parameter[0], parameter[1]) for each, parameter in found if parameter is not None]


def _shapes(module: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in module._parameters.items() if parameter is not None}


def _check_shapes(model: Any, expected: _Shapes) -> None:
    """transformers up to 5.20 takes weights of any shape for a quantized model, and initialises none.

    Modules that the model has made while it was loaded, such as a language's head, are as it wants them.

    Raises:
        FormatError: one has not the shape that its module had for it before.
    """
    for path, module in model.named_modules():
        before = expected.get(module, {})
        for name, shape in _shapes(module).items():
            if shape != before.get(name, shape):
                mend = "transformers 5.21 and later initialise others, with ignore_mismatched_sizes=True"
                raise another_shape(shape, before[name], f"{path}.{name}" if path else name, mend)


def compute_as_plain(model: Any) -> None:
    """Some models (Jamba, FalconMamba) round otherwise where their config says that they are quantized."""
    for module in model.modules():
        if isinstance(config := getattr(module, "config", None), PreTrainedConfig):
            vars(config).pop("_is_quantized", None)


def register() -> None:
    """Make the quantizer known to transformers."""
    AUTO_QUANTIZER_MAPPING[KEY] = SamebitsQuantizer
    AUTO_QUANTIZATION_CONFIG_MAPPING[KEY] = SamebitsConfig


def align_packed(model: torch.nn.Module) -> None:
    """Packed weights that were mapped from a file lie where the file has them, not where decoders want them."""
    for _, module, name in packed_parameters(model):
        for slot in module.sb_recipes[name].slots:
            parameter = module._parameters[slot]
            assert parameter is not None
            if parameter.device.type == "cpu" and parameter.data_ptr() % _ALIGNMENT:
                parameter.data = parameter.data.clone()


register()
