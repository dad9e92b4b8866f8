"""Linear layers, embeddings and heads: vLLM's own methods, but that the weight is packed once it is loaded.

On CUDA devices a product is fused where vLLM's own is F.linear, of which samebits knows the bits. Everywhere else the
weight is decoded, and handed to vLLM's own method.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm import envs
from vllm.config import CUDAGraphMode, get_current_vllm_config
from vllm.forward_context import get_forward_context, is_forward_context_available
from vllm.model_executor.layers.linear import UnquantizedLinearMethod, register_weight_loader_v2_supported_method
from vllm.model_executor.layers.utils import default_unquantized_gemm, dispatch_unquantized_gemm
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info, initialize_online_processing
from vllm.platforms import current_platform

from samebits.errors import InputError
from samebits.format.packed import PackedTensor
from samebits.integrations.vllm.weights import Encoded, Multiply, PackedWeight, encode, hold
from samebits.kernels.ops import decode_packed
from samebits.nn.packed_module import look_up
from samebits.plans import dispatch

_DONE = "_already_called_process_weights_after_loading"  # as in vLLM, which deletes it to load a layer anew


class Decoded:
    """A layer as vLLM's methods are to see it, with plain weights; what they put into it does not stay."""

    def __init__(self, layer: nn.Module, **weights: Any) -> None:
        self.__dict__.update(weights)
        self._layer = layer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def is_new(layer: nn.Module) -> bool:
    """Whether a layer is still to be processed: vLLM asks for that as soon as it is loaded, and once more for all."""
    if getattr(layer, _DONE, False):
        return False
    setattr(layer, _DONE, True)
    return True


def check_loaded(layer: nn.Module) -> None:
    """Refuse a layer that got no weights: on the meta device what a model writes by itself would be lost.

    Raises:
        InputError
    """
    is_dummy = get_current_vllm_config().load_config.load_format == "dummy"
    if not is_dummy and not get_layerwise_info(layer).load_numel:
        where = getattr(layer, "prefix", type(layer).__name__)
        mend = "if the model writes to it in a way of its own, name it in `exclude`"
        raise InputError("no weights were loaded into this layer", where=where, mend=mend)


class _Packed:
    """What the methods of this file share; their other base is the one of vLLM's for plain weights."""

    supports_pre_processed_weights = False  # what another process has packed

    def __init__(self, min_weights: int) -> None:
        super().__init__()
        self.min_weights = min_weights

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if not is_new(layer):
            return
        encoded = self.encoded(layer)
        if encoded is None:
            super().process_weights_after_loading(layer)  # type: ignore[misc]
            return
        made = hold(layer, "weight", encoded, self._multiplier(layer))
        layer.register_buffer("sb_handle", made.handle, persistent=False)
        layer.sb_shape = tuple(made.packed.shape)  # type: ignore[assignment]

    def encoded(self, layer: nn.Module) -> Encoded | None:
        """None: it stays plain."""
        return encode(layer, "weight", self.min_weights)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        shape: Any = getattr(layer, "sb_shape", None)
        if shape is None:
            return super().apply(layer, x, bias)  # type: ignore[misc, no-any-return]
        return torch.ops.samebits.vllm_product(x, layer.sb_handle, bias, shape[0])  # type: ignore[no-any-return]

    def _multiplier(self, layer: nn.Module) -> Multiply:
        gemm = getattr(self, "_gemm_impl", None) or dispatch_unquantized_gemm()
        if current_platform.is_cuda() and gemm is default_unquantized_gemm and not envs.VLLM_BATCH_INVARIANT:
            return _fused
        prepare, multiply = super().process_weights_after_loading, super().apply  # type: ignore[misc]
        prepare(Decoded(layer, weight=layer.weight))  # oneDNN asks for AMX, which attention uses

        def decode_first(packed: PackedTensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            plain = Decoded(layer, weight=nn.Parameter(decode_packed(packed), requires_grad=False))
            prepare(plain)
            return multiply(plain, x, bias)  # type: ignore[no-any-return]

        return decode_first


def _fused(packed: PackedTensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    made: torch.Tensor | None = dispatch.product_again(x, packed.data, bias)
    if made is not None:
        return made
    return dispatch.linear(x, packed, bias) if _is_piece() else dispatch.linear_of_module(x, packed, bias)


def is_fused(weight: PackedWeight) -> bool:
    """Whether products with it are fused where that is faster."""
    return weight.multiply is _fused


def _is_piece() -> bool:
    """Whether a part of the model is captured: what would be decoded ahead for another part could not be used there."""
    if not torch.cuda.is_current_stream_capturing() or not is_forward_context_available():
        return False
    return get_forward_context().cudagraph_runtime_mode is CUDAGraphMode.PIECEWISE  # NONE, where all of it is captured


@register_weight_loader_v2_supported_method
class PackedLinearMethod(_Packed, UnquantizedLinearMethod):  # type: ignore[misc]
    """Of a linear layer, which has no memory before its weights are there."""

    uses_meta_device = True

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        with torch.device("meta"):
            super().create_weights(layer, *args, **kwargs)
        initialize_online_processing(layer)

    def encoded(self, layer: nn.Module) -> Encoded | None:
        check_loaded(layer)
        return super().encoded(layer)


class PackedEmbeddingMethod(_Packed, UnquantizedEmbeddingMethod):  # type: ignore[misc]
    """Of an embedding or a head that is loaded (embeddings.py); a parameter that several share is packed once."""

    def encoded(self, layer: nn.Module) -> Encoded | None:
        weight: Any = layer.weight
        if hasattr(weight, "sb_encoded"):  # for a layer that shares it
            return weight.sb_encoded  # type: ignore[no-any-return]
        weight.sb_encoded = super().encoded(layer)
        return weight.sb_encoded  # type: ignore[no-any-return]

    def embedding(self, layer: nn.Module, input_: torch.Tensor) -> torch.Tensor:
        shape: Any = getattr(layer, "sb_shape", None)
        if shape is None:
            return super().embedding(layer, input_)  # type: ignore[no-any-return]
        handle: Any = layer.sb_handle
        return look_up(lambda ids: torch.ops.samebits.vllm_rows(handle, ids, shape[1]), input_)
