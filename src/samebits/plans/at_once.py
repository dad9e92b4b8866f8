"""Products of one input that are asked for at once, as graphs do that Inductor compiled (plans/graph_pass.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from samebits.format.packed import PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.linear.products import Operands
from samebits.kernels.residents import resident
from samebits.plans.call import call_of
from samebits.plans.group import Group, Weight


class Made(NamedTuple):
    """What one launch made.

    Attributes:
        others: of the group then, which another thread may have replaced since.
    """

    products: list[torch.Tensor]
    group: Group
    others: tuple[Weight, ...]

    @property
    def is_proved(self) -> bool:
        return all(weight.is_proved for weight in self.others)

    def prove(self, alone: Sequence[torch.Tensor]) -> None:
        """By the same products, each made alone."""
        for weight, *both in zip(self.others, self.products[1:], alone[1:], strict=True):
            self.group.prove(weight, *both)


def launch(x: torch.Tensor, every: Sequence[PackedTensor], biases: Sequence[torch.Tensor | None]) -> Made | None:
    """One launch for all of them; None where they are to be made one by one.

    Args:
        x: on a CUDA device.
        every: packed weights, two to MAX_TOGETHER.
        biases: of each.
    """
    first, bias = every[0], biases[0]
    call, group = call_of(x, first, bias), _group(every, biases)
    if call is None or group is None:
        return None
    operands = Operands(first, bias, call.plan)
    choice = group.choice(x, operands, call.key, is_captured=bool(nvrtc.where(x.get_device()).capture))
    held = choice.held() if choice and choice.more_us >= 0 else None  # until the launch
    if choice is None or held is None:
        return None
    try:
        return Made(choice.products(x, bias, lambda: [operands, *choice.operands(held)]), group, choice.others)
    except torch.OutOfMemoryError:  # with many tokens, it takes as much as all these weights decoded
        group.chosen[call.key] = None
        return None


def _group(every: Sequence[PackedTensor], biases: Sequence[torch.Tensor | None]) -> Group | None:
    """Kept beside the first weight; None of operands that do not tell when they change."""
    first, *others = [resident(packed.data) for packed in every]
    if first is None or None in others or any(bias is not None and bias.is_inference() for bias in biases):
        return None
    group: Group = first.at_once or Group()
    first.at_once = group
    if group.is_given_up:
        return None
    each = list(zip(every[1:], biases[1:], strict=True))
    known = group.others
    if len(known) != len(each) or not all(weight.is_of(*own) for weight, own in zip(known, each, strict=True)):
        group.replace_others(*(Weight(*own) for own in each))
    return group
