"""A stand-in for what ComfyUI does with weights: its layers, patches and ModelPatcher, as far as a node meets them.

Written from its interface, as of 2025: a layer with ``weight_function`` patches the weight that it reads, and a
ModelPatcher finds weights by name, computes patched ones in float32 and assigns them, keeping what was there before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Patch = tuple[float, tuple[str, tuple[Any, ...]], float, tuple[int, int, int] | None]


class CastWeightBiasOp:
    comfy_cast_weights = False
    weight_function: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()

    def cast_weight_bias(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """On the input's device; what is patched is a copy."""
        weight = self.weight
        if weight.device != x.device:
            weight = torch.empty_like(weight, device=x.device).copy_(weight)
        elif self.weight_function:
            weight = weight.to(copy=True)
        for function in self.weight_function:
            weight = function(weight)
        return weight, None if self.bias is None else self.bias.to(x.device)

    @property
    def casts(self) -> bool:
        return self.comfy_cast_weights or bool(self.weight_function)


class Linear(nn.Linear, CastWeightBiasOp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, *self.cast_weight_bias(x)) if self.casts else super().forward(x)


class Conv2d(nn.Conv2d, CastWeightBiasOp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._conv_forward(x, *self.cast_weight_bias(x)) if self.casts else super().forward(x)


class BaseModel(nn.Module):
    def __init__(self, diffusion_model: nn.Module) -> None:
        super().__init__()
        self.diffusion_model = diffusion_model


def module_size(module: nn.Module) -> int:
    return sum(tensor.nelement() * tensor.element_size() for tensor in module.state_dict().values())


def attribute_of(model: nn.Module, key: str) -> tuple[nn.Module, str]:
    path, _, name = key.rpartition(".")
    return model.get_submodule(path), name


def assign(model: nn.Module, key: str, value: torch.Tensor) -> None:
    setattr(*attribute_of(model, key), nn.Parameter(value, requires_grad=False))


def calculate_weight(patches: list[Patch], weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Changes ``weight``."""
    for strength, (kind, values), strength_model, offset in patches:
        part = weight if offset is None else weight.narrow(*offset)
        if strength_model != 1.0:
            part *= strength_model
        if kind == "diff":
            part += strength * values[0].to(weight.device, weight.dtype)
            continue
        up, down = (value.to(weight.device, dtype).flatten(start_dim=1) for value in values[:2])
        alpha = values[2] / down.shape[0]
        part += (strength * alpha * torch.mm(up, down).reshape(part.shape)).type(part.dtype)
    return weight


class ModelPatcher:
    def __init__(self, model: nn.Module, load_device: torch.device | str, size: int = 0) -> None:
        self.model, self.size = model, size
        self.load_device, self.offload_device = torch.device(load_device), torch.device("cpu")
        self.patches: dict[str, list[Patch]] = {}
        self.backup: dict[str, torch.Tensor] = {}
        self.model_size()

    def model_size(self) -> int:
        self.size = self.size or module_size(self.model)
        return self.size

    def clone(self) -> ModelPatcher:
        clone = ModelPatcher(self.model, self.load_device, self.size)
        clone.patches = {key: patches[:] for key, patches in self.patches.items()}
        clone.backup = self.backup
        return clone

    def add_patches(self, patches: dict[Any, Any], strength: float = 1.0, strength_model: float = 1.0) -> list[Any]:
        """The keys that were found."""
        state, found = self.model.state_dict(), []
        for at, patch in patches.items():
            key, offset = (at, None) if isinstance(at, str) else at
            if key in state:
                found.append(at)
                self.patches.setdefault(key, []).append((strength, patch, strength_model, offset))
        return found

    def patch_weight_to_device(self, key: str, device: torch.device) -> None:
        if key not in self.patches:
            return
        weight = getattr(*attribute_of(self.model, key))
        self.backup.setdefault(key, weight.to(self.offload_device))
        patched = calculate_weight(self.patches[key], weight.to(device, torch.float32, copy=True))
        assign(self.model, key, patched.to(weight.dtype))

    def _leaves(self) -> Iterator[tuple[int, str, nn.Module, list[str]]]:
        for name, module in self.model.named_modules():
            own = [key for key, _ in module.named_parameters(recurse=False)]
            if own and all(key in own for key, _ in module.named_parameters()):
                yield module_size(module), name, module, own

    def load(self, memory: int | None = None) -> None:
        """Largest layers first, until ``memory`` is used up; the others stay where they are and patch as they run."""
        used = 0
        for size, name, module, keys in sorted(self._leaves(), key=lambda leaf: -leaf[0]):
            if memory is not None and used + size >= memory and hasattr(module, "comfy_cast_weights"):
                key = f"{name}.weight"
                if key in self.patches:
                    module.weight_function = [partial(calculate_weight, self.patches[key], dtype=torch.bfloat16)]
                module.comfy_cast_weights = True
                continue
            used += size
            for key in keys:
                self.patch_weight_to_device(f"{name}.{key}", self.load_device)
            module.to(self.load_device)

    def unpatch_model(self) -> None:
        for module in self.model.modules():
            if isinstance(module, CastWeightBiasOp):
                module.weight_function, module.comfy_cast_weights = (), False
        for key, weight in self.backup.items():
            assign(self.model, key, weight)
        self.backup.clear()
        self.model.to(self.offload_device)


def lora_keys(model: nn.Module) -> dict[str, str]:
    """Names in LoRA files, and the weights that they are for."""
    start, end = "diffusion_model.", ".weight"
    keys = [key for key in model.state_dict() if key.startswith(start) and key.endswith(end)]
    return {"lora_unet_" + key.removeprefix(start).removesuffix(end).replace(".", "_"): key for key in keys}


def load_lora(file: dict[str, torch.Tensor], keys: dict[str, str]) -> dict[str, Any]:
    """The patches of a LoRA file whose names are among ``keys``."""
    patches = {}
    for name, key in keys.items():
        if f"{name}.lora_up.weight" in file:
            up, down = (file[f"{name}.lora_{part}.weight"] for part in ("up", "down"))
            patches[key] = ("lora", (up, down, file[f"{name}.alpha"].item()))
    return patches
