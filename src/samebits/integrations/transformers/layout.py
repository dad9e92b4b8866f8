"""DFloat11 checkpoints in transformers that stay in their layout: ``from_pretrained(folder, keep_format=True)``.

Before the weights are loaded, each module with a unit gets the unit's tensors as buffers instead of its matrices. From
there on transformers loads, moves and saves them like any others, so that saving gives the layout back.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from samebits.df11.checkpoint import StoredUnit, UnitEntry, open_checkpoint
from samebits.errors import InputError, SamebitsError
from samebits.integrations.model_shapes import shapes_in
from samebits.integrations.transformers.names import Names
from samebits.integrations.transformers.quantizer import SamebitsQuantizer, compute_as_plain
from samebits.integrations.transformers.source import KEEP_FORMAT
from samebits.nn.df11 import DecodingMemory, attach_unit, share_unit

_METHOD = "dfloat11"
_WEIGHT = ".weight"
_MEND = f"load it without {KEEP_FORMAT}"


class LayoutConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """Says nothing: a checkpoint's dfloat11_config does."""

    def __init__(self) -> None:
        super().__init__(quant_method=_METHOD)


class LayoutQuantizer(HfQuantizer):  # type: ignore[misc]
    """What transformers calls while it loads a model that keeps the layout."""

    requires_calibration = False
    is_trainable = False
    is_compileable = True

    def __init__(self, quantization_config: LayoutConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._files: dict[str, Path] = {}  # of the tensors to load, by name

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    update_dtype = SamebitsQuantizer.update_dtype

    def update_attn_implementation(self, config: Any) -> Any:
        if getattr(config, "distributed_config", None) is not None:
            raise InputError("a model that keeps its format cannot be split over devices", mend=_MEND)
        return config

    update_tp_plan = update_attn_implementation

    def update_ep_plan(self, config: Any) -> Any:
        return config

    def update_parallel_plan(self, model: Any, plan: Any) -> None:
        """Nothing is split."""

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> list[Any]:
        return weight_conversions

    def _process_model_before_weight_loading(
        self, model: Any, checkpoint_files: Sequence[str] = (), **kwargs: Any
    ) -> None:
        with torch.device("cpu"):  # not the meta device that the model is made on
            layout = _Layout(model, Path(checkpoint_files[0]).parent)
            self._files, self._owners = layout.attach(), layout.owners

    def tensors(self, device_map: Mapping[str, Any] | None, files: ExitStack) -> dict[str, Any]:
        """The checkpoint's tensors, to be read when transformers wants them.

        Raises:
            InputError: ``device_map`` has more than one device.
        """
        devices = {str(device) for device in (device_map or {}).values()}
        if len(devices) > 1 or "disk" in devices:
            mend = f"pass device_map='cuda' or 'cpu', or {_MEND}"
            raise InputError(f"a model that keeps its format cannot be on {', '.join(sorted(devices))}", mend=mend)
        opened = {path: files.enter_context(safe_open(path, "pt")) for path in set(self._files.values())}
        return {name: opened[path].get_slice(name) for name, path in self._files.items()}

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        """Its config is that of the checkpoint, and some models compute otherwise where it says more."""
        for owner in self._owners:
            del owner.__dict__["weight"]
        del model.config.quantization_config
        compute_as_plain(model)
        return model

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        raise InputError("a model that keeps its format cannot be decompressed", mend=f"{_MEND}, then dequantize it")


class _Layout:
    """A model on the meta device, and the checkpoint whose units it is to hold."""

    def __init__(self, model: Any, folder: Path) -> None:
        conversions = get_model_conversion_mapping(model)
        self.model, self.names, self.memory = model, Names(model, conversions), DecodingMemory()
        self.checkpoint = open_checkpoint(folder, lambda _, names: shapes_in(model, conversions, names))
        self.held: set[str] = set()  # parameters that units hold
        self.owners: list[torch.nn.Module] = []  # of these and of those tied to them; they have a stand-in

    def attach(self) -> dict[str, Path]:
        """Give the model its units; the files of all tensors of the checkpoint, as they are stored."""
        files: dict[str, Path] = {}
        units: defaultdict[str, list[UnitEntry]] = defaultdict(list)
        for entry in self.checkpoint:
            if isinstance(entry, UnitEntry):
                units[entry.matrix.unit.path].append(entry)
            else:
                files[entry.name] = entry.file.path
        for path, entries in units.items():
            unit = entries[0].matrix.unit
            try:
                self._attach(unit, [entry.name.removeprefix(path) for entry in entries])
            except SamebitsError as error:
                raise error.at(unit.where) from None
            files |= {f"{path}.{name}": file for name, (file, _) in unit.tensors.items()}
        self._tie()
        self._shorten_patterns()
        return files

    def _attach(self, unit: StoredUnit, ends: Sequence[str]) -> None:
        """Args: ends: of the names of its weights, behind its path."""
        targets = [self.names.target(unit.path + end) for end in ends]
        if not any(target in self.names.parameters for target, _ in targets):
            return  # transformers reports it
        paths = {target.removesuffix(end) for (target, _), end in zip(targets, ends, strict=True)}
        if len(paths) != 1 or any(pattern for _, pattern in targets):
            raise InputError("transformers makes other matrices of this unit's while it loads them", mend=_MEND)
        tensors = {name: torch.from_numpy(tensor) for name, tensor in unit.read().tensors().items()}
        attributes = [end.removesuffix(_WEIGHT).removeprefix(".") for end in ends if end != _WEIGHT]
        attach_unit(self.model.get_submodule(paths.pop()), tensors, attributes, self.memory)
        self.held |= {target for target, _ in targets}
        for target, _ in targets:
            self._stand_in(target)

    def _tie(self) -> None:
        """Where a unit holds one of two tied weights, both modules run on it; transformers has nothing to tie then."""
        ties = {pair for pair in self.model.all_tied_weights_keys.items() if not self.held.isdisjoint(pair)}
        for pair in ties:
            readers = set(pair) - self.held
            if readers:
                holder, reader = (self._module(name) for name in (*(set(pair) - readers), *readers))
                share_unit(holder, reader, self.memory)
                self._stand_in(*readers)
        for path, module in self.model.named_modules():
            if isinstance(module, PreTrainedModel):
                prefix = f"{path}." if path else ""
                module.all_tied_weights_keys = {
                    name: source
                    for name, source in module.all_tied_weights_keys.items()
                    if (prefix + name, prefix + source) not in ties
                }

    def _shorten_patterns(self) -> None:
        """A base model's modules have shorter paths than those of the checkpoint, and are saved under these."""
        model = self.model
        if model.base_model is model:
            said = model.config.dfloat11_config
            prefix = re.compile(rf"^{model.base_model_prefix}\\?\.")
            patterns = {prefix.sub("", pattern, count=1): names for pattern, names in said["pattern_dict"].items()}
            model.config.dfloat11_config = {**said, "pattern_dict": patterns}

    def _stand_in(self, weight: str) -> None:
        """Has transformers find what is loaded where the weight was: it may initialize it with a module above."""
        stand_in = torch.empty_like(self.names.parameters[weight], device="meta")
        stand_in._is_hf_initialized = True  # type: ignore[attr-defined]
        self.owners.append(self._module(weight))
        self.owners[-1].__dict__["weight"] = stand_in

    def _module(self, weight: str) -> Any:
        return self.model.get_submodule(weight.removesuffix(_WEIGHT))


def register() -> None:
    """Make the quantizer known to transformers."""
    AUTO_QUANTIZER_MAPPING[_METHOD] = LayoutQuantizer
    AUTO_QUANTIZATION_CONFIG_MAPPING[_METHOD] = LayoutConfig


register()
