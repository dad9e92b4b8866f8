"""Units decoded where they are wanted."""

from __future__ import annotations

import torch

from samebits.df11.unit import Unit


def decode_unit(unit: Unit, device: torch.device | str = "cpu") -> torch.Tensor:
    """All words of a unit behind each other: bfloat16 [unit.words] on ``device``.

    Raises:
        FormatError: the unit is damaged.
    """
    return torch.from_numpy(unit.decode()).view(torch.bfloat16).to(device)
