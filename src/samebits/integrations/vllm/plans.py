"""Plans for all that vLLM captures CUDA graphs of, found before it measures what memory is left for the cache.

While a graph is captured no plan can be looked for. Heads are not in graphs: they get as many tokens as requests run,
and each number that is new would stop all of these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any, NamedTuple

from torch import nn
from tqdm.auto import tqdm
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import enable_tqdm

from samebits.format.header import Header
from samebits.integrations.vllm.layers import is_fused
from samebits.integrations.vllm.weights import HELD
from samebits.kernels.linear.products import is_supported
from samebits.kernels.residents import Resident, resident
from samebits.plans.environment import blas_state
from samebits.plans.key import PlanKey
from samebits.plans.planner import FEW_TOKENS, Planner


class _Kind(NamedTuple):
    device: int
    rows: int
    columns: int
    has_bias: bool


class _Weights(NamedTuple):
    """Of a kind: the header of one, the numbers of tokens that they get, and what is known of their bytes."""

    header: Header
    tokens: set[int]
    kept: list[Resident]


def finding_plans(original: Callable[..., Any]) -> Callable[..., Any]:
    """In front of the method of a GPU's worker that measures memory."""

    @wraps(original)
    def determine_available_memory(self: Any) -> Any:
        shows_progress = enable_tqdm(self.load_config.use_tqdm_on_load)
        captured = self.vllm_config.compilation_config.cudagraph_capture_sizes or ()
        find(self.get_model(), captured, self.scheduler_config.max_num_seqs, shows_progress)
        return original(self)

    return determine_available_memory


def find(model: nn.Module, captured: Iterable[int], requests: int, shows_progress: bool) -> None:
    """The plans of all fused products in a model.

    Args:
        captured: numbers of tokens that graphs are captured for; without any, all products are made one at a time, and
            their plans are found when they are.
        requests: that run at once, at most.
    """
    kinds, state = _kinds(model, set(captured), requests), blas_state()
    wanted = [(kind, tokens) for kind, found in kinds.items() for tokens in sorted(found.tokens)]
    if state is None or not wanted:
        return
    [device] = {kind.device for kind in kinds}  # of this rank
    keys = [PlanKey(kind.rows, kind.columns, tokens, kind.has_bias, state) for kind, tokens in wanted]
    headers = [kinds[kind].header for kind, _ in wanted]
    outcomes = Planner.of(device).outcomes(list(zip(keys, headers, strict=True)))
    shown = tqdm(outcomes, "Finding plans", len(wanted), disable=not shows_progress)
    for (kind, tokens), outcome in zip(wanted, shown, strict=True):
        if outcome.plan and tokens > FEW_TOKENS:
            for kept in kinds[kind].kept:
                kept.planned.add(tokens)


def _kinds(model: nn.Module, captured: set[int], requests: int) -> dict[_Kind, _Weights]:
    kinds: dict[_Kind, _Weights] = {}
    for layer in model.modules() if captured else ():
        weight = layer.__dict__.get(HELD, {}).get("weight")
        if weight is None or not is_fused(weight):
            continue
        packed = weight.packed
        tokens = captured
        if isinstance(layer, VocabParallelEmbedding):
            tokens = set(range(1, min(requests, FEW_TOKENS) + 1))
        device, (rows, columns) = packed.data.get_device(), packed.shape
        found = kinds.setdefault(_Kind(device, rows, columns, _adds_bias(layer)), _Weights(packed.header, set(), []))
        found.tokens.update(each for each in tokens if is_supported(packed.header, each, device))
        if kept := resident(packed.data):
            found.kept.append(kept)
    return kinds


def _adds_bias(layer: Any) -> bool:
    """Whether a layer's product adds its bias: of those that sum up over ranks, only the first rank's does."""
    is_left = getattr(layer, "skip_bias_add", False) or (isinstance(layer, RowParallelLinear) and layer.tp_rank > 0)
    return getattr(layer, "bias", None) is not None and not is_left
