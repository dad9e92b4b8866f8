"""Find a model's plans ahead of its first run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple

import torch
from torch import nn

from samebits.errors import InputError
from samebits.format.geometry import EXPERTS_DIMENSIONS
from samebits.format.header import Header
from samebits.format.packed import PackedTensor
from samebits.kernels.linear.experts import VARIANTS
from samebits.kernels.linear.products import is_supported
from samebits.kernels.residents import Resident, resident
from samebits.nn.offload import streaming_device
from samebits.nn.packed_linear import PackedLinearModule
from samebits.nn.packed_module import PackedModule, check_module
from samebits.plans.calibrate import UNSUPPORTED
from samebits.plans.environment import blas_state
from samebits.plans.experts import searching_at_once, steps_plan
from samebits.plans.key import PlanKey
from samebits.plans.planner import FEW_TOKENS, Planner
from samebits.plans.store import ExpertsOutcome, Outcome
from samebits.progress import Progress

OTHER_LAYOUT = "its input has gaps between rows, is transposed, or has more than three dimensions"
UNKEYED = "no plan is made while TunableOp or a changed workspace decides over cuBLAS"
CHANGING = "routed experts get other numbers of tokens in each call"
MAX_NUMBERS = 8  # of many tokens that a kind of weight gets, unless they change from call to call
LEARNING_CALLS = 2  # until products of one input are made by one launch, or are known to be faster one by one
_Sizes = dict[PackedLinearModule, set[int]]  # numbers of tokens


@dataclass(frozen=True)
class Prepared:
    """One kind of product in a model, and what was found for it.

    Attributes:
        rows, columns: of the weight.
        tokens: rows of the activations.
        modules: how many modules multiply so.
    """

    rows: int
    columns: int
    tokens: int
    has_bias: bool
    modules: int
    outcome: Outcome


@dataclass(frozen=True)
class PreparedExperts:
    """One kind of product with routed experts in a model's steps, and what was found for it.

    Attributes:
        experts, rows, columns: of the weight, a matrix for each expert.
        pairs: of a token and one of its experts.
        modules: how many modules multiply so.
    """

    experts: int
    rows: int
    columns: int
    pairs: int
    modules: int
    outcome: ExpertsOutcome


@dataclass(frozen=True)
class Preparation:
    """What ``prepare`` found; as a text, a line for each kind of product.

    Attributes:
        products: each kind, and what was found for it.
        experts: likewise, with routed experts.
    """

    products: tuple[Prepared, ...]
    experts: tuple[PreparedExperts, ...] = ()

    @property
    def fused(self) -> int:
        """Kinds of products that are fused."""
        fused = [product.outcome.fused for product in self.products] + [each.outcome.fused for each in self.experts]
        return len(fused) - fused.count(None)

    @property
    def fallback(self) -> int:
        """Kinds of products whose weight is decoded first."""
        return len(self.products) + len(self.experts) - self.fused

    def __str__(self) -> str:
        lines = [f"{self.fused} kinds of products fused, {self.fallback} decoded first"]
        for product in self.products:
            bias = ", bias" if product.has_bias else ""
            shape = f"{product.rows} x {product.columns}, {product.tokens} tokens{bias}, {product.modules} modules"
            lines.append(f"  {shape}: {product.outcome.fused or product.outcome.reason}")
        for each in self.experts:
            how = each.outcome.reason if each.outcome.fused is None else VARIANTS[each.outcome.fused]
            shape = f"{each.experts} experts of {each.rows} x {each.columns}, {each.pairs} pairs"
            lines.append(f"  {shape}, {each.modules} modules: {how}")
        return "\n".join(lines)


class _Kind(NamedTuple):
    """Of weights."""

    device: int
    rows: int
    columns: int
    has_bias: bool


class _Weight(NamedTuple):
    """One that a product may be fused with."""

    module: PackedLinearModule
    header: Header

    @property
    def kept(self) -> Resident | None:
        """What is known of its bytes, if they are on a GPU."""
        data = self.module.sb_data("weight")[0]
        return resident(data) if data.is_cuda else None

    def forget_products(self) -> None:
        """So that the next ones are made by the plans that are found now."""
        kept = self.kept
        if kept:
            kept.forget_products()
            kept.is_changing = False

    def expect_changes(self) -> None:
        """That the next products will have other numbers of tokens, if many."""
        kept = self.kept
        if kept:
            kept.is_changing = True

    def expect(self, tokens: int) -> None:
        """That there is a plan for so many."""
        kept = self.kept
        if kept and tokens > FEW_TOKENS:
            kept.planned.add(tokens)


class _Wanted(NamedTuple):
    """A kind of product.

    Attributes:
        search: what a plan is looked for with; None: there is a reason why not.
    """

    kind: _Kind
    users: list[_Weight]
    tokens: int
    search: tuple[PlanKey, Header] | None
    reason: str

    @classmethod
    def of(cls, kind: _Kind, users: list[_Weight], tokens: int, changing: set[int], state: str | None) -> _Wanted:
        header = next((each.header for each in users if is_supported(each.header, tokens, kind.device)), None)
        if tokens in changing:
            return cls(kind, users, tokens, None, CHANGING)
        if header is None:
            return cls(kind, users, tokens, None, UNSUPPORTED)
        if state is None:
            return cls(kind, users, tokens, None, UNKEYED)
        key = PlanKey(kind.rows, kind.columns, tokens, kind.has_bias, state)
        return cls(kind, users, tokens, (key, header), "")


def prepare(
    model: nn.Module,
    batch_sizes: Sequence[int] | None = None,
    *,
    call: Callable[[], object] | None = None,
    progress: Progress | None = None,
) -> Preparation:
    """Find the plans of every packed linear layer on a GPU, with torch's settings as they are now.

    Without this they are found at the first call of each kind, which takes a moment then, and not at all while a CUDA
    graph is captured. It finds those of routed experts in transformers' models, too: of the steps of ``generate`` for
    ``batch_sizes``, and of what ``call`` does.

    Args:
        model: or any module of one, packed and on its GPU; on a CPU there is nothing to find.
        batch_sizes: numbers of tokens in one call of a layer. When text is generated: sequences in the batch. One if
            there is no ``call`` either.
        call: runs the model, if there is something to prepare: once, and each layer is prepared for as many tokens as
            it gets, but for routed experts with many, whose numbers no other call has; then twice more, and layers that
            share an input are learned, and which weights to decode ahead. For models whose layers get different numbers
            of tokens, as those of diffusion models do.
        progress: is called with the number of plans found and their total.

    Raises:
        InputError: no module, or batch sizes that are no whole numbers from 1 on.
    """
    check_module(model, "give a model, of a pipeline one of its parts")
    if batch_sizes is None:
        batch_sizes = () if call else (1,)
    batch_sizes = _whole_numbers(batch_sizes)
    kinds = _kinds(model)
    for weights in kinds.values():
        for weight in weights:
            weight.forget_products()
    sizes = {weight.module: set(batch_sizes) for weights in kinds.values() for weight in weights}
    left = {module: set[int]() for module in sizes}
    if call and (sizes or any(_stacks(model))):
        _note_tokens(call, sizes, left)
    changing = {kind: _changing(weights, sizes, batch_sizes) for kind, weights in kinds.items()}
    state, steps = blas_state(), _steps(model, batch_sizes)
    wanted = [_Wanted.of(*each, changing[each[0]], state) for each in _products(kinds, sizes)]
    searches: dict[int, list[tuple[PlanKey, Header]]] = {}
    for each in wanted:
        if each.search:
            searches.setdefault(each.kind.device, []).append(each.search)
    found = {device: Planner.of(device).outcomes(keys) for device, keys in searches.items()}
    products = []
    for kind, users, tokens, search, reason in wanted:
        outcome = next(found[kind.device]) if search else Outcome(None, reason)
        for weight in users:
            if reason == CHANGING:
                weight.expect_changes()
            elif outcome.plan:
                weight.expect(tokens)
        products.append(Prepared(kind.rows, kind.columns, tokens, kind.has_bias, len(users), outcome))
        if progress:
            progress(len(products), len(wanted) + len(steps))
    experts = []
    for pairs, stacks in steps:
        count, rows, columns = stacks[0].shape
        known = steps_plan(stacks[0], pairs) or ExpertsOutcome(None, UNKEYED)
        experts.append(PreparedExperts(count, rows, columns, pairs, len(stacks), known))
        if progress:
            progress(len(products) + len(experts), len(wanted) + len(steps))
    if call and products:
        for _ in range(LEARNING_CALLS):
            call()
    for kind, users, tokens in _products(kinds, left):
        outcome = Outcome(None, OTHER_LAYOUT)
        products.append(Prepared(kind.rows, kind.columns, tokens, kind.has_bias, len(users), outcome))
    return Preparation(tuple(products), tuple(experts))


def _stacks(model: nn.Module) -> Iterator[tuple[PackedModule, PackedTensor]]:
    """Experts on a GPU, whose products find their plans when they are made."""
    for module in model.modules():
        if not isinstance(module, PackedModule):
            continue
        for name, recipe in module.sb_recipes.items():
            if recipe.whole is not None and len(recipe.shape) == EXPERTS_DIMENSIONS:
                [data] = module.sb_data(name)
                if data.is_cuda:
                    yield module, PackedTensor(recipe.whole, data)


def _steps(model: nn.Module, batch_sizes: Sequence[int]) -> list[tuple[int, list[PackedTensor]]]:
    """Numbers of rows of products with routed experts in steps of so many tokens, and the experts of each kind."""
    kinds: dict[tuple[Any, ...], list[PackedTensor]] = {}
    every = sorted({*batch_sizes})
    for module, packed in _stacks(model):
        for tokens in every:
            pairs = module.sb_routed_rows(tokens)
            if pairs is not None:
                kinds.setdefault((packed.data.get_device(), packed.shape, pairs), []).append(packed)
    return [(pairs, stacks) for (_, _, pairs), stacks in kinds.items()]


def _whole_numbers(batch_sizes: Sequence[int]) -> list[int]:
    try:
        sizes = [index(size) for size in batch_sizes]
    except TypeError:
        sizes = [0]
    if min(sizes, default=1) < 1:
        raise InputError(f"batch sizes {batch_sizes!r}", mend="give a list of whole numbers from 1 on")
    return sizes


def _note_tokens(call: Callable[[], object], sizes: _Sizes, left: _Sizes) -> None:
    """Add the numbers of tokens that each of these modules gets in a call; to ``left`` of inputs without plans."""

    def note(module: Any, inputs: tuple[torch.Tensor, ...], named: dict[str, torch.Tensor]) -> None:
        [x] = (*inputs, *named.values())
        if x.numel():
            own = sizes if module.sb_may_be_fused(x) else left
            own[module].add(x.numel() // x.shape[-1])

    with ExitStack() as hooks:
        for module in sizes:
            hooks.enter_context(module.register_forward_pre_hook(note, with_kwargs=True))
        hooks.enter_context(searching_at_once())
        call()


def _changing(weights: Sequence[_Weight], sizes: _Sizes, asked: Sequence[int]) -> set[int]:
    """Of the numbers of tokens that weights of a kind got in a call: those that no other call will have."""
    got = Counter(tokens for weight in weights for tokens in sizes[weight.module] if tokens > FEW_TOKENS)
    few = {tokens for tokens, users in got.items() if users * MAX_NUMBERS < len(weights)}
    return few.difference(asked) if len(got) > MAX_NUMBERS else set()


def _products(kinds: dict[_Kind, list[_Weight]], sizes: _Sizes) -> Iterator[tuple[_Kind, list[_Weight], int]]:
    """Each kind with each number of tokens that some of its modules get, and their weights."""
    for kind, weights in kinds.items():
        for tokens in sorted(set[int]().union(*(sizes[weight.module] for weight in weights))):
            yield kind, [weight for weight in weights if tokens in sizes[weight.module]], tokens


def _kinds(model: nn.Module) -> dict[_Kind, list[_Weight]]:
    """The weights that a product may be fused with, by kind."""
    kinds: dict[_Kind, list[_Weight]] = {}
    streamed = streaming_device(model)
    elsewhere = streamed.index if streamed and streamed.type == "cuda" else None  # of weights in main memory
    for module in model.modules():
        if not isinstance(module, PackedLinearModule):
            continue
        header, data = module.sb_recipes["weight"].matrix, module.sb_data("weight")[0]
        device = data.get_device() if data.is_cuda else elsewhere
        if header is not None and device is not None:
            rows, columns = header.shape
            kind = _Kind(device, rows, columns, module.bias is not None)
            kinds.setdefault(kind, []).append(_Weight(module, header))
    return kinds
