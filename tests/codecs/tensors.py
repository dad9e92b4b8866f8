"""Words as BF16 tensors and back; packed tensors as bytes and back; and the codes that samebits may choose."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from samebits.codecs import plan
from samebits.format.header import Header
from samebits.format.packed import PackedTensor


def tensor_of(words: NDArray[np.uint16]) -> torch.Tensor:
    """A BF16 tensor of these words, in their shape."""
    return torch.from_numpy(np.ascontiguousarray(words).view(np.int16).reshape(words.shape).copy()).view(torch.bfloat16)


def words_of(tensor: torch.Tensor) -> NDArray[np.uint16]:
    """The words of a BF16 tensor on any device, in its shape."""
    assert tensor.dtype == torch.bfloat16
    return tensor.detach().cpu().contiguous().view(torch.int16).numpy().view(np.uint16)


def packed_of(data: bytes) -> PackedTensor:
    """A validated packed tensor on the CPU; its digest is left to others."""
    return PackedTensor.from_data(torch.from_numpy(np.frombuffer(data, np.uint8).copy()), header=Header.parse(data))


def bytes_of(packed: PackedTensor) -> bytes:
    return packed.data.cpu().numpy().tobytes()


@contextmanager
def always_quad() -> Iterator[None]:
    """samebits packs with the quad code whatever can be, as fused kernels want it."""
    bounds = dict.fromkeys(("QUAD_PREMIUM", "QUAD_OVERHEAD", "FUSED_PREMIUM", "FUSED_OVERHEAD"), 99.0)
    with mock.patch.multiple(plan, **bounds), without_compact():
        yield


@contextmanager
def without_compact() -> Iterator[None]:
    """samebits packs small tensors in the quad or the single code, as it does large ones."""
    with mock.patch.multiple(plan, COMPACT_WORDS=0, MAX_COMPACT_WORDS=0):
        yield
