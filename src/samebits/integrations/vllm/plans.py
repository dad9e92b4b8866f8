"""Plans for all that vLLM captures CUDA graphs of, found before it measures what memory is left for the cache.

While a graph is captured no plan can be looked for. Heads are not in graphs: they get as many tokens as requests run,
and each number that is new would stop all of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any

from torch import nn
from tqdm.auto import tqdm
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import enable_tqdm

from samebits.format.packed import PackedTensor
from samebits.integrations.vllm import experts
from samebits.integrations.vllm.layers import is_fused
from samebits.integrations.vllm.weights import HELD
from samebits.kernels.linear.products import is_supported
from samebits.kernels.residents import resident
from samebits.plans.environment import blas_state
from samebits.plans.key import PlanKey
from samebits.plans.planner import FEW_TOKENS, Planner


def finding_plans(original: Callable[..., Any]) -> Callable[..., Any]:
    """In front of the method of a GPU's worker that measures memory."""

    @wraps(original)
    def determine_available_memory(self: Any) -> Any:
        shows_progress = enable_tqdm(self.load_config.use_tqdm_on_load)
        captured = self.vllm_config.compilation_config.cudagraph_capture_sizes or ()
        model = self.get_model()
        find(model, captured, self.scheduler_config.max_num_seqs, shows_progress)
        most = self.scheduler_config.max_num_batched_tokens
        use_all = experts.find(model, captured, most, shows_progress)
        memory = original(self)
        use_all()
        return memory

    return determine_available_memory


def find(model: nn.Module, captured: Iterable[int], requests: int, shows_progress: bool) -> None:
    """The plans of all fused products in a model.

    Args:
        captured: numbers of tokens that graphs are captured for; without any, all products are made one at a time, and
            their plans are found when they are.
        requests: that run at once, at most.
    """
    weights = _weights(model, set(captured), requests)
    if not weights:
        return
    keys = sorted(weights)  # those of a shape follow each other
    planner = Planner.of(weights[keys[0]][0].data.get_device())  # a rank has one
    outcomes = planner.outcomes([(key, weights[key][0].header) for key in keys])
    for key, outcome in zip(keys, tqdm(outcomes, "Finding plans", len(keys), disable=not shows_progress), strict=True):
        for packed in weights[key] if outcome.plan and key.tokens > FEW_TOKENS else ():
            if kept := resident(packed.data):
                kept.planned.add(key.tokens)


def _weights(model: nn.Module, captured: set[int], requests: int) -> dict[PlanKey, list[PackedTensor]]:
    """Those that products are fused with, by what these are."""
    found: dict[PlanKey, list[PackedTensor]] = {}
    state = blas_state()
    if state is None or not captured:
        return found
    for layer in model.modules():
        weight = layer.__dict__.get(HELD, {}).get("weight")
        if weight is None or not is_fused(weight):
            continue
        packed, has_bias = weight.packed, _adds_bias(layer)
        rows, columns = packed.shape
        is_head = isinstance(layer, VocabParallelEmbedding)
        for tokens in range(1, min(requests, FEW_TOKENS) + 1) if is_head else captured:
            key = PlanKey(rows, columns, tokens, has_bias, state)
            if key in found or is_supported(packed.header, tokens, packed.data.get_device()):
                found.setdefault(key, []).append(packed)
    return found


def _adds_bias(layer: Any) -> bool:
    """Whether a layer's product adds its bias: of those that sum up over ranks, only the first rank's does."""
    is_left = getattr(layer, "skip_bias_add", False) or (isinstance(layer, RowParallelLinear) and layer.tp_rank > 0)
    return getattr(layer, "bias", None) is not None and not is_left
