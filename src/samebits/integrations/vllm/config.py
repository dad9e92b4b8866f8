"""What vLLM makes of a quantization_config: which layers get which method.

The methods are imported when a layer asks for one: this file is, in each process of each engine, whatever its model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.platforms import current_platform

from samebits.errors import InputError
from samebits.format.folder import KEY
from samebits.format.names import MIN_WEIGHTS, is_selected

_MIN_CAPABILITY = 80
_DRAFT = "draft_model."  # which vLLM puts in front of the names of a draft's linear layers alone
_LOAD_FORMATS = ("sharded_state", "runai_streamer_sharded", "tensorizer")


class SamebitsQuantization(QuantizationConfig):  # type: ignore[misc]
    """Which weights vLLM's layers hold packed.

    Args:
        min_weights: smaller ones stay as they are.
        include, exclude: shell patterns of vLLM's names, in which each part of a fused projection stands for itself
            (``model.layers.0.self_attn.q_proj.weight``); one of which a part is left alone stays plain.
    """

    def __init__(
        self, min_weights: int = MIN_WEIGHTS, include: Sequence[str] = (), exclude: Sequence[str] = ()
    ) -> None:
        super().__init__()
        self.min_weights, self.include, self.exclude = min_weights, include, exclude

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> SamebitsQuantization:
        """
        Args:
            config: the ``quantization_config`` of a config.json (FORMAT.md 7.4), or of vLLM's ``hf_overrides``.

        Raises:
            InputError, FormatError, VersionError: see SamebitsConfig.from_dict.
        """
        from samebits.integrations.transformers.quantizer import SamebitsConfig

        made = SamebitsConfig.from_dict(config)
        assert isinstance(made, SamebitsConfig)
        return cls(made.min_weights, made.include, made.exclude)

    def get_name(self) -> str:
        return KEY

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    @classmethod
    def get_min_capability(cls) -> int:
        return _MIN_CAPABILITY

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """None: vLLM's own for plain weights."""
        from vllm.config import get_current_vllm_config
        from vllm.model_executor.layers.fused_moe import RoutedExperts
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

        from samebits.integrations.vllm import embeddings, loader
        from samebits.integrations.vllm.experts import PackedExpertsMethod
        from samebits.integrations.vllm.layers import PackedLinearMethod

        vllm = get_current_vllm_config()
        _check(vllm)
        loader.register()  # before weights are loaded
        embeddings.note(layer, self)
        if isinstance(layer, LinearBase):
            is_special = type(layer).forward.__module__ != LinearBase.__module__
            is_plain = is_special or not self.selects(prefix)
            return UnquantizedLinearMethod() if is_plain else PackedLinearMethod(self.min_weights)
        is_packed = isinstance(layer, RoutedExperts) and current_platform.is_cuda() and vllm.lora_config is None
        if is_packed and self.selects(prefix):
            return PackedExpertsMethod(self.min_weights, layer.moe_config)
        return None  # also for embeddings, see embeddings.py

    def selects(self, prefix: str) -> bool:
        """Whether all weights are to be packed that vLLM fuses into the one of this name."""
        path, dot, leaf = prefix.removeprefix(_DRAFT).rpartition(".")
        parts = self.packed_modules_mapping.get(leaf, [leaf])
        names = [f"{path}{dot}{part}.weight" for part in parts]
        return all(is_selected(name, self.include, self.exclude) for name in names)


def _check(vllm: Any) -> None:
    """
    Raises:
        InputError: vLLM is to load or to move weights in ways that know plain ones only.
    """
    load_format, offload = vllm.load_config.load_format, vllm.offload_config
    if load_format in _LOAD_FORMATS:
        raise InputError(f"load_format {load_format} does not know packed weights", mend="use load_format auto")
    if offload.uva.cpu_offload_gb or offload.prefetch.offload_group_size:
        raise InputError("vLLM's offloading cannot move packed weights", mend="leave out cpu_offload_gb and offload_*")


def register() -> None:
    register_quantization_config(KEY)(SamebitsQuantization)
