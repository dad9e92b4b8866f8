"""The two functions everything else is built on: encode and decode one tensor."""

from __future__ import annotations

import torch

from samebits.errors import DtypeError
from samebits.format.packed import PackedTensor


def encode(tensor: torch.Tensor) -> PackedTensor:
    """Pack a BF16 tensor of any shape, on the device it is on; the bytes are the same from every device.

    Args:
        tensor: dtype bfloat16, any shape and strides, on the CPU or a CUDA device.

    Returns:
        The packed tensor, on the same device; ``.is_raw`` where packing would not make it smaller.

    Raises:
        DtypeError: the tensor is not bfloat16.
    """
    if tensor.dtype != torch.bfloat16:
        mend = "convert it explicitly with .to(torch.bfloat16), which loses bits"
        raise DtypeError(f"only bfloat16 can be packed, not {tensor.dtype}", mend=mend)
    if tensor.device.type == "cuda":
        from samebits.kernels.encode import encode_cuda

        return encode_cuda(tensor)
    from samebits.codecs.encode import encode_cpu

    return encode_cpu(tensor.detach().cpu())


def decode(packed: PackedTensor, device: torch.device | str | None = None) -> torch.Tensor:
    """The original tensor, word for word.

    Args:
        packed: what ``encode`` returned or a file held.
        device: where the result is wanted; default: where ``packed`` is.

    Returns:
        dtype bfloat16, ``packed.shape``, contiguous.
    """
    if device is not None:
        packed = packed.to(device)
    if packed.is_raw:
        return packed.data.view(torch.bfloat16).reshape(packed.shape).clone()
    from samebits.kernels.ops import decode_packed

    return decode_packed(packed)
