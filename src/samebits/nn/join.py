"""Stacks of matrices that a folder has one by one, such as experts, packed on a GPU as one tensor each.

Kernels multiply with a stack, and decode some of its matrices, by indices that the host never sees. Pieces are decoded
one by one: for them the host has to wait for the indices, or, while a graph is captured, all are decoded.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from samebits.api import encode
from samebits.errors import SamebitsError
from samebits.format.geometry import EXPERTS_DIMENSIONS
from samebits.format.header import Header
from samebits.nn.packed_module import PackedModule, pack, refuse_other_class, sharers, slot_name
from samebits.nn.recipe import Piece, is_sharded

Owners = list[tuple[PackedModule, str]]  # of a weight that they share, each with its name there
_log = logging.getLogger(__name__)


@torch.inference_mode(False)  # what is made here outlives that mode
@torch.no_grad()
def join_stacks(model: nn.Module) -> int:
    """Join those of a model whose pieces are on one GPU, one stack after the other, which is decoded for that.

    Of a model that is just being loaded: threads that run it, and graphs that were captured, have the pieces.

    Returns:
        How many stacks became one tensor. One that cannot, for lack of memory say, stays as it is.
    """
    here, joined = set(model.modules()), 0
    for owners in sharers().values():
        module, name = owners[0]
        if any(owner in here for owner, _ in owners) and _is_divided(module, name):
            try:
                joined += _join(owners)
            except (torch.OutOfMemoryError, SamebitsError) as error:
                _log.warning("matrices of %s.%s stay packed one by one: %s", module.sb_base.__name__, name, error)
    return joined


def _is_divided(module: PackedModule, name: str) -> bool:
    recipe = module.sb_recipes[name]
    is_stack = len(recipe.shape) == EXPERTS_DIMENSIONS and len(recipe.pieces) > 1
    is_usual = recipe.dtype is torch.bfloat16 and not recipe.stride
    return is_stack and is_usual and _are_on_one_gpu(module.sb_data(name))


def _are_on_one_gpu(data: Sequence[torch.Tensor]) -> bool:
    return data[0].is_cuda and all(each.device == data[0].device and not is_sharded(each) for each in data)


def _join(owners: Owners) -> bool:
    for module, _ in owners:
        refuse_other_class(module)
    module, name = owners[0]
    recipe = module.sb_recipes[name]
    packed = encode(recipe.decode(module.sb_data(name)))
    if packed.is_raw:
        return False
    pack_whole(owners, packed.header, packed.data)
    return True


def pack_whole(owners: Owners, header: Header, data: torch.Tensor) -> None:
    """Give those that share a weight in pieces one packed tensor in place of these."""
    parameter = nn.Parameter(data, requires_grad=False)
    for module, name in owners:
        pieces = (Piece(slot_name(name), header),)
        pack(module, name, replace(module.sb_recipes[name], pieces=pieces), [parameter])
