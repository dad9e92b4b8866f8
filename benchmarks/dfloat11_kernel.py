"""DFloat11's released decode kernel, launched as its package does; the PTX is read from the installed package."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch

from common import Measured
from gpu import DISTINCT_BYTES, OUTPUTS, time_graph
from samebits.bf16 import words_of
from samebits.df11.unit import BLOCK_BYTES, Unit
from samebits.kernels import nvrtc

PACKAGE = "dfloat11"
THREADS = BLOCK_BYTES // 8
# The kernel's pointers in their order, the output's excepted.
ARGUMENTS = ("luts", "encoded_exponent", "sign_mantissa", "output_positions", "gaps")


class DFloat11:
    """All matrices as one unit, decoded in one launch, as the package does with a block of a model."""

    name = "DFloat11's kernel"

    def __init__(self, ptx: bytes) -> None:
        self.ptx = ptx
        self.kernel: Any = None

    @classmethod
    def installed(cls) -> DFloat11 | None:
        """None without the package, which is not imported: it wants CuPy and much else."""
        spec = find_spec(PACKAGE)
        if spec is None or not spec.submodule_search_locations:
            return None
        decoder = cls(Path(spec.submodule_search_locations[0], "decode.ptx").read_bytes())
        decoder.name += f", {version(PACKAGE)}"
        return decoder

    def measure(self, weights: Sequence[torch.Tensor], repeats: int) -> Measured:
        """
        Raises:
            RuntimeError: its output differs from the weights, or it cannot be launched.
        """
        device, sizes = weights[0].device, [weight.numel() for weight in weights]
        unit = Unit.encode(np.concatenate([words_of(weight.cpu()).ravel() for weight in weights]), sizes)
        tensors = [torch.from_numpy(getattr(unit, name)).to(device) for name in ARGUMENTS]
        nbytes = sum(tensor.nbytes for tensor in tensors)
        copies = [tensors, *([t.clone() for t in tensors] for _ in range(int(DISTINCT_BYTES / nbytes)))]
        outputs = [torch.zeros(unit.words, dtype=torch.bfloat16, device=device) for _ in range(OUTPUTS)]
        calls = [partial(self.decode, unit, copy, outputs[i % OUTPUTS]) for i, copy in enumerate(copies)]
        timing = time_graph(calls, repeats)
        expected = torch.cat([weight.flatten() for weight in weights]).view(torch.int16)
        if not all(torch.equal(output.view(torch.int16), expected) for output in outputs[: len(copies)]):
            raise RuntimeError("its output differs from the weights")
        return Measured(nbytes, timing, "CUDA graph")

    def decode(self, unit: Unit, tensors: Sequence[torch.Tensor], output: torch.Tensor) -> None:
        """Launch on torch's current stream; ``tensors`` are ARGUMENTS on the device."""
        if self.kernel is None:
            from cuda.core import Device, ObjectCode

            Device(output.device.index).set_current()
            self.kernel = ObjectCode.from_ptx(self.ptx).get_kernel("decode")
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (*tensors, output))
        counts = (ctypes.c_int32(count) for count in (unit.luts.shape[0], unit.encoded_exponent.size, unit.words))
        nvrtc.launch(self.kernel, unit.blocks, THREADS, shared_bytes(unit), *pointers, *counts)


def shared_bytes(unit: Unit) -> int:
    """A counter for each thread, one for the block, and the most words that one block decodes."""
    positions = unit.output_positions.view("<u4").astype(np.int64)
    return 4 * THREADS + 4 + 2 * int(np.diff(positions).max())
