"""A checkpoint in figures, from its headers alone."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from samebits.format.container import Checkpoint, Entry

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


@dataclass(frozen=True)
class Sizes:
    """Sums over some tensors.

    Attributes:
        weights: values in all of them; packed_weights: in the packed ones.
        original_bytes, stored_bytes: of all; packed_bytes: of the packed ones, everything counted.
    """

    tensors: int
    packed_tensors: int
    weights: int
    packed_weights: int
    original_bytes: int
    stored_bytes: int
    packed_bytes: int

    @classmethod
    def of(cls, entries: Iterable[Entry]) -> Sizes:
        entries = list(entries)
        packed = [entry for entry in entries if entry.is_packed]
        return cls(
            tensors=len(entries),
            packed_tensors=len(packed),
            weights=sum(entry.words for entry in entries),
            packed_weights=sum(entry.words for entry in packed),
            original_bytes=sum(entry.original_nbytes for entry in entries),
            stored_bytes=sum(entry.nbytes for entry in entries),
            packed_bytes=sum(entry.nbytes for entry in packed),
        )

    @property
    def ratio(self) -> float:
        """Stored over original bytes."""
        return self.stored_bytes / self.original_bytes if self.original_bytes else 1.0

    @property
    def bits_per_weight(self) -> float | None:
        """Of all tensors; None if they have no weights."""
        return bits_per_weight(self.stored_bytes, self.weights)

    @property
    def bits_per_packed_weight(self) -> float | None:
        """Of the packed tensors; None if there are none."""
        return bits_per_weight(self.packed_bytes, self.packed_weights)

    def to_json(self) -> dict[str, float | None]:
        bits = {"bits_per_weight": self.bits_per_weight, "bits_per_packed_weight": self.bits_per_packed_weight}
        return {**vars(self), "ratio": self.ratio, **bits}


def bits_per_weight(nbytes: int, weights: int) -> float | None:
    return 8 * nbytes / weights if weights else None


def kind_of(name: str) -> str:
    """A tensor's name with layer and expert numbers replaced: what alike tensors share."""
    return _NUMBER.sub("*", name)


def by_kind(checkpoint: Checkpoint) -> dict[str, Sizes]:
    """Sizes of each kind of tensor, in order of first appearance."""
    groups: dict[str, list[Entry]] = defaultdict(list)
    for entry in checkpoint:
        groups[kind_of(entry.name)].append(entry)
    return {kind: Sizes.of(entries) for kind, entries in groups.items()}
