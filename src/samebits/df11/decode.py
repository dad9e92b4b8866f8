"""Units decoded where they are wanted."""

from __future__ import annotations

import numpy as np
import torch

from samebits.bf16 import words_of
from samebits.df11.operator import LAYOUT, check_outcome
from samebits.df11.unit import Unit


def decode_unit(unit: Unit, device: torch.device | str) -> torch.Tensor:
    """All words of a unit behind each other: bfloat16 [unit.words] on ``device``, to which the unit's bytes travel.

    Raises:
        FormatError: the unit is damaged.
    """
    device = torch.device(device)
    if device.type != "cuda":
        return torch.from_numpy(unit.decode()).view(torch.bfloat16).to(device)
    unit.validate()
    layout = [torch.from_numpy(np.ascontiguousarray(getattr(unit, name))).to(device) for name in LAYOUT]
    output = torch.empty(unit.words, dtype=torch.bfloat16, device=device)
    malformed = torch.zeros(1, dtype=torch.int32, device=device)
    torch.ops.samebits.df11_decode(*layout, output, malformed)
    check_outcome(malformed)
    return output


def decode_words(unit: Unit, before: int, out: torch.Tensor, device: torch.device | str) -> None:
    """The words from ``before`` on that fill ``out``, bfloat16 [words] on any device, decoded on ``device``.

    Raises:
        FormatError: the unit is damaged.
    """
    if out.device.type == torch.device(device).type == "cpu":
        unit.decode(words_of(out), before)
    else:
        out.copy_(decode_unit(unit, device)[before : before + out.numel()])
