"""Decoding units of DFloat11 checkpoints on a CUDA device: csrc/df11.cu.

All matrices of a unit go into one tensor, behind each other: a block of the stream then has one place to go to, whose
words are stored 16 bytes at a time without a look at where a matrix ends. A matrix is a view of it.
"""

from __future__ import annotations

from functools import cache

import torch

from samebits.errors import DtypeError, FormatError, InputError
from samebits.kernels import nvrtc
from samebits.kernels.residents import may_start_early
from samebits.kernels.structures import UnitStructure

BLOCK_BYTES = 4096  # csrc/df11.cu from here on: kBlockBytes
_GAP_BYTES = 320  # of a block
_ENTRIES = 256
_MAX_TABLES = 17
_THREADS = 256
_BLOCKS_PER_PROCESSOR = 4
_SHARED_BYTES = 56912  # sizeof(Shared)
_RESERVED_BYTES = 1024  # of shared memory, to every block
_TOO_MANY_WEIGHTS = (1 << 32) - 8  # the kernel counts on to the next multiple of 8 in 32 bits


def decode_df11_cuda(
    luts: torch.Tensor, encoded_exponent: torch.Tensor, sign_mantissa: torch.Tensor, output_positions: torch.Tensor,
    gaps: torch.Tensor, output: torch.Tensor, malformed: torch.Tensor,
) -> None:  # fmt: skip
    """Decode a unit on torch's current stream, in one launch.

    Whatever the first five tensors (uint8) hold, memory outside of them and ``output`` is left alone.

    Args:
        output: bfloat16 [weights].
        malformed: int32 [1]; becomes 1 where gaps or positions contradict the stream, else stays as it is.

    Raises:
        DtypeError, InputError: tensors of other dtypes, not contiguous, or on several devices.
        FormatError: sizes that do not fit each other.
        DeviceError: the kernel cannot be built or launched.
    """
    layout = (luts, encoded_exponent, sign_mantissa, output_positions, gaps)
    _check_tensors(*layout, output, malformed)
    blocks = _check_sizes(*layout, output)
    stream, rest, positions, starts, tables, target = (
        _aligned(tensor) for tensor in (encoded_exponent, sign_mantissa, output_positions, gaps, luts, output)
    )
    addresses = [tensor.data_ptr() for tensor in (stream, rest, positions, starts, tables, target, malformed)]
    unit = UnitStructure(*addresses, output.numel(), stream.numel(), positions.numel() // 4, luts.shape[0] - 1)
    early = min(map(may_start_early, (stream, positions, starts, tables)))  # what it reads before it waits
    with torch.cuda.device(output.device):
        device = torch.cuda.current_device()
        nvrtc.launch(nvrtc.kernel("df11.cu", "decode_df11", device), min(blocks, _resident_blocks(device)), _THREADS,
                     _SHARED_BYTES, unit, early=early)  # fmt: skip
    if target is not output:
        output.copy_(target)


def _check_tensors(*tensors: torch.Tensor) -> None:
    *layout, output, malformed = tensors
    dtypes = [*(tensor.dtype for tensor in layout), output.dtype, malformed.dtype]
    if dtypes != [torch.uint8] * 5 + [torch.bfloat16, torch.int32]:
        raise DtypeError(f"tensors of a unit of dtypes {dtypes}", mend="the layout is uint8, its output bfloat16")
    if any(tensor.device != output.device or not tensor.is_contiguous() for tensor in tensors):
        raise InputError("tensors of a unit are not contiguous on one device", mend="move them there")


def _check_sizes(
    luts: torch.Tensor, stream: torch.Tensor, rest: torch.Tensor, positions: torch.Tensor, gaps: torch.Tensor,
    output: torch.Tensor,
) -> int:  # fmt: skip
    """Everything that the kernel does not clamp itself; the number of blocks."""
    blocks = -(-stream.numel() // BLOCK_BYTES)
    fit = (
        luts.dim() == 2 and luts.shape[1] == _ENTRIES and 2 <= luts.shape[0] <= _MAX_TABLES + 1
        and 0 < stream.numel() < 1 << 31 and rest.numel() == output.numel() < _TOO_MANY_WEIGHTS
        and positions.numel() in (4 * blocks, 4 * blocks + 4) and gaps.numel() == blocks * _GAP_BYTES
    )  # fmt: skip
    if not fit:
        shapes = [list(tensor.shape) for tensor in (luts, stream, rest, positions, gaps, output)]
        mend = "give the tensors of one unit, as they lie in a file"
        raise FormatError(f"tensors of a unit whose shapes do not fit each other: {shapes}", mend=mend)
    return blocks


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor``, or a copy at an address for loads of 16 bytes."""
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


@cache
def _resident_blocks(device: int) -> int:
    """Blocks that the device can run at a time."""
    available = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor
    fitting = min(_BLOCKS_PER_PROCESSOR, available // (_SHARED_BYTES + _RESERVED_BYTES))
    return max(fitting, 1) * nvrtc.multiprocessors(device)
