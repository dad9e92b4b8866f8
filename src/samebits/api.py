"""The two functions everything else is built on: encode and decode one tensor."""

from __future__ import annotations

from dataclasses import replace

import torch

from samebits.codecs.memory import staying
from samebits.errors import DtypeError, InputError
from samebits.format.packed import PackedTensor, check_in_memory


def encode(tensor: torch.Tensor) -> PackedTensor:
    """Pack a BF16 tensor of any shape, on the device it is on; the bytes are the same from every device.

    Args:
        tensor: dtype bfloat16, any shape and strides, on the CPU or a CUDA device.

    Returns:
        The packed tensor, on the same device, a copy; ``.is_raw`` where packing would not make it smaller.

    Raises:
        DtypeError: the tensor is not bfloat16.
        InputError: its values are not all in memory (meta, sparse, nested, a class of its own).
        DeviceError: it is on a GPU, where no kernel can be built, or too large for one.
    """
    if isinstance(tensor, torch.Tensor):
        tensor = tensor.detach()
        tensor = tensor if type(tensor) is torch.Tensor else tensor.clone()  # a class of its own may give a plain copy
    if type(tensor) is not torch.Tensor:
        raise InputError(f"{type(tensor).__name__} is no plain tensor", mend="make one of it first")
    check_in_memory(tensor)
    if tensor.dtype != torch.bfloat16:
        from samebits.bf16 import is_bf16

        mend = "convert it explicitly with .to(torch.bfloat16)"
        if tensor.is_floating_point():
            mend += ", which changes no value" if is_bf16(tensor) else ", which loses bits"
        raise DtypeError(f"only bfloat16 can be packed, not {tensor.dtype}", mend=mend)
    tensor = tensor.resolve_neg()  # of a view that only says so, the words are those of its opposite
    if tensor.device.type == "cuda":
        from samebits.kernels.encode import encode_cuda

        packed = encode_cuda(tensor)
    else:
        from samebits.codecs.encode import encode_cpu

        packed = encode_cpu(tensor.cpu())
    return replace(packed, data=packed.data.clone()) if packed.is_raw else packed


def decode(packed: PackedTensor, device: torch.device | str | None = None) -> torch.Tensor:
    """The original tensor, word for word.

    Args:
        packed: what ``encode`` returned or a file held.
        device: where the result is wanted; default: where ``packed`` is.

    Returns:
        dtype bfloat16, ``packed.shape``, contiguous.

    Raises:
        InputError: not a packed tensor, or its bytes are freed, or more or fewer than its header says.
        DigestError: it does not begin with its header any more, as others were written to its bytes; on the CPU. What
            is read from elsewhere is looked at as a whole when it is wrapped (``PackedTensor.from_data``) or unpickled.
        DeviceError: there is no such GPU, or no kernel can be built for it.
    """
    if not isinstance(packed, PackedTensor):
        mend = "call PackedTensor.from_data on a packed tensor's bytes"
        raise InputError(f"{type(packed).__name__} is no PackedTensor", mend=mend)
    if device is not None:
        packed = packed.to(device)
    from samebits.kernels.ops import decode_packed

    if torch.compiler.is_compiling():
        return decode_packed(packed)
    with staying():
        return decode_packed(packed)
