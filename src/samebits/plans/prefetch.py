"""Weights of products to come, decoded on the way by launches that have the time.

A product of many tokens takes as long as tensor cores multiply, and the warps that decode its weight are done long
before (csrc/linear_relay.cuh). They go on with what will be asked for next, which then is multiplied by cuBLAS as in
the dense model. What that is is learned from the calls, as in together.py: such a launch notes the products behind it,
and from the next time on decodes what carry.py chooses of their weights. What is decoded is kept beside the weight's
bytes until the product is asked for, on the same stream and in the same CUDA graph; if it never is, the launch forgets
what it had noted. In training nothing is decoded ahead: weights would be kept through the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from samebits.format.packed import Header, PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.linear.products import Operands, Products, is_prefetchable
from samebits.kernels.residents import ParameterBytes, Resident, make_room, resident, residents
from samebits.kernels.structures import MAX_PREFETCHED
from samebits.plans.call import Call
from samebits.plans.carry import Coming, best_way
from samebits.plans.turn import Turns

_NOTED = 32  # products behind a launch that are noted: more than two layers of most models
_NEVER = 1 << 62  # weights, for which no launch has room
_FEW_TOKENS = 128  # with no more, a fused product is faster than cuBLAS's
_SETTLED = 3  # times in a row that a choice was the same
_MAX_UNWANTED = 3  # launches that decoded something nobody asked for


class _Weight(NamedTuple):
    """Of a product that was asked for; ``shape`` is its input's."""

    data: ParameterBytes
    header: Header
    shape: torch.Size

    def now(self) -> PackedTensor | None:
        data = self.data.now()
        return None if data is None else PackedTensor(self.header, data)


class _Plan(NamedTuple):
    """What a launch is to decode ahead.

    Attributes:
        gained_us: by those behind it.
    """

    weights: list[PackedTensor]
    gained_us: float


class Choice(NamedTuple):
    """What a launch decodes ahead.

    Attributes:
        weights: by their bytes.
        products: the launch with these.
        plain: the one without.
    """

    weights: tuple[Resident, ...]
    products: Products
    plain: Products


class Carrier:
    """A launch that may decode ahead. Threads share it, so what they read together is replaced together.

    Attributes:
        noted: what was asked for behind it when that was noted; None of few tokens.
        choice: what it decodes; None: nothing.
        in_a_row: how often that was chosen of what was noted.
        unwanted: launches that decoded something nobody asked for.
        is_given_up: these were too many, or there was too little memory.
    """

    __slots__ = ("choice", "in_a_row", "is_given_up", "noted", "unwanted")

    def __init__(self) -> None:
        self.noted: tuple[_Weight | None, ...] = ()
        self.choice: Choice | None = None
        self.in_a_row, self.unwanted, self.is_given_up = 0, 0, False

    @property
    def is_settled(self) -> bool:
        """Whether the choice has been the same often enough to stay.

        The first ones are made before it is known which products behind are made together, and how fast.
        """
        return self.is_given_up or self.in_a_row >= _SETTLED

    def choose(self, choice: Choice | None) -> None:
        self.in_a_row = self.in_a_row + 1 if choice is self.choice else 1
        self.choice = choice

    def settled(self, products: Products, where: nvrtc.Where) -> Choice | None:
        """The choice, once to choose again would but take the host its time.

        A graph's last launches choose otherwise than those of steps that follow each other.
        """
        choice = self.choice
        if choice is None or not self.is_settled or where.capture or choice.plain is not products:
            return None
        return choice if all(each.prefetched is None and each.now() is not None for each in choice.weights) else None


class Made(NamedTuple):
    """What a launch has made.

    Attributes:
        products: None where it was not worth it.
        ahead: what was decoded beside.
        is_settled: the next one will be made, or not, in the same way.
    """

    products: list[torch.Tensor] | None
    ahead: Choice | None
    is_settled: bool


class Window(NamedTuple):
    """What is asked for behind a launch, while that is noted.

    Attributes:
        where: the launch was made; what is asked for elsewhere could not be decoded there.
    """

    carrier: Carrier
    where: nvrtc.Where
    noted: list[_Weight | None]


class Prefetcher:
    """The products of all threads."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns

    def take(self, x: torch.Tensor, packed: PackedTensor) -> torch.Tensor | None:
        """The weight, if it has been decoded ahead; once."""
        kept = residents.get(id(packed.data))
        prefetched = kept.prefetched if kept else None
        if kept is None or prefetched is None:  # also of another thread, which took it meanwhile
            return None
        kept.prefetched, (where, weight) = None, prefetched
        return weight if where == nvrtc.where(x.get_device()) and kept.now() is packed.data else None

    def note(self, x: torch.Tensor, packed: PackedTensor) -> None:
        """That a product is asked for."""
        turns, where = self._turns, nvrtc.where(x.get_device())
        if where.capture != turns.graph:
            turns.graph, turns.captured = where.capture, set()
        if where.capture:
            turns.captured.add(id(packed.data))
        windows = turns.windows
        if not windows:
            return
        has_few = x.numel() <= _FEW_TOKENS * x.shape[-1]
        is_noted = not has_few and not packed.data.is_inference()
        weight = _Weight(ParameterBytes(packed.data), packed.header, x.shape) if is_noted else None
        for window in windows:
            window.noted.append(weight if window.where == where else None)
        if len(windows[0].noted) >= _NOTED:
            self._close(windows[0])

    def launch(
        self, x: torch.Tensor, bias: torch.Tensor | None, own: Sequence[torch.Tensor],
        operands: Callable[[], Sequence[Operands]], products: Products, *, gained_us: float | None,
    ) -> Made:  # fmt: skip
        """What ``products`` makes, with others' weights decoded beside.

        Args:
            own: packed bytes of its weights.
            gained_us: microseconds that the launch alone takes less than what would be done instead; None: it is made,
                and decodes nothing for others yet.
        """

        def alone(*, is_settled: bool) -> Made:
            is_worth_it = gained_us is None or gained_us >= 0
            return Made(products(x, bias, operands) if is_worth_it else None, None, is_settled)

        kept = resident(own[0])
        if kept is None or products.launch.spare is None or x.requires_grad:
            return alone(is_settled=True)
        carrier = _carrier_of(kept, x.shape)
        where = nvrtc.where(x.get_device())
        _forget_unwanted(carrier)
        self._note_behind(carrier, where)
        if carrier.is_given_up or gained_us is None or not carrier.noted:
            carrier.choice, carrier.in_a_row = None, 0
            return alone(is_settled=carrier.is_given_up)
        choice = carrier.settled(products, where)
        if choice is None:
            plan = self._plan(x, own, products, carrier)
            choice = None if gained_us + plan.gained_us < 0 else _choice(carrier.choice, plan, products)
            carrier.choose(choice)
        if choice is None:
            return alone(is_settled=carrier.is_settled)
        try:
            made = choice.products(x, bias, operands)
        except torch.OutOfMemoryError:
            carrier.is_given_up = True
            return alone(is_settled=True)
        for each, decoded in zip(choice.weights, made[len(own) :], strict=True):
            each.prefetched = where, decoded
        return Made(made[: len(own)], choice, carrier.is_settled)

    def _note_behind(self, carrier: Carrier, where: nvrtc.Where) -> None:
        """Once; and what is asked for in the next round is not behind it any more."""
        own = [window for window in self._turns.windows if window.carrier is carrier]
        if own:
            self._close(own[0])
        elif not carrier.noted:
            self._turns.windows = (*self._turns.windows, Window(carrier, where, []))

    def _close(self, window: Window) -> None:
        window.carrier.noted = tuple(window.noted)
        self._turns.windows = tuple(each for each in self._turns.windows if each is not window)

    def _plan(self, x: torch.Tensor, own: Sequence[torch.Tensor], products: Products, carrier: Carrier) -> _Plan:
        """Of the products noted, until the next round: a CUDA graph has its first products behind it."""
        spare, device = products.launch.spare, x.get_device()
        assert spare is not None
        not_again, coming, packed = {id(data) for data in own}, list[Coming](), list[list[PackedTensor]]()
        for group in _groups(carrier.noted):
            first = group[0][0]
            if first.data is own[0] or id(first.data) in self._turns.captured:
                break
            new = [each for each, _ in group if id(each.data) not in not_again]
            not_again |= {id(each.data) for each in new}
            if new and all(_is_missing(each, device) for each in new):
                fits = all(is_prefetchable(each, products.launch, device) for each in new)
                coming.append(_coming(group, new, fits=fits))
                packed.append(new)
        way = best_way(spare.weights, MAX_PREFETCHED, coming)
        return _Plan([each for number in way.carried for each in packed[number]], way.gained_us)


def _carrier_of(kept: Resident, shape: torch.Size) -> Carrier:
    make_room(kept.carriers, shape)
    carrier: Carrier = kept.carriers.setdefault(shape, Carrier())
    return carrier


def _forget_unwanted(carrier: Carrier) -> None:
    """What was decoded ahead the last time, and not asked for since; and that it was expected.

    Where a part of a model is captured as a CUDA graph, its last launch does not count.
    """
    is_unwanted = False
    for each in carrier.choice.weights if carrier.choice else ():
        prefetched, each.prefetched = each.prefetched, None
        is_unwanted |= prefetched is not None and not prefetched[0].capture
    if is_unwanted:
        carrier.noted, carrier.in_a_row = (), 0
        carrier.unwanted += 1
        carrier.is_given_up |= carrier.unwanted >= _MAX_UNWANTED


def _choice(choice: Choice | None, plan: _Plan, products: Products) -> Choice | None:
    """That of a plan; the one that there is, if it is the same."""
    chosen = [kept for packed in plan.weights if (kept := resident(packed.data))]
    if not chosen or len(chosen) < len(plan.weights):
        return None
    if choice is None or choice.plain is not products or not _are(choice.weights, chosen):
        return Choice(tuple(chosen), Products(products.launch, plan.weights), products)
    return choice


def _are(left: Sequence[object], right: Sequence[object]) -> bool:
    return len(left) == len(right) and all(one is other for one, other in zip(left, right, strict=True))


def _is_missing(packed: PackedTensor, device: int) -> bool:
    """Whether the weight is on this device, to stay, and nobody has decoded it."""
    kept = resident(packed.data)
    if kept is None or kept.has_changed or kept.prefetched is not None:
        return False
    return packed.data.get_device() == device


def _coming(group: Sequence[tuple[PackedTensor, torch.Size]], new: Sequence[PackedTensor], *, fits: bool) -> Coming:
    """What is known of products that are, or may be, made by one launch.

    Args:
        new: those of them whose weights are missing.
        fits: these can be decoded by another launch.
    """
    first, shape = group[0]
    weights, call = _count(new) if fits else _NEVER, _call(first, shape)
    if call is None:
        return Coming(weights, len(new), 0.0, 0)
    known = _joint(first, call) or call
    spare = known.products.launch.spare
    return Coming(weights, len(new), known.gained_us, spare.weights if spare else 0)


def _call(packed: PackedTensor, shape: torch.Size) -> Call | None:
    kept = resident(packed.data)
    return kept.calls.get(shape) if kept else None


def _joint(packed: PackedTensor, call: Call) -> Any:
    """How one launch makes the product and others, see together.py; None: alone."""
    kept = resident(packed.data)
    return kept.followers.chosen.get(call.key) if kept and kept.followers else None


def _count(every: Sequence[PackedTensor]) -> int:
    return sum(rows * columns for rows, columns in (each.header.shape for each in every))


def _others(packed: PackedTensor, shape: torch.Size) -> Sequence[Any]:
    """That a launch makes products with beside this one, unless one by one is known to be faster."""
    kept = resident(packed.data)
    if kept is None or kept.followers is None:
        return ()
    call, group = kept.calls.get(shape), kept.followers
    are_apart = call is not None and group.chosen.get(call.key, group) is None
    return () if are_apart else group.others


def _groups(noted: Sequence[_Weight | None]) -> Iterator[list[tuple[PackedTensor, torch.Size]]]:
    """What was noted; together where one launch makes the products, or may do so: to take some would gain nothing."""
    weights = [(packed, each.shape) for each in noted if each and (packed := each.now())]
    while weights:
        others = {id(other.data.now()) for other in _others(*weights[0])}
        count = 1
        while count < len(weights) and id(weights[count][0].data) in others:
            count += 1
        yield weights[:count]
        del weights[:count]
