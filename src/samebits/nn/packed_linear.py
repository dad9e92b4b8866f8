"""Packed linear layers: fused products, and products as torch makes them where more than values is asked for."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F

from samebits.format.header import Header
from samebits.format.names import PACKED, WEIGHT
from samebits.format.packed import PackedTensor
from samebits.nn.packed_module import PackedModule, register_kind
from samebits.nn.product import FrozenProduct, is_alone, is_frozen, is_fusible, is_matrix, is_trained
from samebits.nn.recipe import shows_requires_grad
from samebits.plans import dispatch
from samebits.plans.key import has_planned_layout, is_gapless

_DATA = PACKED[1:]  # the parameter that holds a packed weight


class PackedLinearModule(PackedModule):
    """For classes whose forward is nn.Linear's: on a GPU the product need not decode the weight first."""

    sb_has_signature = True
    sb_kept = (*PackedModule.sb_kept, "sb_operands")
    sb_operands: str  # of the weight's recipe

    def sb_recipes_changed(self) -> None:
        self.__dict__["sb_operands"] = self.sb_recipes["weight"].operands

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not isinstance(self, PackedModule):
            return type(self).forward(self, input)
        own = self._parameters
        bias: Any = own["bias"] if "bias" in own else self.bias  # noqa: SIM401 - the first way takes less time
        if torch.compiler.is_compiling():
            return _traced(self, self.sb_operands, input, bias)
        recipe = self.sb_recipes["weight"]
        if not recipe.operands:
            return super().forward(input)  # type: ignore[no-any-return]
        data: Any = own[_DATA]
        made: torch.Tensor | None = dispatch.product_again(input, data, bias)
        if made is not None:
            return made
        if is_frozen(input, bias):
            packed = PackedTensor(cast(Header, recipe.matrix), data)
            return FrozenProduct.apply(input, bias, packed, self._sb_untracked)  # type: ignore[no-any-return, no-untyped-call]
        if not is_fusible(input, bias):
            if not is_alone(input, bias, data):
                return super().forward(input)  # type: ignore[no-any-return]
            return F.linear(input, recipe.decode(self.sb_data("weight")), bias)
        if input.dim() > 2 and not is_gapless(input):
            if not is_matrix(input, bias, recipe.shows_requires_grad(input.device)):
                return super().forward(input)  # type: ignore[no-any-return]
            input = input.flatten(0, -2).unflatten(0, input.shape[:-1])  # the same memory
            made = dispatch.product_again(input, data, bias)
            if made is not None:
                return made
        assert recipe.matrix is not None
        self.sb_data("weight")  # which looks at it
        return dispatch.linear_of_module(input, PackedTensor(recipe.matrix, data), bias)

    def _sb_untracked(self, input: torch.Tensor) -> torch.Tensor:
        """``forward`` where no gradients are recorded, of an input without gaps."""
        if input.is_cuda:
            return PackedLinearModule.forward(self, input)
        return F.linear(input, self.sb_decode("weight"), cast("torch.Tensor | None", self.bias))

    def sb_may_be_fused(self, input: torch.Tensor) -> bool:
        """Whether plans are made for inputs that lie in memory as this one does; else the product is left to torch."""
        if input.dim() == 3 and is_matrix(input, self.bias, self.sb_recipes["weight"].requires_grad):
            return True
        return has_planned_layout(input)


def _traced(module: PackedLinearModule, operands: str, input: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """As torch multiplies in traces.

    Inputs without gaps it multiplies in two dimensions, whatever strides a dimension of 1 will have; others too, where
    the weight has requires_grad, but adds the bias then.

    Args:
        operands: Recipe.operands, the only attribute of the module that is asked for where the product is an operator:
            what is asked for is guarded at every call, and only texts and parameters as fast as torch's own layers'.
    """
    is_whole = input.is_contiguous()
    is_fused = bool(operands) and is_fusible(input, bias)
    is_frozen = not is_fused and is_whole and bool(operands) and is_trained(input, bias)
    is_operator = is_fused or is_frozen
    is_folded = input.dim() > 2 and (is_operator if is_whole else _shows_requires_grad(module, operands, input.device))
    rows = input.flatten(0, -2) if is_folded else input
    addend = None if is_folded and not is_whole else bias
    if is_operator:
        product = torch.ops.samebits.linear if is_fused else torch.ops.samebits.frozen_linear
        height, width, _, *fields = [int(number) for number in operands.split()]
        y = product(rows, module._parameters[_DATA], addend, [height, width], fields)
    else:
        y = F.linear(rows, module.sb_decode("weight"), addend)
    y = y.view(*input.shape[:-1], y.shape[-1]) if is_folded else y
    return y if addend is bias else y + bias  # type: ignore[no-any-return]


def _shows_requires_grad(module: PackedLinearModule, operands: str, device: torch.device) -> bool:
    if not operands:
        return module.sb_recipes["weight"].shows_requires_grad(device)
    return operands.split()[2] == "1" and shows_requires_grad(torch.bfloat16, device)


register_kind(lambda base, names: base.forward is nn.Linear.forward and names == (WEIGHT[1:],), PackedLinearModule)
