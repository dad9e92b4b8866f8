"""Weights of products to come, decoded on the way by launches that have the time.

A product of many tokens takes as long as tensor cores multiply, and the warps that decode its weight are done long
before (csrc/linear_relay.cuh). They go on with what will be asked for next, which then is multiplied by cuBLAS as in
the dense model. What that is is learned from the calls, as in together.py: such a launch notes the products behind it,
and from the next time on decodes as many of their weights as it has time and memory for. What is decoded is kept beside
the weight's bytes until the product is asked for, on the same stream and in the same CUDA graph; if it never is, the
launch forgets what it had noted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from samebits.format.packed import Header, PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.linear import Operands, Products, is_prefetchable
from samebits.kernels.residents import Bytes, Resident, resident, residents
from samebits.kernels.structures import MAX_PREFETCHED
from samebits.plans.turn import Turns

_NOTED = 24  # products behind a launch that are noted
_FEW_TOKENS = 128  # with no more, a fused product is faster than cuBLAS's
_MAX_SHAPES = 16  # of inputs of one weight
_MAX_UNWANTED = 3  # launches that decoded something nobody asked for


class _Weight(NamedTuple):
    data: Bytes
    header: Header

    def now(self) -> PackedTensor | None:
        data = self.data.now()
        return None if data is None else PackedTensor(self.header, data)


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
        choice: what it decodes, where that is something.
        unwanted: launches that decoded something nobody asked for.
        is_given_up: these were too many, or there was too little memory.
    """

    __slots__ = ("choice", "is_given_up", "noted", "unwanted")

    def __init__(self) -> None:
        self.noted: tuple[_Weight | None, ...] = ()
        self.choice: Choice | None = None
        self.unwanted, self.is_given_up = 0, False


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
        weight = None if has_few or packed.data.is_inference() else _Weight(Bytes(packed.data), packed.header)
        for window in windows:
            window.noted.append(weight if window.where == where else None)
        if len(windows[0].noted) >= _NOTED:
            self._close(windows[0])

    def launch(
        self, x: torch.Tensor, bias: torch.Tensor | None, own: Sequence[torch.Tensor],
        operands: Callable[[], Sequence[Operands]], products: Products, *, decodes: bool = True,
    ) -> tuple[list[torch.Tensor], Choice | None]:  # fmt: skip
        """What ``products`` makes; and what was decoded beside.

        Args:
            own: packed bytes of its weights.
            decodes: else nothing is, yet.
        """
        kept = resident(own[0])
        if kept is None or products.launch.spare is None:
            return products(x, bias, operands), None
        if len(kept.carriers) >= _MAX_SHAPES and x.shape not in kept.carriers:
            kept.carriers.clear()
        carrier: Carrier = kept.carriers.setdefault(x.shape, Carrier())
        where = nvrtc.where(x.get_device())
        _forget_unwanted(carrier)
        self._note_behind(carrier, where)
        weights = [] if carrier.is_given_up or not decodes else self._chosen(x, own, products, carrier)
        choice = _choice(carrier, weights, products)
        if choice is None:
            return products(x, bias, operands), None
        try:
            made = choice.products(x, bias, operands)
        except torch.OutOfMemoryError:
            carrier.is_given_up = True
            return products(x, bias, operands), None
        for each, weight in zip(choice.weights, made[len(own) :], strict=True):
            each.prefetched = where, weight
        return made[: len(own)], choice

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

    def _chosen(
        self, x: torch.Tensor, own: Sequence[torch.Tensor], products: Products, carrier: Carrier
    ) -> list[PackedTensor]:
        """The next weights that a launch has room for, in the order of their products.

        Not of the next round: a CUDA graph has its first products behind it.
        """
        spare, device = products.launch.spare, x.get_device()
        assert spare is not None
        left, not_again, found = spare.weights, {id(data) for data in own}, list[PackedTensor]()
        for group in _groups(carrier.noted):
            if group[0].data is own[0] or id(group[0].data) in self._turns.captured:
                break
            new = [each for each in group if id(each.data) not in not_again]
            if not all(_is_wanted(each, products, device) for each in new):
                continue
            left -= sum(rows * columns for rows, columns in (each.header.shape for each in new))
            if left < 0 or len(found) + len(new) > MAX_PREFETCHED:
                break
            found += new
            not_again |= {id(each.data) for each in new}
        return found


def _forget_unwanted(carrier: Carrier) -> None:
    """What was decoded ahead the last time, and not asked for since; and that it was expected.

    Where a part of a model is captured as a CUDA graph, its last launch does not count.
    """
    is_unwanted = False
    for each in carrier.choice.weights if carrier.choice else ():
        prefetched, each.prefetched = each.prefetched, None
        is_unwanted |= prefetched is not None and not prefetched[0].capture
    if is_unwanted:
        carrier.noted = ()
        carrier.unwanted += 1
        carrier.is_given_up |= carrier.unwanted >= _MAX_UNWANTED


def _choice(carrier: Carrier, weights: Sequence[PackedTensor], products: Products) -> Choice | None:
    """The one that there is, if it is of the same weights."""
    chosen, choice = [kept for packed in weights if (kept := resident(packed.data))], carrier.choice
    if not chosen or len(chosen) < len(weights):
        choice = None
    elif choice is None or choice.plain is not products or not _are(choice.weights, chosen):
        choice = Choice(tuple(chosen), Products(products.launch, weights), products)
    carrier.choice = choice
    return choice


def _are(left: Sequence[object], right: Sequence[object]) -> bool:
    return len(left) == len(right) and all(one is other for one, other in zip(left, right, strict=True))


def _is_wanted(packed: PackedTensor, products: Products, device: int) -> bool:
    kept = resident(packed.data)
    if kept is None or kept.prefetched is not None or packed.data.get_device() != device:
        return False
    return is_prefetchable(packed, products.launch, device)


def _groups(noted: Sequence[_Weight | None]) -> Iterator[list[PackedTensor]]:
    """What was noted; where products are made by one launch, together: to take some from it would gain nothing."""
    weights = [packed for each in noted if each and (packed := each.now())]
    while weights:
        kept = resident(weights[0].data)
        others = {id(other.data.now()) for other in kept.followers.others} if kept and kept.followers else set()
        count = 1
        while count < len(weights) and id(weights[count].data) in others:
            count += 1
        yield weights[:count]
        del weights[:count]
