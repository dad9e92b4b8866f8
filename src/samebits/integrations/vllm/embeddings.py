"""Which of a model's embeddings and heads are packed, decided when it is loaded: they tell vLLM no name of their own,
many not even the model's quantization, and share parameters in ways that models write themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

import torch
from torch import nn
from vllm.config import CompilationConfig, CompilationMode, get_current_vllm_config
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)

try:
    from vllm.model_executor.model_loader.weight_tying import maybe_retie_word_embeddings
except ImportError:  # 0.26, which does not tie what a checkpoint has twice
    maybe_retie_word_embeddings = None

from samebits.integrations.vllm.layers import PackedEmbeddingMethod

_ASKED = "sb_quantization"  # of a layer: whom it has asked
_FIXED = ("deterministic", "emulate_precision_casts")  # options of Inductor's
_IS_READ = "replicated_embed"  # of models of DeepSeek V3.2, GLM 5 and dots3: that they fuse a look-up and a norm


class Quantization(Protocol):
    """What of a model is packed; see config.py."""

    min_weights: int

    def selects(self, prefix: str) -> bool: ...


def note(layer: nn.Module, quantization: Quantization) -> None:
    """That a layer has asked for its method: only by its layers can be told which model is quantized."""
    layer.__dict__[_ASKED] = quantization


def choosing_embeddings(original: Callable[..., Any]) -> Callable[..., Any]:
    """In front of the function that has a loaded model's layers process their weights."""

    @wraps(original)
    def process_weights_after_loading(model: nn.Module, model_config: Any, target_device: torch.device) -> None:
        quantization = next((each.__dict__[_ASKED] for each in model.modules() if _ASKED in each.__dict__), None)
        if quantization:
            if maybe_retie_word_embeddings:  # as vLLM does at first
                maybe_retie_word_embeddings(model, model_config)
            choose(model, quantization, keeps_lookups=_keeps_lookups(get_current_vllm_config().compilation_config))
        original(model, model_config, target_device)

    return process_weights_after_loading


def choose(model: nn.Module, quantization: Quantization, *, keeps_lookups: bool) -> None:
    """Give them the method for packed weights; a parameter is packed if that holds for all layers that share it.

    And for all their names. An embedding stays plain whose memory the model has found that a kernel of vLLM's may read.
    Look-ups of compiled models stay plain unless Inductor is told how to make and round sums: it has to make the same
    kernels of a look-up and what is behind it. It stores a sum of residuals once that has read so many tensors, two of
    them for a look-up, and adds up a norm of what is stored in another order than one of what it has in registers.
    """
    names: dict[nn.Module, list[str]] = {}
    for name, layer in model.named_modules(remove_duplicate=False):
        names.setdefault(layer, []).append(name)
    read = {getattr(layer, "embed_tokens", None) for layer in names if getattr(layer, _IS_READ, False)}
    users: dict[int, list[nn.Module]] = {}
    for layer in names:
        for parameter in layer._parameters.values():
            users.setdefault(id(parameter), []).append(layer)

    def may_be_packed(layer: nn.Module) -> bool:
        is_plain = isinstance(layer, VocabParallelEmbedding) and type(layer.quant_method) is UnquantizedEmbeddingMethod
        is_free = isinstance(layer, ParallelLMHead) or not (keeps_lookups or layer in read)
        return is_plain and is_free and all(map(quantization.selects, names[layer]))

    packable = {layer for layer in names if may_be_packed(layer)}
    for layer in packable:
        if packable.issuperset(users[id(layer.weight)]):
            layer.quant_method = PackedEmbeddingMethod(quantization.min_weights)
            layer.use_fused_embedding = False  # type: ignore[assignment]  # which reads the weight's memory


def _keeps_lookups(config: CompilationConfig) -> bool:
    """Whether look-ups stay plain: where Inductor decides for itself how sums behind them are made."""
    is_compiled = config.mode is not None and config.mode != CompilationMode.NONE
    return is_compiled and not all(config.inductor_compile_config.get(option) for option in _FIXED)
