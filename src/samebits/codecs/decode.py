"""Decoding on the CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from samebits.codecs import decode_loops
from samebits.codecs.compact import decode_compact
from samebits.codecs.huffman import CanonicalCode
from samebits.format.geometry import Code
from samebits.format.packed import PackedTensor
from samebits.parallel import run_ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TASK_WORDS = 1 << 20


def decode_cpu(packed: PackedTensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The original tensor.

    Args:
        packed: validated, on the CPU.
        out: bfloat16, contiguous, of the packed shape; written to if given, for example in a mapped file.

    Returns:
        ``out``, or a new tensor.
    """
    if out is None:
        out = torch.from_numpy(np.empty(packed.words, np.int16)).view(torch.bfloat16).view(packed.shape)
    if packed.is_raw:
        return out.copy_(packed.data.view(torch.bfloat16).reshape(packed.shape))
    output = out.reshape(-1).view(torch.int16).numpy().view(np.uint16)
    if packed.code is Code.COMPACT:
        decode_compact(packed, output)
        return out
    header, geometry = packed.header, packed.header.geometry
    shifts = packed.array("row_shifts", "i1") if header.has_row_shifts else np.array([header.shift], np.int8)
    quad = header.code is Code.QUAD
    table = _table(packed)
    run_ranges(decode_loops.decode_chunks, geometry.chunks, max(1, _TASK_WORDS // (512 * geometry.chunk_stages)),
               output, geometry.rows, geometry.columns, geometry.chunk_stages, quad, shifts, header.window, table,
               header.max_code_length, packed.array("offsets", "<u4"), packed.array("planes", "<u4"),
               packed.array("streams", "<u4"))  # fmt: skip
    return out


def _table(packed: PackedTensor) -> NDArray[np.uint64]:
    """uint64 [2 ** max_code_length]: ``length << 32`` and, below, a quad's four top7 bytes or one exponent."""
    code = CanonicalCode.from_section(packed.array("code", "<u2"))
    entries = code.decode_table(packed.header.max_code_length).astype(np.uint64)
    lengths, symbols = entries >> np.uint64(12), entries & np.uint64(0xFFF)
    if packed.code is Code.QUAD:
        window = np.uint64(packed.header.window)
        tops = np.zeros_like(symbols)
        for i in range(4):
            tops |= ((symbols >> np.uint64(3 * i) & np.uint64(7)) + window) << np.uint64(8 * i)
        symbols = tops
    return lengths << np.uint64(32) | symbols
