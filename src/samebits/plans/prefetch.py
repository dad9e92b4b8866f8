"""Weights of products to come, decoded on the way by launches of products in front of them.

A product of many tokens takes as long as tensor cores multiply, and the warps that decode its weight are done long
before (csrc/linear_relay.cuh). They go on with what will be asked for next, which then is multiplied by cuBLAS as in
the dense model. And where a weight is decoded first, the launch that does so decodes what comes next as well, as long
as these are small: each alone would take a launch that ends before it has filled the GPU (kernels/decode_together.py).

What comes next is learned from the calls, as in together.py: such a launch notes the products behind it, and from the
next time on decodes what carry.py chooses of their weights. What is decoded is kept beside the weight's bytes until the
product is asked for, on the same stream and in the same CUDA graph; if it never is, the launch forgets what it had
noted. In training nothing is decoded ahead: weights would be kept through the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from samebits.errors import DeviceError
from samebits.format.packed import PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.decode import decode_cuda
from samebits.kernels.decode_together import DecodeTogether, load, suits
from samebits.kernels.linear.products import Operands, Products, is_prefetchable, is_supported
from samebits.kernels.residents import ParameterBytes, Resident, make_room, resident, residents
from samebits.kernels.structures import MAX_PREFETCHED
from samebits.plans.call import Call
from samebits.plans.carrier import Carrier, Choice, NotedWeight, Window
from samebits.plans.carry import Carrying, Coming, beside, best_way, led, together
from samebits.plans.planner import FEW_TOKENS
from samebits.plans.turn import Turns

_NOTED = 32  # products behind a launch that are noted: more than two layers of most models


class Made(NamedTuple):
    """What a launch has made.

    Attributes:
        products: None where it was not worth it, and nothing is made yet.
        ahead: what was decoded beside; or, where there are no products, is to be decoded with the first weight.
        is_settled: the next one will be made, or not, in the same way.
    """

    products: list[torch.Tensor] | None
    ahead: Choice | None
    is_settled: bool


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
        carrier: Carrier | None = kept.carriers.get(x.shape)
        if carrier and carrier.led:  # another launch decodes the weight now, and perhaps these
            carrier.choose_nothing()
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
        is_noted = _has_many_tokens(x) and not packed.data.is_inference()
        weight = NotedWeight(ParameterBytes(packed.data), packed.header, x.shape) if is_noted else None
        for window in windows:
            window.noted.append(weight if window.where == where else None)
            is_next_round = window.first == id(packed.data)
            if is_next_round or len(window.noted) >= _NOTED:
                self._close(window)

    def launch(
        self, x: torch.Tensor, bias: torch.Tensor | None, packed: PackedTensor, others: Sequence[torch.Tensor],
        operands: Callable[[], Sequence[Operands]], products: Products, *, gained_us: float | None,
        carried_us: float | None, first_gained_us: float = 0.0,
    ) -> Made:  # fmt: skip
        """What ``products`` makes, with others' weights decoded beside.

        Args:
            packed, others: its weights: the first, and bytes of those behind.
            gained_us: microseconds that the launch alone takes less than what would be done instead; None: it is made,
                and decodes nothing for others yet.
            carried_us: that each weight of others takes it.
            first_gained_us: that its first product takes less then than with its weight decoded first.
        """
        choice, is_settled = self._choice(x, packed, others, products, gained_us, carried_us, first_gained_us)
        launch = choice.launch if choice else None
        if isinstance(launch, DecodeTogether):
            return Made(None, choice, is_settled)
        if choice and launch:
            try:
                made = launch(x, bias, operands)
            except torch.OutOfMemoryError:
                _give_up(packed, x.shape)
                is_settled = True
            else:
                count = 1 + len(others)
                choice.keep(nvrtc.where(x.get_device()), made[count:])
                return Made(made[:count], choice, is_settled)
        is_worth_it = gained_us is None or gained_us >= 0
        return Made(products(x, bias, operands) if is_worth_it else None, None, is_settled)

    def without_plan(self, x: torch.Tensor, packed: PackedTensor) -> Made:
        """What is to be decoded with the weight of a product that cannot be fused."""
        return Made(None, *self._choice(x, packed, (), None, 0.0, None, 0.0))

    def decode(self, x: torch.Tensor, packed: PackedTensor, made: Made) -> tuple[torch.Tensor, Made]:
        """The weight of a product that was not made; and how it was decoded, if others with it, there was memory."""
        choice = made.ahead
        held = [data for each in choice.weights if (data := each.now()) is not None] if choice else []
        if choice and isinstance(choice.launch, DecodeTogether) and len(held) == len(choice.weights):
            try:
                weight, *others = choice.launch(packed.data, *held)
            except (torch.OutOfMemoryError, DeviceError):  # shared memory, for one's table and another's chunks
                _give_up(packed, x.shape)
            else:
                choice.keep(nvrtc.where(x.get_device()), others)
                return weight, made
        return decode_cuda(packed), made._replace(ahead=None)

    def _begin(self, x: torch.Tensor, packed: PackedTensor, products: Products | None) -> Carrier | None:
        """The carrier whose first weight this is, and which notes what comes behind; None if it decodes for nobody.

        Where a weight is decoded first that begins the second time: while something is noted, all products are made in
        the usual way, and some shapes come but once, as those of prompts and of what a router gives an expert.
        """
        kept, has_spare = resident(packed.data), products is not None and products.launch.spare is not None
        if kept is None or x.requires_grad or not (has_spare or _has_many_tokens(x)):
            return None
        is_new, carrier = x.shape not in kept.carriers, _carrier_of(kept, x.shape)
        if (is_new or kept.is_changing) and not has_spare:
            return None
        carrier.forget_unwanted()
        if not carrier.noted:
            where = nvrtc.where(x.get_device())
            if not where.capture and suits(packed):
                load(x.get_device())
            self._turns.windows = (*self._turns.windows, Window(carrier, id(packed.data), where, []))
        return carrier

    def _close(self, window: Window) -> None:
        window.carrier.noted = tuple(window.noted)
        self._turns.windows = tuple(each for each in self._turns.windows if each is not window)

    def _choice(
        self, x: torch.Tensor, packed: PackedTensor, others: Sequence[torch.Tensor], products: Products | None,
        gained_us: float | None, carried_us: float | None, first_gained_us: float,
    ) -> tuple[Choice | None, bool]:  # fmt: skip
        """What is decoded for products to come, and whether that stays so; ``products``: None without a plan."""
        carrier = self._begin(x, packed, products)
        if carrier is None:
            return None, True
        if carrier.is_given_up or gained_us is None or not carrier.noted:
            carrier.choose_nothing()
            return None, carrier.is_given_up
        choice = carrier.settled(products, nvrtc.where(x.get_device()))
        if choice is None:
            choice = self._best(x, packed, others, products, carrier, gained_us, carried_us, first_gained_us)
            carrier.choose(choice)
        return choice, carrier.is_settled

    def _best(
        self, x: torch.Tensor, packed: PackedTensor, others: Sequence[torch.Tensor], products: Products | None,
        carrier: Carrier, gained_us: float, carried_us: float | None, first_gained_us: float,
    ) -> Choice | None:  # fmt: skip
        behind, best, gained = self._behind(x, packed, others, products, carrier), None, max(gained_us, 0.0)
        if products is not None and products.launch.spare is not None:
            carrying = beside(products.launch.spare.weights, MAX_PREFETCHED, carried_us)
            beside_us, weights = behind.carried(carrying)
            if weights and gained_us + beside_us >= gained:
                best, gained = _chosen(carrier, weights, products, None), gained_us + beside_us
        if _has_many_tokens(x) and suits(packed):
            if others:  # which come behind the first one
                behind = self._behind(x, packed, (), products, carrier)
            first_us, weights = behind.carried(together(MAX_PREFETCHED))
            if weights and first_us - first_gained_us >= gained:  # else launches might leave it to each other for ever
                best = _chosen(carrier, weights, products, packed)
        return best

    def _behind(
        self, x: torch.Tensor, packed: PackedTensor, others: Sequence[torch.Tensor], products: Products | None,
        carrier: Carrier,
    ) -> _Behind:  # fmt: skip
        """What was noted, until the next round: a CUDA graph has its first products behind it."""
        device, not_again = x.get_device(), {id(packed.data), *map(id, others)}
        coming, weights, leaders = list[Coming](), list[list[PackedTensor]](), list[Choice | None]()
        for group in _groups(carrier.noted):
            first, shape = group[0]
            if first.data is packed.data or id(first.data) in self._turns.captured:
                break
            new = [each for each, _ in group if id(each.data) not in not_again]
            not_again |= {id(each.data) for each in new}
            if new and all(_is_missing(each, device) for each in new):
                coming.append(_coming(group, new, products, device))
                weights.append(new)
                leaders.append(_led_by(first, shape))
        return _together(coming, weights, leaders)


class _Behind(NamedTuple):
    """Products behind a launch.

    Attributes:
        weights: that are decoded for each.
    """

    coming: list[Coming]
    weights: list[list[PackedTensor]]

    def carried(self, carrying: Carrying) -> tuple[float, list[PackedTensor]]:
        """What the launch decodes of it, and microseconds that are gained by that."""
        way = best_way(carrying, self.coming)
        return way.gained_us, [each for number in way.carried for each in self.weights[number]]


def _has_many_tokens(x: torch.Tensor) -> bool:
    return x.numel() > FEW_TOKENS * x.shape[-1]


def _carrier_of(kept: Resident, shape: torch.Size) -> Carrier:
    make_room(kept.carriers, shape)
    carrier: Carrier = kept.carriers.setdefault(shape, Carrier())
    return carrier


def _give_up(packed: PackedTensor, shape: torch.Size) -> None:
    """There is too little memory, and will be."""
    kept = resident(packed.data)
    if kept:
        _carrier_of(kept, shape).is_given_up = True


def _chosen(
    carrier: Carrier, weights: Sequence[PackedTensor], plain: Products | None, first: PackedTensor | None
) -> Choice | None:
    """A launch that decodes ``weights``, with ``first`` or beside the products; the one there is, if it does so."""
    chosen, choice = tuple(kept for packed in weights if (kept := resident(packed.data))), carrier.choice
    if len(chosen) < len(weights):
        return None
    if choice is not None and choice.is_of(chosen, plain, decodes_first=first is not None):
        return choice
    if first is not None:
        return Choice(chosen, DecodeTogether([first.header, *(each.header for each in weights)]), plain)
    assert plain is not None
    return Choice(chosen, Products(plain.launch, weights), plain)


def _is_missing(packed: PackedTensor, device: int) -> bool:
    """Whether the weight is on this device, to stay, and nobody has decoded it."""
    kept = resident(packed.data)
    if kept is None or kept.has_changed or kept.prefetched is not None:
        return False
    return packed.data.get_device() == device


def _coming(
    group: Sequence[tuple[PackedTensor, torch.Size]], new: Sequence[PackedTensor], products: Products | None,
    device: int,
) -> Coming:  # fmt: skip
    """What is known of products that are, or may be, made by one launch.

    Args:
        new: those of them whose weights are missing.
        products: of the launch that may decode them.
    """
    first, shape = group[0]
    if products is None or products.launch.spare is None:
        suits_beside = all(is_supported(each.header, 1, device) for each in new)
    else:
        suits_beside = all(is_prefetchable(each, products.launch, device) for each in new)
    call = _call(first, shape)
    known = _joint(first, call) or call if call else None
    spare = known.products.launch.spare if known else None
    return Coming(
        _count(new),
        len(new),
        suits_beside,
        suits_together=all(map(suits, new)),
        is_led=False,
        gained_us=known.gained_us if known else 0.0,
        room=spare.weights if spare else 0,
        carried_us=known.carried_us if known else None,
    )


def _led_by(packed: PackedTensor, shape: torch.Size) -> Choice | None:
    """What the launch that decodes this weight first decodes with it, if it did so when it was asked for last."""
    kept = resident(packed.data)
    carrier: Carrier | None = kept.carriers.get(shape) if kept else None
    return carrier.led if carrier else None


def _together(
    coming: Sequence[Coming], packed: Sequence[list[PackedTensor]], leaders: Sequence[Choice | None]
) -> _Behind:
    """With those that one launch decodes as one."""
    left, every, weights = list(range(len(coming))), list[Coming](), list[list[PackedTensor]]()
    while left:
        first = left[0]
        choice = leaders[first]
        theirs = {id(each.now()) for each in choice.weights} if choice else set[int]()
        own = [first, *(i for i in left[1:] if all(id(each.data) in theirs for each in packed[i]))]
        left = [i for i in left if i not in own]
        every.append(led([coming[i] for i in own]) if choice else coming[first])
        weights.append([each for i in own for each in packed[i]])
    return _Behind(every, weights)


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


def _groups(noted: Sequence[NotedWeight | None]) -> Iterator[list[tuple[PackedTensor, torch.Size]]]:
    """What was noted; together where one launch makes the products, or may do so: to take some would gain nothing."""
    weights = [(packed, each.shape) for each in noted if each and (packed := each.now())]
    while weights:
        others = {id(other.data.now()) for other in _others(*weights[0])}
        count = 1
        while count < len(weights) and id(weights[count][0].data) in others:
            count += 1
        yield weights[:count]
        del weights[:count]
