"""Products whose sums cancel: their bits are rounding errors, and these depend on the order of the sums.

The columns of a weight are paired at random, far apart, and the two of a pair are each other's negative. Activations
that are the same in both columns of each pair make every sum 0 but for the rounding of its partial sums: two orders
then differ nearly everywhere, where ordinary activations may differ nowhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

_SMALL = 1 << 20  # weights: so few suit the quad code only if they are made for it
_SIGMA = 0.02  # of weights that are as trained ones
_ROW_SPREAD = 0.2  # of the logarithms of rows' scales
_LARGEST = -6  # even weights are below 2^-5
_LIKELIHOODS = (0.5, 0.85, 0.97)  # that an even weight lies in the first 2, 4, 6 octaves below
_BLOCK_WORDS = 1 << 22  # made at a time
_OCTAVES = 3  # activations are multiplied by up to 2^3 and 2^-3


class Columns(NamedTuple):
    """Which columns are paired: int64 [columns / 2], a column and its partner."""

    first: torch.Tensor
    second: torch.Tensor


@dataclass(frozen=True)
class Probe:
    """A weight of paired columns.

    Attributes:
        weight: bfloat16 [rows, columns].
    """

    weight: torch.Tensor
    paired: Columns

    @staticmethod
    def kinds(rows: int, columns: int) -> tuple[bool, ...]:
        """Whether to make it even, in the order in which that is tried: as trained ones are, if these can be fused."""
        return (True,) if rows * columns < _SMALL else (False, True)

    @classmethod
    def make(cls, rows: int, columns: int, device: torch.device, seed: int = 0, *, even: bool = False) -> Probe:
        """One for an even number of columns; the same at every call, in memory little more than the weight itself.

        The weight packs as trained ones do, and so takes as long; ``even``: it suits the quad code however small it is.
        """
        generator = torch.Generator(device).manual_seed(seed)
        paired = Columns(*torch.randperm(columns, generator=generator, device=device).chunk(2))
        weight = torch.empty(rows, columns, dtype=torch.bfloat16, device=device)
        for block in weight.split(max(1, _BLOCK_WORDS // columns)):
            words = (_even if even else _weights)(len(block), columns // 2, generator)
            block[:, paired.first] = words
            block[:, paired.second] = -words
        return cls(weight, paired)

    def cancelling(self, tokens: int, seed: int) -> torch.Tensor:
        """Activations bfloat16 [tokens, columns] under which every exact sum is 0."""
        generator = torch.Generator(self.weight.device).manual_seed(seed)
        half = _normal(tokens, len(self.paired.first), generator)
        octaves = torch.randint(-_OCTAVES, _OCTAVES + 1, half.shape, generator=generator, device=half.device)
        words = torch.ldexp(half, octaves).to(torch.bfloat16)
        x = torch.empty(tokens, self.weight.shape[1], dtype=torch.bfloat16, device=half.device)
        x[:, self.paired.first] = words
        x[:, self.paired.second] = words
        return x

    def plain(self, tokens: int, seed: int) -> torch.Tensor:
        """Normal activations, bfloat16 [tokens, columns]."""
        generator = torch.Generator(self.weight.device).manual_seed(seed)
        return _normal(tokens, self.weight.shape[1], generator).to(torch.bfloat16)

    def bias(self, scale: torch.Tensor, seed: int) -> torch.Tensor:
        """Normal values, bfloat16 [rows], of a size at which adding them does not hide what the sums are."""
        generator = torch.Generator(self.weight.device).manual_seed(seed)
        return (_normal(1, len(self.weight), generator)[0] * scale).to(torch.bfloat16)


def _weights(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Normal ones, whose rows differ in scale."""
    scales = _SIGMA * torch.exp(_ROW_SPREAD * _normal(rows, 1, generator))
    return (_normal(rows, columns, generator) * scales).to(torch.bfloat16)


def _even(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    """Of either sign, in pairs of octaves of which both are as likely."""
    random = torch.rand(2, rows, columns, dtype=torch.float32, generator=generator, device=generator.device)
    bits = torch.randint(0, 4, (rows, columns), dtype=torch.int32, generator=generator, device=generator.device)
    octaves = (bits & 1) + 2 * sum((random[0] > likelihood).to(bits.dtype) for likelihood in _LIKELIHOODS)
    signed = (1 + random[1]) * ((bits & 2) - 1)
    return torch.ldexp(signed, _LARGEST - octaves).to(torch.bfloat16)


def _normal(rows: int, columns: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=torch.float32, generator=generator, device=generator.device)
