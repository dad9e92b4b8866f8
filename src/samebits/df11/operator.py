"""The operator samebits::df11_decode: a unit's words into a tensor, on the CPU or a CUDA device.

    df11_decode(luts, encoded_exponent, sign_mantissa, output_positions, gaps, output!, malformed!)

The tensors of the layout come as they are in a file (unit.py), without ``split_positions``; ``output`` is bfloat16
[weights]. A stream that contradicts them is a FormatError on the CPU, and on a GPU a 1 in ``malformed``, int32 [1].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from samebits.df11.code import MEND
from samebits.df11.unit import Unit
from samebits.errors import FormatError

LAYOUT = ("luts", "encoded_exponent", "sign_mantissa", "output_positions", "gaps")  # what the operator takes of a unit

_LIBRARY = torch.library.Library("samebits", "FRAGMENT")
_LIBRARY.define(
    "df11_decode(Tensor luts, Tensor encoded_exponent, Tensor sign_mantissa, Tensor output_positions, Tensor gaps, "
    "Tensor(a!) output, Tensor(b!) malformed) -> ()"
)


def check_unit(tensors: Mapping[str, torch.Tensor]) -> Unit:
    """Validate a unit's six tensors on any device; of the two large ones only the sizes.

    Returns:
        The unit, whose large tensors are not to be read.

    Raises:
        FormatError: a tensor of another dtype or number of dimensions, or as Unit.validate.
    """
    arrays: dict[str, Any] = {}
    for name, tensor in tensors.items():
        dtype = torch.int64 if name == "split_positions" else torch.uint8
        if tensor.dtype != dtype or tensor.dim() != (2 if name == "luts" else 1):
            raise FormatError(f"{tensor.dtype} {list(tensor.shape)}", where=name, mend=MEND)
        if name in ("encoded_exponent", "sign_mantissa"):
            arrays[name] = np.broadcast_to(np.uint8(0), tensor.numel())
        else:
            arrays[name] = np.ascontiguousarray(tensor.cpu().numpy())
    unit = Unit(**arrays)
    unit.validate()
    return unit


def check_outcome(malformed: torch.Tensor) -> None:
    """Wait for the operator, and look at what it says.

    Raises:
        FormatError: the stream contradicts the unit's other tensors.
    """
    if malformed.item():
        raise FormatError("gaps or positions contradict the stream", mend=MEND)


def _decode_on_cpu(
    luts: torch.Tensor, encoded_exponent: torch.Tensor, sign_mantissa: torch.Tensor, output_positions: torch.Tensor,
    gaps: torch.Tensor, output: torch.Tensor, malformed: torch.Tensor,
) -> None:  # fmt: skip
    words = output.view(torch.int16).numpy().view(np.uint16)
    if words.shape != sign_mantissa.shape:
        raise FormatError(f"a unit of {sign_mantissa.numel()} weights for {words.size}", mend=MEND)
    Unit(
        luts.numpy(), encoded_exponent.numpy(), sign_mantissa.numpy(), output_positions.numpy(), gaps.numpy(),
        split_positions=np.empty(0, np.int64),
    ).decode(words)  # fmt: skip


def _decode_on_cuda(*tensors: torch.Tensor) -> None:
    from samebits.kernels.df11 import decode_df11_cuda

    decode_df11_cuda(*tensors)


def _decode_fake(*tensors: torch.Tensor) -> None:
    pass


_LIBRARY.impl("df11_decode", _decode_on_cpu, "CPU")
_LIBRARY.impl("df11_decode", _decode_on_cuda, "CUDA")
torch.library.register_fake("samebits::df11_decode", _decode_fake, lib=_LIBRARY)
