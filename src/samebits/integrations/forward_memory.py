"""What a forward pass of a language model takes in memory beside its weights, found without any: on the meta device.

The model runs there, and each operator's outputs are counted while they live: activations, and the cache as it grows.
Weights that are decoded are counted while their products are made. In a pass over many tokens that is every packed
one, those of products of one input at once, as one launch makes them (plans/together.py); with few tokens products are
fused and decode nothing. Of routed experts a stack is decoded at a time, or, behind the prompt, the matrices that
transformers gathers for each token, of which the plain model has both products' at once. Attention is counted as
kernels have it that keep no scores.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache
from transformers.integrations import moe

from samebits.format.geometry import EXPERTS_DIMENSIONS
from samebits.integrations.transformers.cache import states_of
from samebits.integrations.transformers.experts import is_experts
from samebits.kernels.linear.experts import may_be_fused
from samebits.plans.experts import FEW_PAIRS
from samebits.plans.planner import FEW_TOKENS

_EXPERTS = "samebits_meta"  # as an implementation of transformers' experts


@dataclass(frozen=True)
class Pass:
    """Bytes beside the weights at the most, in the course of a forward pass.

    Attributes:
        packed: of the compressed model, with what is decoded.
        plain: of the model as it was.
        cache: of the cache behind it, which counts in both.
    """

    packed: int
    plain: int
    cache: int


class ForwardMemory:
    """Forward passes of a model on the meta device.

    Args:
        model: of transformers, which generates.
        packed: its modules that decode weights for their forward, and these.
    """

    def __init__(self, model: Any, packed: Mapping[nn.Module, Sequence[nn.Parameter]]) -> None:
        self._model, self._packed = model, packed
        self._known: dict[tuple[int, int, int], Pass] = {}

    def prompt(self, tokens: int, batch: int) -> Pass:
        """Over the first tokens of each sequence of a batch.

        Raises:
            RuntimeError, NotImplementedError, AttributeError, ValueError: the model needs values, or has no cache.
        """
        return self._pass(0, tokens, batch)

    def step(self, context: int, batch: int) -> Pass:
        """Over one more token, the last of ``context``.

        Raises:
            as prompt.
        """
        return self._pass(context - 1, 1, batch)

    def _pass(self, before: int, tokens: int, batch: int) -> Pass:
        key = before, tokens, batch
        if key not in self._known:
            self._known[key] = self._measured(*key)
        return self._known[key]

    @torch.inference_mode()
    def _measured(self, before: int, tokens: int, batch: int) -> Pass:
        live = _Live(self._model)
        with _as_kernels(self._model):
            calls = self._calls(before, tokens, batch)
            with live:
                cache = self._run(before, batch, None) if before else None
                live.restart()
                with self._counted(live, iter(calls)):
                    cache = self._run(tokens, batch, cache)
        size = sum(state.nbytes for layer in cache.layers for state in states_of(layer).values())
        return Pass(live.most.packed, live.most.plain, size)

    def _run(self, tokens: int, batch: int, cache: Any) -> Any:
        """The cache behind a pass."""
        ids = torch.zeros(batch, tokens, dtype=torch.int64, device="meta")
        options: dict[str, Any] = {} if cache is None else {"past_key_values": cache}
        if "logits_to_keep" in inspect.signature(self._model.forward).parameters:
            options["logits_to_keep"] = 1
        output = self._model(input_ids=ids, use_cache=True, **options)
        return next(value for value in output.values() if isinstance(value, Cache))

    @contextmanager
    def _counted(self, live: _Live, calls: Iterator[_Call]) -> Iterator[None]:
        """Inside, what is decoded counts while a module with packed weights runs."""
        held: list[_Call] = []

        def begin(*_: Any) -> None:
            call = next(calls)
            live.count(call.decoded, call.made, call.gathered)
            held.append(call)

        def end(*_: Any) -> None:
            call = held.pop()
            live.count(-call.decoded, 0, -call.gathered)

        with ExitStack() as stack:
            for module in self._packed:
                stack.callback(module.register_forward_pre_hook(begin).remove)
                stack.callback(module.register_forward_hook(end).remove)
            yield

    def _calls(self, before: int, tokens: int, batch: int) -> list[_Call]:
        """Of the modules with packed weights, in their order."""
        seen: list[_Seen] = []

        def note(module: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any], output: Any) -> None:
            given, *others = (each for each in (*inputs, *options.values()) if isinstance(each, torch.Tensor))
            made = output.nbytes if isinstance(output, torch.Tensor) else 0
            has_many = given.numel() > FEW_TOKENS * given.shape[-1]
            experts = _Experts.of(module, self._packed[module], others[0].numel() if others else 0, gathers=before > 0)
            dense = sum(2 * each.numel() for each in self._packed[module] if each.dim() < EXPERTS_DIMENSIONS)
            decoded = experts.decoded + (dense if has_many else 0)
            place = module if experts.decoded or experts.gathered else None
            seen.append(_Seen(given, place, decoded, made if has_many else 0, experts.gathered))

        cache = self._run(before, batch, None) if before else None
        with ExitStack() as stack:
            for module in self._packed:
                stack.callback(module.register_forward_hook(note, with_kwargs=True).remove)
            self._run(tokens, batch, cache)
        groups = groupby(seen, key=lambda each: (id(each.given), id(each.alone)))
        return [call for _, group in groups for call in _together([*group])]


class _Experts(NamedTuple):
    """Bytes of routed experts' matrices while their products are made.

    Attributes:
        decoded: of the compressed model, one stack after the other.
        gathered: of the plain one, for both products.
    """

    decoded: int
    gathered: int

    @classmethod
    def of(cls, module: nn.Module, weights: Sequence[torch.Tensor], pairs: int, *, gathers: bool) -> _Experts:
        """
        Args:
            weights: of the module; those of three dimensions are stacks. It holds all of them, if it is no module of
                routed experts.
            pairs: of a token and an expert.
            gathers: a matrix is read for each pair, else whole stacks are.
        """
        stacks = [each for each in weights if each.dim() >= EXPERTS_DIMENSIONS]
        if not is_experts(type(module)):
            return cls(sum(2 * each.numel() for each in stacks), 0)
        is_transposed = getattr(module, "is_transposed", False)
        read = [2 * (pairs * each[0].numel() if gathers else each.numel()) for each in stacks]
        are_fused = [pairs <= FEW_PAIRS and may_be_fused(tuple(each.shape)) and not is_transposed for each in stacks]
        decoded = (size for size, is_fused in zip(read, are_fused, strict=True) if not is_fused)
        return cls(max(decoded, default=0), sum(read) if gathers else 0)


class _Seen(NamedTuple):
    """Of a module: its input, held; bytes of its weights that are decoded, and of its output if others may make it."""

    given: torch.Tensor
    alone: nn.Module | None  # itself, if none of its weights is decoded with others'
    weights: int
    made: int
    gathered: int  # see _Experts


@dataclass(frozen=True)
class _Call:
    """Bytes decoded while a module runs; and made from its beginning on beside what its operators make, or no more."""

    decoded: int
    made: int
    gathered: int


def _together(group: Sequence[_Seen]) -> Iterator[_Call]:
    """Products of one input, all of which the first makes."""
    yield _Call(sum(each.weights for each in group), sum(each.made for each in group[1:]), group[0].gathered)
    for each in group[1:]:
        yield _Call(0, -each.made, each.gathered)


class _Bytes(NamedTuple):
    packed: int
    plain: int


class _Live(TorchDispatchMode):
    """Counts what operators make while it lives.

    Attributes:
        most: of both models, since it was set.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = _Bytes(0, 0)
        self._decoded = self._made = self._gathered = self._bytes = 0
        self._weights = {each.untyped_storage()._cdata for each in (*model.parameters(), *model.buffers())}
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def restart(self) -> None:
        """From now on."""
        self._forget()
        self.most = _Bytes(self._bytes, self._bytes)

    def count(self, decoded: int, made: int, gathered: int) -> None:
        """More that is decoded, or less; and of what is made, and of what the plain model gathers."""
        self._decoded += decoded
        self._made += made
        self._gathered += gathered
        self._forget()
        self._note()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        self._forget()
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._live and storage._cdata not in self._weights:
                    self._live[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                    self._bytes += storage.nbytes()
        self._note()
        return output

    def _forget(self) -> None:
        for key in [key for key, (reference, _) in self._live.items() if reference.expired()]:
            self._bytes -= self._live.pop(key)[1]

    def _note(self) -> None:
        packed, plain = self._bytes + self._made + self._decoded, self._bytes + self._gathered
        self.most = _Bytes(max(self.most.packed, packed), max(self.most.plain, plain))


@contextmanager
def _as_kernels(model: nn.Module) -> Iterator[None]:
    """Inside, attention and experts make what they make on a GPU."""
    found: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
    configs = list({id(config): config for config in found}.values())
    before = [config._experts_implementation for config in configs]
    moe.ALL_EXPERTS_FUNCTIONS.register(_EXPERTS, _experts)
    try:
        for config in configs:
            config._experts_implementation = _EXPERTS
        with _WithoutScores():
            yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._experts_implementation = name


class _WithoutScores(TorchFunctionMode):
    """Attention gives what flash attention does, laid out in memory as it does, and makes nothing else."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, _, value = _operands(*args, **(kwargs or {}))
        *front, heads, tokens = query.shape[:-1]
        return query.new_empty(*front, tokens, heads, value.shape[-1]).transpose(-2, -3)


def _operands(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **options: Any) -> Any:
    return query, key, value


def _experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """What grouped_mm makes, for a module of experts, but for indices."""
    rows, columns = top_k_index.numel(), hidden_states.shape[-1]
    inner = self.down_proj.numel() // (self.down_proj.shape[0] * columns)
    selected = hidden_states.new_empty(rows, columns)
    up = selected.new_empty(rows, (1 + self.has_gate) * inner)
    up = self._apply_gate(up) if self.has_gate else self.act_fn(up)
    down = up.new_empty(rows, columns)
    weighted = down * top_k_weights.reshape(-1, 1)
    summed: torch.Tensor = weighted.view(-1, top_k_index.shape[-1], columns).sum(dim=1)
    return summed.to(hidden_states.dtype)
