"""Mixtures of experts on CUDA devices: fused where that is faster (routed.py), else decoded for vLLM's own kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
import vllm
from torch import nn
from tqdm.auto import tqdm
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload.layerwise import initialize_online_processing
from vllm.platforms import current_platform

from samebits.format.packed import PackedTensor
from samebits.integrations.vllm.layers import Decoded, check_loaded, is_new
from samebits.integrations.vllm.routed import Choices, Routing, are_supported, decoded
from samebits.integrations.vllm.weights import HELD, encode, hold
from samebits.plans.planner import Planner

_NAMES = ("w13_weight", "w2_weight")
_CHOICES = "sb_choices"  # of a layer
_known: WeakValueDictionary[tuple[Any, ...], Choices] = WeakValueDictionary()  # of an engine's layers that are alike


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
        layer.__dict__[_CHOICES] = self._choices(layer)

    def apply(self, layer: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        scales, routed = (kwargs.get(name, *args[i : i + 1]) for i, name in enumerate(("topk_weights", "topk_ids")))
        return super().apply(self._prepared(layer, x, scales, routed), x, *args, **kwargs)  # type: ignore[no-any-return]

    def apply_monolithic(self, layer: nn.Module, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        plain = Decoded(layer, **self._plain(layer, None))
        return super().apply_monolithic(plain, x, *args, **kwargs)  # type: ignore[no-any-return]

    def _prepared(self, layer: Any, x: torch.Tensor, scales: torch.Tensor, routed: torch.Tensor) -> Decoded:
        """The layer with weights as vLLM's kernels are to get them."""
        choices: Choices | None = layer.__dict__[_CHOICES]
        if choices and routed.shape[1:] == (choices.each,) and _suit(x, scales, routed):
            fused = choices.weights(list(_packed(layer).values()), routed)
            if fused:
                return Decoded(layer, **dict(zip(_NAMES, fused, strict=True)))
        return Decoded(layer, **self._plain(layer, routed))

    def _plain(self, layer: Any, routed: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Weights by name.

        Args:
            routed: numbers of the experts that are used, of all experts there are; None: not known yet.
        """
        reads_routed = self.unquantized_backend is UnquantizedMoeBackend.TRITON and _has_all_tokens(layer)
        return {name: decoded(packed, routed if reads_routed else None) for name, packed in _packed(layer).items()}

    def _choices(self, layer: Any) -> Choices | None:
        """None: its experts are always decoded."""
        packed = list(_packed(layer).values())
        is_triton = self.unquantized_backend is UnquantizedMoeBackend.TRITON and current_platform.is_cuda()
        if not is_triton or self.moe.has_bias or not _has_all_tokens(layer) or not are_supported(packed):
            return None
        device, shapes = packed[0].device, tuple(tuple(each.shape) for each in packed)
        kind = f"{layer.activation} {layer.apply_router_weight_on_input}"
        key = id(get_current_vllm_config()), shapes, device, layer.top_k, kind
        state = f"vllm={vllm.__version__} experts_of_a_token={layer.top_k} layer={kind}"
        made = Choices(packed, layer.top_k, partial(self._run, layer), partial(self._of, layer),
                       Planner.of(device.index or 0).store, state)  # fmt: skip
        return _known.setdefault(key, made)

    def _run(self, layer: Any, x: torch.Tensor, routing: Routing, weights: Iterable[Any]) -> torch.Tensor:
        """vLLM's own products."""
        given = Decoded(layer, **dict(zip(_NAMES, weights, strict=True)))
        return super().apply(given, x, routing.scales, routing.ids, None, None)  # type: ignore[no-any-return]

    def _of(self, layer: Any, routing: Routing) -> list[torch.Tensor]:
        return list(self._plain(layer, routing.ids).values())


def find(model: nn.Module, captured: Iterable[int], most: int, shows_progress: bool) -> Callable[[], None]:
    """How routed experts are multiplied, few tokens first: with numbers that graphs are captured of, and for others.

    Args:
        most: tokens that come at once.

    Returns:
        What has the latter used, when the memory that decoding takes has been measured.
    """
    found = {each for layer in model.modules() if (each := layer.__dict__.get(_CHOICES))}
    for choices in found:
        numbers = sorted([(tokens, False) for tokens in {*captured}] + [(rung, True) for rung in choices.rungs(most)])
        for tokens, is_rung in tqdm(numbers, "Finding plans for experts", disable=not shows_progress):
            if is_rung:
                choices.find_rung(tokens)
            else:
                choices.of(tokens, ahead=True)
        choices.forget_probes()  # before what is left is given to the cache

    def climb() -> None:
        for choices in found:
            choices.climb()

    return climb


def _packed(layer: nn.Module) -> Mapping[str, PackedTensor]:
    """A layer's weights that are packed, by name."""
    return {name: weight.packed for name, weight in layer.__dict__.get(HELD, {}).items()}


def _suit(x: torch.Tensor, scales: torch.Tensor, routed: torch.Tensor) -> bool:
    """Whether these are operands as the fused kernel takes them."""
    are_whole = x.is_contiguous() and scales.is_contiguous() and routed.is_contiguous()
    dtypes = scales.dtype is torch.float32 and routed.dtype in (torch.int32, torch.int64)
    return are_whole and dtypes and x.dim() == 2 and len(x) > 0 and x.data_ptr() % 16 == 0


def _has_all_tokens(layer: Any) -> bool:
    """Whether this rank's experts see its own tokens alone, by the numbers that the router gives."""
    parallel = layer.moe_config.moe_parallel_config
    is_alone = parallel.dp_size == 1 and parallel.pcp_size == 1 and not parallel.is_sequence_parallel
    return layer.expert_map is None and is_alone
