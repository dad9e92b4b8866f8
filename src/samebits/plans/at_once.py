"""Products of one input that are asked for at once, as graphs do that Inductor compiled (plans/graph_pass.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from samebits.bf16 import same_words
from samebits.errors import DeviceError
from samebits.format.packed import PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.linear.products import Operands
from samebits.kernels.residents import resident
from samebits.plans.call import Call
from samebits.plans.group import Group, Weight

Factor = tuple[PackedTensor, torch.Tensor | None]  # a weight and its bias
_MAX_GROUPS = 8  # of one first weight, with those that are gone: graphs may make biases or weights anew in each call


class Groups:
    """What is asked for with a weight, by the ids of the other weights and their biases."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, ...], Group] = {}
        self._made = 0

    def group(self, others: Sequence[Factor]) -> Group | None:
        """Of these; None where there were too many, or it is given up."""
        key = tuple(id(each) for packed, bias in others for each in (packed.data, bias))
        known = self._groups.get(key)
        if known is not None and known.is_given_up:
            return None
        if known is not None and all(weight.is_of(*each) for weight, each in zip(known.others, others, strict=True)):
            return known
        self._made += 1
        if self._made > _MAX_GROUPS:
            self._groups.clear()
            return None
        made = Group(tuple(Weight(*each) for each in others))
        self._groups[key] = made
        return made


class Made(NamedTuple):
    """What one launch made.

    Attributes:
        is_proved: products of these weights had the bytes of products that were made one by one.
    """

    products: list[torch.Tensor]
    group: Group
    is_proved: bool

    def prove(self, alone: Sequence[torch.Tensor]) -> None:
        """By the same products, each made alone. Zeros prove nothing."""
        if not same_words(alone[0], self.products[0]):
            self.group.give_up()
        elif alone[0].any():
            for weight, *both in zip(self.group.others, self.products[1:], alone[1:], strict=False):
                self.group.prove(weight, *both)


def launch(x: torch.Tensor, factors: Sequence[Factor], calls: Sequence[Call | None]) -> Made | None:
    """One launch for all products; None where they are to be made one by one.

    Args:
        x: on a CUDA device.
        factors: two to MAX_TOGETHER.
        calls: of each product.
    """
    (first, bias), *others = factors
    call, kept = calls[0], resident(first.data)
    if call is None or None in calls or kept is None or not _tell_changes(others):
        return None
    kept.at_once = groups = kept.at_once or Groups()
    group: Group | None = groups.group(others)
    if group is None:
        return None
    operands = Operands(first, bias, call.plan)
    choice = group.choice(x, operands, call.key, is_captured=bool(nvrtc.where(x.get_device()).capture))
    held = choice.held() if choice and choice.more_us >= 0 else None  # until the launch
    if choice is None or held is None:
        return None
    is_proved = group.is_proved
    try:
        return Made(choice.products(x, bias, lambda: [operands, *choice.operands(held)]), group, is_proved)
    except (torch.OutOfMemoryError, DeviceError):  # with many tokens, it takes as much as all these weights decoded
        group.chosen[call.key] = None
        return None


def _tell_changes(factors: Sequence[Factor]) -> bool:
    """Whether all operands do."""
    return all(
        resident(packed.data) is not None and not (bias is not None and bias.is_inference()) for packed, bias in factors
    )
