"""Packed weights of vLLM's layers, and the operators samebits::vllm_product and samebits::vllm_rows.

vLLM compiles a model once for all its layers: their graphs are the same but for the tensors that they get. Packed bytes
are of another size in each layer, and the fields of their headers are other numbers; so graphs get neither, but a
handle, a few bytes. By where these are in memory an operator finds the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import nn

from samebits.errors import InputError
from samebits.format.packed import PackedTensor
from samebits.kernels.ops import decode_rows
from samebits.kernels.residents import resident
from samebits.nn.convert import encode_parameter
from samebits.nn.lazy import LazyWeight
from samebits.nn.packed_module import slot_name, whole
from samebits.nn.recipe import Recipe

Multiply = Callable[[PackedTensor, torch.Tensor, "torch.Tensor | None"], torch.Tensor]  # packed, x and bias

HANDLE = 16  # bytes
HELD = "sb_weights"  # of a layer: what of it is packed, by name
_LIBRARY = torch.library.Library("samebits", "FRAGMENT")
_weights: WeakValueDictionary[int, PackedWeight] = WeakValueDictionary()  # by the address of their handles


class PackedWeight:
    """A layer's weight in packed form; two layers that are tied have one each, of the same bytes.

    Attributes:
        packed: its bytes are a parameter of the layer.
        handle: uint8 [HANDLE]; what is in it says nothing.
        multiply: makes a product with it; None for a weight that is no matrix.
    """

    def __init__(self, packed: PackedTensor, multiply: Multiply | None) -> None:
        self.packed, self.multiply = packed, multiply
        self.handle = torch.zeros(HANDLE, dtype=torch.uint8, device=packed.device)
        _weights[self.handle.data_ptr()] = self


class Encoded(NamedTuple):
    """Bytes that layers may share."""

    packed: PackedTensor
    recipe: Recipe


def encode(layer: nn.Module, name: str, min_weights: int) -> Encoded | None:
    """A loaded parameter; None if it is to stay as it is: it is small, no BF16, or would not get smaller."""
    weight: torch.Tensor = layer._parameters[name]  # type: ignore[assignment]
    if weight.is_meta or weight.numel() < min_weights:
        return None
    plain = weight.detach().as_subclass(torch.Tensor)
    packed = encode_parameter(plain, f"{type(layer).__name__}.{name}")
    if packed is None:
        return None
    data = nn.Parameter(packed.data, requires_grad=False)
    if data.is_cuda and (known := resident(data)):
        known.is_changing = True  # prompts and how many of them run together: no plans are looked for while they wait
    return Encoded(PackedTensor(packed.header, data), whole(packed, name, plain))


def hold(layer: nn.Module, name: str, encoded: Encoded, multiply: Multiply | None = None) -> PackedWeight:
    """Put a packed weight in a parameter's place, in ``layer.sb_weights`` by name.

    The bytes are a parameter of the layer then. What reads the layer's weight under its old name gets a LazyWeight.
    """
    made = PackedWeight(encoded.packed, multiply)
    delattr(layer, name)
    layer.register_parameter(slot_name(name), encoded.packed.data)  # type: ignore[arg-type]
    weight = LazyWeight(encoded.recipe, [encoded.packed.data], requires_grad=False)
    are_experts = multiply is None  # of which those of other ranks come, too
    weight.weight_loader = _load_no_more if are_experts else _refuse_more  # type: ignore[attr-defined]
    layer.__dict__[name] = weight
    layer.__dict__.setdefault(HELD, {})[name] = made
    return made


def _load_no_more(*args: Any, **kwargs: Any) -> None:
    """For what comes when a layer has all it needs: experts of other ranks. It is not loaded, as None says."""


def _refuse_more(*args: Any, **kwargs: Any) -> None:
    """
    Raises:
        InputError: always, where a layer has all that belongs to it.
    """
    mend = "start another engine to load others; a checkpoint must not have more than the layer takes"
    raise InputError("weights for a layer that is packed already", mend=mend)


def _weight_of(handle: torch.Tensor) -> PackedWeight:
    """
    Raises:
        InputError: the handle has been moved.
    """
    found = _weights.get(handle.data_ptr())
    if found is None:
        mend = "do without what moves weights: cpu_offload_gb, and other offloading of vLLM's"
        raise InputError("a packed layer is no longer where it was loaded to", mend=mend)
    return found


def _product(x: torch.Tensor, handle: torch.Tensor, bias: torch.Tensor | None, rows: int) -> torch.Tensor:
    weight = _weight_of(handle)
    assert weight.multiply is not None
    return weight.multiply(weight.packed, x, bias)


def _product_fake(x: torch.Tensor, handle: torch.Tensor, bias: torch.Tensor | None, rows: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], rows))


def _rows(handle: torch.Tensor, ids: torch.Tensor, columns: int) -> torch.Tensor:
    return decode_rows(_weight_of(handle).packed, ids)


def _rows_fake(handle: torch.Tensor, ids: torch.Tensor, columns: int) -> torch.Tensor:
    return handle.new_empty((*ids.shape, columns), dtype=torch.bfloat16)


_LIBRARY.define(
    "vllm_product(Tensor x, Tensor handle, Tensor? bias, int rows) -> Tensor",
    tags=(torch.Tag.flexible_layout,),  # as samebits::linear
)
_LIBRARY.define("vllm_rows(Tensor handle, Tensor ids, int columns) -> Tensor")
for _name, _implementation, _fake in (
    ("vllm_product", _product, _product_fake),
    ("vllm_rows", _rows, _rows_fake),
):
    _LIBRARY.impl(_name, _implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(f"samebits::{_name}", _fake, lib=_LIBRARY)
