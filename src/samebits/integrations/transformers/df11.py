"""DFloat11 checkpoints in transformers: loaded as the BF16 checkpoints that they stand for, packed while loading.

Their config.json has a dfloat11_config and no quantization_config, and their files are named after units. So two
functions of transformers are wrapped: the one that chooses a quantizer chooses samebits' and names a file that exists,
and the one that reads the files gets tensors with the original names, each decoded when its turn comes. Both act as
before on all other checkpoints, but for compressed ones that are to be split over devices (parallel.py). A model loaded
so is like any that was packed while loading.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open
from transformers import modeling_utils
from transformers.modeling_utils import PreTrainedModel

from samebits.df11.checkpoint import UnitEntry, open_checkpoint
from samebits.df11.config import KEY, Df11Config
from samebits.errors import InputError, SamebitsError
from samebits.format.safetensors_file import SUFFIX
from samebits.integrations.model_shapes import shapes_in
from samebits.integrations.transformers import layout
from samebits.integrations.transformers.parallel import plain_tensors
from samebits.integrations.transformers.quantizer import SamebitsConfig, SamebitsQuantizer
from samebits.integrations.transformers.source import FILE, KEEP_FORMAT, follow_source, hub_options, loading


def register() -> None:
    """Wrap the two functions."""
    modeling_utils.get_hf_quantizer = _choosing(modeling_utils.get_hf_quantizer)
    PreTrainedModel._load_pretrained_model = staticmethod(_reading(PreTrainedModel._load_pretrained_model))


def _choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def get_hf_quantizer(config: Any, quantization_config: Any, *args: Any, **kwargs: Any) -> Any:
        """A quantization_config says more of the files than dfloat11_config, which may have been left there."""
        follow_source(config)
        if _is_df11(config):
            Df11Config.parse(getattr(config, KEY))
            setattr(config, FILE, _any_file())
            quantization_config = _settled(quantization_config)
        return original(config, quantization_config, *args, **kwargs)

    return get_hf_quantizer


def _settled(quantization_config: Any) -> Any:
    """
    Raises:
        InputError: the layout is to be kept, and more is asked for.
    """
    if not loading.get()[1].get(KEEP_FORMAT):
        return quantization_config or SamebitsConfig()
    if quantization_config is not None:
        mend = f"leave out {KEEP_FORMAT} or quantization_config"
        raise InputError(f"with {KEEP_FORMAT}, nothing is packed that quantization_config could choose", mend=mend)
    return layout.LayoutConfig()


def _is_df11(config: Any) -> bool:
    return hasattr(config, KEY) and getattr(config, "quantization_config", None) is None


def _any_file() -> str:
    """The name of a weight file of the folder or hub id that is being loaded; all of the hub's are fetched.

    Raises:
        InputError: there is none.
    """
    path, options = loading.get()
    subfolder = options.get("subfolder") or ""
    folder = Path(path)
    if not folder.is_dir():
        patterns = [str(Path(subfolder, f"*{SUFFIX}*")), str(Path(subfolder, "*.json"))]
        folder = Path(snapshot_download(path, allow_patterns=patterns, **hub_options()))
    names = sorted(file.name for file in Path(folder, subfolder).glob(f"*{SUFFIX}"))
    if not names:
        mend = "fetch all files of the model; pickles of DFloat11 0.1 are not opened"
        raise InputError("no safetensors files in this folder", where=str(folder), mend=mend)
    return names[0]


def _reading(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def _load_pretrained_model(
        model: Any, state_dict: Any, checkpoint_files: Any, load_config: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Of a DFloat11 checkpoint, the config forgets what the model no longer is."""
        quantizer = load_config.hf_quantizer
        folder = Path(checkpoint_files[0]).parent if checkpoint_files else Path()
        with ExitStack() as files:
            if isinstance(quantizer, layout.LayoutQuantizer):
                vars(model.config).pop(FILE, None)
                state_dict = quantizer.tensors(load_config.device_map, files)
            elif isinstance(quantizer, SamebitsQuantizer) and quantizer.reads_parts:
                state_dict = plain_tensors(folder, load_config.device_map, files)
            elif hasattr(model.config, KEY) and not getattr(quantizer, "pre_quantized", False):
                state_dict = _tensors(model, folder, load_config.weight_mapping or (), files)
                for name in (KEY, FILE):
                    vars(model.config).pop(name, None)
            return original(model, state_dict, checkpoint_files, load_config, *args, **kwargs)

    return _load_pretrained_model


def _tensors(model: Any, folder: Path, conversions: Sequence[Any], files: ExitStack) -> dict[str, Any]:
    """What stands for a checkpoint's tensors until they are read, by their original names."""

    def model_shapes(folder: Path, names: Sequence[str]) -> Mapping[str, tuple[int, ...]]:
        return shapes_in(model, conversions, names)

    checkpoint = open_checkpoint(folder, model_shapes)
    opened = {file.path: files.enter_context(safe_open(file.path, "pt")) for file in checkpoint.files}
    return {
        entry.name: _Slice(entry) if isinstance(entry, UnitEntry) else opened[entry.file.path].get_slice(entry.name)
        for entry in checkpoint
    }


class _Slice:
    """A matrix of a unit, as transformers sees tensors of safetensors files: it asks for all, then for a device."""

    def __init__(self, entry: UnitEntry) -> None:
        self.entry = entry

    def __getitem__(self, index: Any) -> _Slice | torch.Tensor:
        return self if index is Ellipsis else self.to()[index]

    def get_shape(self) -> list[int]:
        return list(self.entry.shape)

    def get_dtype(self) -> str:
        return self.entry.dtype

    def to(self, device: torch.device | str | int | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Decode it there.

        Raises:
            FormatError: the unit is damaged.
        """
        device = torch.device("cpu" if device is None else device)
        out = torch.empty(self.entry.shape, dtype=torch.bfloat16, device=device)
        try:
            return self.entry.matrix.decode(out, device).to(dtype or out.dtype)
        except SamebitsError as error:
            raise error.at(self.entry.name) from None


register()
