"""Launches that decode weights of products to come, and what is known of each; see prefetch.py."""

from __future__ import annotations

from typing import NamedTuple

import torch

from samebits.format.header import Header
from samebits.format.packed import PackedTensor
from samebits.kernels import nvrtc
from samebits.kernels.decode_together import DecodeTogether
from samebits.kernels.linear.products import Products
from samebits.kernels.residents import ParameterBytes, Resident

_SETTLED = 3  # times in a row that a choice was the same
_MAX_UNWANTED = 3  # launches that decoded something nobody asked for


class NotedWeight(NamedTuple):
    """Of a product that was asked for; ``shape`` is its input's."""

    data: ParameterBytes
    header: Header
    shape: torch.Size

    def now(self) -> PackedTensor | None:
        data = self.data.now()
        return None if data is None else PackedTensor(self.header, data)


class Choice(NamedTuple):
    """What a launch decodes for others.

    Attributes:
        weights: theirs, by their bytes.
        launch: with these: of products, or of the first one's weight alone, which then is decoded first.
        plain: the products without; None where they cannot be fused.
    """

    weights: tuple[Resident, ...]
    launch: Products | DecodeTogether
    plain: Products | None

    @property
    def decodes_first(self) -> bool:
        return isinstance(self.launch, DecodeTogether)

    def is_of(self, weights: tuple[Resident, ...], plain: Products | None, *, decodes_first: bool) -> bool:
        return self.weights == weights and self.plain is plain and self.decodes_first is decodes_first

    def keep(self, where: nvrtc.Where, decoded: list[torch.Tensor]) -> None:
        """What the launch has decoded there, until it is asked for."""
        for each, weight in zip(self.weights, decoded, strict=True):
            each.prefetched = where, weight


class Carrier:
    """A launch that may decode for others. Threads share it, so what they read together is replaced together.

    Attributes:
        noted: what was asked for behind it when that was noted; None of few tokens.
        choice: what it decodes; None: nothing.
        in_a_row: how often that was chosen of what was noted.
        unwanted: launches that decoded something nobody asked for.
        is_given_up: these were too many, or there was too little memory.
    """

    __slots__ = ("choice", "in_a_row", "is_given_up", "noted", "unwanted")

    def __init__(self) -> None:
        self.noted: tuple[NotedWeight | None, ...] = ()
        self.choice: Choice | None = None
        self.in_a_row, self.unwanted, self.is_given_up = 0, 0, False

    @property
    def is_settled(self) -> bool:
        """Whether the choice has been the same often enough to stay.

        The first ones are made before it is known which products behind are made together, and how fast.
        """
        return self.is_given_up or self.in_a_row >= _SETTLED

    @property
    def led(self) -> Choice | None:
        """The choice, where it is to decode others' weights with its own first."""
        return self.choice if self.choice and self.choice.decodes_first else None

    def choose(self, choice: Choice | None) -> None:
        self.in_a_row = self.in_a_row + 1 if choice is self.choice else 1
        self.choice = choice

    def choose_nothing(self) -> None:
        self.choice, self.in_a_row = None, 0

    def settled(self, plain: Products | None, where: nvrtc.Where) -> Choice | None:
        """The choice, once to choose again would but take the host its time.

        A graph's last launches choose otherwise than those of steps that follow each other.
        """
        choice = self.choice
        if choice is None or not self.is_settled or where.capture or choice.plain is not plain:
            return None
        return choice if all(each.prefetched is None and each.now() is not None for each in choice.weights) else None

    def forget_unwanted(self) -> None:
        """What was decoded for others the last time, and not asked for since; and that it was expected.

        Where a part of a model is captured as a CUDA graph, its last launch does not count.
        """
        is_unwanted = False
        for each in self.choice.weights if self.choice else ():
            prefetched, each.prefetched = each.prefetched, None
            is_unwanted |= prefetched is not None and not prefetched[0].capture
        if is_unwanted:
            self.noted, self.in_a_row = (), 0
            self.unwanted += 1
            self.is_given_up |= self.unwanted >= _MAX_UNWANTED


class Window(NamedTuple):
    """What is asked for behind a launch, while that is noted.

    Attributes:
        first: id of the packed bytes of its first weight.
        where: the launch was made; what is asked for elsewhere could not be decoded there.
    """

    carrier: Carrier
    first: int
    where: nvrtc.Where
    noted: list[NotedWeight | None]
