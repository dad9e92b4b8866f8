"""Tensor parallelism in transformers (``DistributedConfig(tp_size=N)``): each rank packs its own part of a weight.

transformers splits a model before it loads the weights: a parameter becomes a DTensor without bytes, and a module's
forward a function that remembers the module's own. So, while a model is loaded,

    linear layers and experts get a forward that is looked up when it is called, as packing changes their class;
    a compressed checkpoint stands for the plain one: each tensor is decoded when its turn comes, transformers takes the
    rank's part of it, and that is packed like the weights of any checkpoint that is packed while loading.

What is split otherwise, such as embeddings, stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import safe_open
from torch import nn
from transformers.distributed.sharding_utils import _dtensor_from_local_like
from transformers.distributed.utils import is_dtensor

from samebits.api import decode, encode
from samebits.errors import InputError
from samebits.format.container import Checkpoint, Entry
from samebits.format.packed import PackedTensor
from samebits.integrations import numbers
from samebits.integrations.transformers.experts import is_experts
from samebits.nn.packed_module import PackedModule
from samebits.nn.selection import Selection

MOE_MINIMUM = (5, 23)  # versions of transformers before do not add up what packed experts give on each rank
# Other kinds of parallelism in DistributedConfig, and the least value that asks for them.
_OTHERS = {"fsdp_size": 2, "dp_replicate_size": 2, "pp_size": 2, "ep_size": 2, "enable_expert_parallel": True}
_PLACEHOLDERS = "sb_placeholders"  # of a module: by parameter, the DTensor without bytes that its packed part replaced


def is_split(config: Any) -> bool:
    """Whether a model with this config is one rank's part.

    Raises:
        InputError: ``config`` asks for parts of another kind than those of tensor parallelism.
    """
    distributed = getattr(config, "distributed_config", None)
    if distributed is None:
        return False
    for name, least in _OTHERS.items():
        if (getattr(distributed, name, None) or 0) >= least:
            mend = "pass tp_size alone, or load the uncompressed model"
            raise InputError(f"compressed weights cannot be split over devices by {name}", mend=mend)
    return (distributed.tp_size or 1) > 1


def local(parameter: Any) -> nn.Parameter:
    """This rank's part, if the parameter is split."""
    if not is_dtensor(parameter):
        return cast(nn.Parameter, parameter)
    return nn.Parameter(parameter.detach().to_local(), parameter.requires_grad)


@dataclass(frozen=True)
class SplitSelection(Selection):
    """Of a model that is split.

    Attributes:
        tied: names of parameters that several modules share.
    """

    tied: frozenset[str] = field(default_factory=frozenset)

    def reason_against(self, module: nn.Module, name: str, full_name: str) -> str | None:
        parameter = module._parameters[name]
        if full_name in self.tied:
            return "tied, in a model that is split over devices"
        if parameter is None or not is_dtensor(parameter):
            return super().reason_against(module, name, full_name)
        if not _can_be_split(module):
            return "split over devices, in a module that is not a linear layer"
        module._parameters[name] = local(parameter)
        try:
            return super().reason_against(module, name, full_name)
        finally:
            module._parameters[name] = parameter


def select(model: Any, selection: Selection) -> SplitSelection:
    """What of a split model is to be packed."""
    ties = model.all_tied_weights_keys
    return SplitSelection(
        selection.min_weights, selection.include, selection.exclude, frozenset([*ties, *ties.values()])
    )


def _can_be_split(module: nn.Module) -> bool:
    """Whether it computes with plain parts of its weights; packed already or not."""
    base = module.sb_base if isinstance(module, PackedModule) else type(module)
    return issubclass(base, nn.Linear) or is_experts(base)


def bind_late(model: Any) -> None:
    """Have transformers wrap forwards that are looked up when they are called.

    Raises:
        InputError: a mixture of experts, with a version of transformers that would give wrong results.
    """
    for module in model.modules():
        if is_experts(type(module)) and numbers(version("transformers")) < MOE_MINIMUM:
            needed = ".".join(map(str, MOE_MINIMUM))
            mend = f"install transformers {needed} or newer, or use device_map='auto'"
            raise InputError(f"compressed experts cannot be split over devices before transformers {needed}", mend=mend)
        if _can_be_split(module):
            module.forward = partial(_forward, module)


def _forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, *args, **kwargs)


def unbind(model: Any) -> None:
    """Undo bind_late for modules that transformers did not split."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, partial) and forward.func is _forward:
            del module.__dict__["forward"]


def remember(module: nn.Module, name: str, parameter: torch.Tensor | None) -> None:
    """Before a split parameter gives way to a packed part: its module is to compute with parts from there on."""
    if is_dtensor(parameter):
        module._hf_quantized_needs_local_tp = True  # type: ignore[assignment]
        module.__dict__.setdefault(_PLACEHOLDERS, {})[name] = parameter


def restore(model: nn.Module) -> None:
    """Where a part is plain again, make it what transformers made of it at first: a DTensor."""
    for module in model.modules():
        for name, placeholder in module.__dict__.get(_PLACEHOLDERS, {}).items():
            part = module._parameters.get(name)
            if part is not None and not is_dtensor(part):
                whole = _dtensor_from_local_like(part.detach(), placeholder)
                module._parameters[name] = nn.Parameter(whole, part.requires_grad)


def gather(model: nn.Module, keep: bool) -> dict[str, torch.Tensor | PackedTensor]:
    """What the ranks hold parts of, put together: by parameter, on the CPU, packed where the parts are.

    All ranks must call this, as they exchange their parts, one parameter at a time.

    Args:
        keep: whether this rank is to get the result; others get nothing.
    """
    result: dict[str, torch.Tensor | PackedTensor] = {}
    tied: dict[int, torch.Tensor] = {}
    for path, module in model.named_modules():
        placeholders = module.__dict__.get(_PLACEHOLDERS, {})
        for name in sorted({*placeholders, *module._parameters}):
            full_name, part = f"{path}.{name}" if path else name, module._parameters.get(name)
            if is_dtensor(part):
                tied[id(part)] = tied[id(part)] if id(part) in tied else _whole(part).to("cpu" if keep else "meta")
                result[full_name] = tied[id(part)]
            elif part is None and name in placeholders:
                decoded = cast(PackedModule, module).sb_decode(name)
                weight = _whole(_dtensor_from_local_like(decoded, placeholders[name]))
                result[full_name] = _packed(weight).to("cpu") if keep else weight.to("meta")
    return result if keep else {}


def _whole(part: Any) -> torch.Tensor:
    return cast(torch.Tensor, part.detach().full_tensor())


def _packed(weight: torch.Tensor) -> torch.Tensor | PackedTensor:
    packed = encode(weight)
    return weight if packed.is_raw else packed


def plain_tensors(folder: Path, device_map: Mapping[str, Any] | None, files: ExitStack) -> dict[str, Any]:
    """What stands for a compressed checkpoint's tensors until they are read, by their original names.

    Raises:
        FormatError, DigestError: damaged files.
    """
    checkpoint = Checkpoint.open(folder)
    device = next(iter((device_map or {"": "cpu"}).values()))
    opened = {file.path: files.enter_context(safe_open(file.path, "pt")) for file in checkpoint.files}
    for entry in checkpoint:
        entry.check()
    return {
        entry.name: _Slice(entry, device) if entry.is_packed else opened[entry.file.path].get_slice(entry.name)
        for entry in checkpoint
    }


class _Slice:
    """A packed tensor, as transformers sees tensors of safetensors files: it asks for all or for a part of it."""

    def __init__(self, entry: Entry, device: Any) -> None:
        self.entry, self.device = entry, device

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Decoded on the rank's device; a part keeps no more memory than it takes."""
        weight = decode(self.entry.packed(), self.device)
        return weight if index is Ellipsis else weight[index].clone(memory_format=torch.contiguous_format)

    def get_shape(self) -> list[int]:
        return list(self.entry.shape)

    def get_dtype(self) -> str:
        return self.entry.dtype
