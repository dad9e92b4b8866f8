"""Products of one input that are asked for one after another, made by one launch: queries, keys and values, say.

A launch takes some microseconds before it multiplies, and a small matrix does not fill a GPU. What belongs together is
learned from the calls, whatever the model's classes are. The first time, products of an input are noted that follow
another product of it; the second time, one launch makes them all when the first is asked for, and each of the others
is made once more when its turn comes: where the bytes are the same, one launch suffices from the third time on. What
it has made is given to whom asks for it if the input, the weight, the bias, the stream, the CUDA graph that is being
captured and torch's settings are still those of the launch; else the product is made anew.
"""

from __future__ import annotations

import torch
from torch.nn import functional as F

from samebits.errors import DeviceError
from samebits.format.packed import PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.linear.products import Operands, fused_linear
from samebits.kernels.residents import resident
from samebits.kernels.structures import MAX_TOGETHER
from samebits.plans import recall
from samebits.plans.call import Call
from samebits.plans.environment import blas_state
from samebits.plans.group import Group, Weight
from samebits.plans.prefetch import Made, Prefetcher
from samebits.plans.turn import Turn, Turns


class Together:
    """The products of all threads."""

    def __init__(self) -> None:
        self.turns = Turns()
        self.prefetcher = Prefetcher(self.turns)

    def take(self, x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """The product, if it has been made."""
        turn = self.turns.last
        made = turn.made.get(id(packed.data)) if turn.made else None
        if made is None:
            return None
        group: Group = made[0]
        weight: Weight = made[1]
        plan, y = made[2:]
        if not self._is_same_input(x, _where(x)) or not weight.is_of(packed, bias) or blas_state() != turn.state:
            return None  # and where it stays, nobody wanted it
        del turn.made[id(packed.data)]
        if not turn.made:
            group.unwanted = 0
        if weight.is_proved:
            return y
        alone = fused_linear(x, packed, bias, plan)
        group.prove(weight, y, alone)
        return alone

    def multiply(self, x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None, call: Call) -> torch.Tensor:
        """A product that has a plan; and, in one launch with it, what is expected to be asked for next."""
        data = packed.data
        if x.is_inference() or data.is_inference():  # which have no versions
            return self._alone(x, packed, bias, call)
        where = _where(x)
        if self._is_same_input(x, where) and self.turns.last.first() is not data:  # else another round begins
            is_known = self._learn(packed, bias)
            return self._alone(x, packed, bias, call, joins=False) if is_known else call.multiply(x, packed, bias)
        self._begin(x, where, data, call.key.state)
        kept = resident(data)
        group: Group | None = kept.followers if kept else None
        if group is None or not group.others:
            return self._alone(x, packed, bias, call)
        operands = Operands(packed, bias, call.plan)
        choice = group.choice(x, operands, call.key, is_captured=bool(where.capture))
        held = choice.held() if choice else None  # until the launch
        if choice is None or held is None:
            is_decided = group.chosen.get(call.key, group) is None
            group.forget_gone()
            return self._alone(x, packed, bias, call) if is_decided else call.multiply(x, packed, bias)
        others = [each.data for each in held]
        try:
            made = self.prefetcher.launch(
                x, bias, packed, others, lambda: [operands, *choice.operands(held)], choice.products,
                gained_us=choice.more_us if group.is_proved else None, carried_us=choice.carried_us,
                first_gained_us=max(call.gained_us, 0.0),
            )  # fmt: skip
        except (torch.OutOfMemoryError, DeviceError):  # with many tokens, it takes as much as all these weights decoded
            group.chosen[call.key] = None
            return call.multiply(x, packed, bias)
        if made.products is None:
            return self._one_by_one(x, packed, bias, call, made)
        y, *ys = made.products
        each = zip(choice.others, others, choice.plans, ys, strict=True)
        self.turns.last.made = {id(other): (group, weight, plan, y) for weight, other, plan, y in each}
        if not group.is_proved:
            return call.multiply(x, packed, bias)
        joint = recall.Joint(group, choice.others, choice.plans)
        recall.remember(x, packed, bias, call, choice.products, joint, ahead=made.ahead, is_settled=made.is_settled)
        return y

    def without_plan(self, x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None) -> torch.Tensor:
        """A product that cannot be fused, or is not known to have a plan."""
        return self._decoded_first(x, packed, bias, self.prefetcher.without_plan(x, packed), joins=False)

    def _alone(
        self, x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None, call: Call, *, joins: bool = True
    ) -> torch.Tensor:
        operands = [Operands(packed, bias, call.plan)]
        made = self.prefetcher.launch(
            x, bias, packed, (), lambda: operands, call.products, gained_us=call.gained_us, carried_us=call.carried_us
        )
        if made.products is None:
            return self._decoded_first(x, packed, bias, made, joins=joins)
        [y] = made.products
        recall.remember(x, packed, bias, call, call.products, joins=joins, ahead=made.ahead, is_settled=made.is_settled)
        return y

    def _one_by_one(
        self, x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None, call: Call, made: Made
    ) -> torch.Tensor:
        """The first of products that one launch could make."""
        if made.ahead or not call.is_fused:
            return self._decoded_first(x, packed, bias, made, joins=True)
        y = call.multiply(x, packed, bias)
        recall.remember(x, packed, bias, call, call.products, is_settled=made.is_settled)
        return y

    def _decoded_first(
        self, x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None, made: Made, *, joins: bool
    ) -> torch.Tensor:
        weight, made = self.prefetcher.decode(x, packed, made)
        y = F.linear(x, weight, bias)
        recall.remember_decoded(x, packed, bias, joins=joins, ahead=made.ahead, is_settled=made.is_settled)
        return y

    def _is_same_input(self, x: torch.Tensor, where: nvrtc.Where) -> bool:
        turn = self.turns.last
        return turn.now() is x and turn.where == where

    def _begin(self, x: torch.Tensor, where: nvrtc.Where, data: torch.Tensor, state: str) -> None:
        for group in {id(group): group for group, *_ in self.turns.last.made.values()}.values():
            group.note_unwanted()
        self.turns.last = Turn(x, where, state, data)

    def _learn(self, packed: PackedTensor, bias: torch.Tensor | None) -> bool:
        """That a product was asked for behind another one of its input; returns whether there is no more to learn."""
        first = self.turns.last.first()
        if first is None or (bias is not None and bias.is_inference()):
            return False
        kept = resident(first)
        if kept is None:
            return False
        group: Group = kept.followers or Group()
        kept.followers = group
        if group.is_given_up or any(other.is_of(packed, bias) for other in group.others):
            return True
        others = [other for other in group.others if other.now()]
        if len(others) + 1 >= MAX_TOGETHER or resident(packed.data) is None:
            return True
        group.replace_others(*others, Weight(packed, bias))
        kept.forget_products()  # which make it alone
        return False


def _where(x: torch.Tensor) -> nvrtc.Where:
    return nvrtc.where(x.get_device())
