"""Where vLLM loads weights: compressed folders are read, their tensors decoded one by one; reloading is refused.

Also who else is to know when that is done.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from tqdm.auto import tqdm
from vllm.model_executor.model_loader import base_loader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.weight_utils import enable_tqdm
from vllm.platforms import current_platform

from samebits.api import decode
from samebits.df11.checkpoint import read_config
from samebits.errors import InputError
from samebits.format.container import Checkpoint
from samebits.format.folder import KEY, check_published
from samebits.format.names import original_name
from samebits.format.safetensors_file import SUFFIX, SafetensorsFile
from samebits.integrations.vllm.embeddings import choosing_embeddings
from samebits.integrations.vllm.plans import finding_plans
from samebits.integrations.vllm.routed import multiplying_routed
from samebits.integrations.vllm.weights import HELD

_TAKES_LAST = "sb_takes_last"  # of a loader


@cache
def register() -> None:
    """Put samebits in front of what of vLLM loads a model, and measures its memory then."""
    wrappers: list[tuple[Any, str, Callable[..., Any]]] = [
        (DefaultModelLoader, "load_weights", _checking_plain),
        (DefaultModelLoader, "_get_weights_iterator", _reading_packed),
        (layerwise, "restore_layer_on_meta", _refusing_packed),
        (base_loader, "process_weights_after_loading", choosing_embeddings),
    ]
    if current_platform.is_cuda():
        from vllm.model_executor.layers.fused_moe.experts import triton_moe
        from vllm.v1.worker.gpu_worker import Worker

        wrappers.append((Worker, "determine_available_memory", finding_plans))
        wrappers.append((triton_moe, "invoke_fused_moe_triton_kernel", multiplying_routed))
    for place, name, wrapper in wrappers:
        setattr(place, name, wrapper(getattr(place, name)))


def _checking_plain(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def load_weights(self: Any, model: Any, model_config: Any) -> None:
        """As for a model that is not quantized: only of those vLLM refuses one that lacks a norm, say."""
        is_packed = model_config.quantization == KEY
        setattr(self, _TAKES_LAST, is_packed)
        if not is_packed:
            original(self, model, model_config)
            return
        _refuse_packed(model)
        for layer in model.modules():  # some have got parameters since vLLM has counted what is to come, such as biases
            if getattr(getattr(layer, "quant_method", None), "uses_meta_device", False):
                layerwise.initialize_online_processing(layer)
        model_config = copy(model_config)
        model_config.quantization = None
        original(self, model, model_config)
        model.load_weights = _only_once(model)

    return load_weights


def _only_once(model: Any) -> Callable[..., Any]:
    """The method by which vLLM, and those who train a model, load its weights."""
    original = model.load_weights

    @wraps(original)
    def load_weights(*args: Any, **kwargs: Any) -> Any:
        _refuse_packed(model)
        return original(*args, **kwargs)

    return load_weights


def _refuse_packed(layer: nn.Module) -> None:
    """
    Raises:
        InputError: a layer, or one in it, is packed: CUDA graphs know where its bytes are, and others may not fit.
    """
    if any(HELD in each.__dict__ for each in layer.modules()):
        raise InputError("packed weights cannot be loaded anew in a running engine", mend="start another engine")


def _refusing_packed(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def restore_layer_on_meta(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """vLLM begins with the whole model, so nothing has been taken when that is refused."""
        _refuse_packed(layer)
        return original(layer, *args, **kwargs)

    return restore_layer_on_meta


def _reading_packed(original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def get_weights_iterator(self: Any, source: Any) -> Iterator[tuple[str, torch.Tensor]]:
        folder, files, is_safetensors, *_ = self._prepare_weights(
            source.model_or_path, source.subfolder, source.revision, source.fall_back_to_pt,
            source.allow_patterns_overrides,
        )  # fmt: skip
        check_published(Path(folder))
        if read_config(Path(folder)):
            mend = "pack it anew, `samebits compress FOLDER OUT`, and give what that writes"
            raise InputError("the folder is in DFloat11's layout, which is not read here", where=folder, mend=mend)
        names = _names(files) if is_safetensors else []
        if all(original_name(name) is None for name in names):
            tensors = original(self, source)
            return _last_ones(tensors, source.prefix, names) if getattr(self, _TAKES_LAST, False) else tensors
        self.counter_before_loading_weights = self.counter_before_loading_weights or time.perf_counter()
        tensors = _tensors(Checkpoint.open(Path(folder)), enable_tqdm(self.load_config.use_tqdm_on_load))
        return ((source.prefix + name, tensor) for name, tensor in tensors)

    return get_weights_iterator


def _names(files: Sequence[str]) -> list[str]:
    """Of all tensors; vLLM may have formats of its own beside."""
    paths = (Path(file) for file in files)
    return [name for path in paths if path.suffix == SUFFIX for name in SafetensorsFile.open(path).tensors]


def _last_ones(
    tensors: Iterator[tuple[str, torch.Tensor]], prefix: str, names: Iterable[str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Of tensors that several files have: to a plain layer vLLM loads all, and the last one stays."""
    left = Counter(prefix + name for name in names)
    for name, tensor in tensors:
        left[name] -= 1
        if left[name] <= 0:
            yield name, tensor


def _tensors(checkpoint: Checkpoint, shows_progress: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors, those that are packed decoded on the device of the platform.

    Raises:
        FormatError, DigestError: the files are damaged.
    """
    device = torch.device(current_platform.device_type)
    files = checkpoint.by_file.items()
    for path, entries in tqdm(files, desc="Loading compressed safetensors files", disable=not shows_progress):
        with safe_open(path, framework="pt") as plain:
            for entry in entries:
                entry.check()
                yield entry.name, decode(entry.packed(), device) if entry.is_packed else plain.get_tensor(entry.name)
