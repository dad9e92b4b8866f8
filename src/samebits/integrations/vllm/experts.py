"""Mixtures of experts on CUDA devices: the experts that tokens are routed to are decoded for vLLM's own kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing

from samebits.integrations.vllm.layers import Decoded, check_loaded, is_new
from samebits.integrations.vllm.weights import HELD, encode, hold
from samebits.kernels.ops import decode_experts, decode_packed

_NAMES = ("w13_weight", "w2_weight")
_EVERY = 4  # with so many choices for each expert, nearly all are chosen


class PackedExpertsMethod(UnquantizedFusedMoEMethod):  # type: ignore[misc]
    """Of the routed experts of a layer, whose matrices are two parameters [experts, rows, columns]."""

    uses_meta_device = True
    supports_eplb = False  # which moves experts between parameters

    def __init__(self, min_weights: int, moe: Any) -> None:
        super().__init__(moe)
        self.min_weights = min_weights
        self.supports_pre_processed_weights = False  # as of _Packed

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        with torch.device("meta"):
            super().create_weights(layer, *args, **kwargs)
        initialize_online_processing(layer)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if not is_new(layer):
            return
        check_loaded(layer)
        super().process_weights_after_loading(layer)
        for name in _NAMES:
            encoded = encode(layer, name, self.min_weights)
            if encoded is not None:
                hold(layer, name, encoded)

    def apply(self, layer: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        routed = kwargs["topk_ids"] if "topk_ids" in kwargs else args[1]
        return super().apply(self._decoded(layer, routed), x, *args, **kwargs)  # type: ignore[no-any-return]

    def apply_monolithic(self, layer: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().apply_monolithic(self._decoded(layer, None), x, *args, **kwargs)  # type: ignore[no-any-return]

    def _decoded(self, layer: Any, routed: torch.Tensor | None) -> Decoded:
        """The layer with plain weights.

        Args:
            routed: numbers of the experts that are used, of all experts there are; None: not known yet.
        """
        reads_routed = self.unquantized_backend is UnquantizedMoeBackend.TRITON and _has_all_tokens(layer)
        plain = {}
        for name, weight in getattr(layer, HELD, {}).items():
            packed = weight.packed
            if routed is None or not reads_routed or routed.numel() >= packed.shape[0] * _EVERY:
                plain[name] = decode_packed(packed)
            else:
                plain[name] = decode_experts(packed, routed.clamp(0, packed.shape[0] - 1))  # -1: of no token
        return Decoded(layer, **plain)


def _has_all_tokens(layer: Any) -> bool:
    """Whether this rank's experts see its own tokens alone, by the numbers that the router gives."""
    parallel = layer.moe_config.moe_parallel_config
    is_alone = parallel.dp_size == 1 and parallel.pcp_size == 1 and not parallel.is_sequence_parallel
    return layer.expert_map is None and is_alone
