"""What autograd keeps of decoded weights: how to decode them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from samebits.nn.product import check_unchanged
from samebits.nn.recipe import Recipe


class Saved(NamedTuple):
    """What autograd keeps of a decoded weight, or a view of it, for the backward pass: how to decode it again."""

    recipe: Recipe
    data: list[torch.Tensor]
    versions: list[int]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def restore(self) -> torch.Tensor:
        """
        Raises:
            InputError: see check_unchanged.
        """
        check_unchanged(self.data, self.versions)
        return self.recipe.decode(self.data).as_strided(self.shape, self.stride, self.offset)


Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


def hooks_around() -> Hooks:
    """What autograd would do with a saved tensor without the hooks here: checkpointing and offloading hook in too."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # from torch 2.8 on
    hooks: Hooks | None = top(True) if top else None
    return hooks or (_same, _same)


def drop(hooks: object) -> None:
    """Of the hooks that a KeyboardInterrupt kept from being left: autograd would ask them for ever, and no longer
    notice writes to what it has saved."""
    if isinstance(hooks, saved_tensors_hooks) and hooks_around()[0] is hooks.pack_hook:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
