"""Products of one input that one launch makes: which weights these are, and whether that is faster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from samebits.bf16 import same_words
from samebits.format.header import Header
from samebits.format.packed import PackedTensor
from samebits.kernels.linear.products import (
    LinearPlan,
    Operands,
    Products,
    is_launchable,
    is_supported,
    launch_together,
)
from samebits.kernels.residents import ParameterBytes
from samebits.plans.key import PlanKey
from samebits.plans.planner import Planner

_MAX_UNWANTED = 3  # launches that made a product nobody asked for, after which a group is given up


class Held(NamedTuple):
    """The bytes of a packed weight, and its bias."""

    data: torch.Tensor
    bias: torch.Tensor | None


class Weight:
    """A packed weight and its bias, while they live and nobody changes them.

    Attributes:
        is_proved: a product of it that was made with others had the bytes of one that was made alone.
    """

    __slots__ = ("bias", "data", "header", "is_proved")

    def __init__(self, packed: PackedTensor, bias: torch.Tensor | None) -> None:
        self.header, self.is_proved = packed.header, False
        self.data, self.bias = ParameterBytes(packed.data), None if bias is None else ParameterBytes(bias)

    @property
    def has_bias(self) -> bool:
        return self.bias is not None

    def now(self) -> Held | None:
        """Its bytes, if they are unchanged; whoever holds them keeps them."""
        data, bias = self.data.now(), self.bias.now() if self.bias else None
        return None if data is None or (bias is None) is self.has_bias else Held(data, bias)

    def is_of(self, packed: PackedTensor, bias: torch.Tensor | None) -> bool:
        """Whether these are its operands, unchanged."""
        return self.data.now() is packed.data and (bias is None if self.bias is None else self.bias.now() is bias)

    def operands(self, held: Held, plan: LinearPlan) -> Operands:
        return Operands(PackedTensor(self.header, held.data), held.bias, plan)


class Choice(NamedTuple):
    """How one launch makes a product and others.

    Attributes:
        header: of the first.
        plans: of the others.
        gained_us: microseconds that it takes less than if all weights are decoded first.
        more_us: the same, than one by one.
        carried_us: as GroupOutcome's.
    """

    header: Header
    others: tuple[Weight, ...]
    plans: tuple[LinearPlan, ...]
    products: Products
    gained_us: float
    more_us: float
    carried_us: float | None

    def held(self) -> list[Held] | None:
        """Of the others, if all are unchanged."""
        found = [held for other in self.others if (held := other.now())]
        return found if len(found) == len(self.others) else None

    def operands(self, held: Sequence[Held]) -> list[Operands]:
        each = zip(self.others, held, self.plans, strict=True)
        return [other.operands(own, plan) for other, own, plan in each]


@dataclass
class Group:
    """What is asked for behind a product. Threads share it, so what they read together is replaced together.

    Attributes:
        unwanted: launches in a row that made something nobody asked for.
        is_given_up: there were too many of these, or a product had other bits than one that was made alone.
        chosen: by key of the first product; None: one by one.
    """

    others: tuple[Weight, ...] = ()
    unwanted: int = 0
    is_given_up: bool = False
    chosen: dict[PlanKey, Choice | None] = field(default_factory=dict)

    @property
    def is_proved(self) -> bool:
        others = self.others
        return bool(others) and all(other.is_proved for other in others)

    def chosen_for(self, tokens: int) -> bool:
        """Whether one launch makes these products of so many tokens, under any settings, whatever comes behind it."""
        chosen = [choice for key, choice in self.chosen.items() if key.tokens == tokens]
        return any(choice is not None and choice.more_us >= 0 for choice in chosen)

    def choice(self, x: torch.Tensor, first: Operands, key: PlanKey, *, is_captured: bool) -> Choice | None:
        """None if products are to be made one by one, now or always."""
        chosen, others = self.chosen, self.others  # in this order: another thread may replace both meanwhile
        if key not in chosen and not is_captured and all(other.now() for other in others):
            chosen[key] = _choose(x, first, key, others)
        choice = chosen.get(key)
        if choice is None or choice.others is not others or (is_captured and not self.is_proved):
            return None
        header = first.packed.header
        return choice if choice.header is header or choice.header == header else None

    def prove(self, weight: Weight, made: torch.Tensor, alone: torch.Tensor) -> None:
        """Of a product that was made with others, by the same one made alone."""
        is_same = same_words(alone, made)
        if not is_same:
            self.give_up()
        weight.is_proved = is_same and bool(alone.any())  # zeros prove nothing

    def replace_others(self, *others: Weight) -> None:
        self.others, self.chosen = others, {}

    def forget_gone(self) -> None:
        """Those that have changed or are gone; the others are a group without them."""
        others = self.others  # once: another thread may replace it meanwhile
        remaining = [other for other in others if other.now()]
        if len(remaining) < len(others):
            self.replace_others(*remaining)

    def give_up(self) -> None:
        self.is_given_up = True
        self.replace_others()

    def note_unwanted(self) -> None:
        self.unwanted += 1
        if self.unwanted >= _MAX_UNWANTED:
            self.give_up()


def _choose(x: torch.Tensor, first: Operands, key: PlanKey, others: tuple[Weight, ...]) -> Choice | None:
    device = x.get_device()
    planner, every, keys = Planner.of(device), [first], [key]
    for other in others:
        keys.append(key._replace(rows=other.header.shape[0], has_bias=other.has_bias))
        plan = planner.outcome(keys[-1]).plan if is_supported(other.header, key.tokens, device) else None
        if plan is None or not is_launchable(other.header, key.tokens, plan, device):
            return None
        held = other.now()
        if held is None:
            return None
        every.append(other.operands(held, plan))
    found = planner.together(tuple(keys), x, every)
    launch = None if found.variant is None else launch_together(every, key.tokens, found.variant, device)
    if launch is None:
        return None
    plans = tuple(operands.plan for operands in every[1:])
    one_by_one_us = sum(max(planner.outcome(key).gained_us, 0.0) for key in keys)
    gained_us = found.gained_us + one_by_one_us
    return Choice(first.packed.header, others, plans, Products(launch), gained_us, found.gained_us, found.carried_us)
