"""Decoding on the CPU."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from samebits.bf16 import words_of
from samebits.codecs import decode_loops, openmp
from samebits.codecs.compact import decode_compact
from samebits.codecs.huffman import CanonicalCode
from samebits.codecs.memory import empty
from samebits.format.geometry import Code
from samebits.format.header import Header
from samebits.format.packed import PackedTensor, check_code
from samebits.parallel import TASK_WORDS, grain_of, run_ranges

if TYPE_CHECKING:
    from numpy.typing import NDArray


def decode_cpu(packed: PackedTensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """The original tensor.

    Args:
        packed: validated, on the CPU.
        out: bfloat16, contiguous, of the packed shape; written to if given, for example in a mapped file.

    Returns:
        ``out``, or a new tensor.
    """
    if out is None:
        out = empty(packed.shape)
    if packed.is_raw:
        return out.copy_(packed.data.view(torch.bfloat16).reshape(packed.shape))
    if packed.code is Code.COMPACT:
        decode_compact(packed, words_of(out))
        return out
    whole = np.zeros(1, np.int64)  # all words as one entry, so that there is one loop to compile
    _decode_entries(packed, out, math.prod(packed.shape), whole, whole)
    return out


def decode_rows_cpu(packed: PackedTensor, ids: torch.Tensor) -> torch.Tensor:
    """``decode_cpu(packed)[ids]``, decoding no more than that takes.

    Args:
        ids: int32 or int64, any shape, on the CPU.

    Raises:
        IndexError: an id is negative, or beyond the first dimension.
    """
    shape = (*ids.shape, *packed.shape[1:])
    if not gathers(packed.header, ids.numel()):
        return decode_cpu(packed).index_select(0, ids.reshape(-1)).view(shape)
    out = empty(shape)
    entries = _checked(packed.header, ids)
    words = packed.header.entry_words
    _decode_entries(packed, out, words, entries, np.arange(len(entries)) * words)
    return out


def decode_experts_cpu(packed: PackedTensor, routed: torch.Tensor) -> torch.Tensor:
    """A tensor of the packed shape in which entries of the first dimension are decoded if they occur in ``routed``.

    Args:
        routed: int32 or int64, any shape, on the CPU.

    Returns:
        Whatever the memory held, where not decoded.

    Raises:
        IndexError: as decode_rows_cpu.
    """
    entries = np.unique(_checked(packed.header, routed))
    if not packed.header.is_chunked:
        return decode_cpu(packed)
    out = empty(packed.shape)
    words = packed.header.entry_words
    _decode_entries(packed, out, words, entries, entries * words)
    return out


def gathers(header: Header, count: int) -> bool:
    """Whether to decode ``count`` entries of the first dimension one by one: if that takes no more chunks than all."""
    if not header.is_chunked:
        return False
    return count * header.geometry.chunks_of_runs(header.entry_words) <= header.geometry.chunks


def _checked(header: Header, ids: torch.Tensor) -> NDArray[np.int64]:
    numbers: NDArray[np.int64] = ids.reshape(-1).numpy().astype(np.int64)
    wrong = numbers[(numbers < 0) | (numbers >= header.shape[0])]
    if len(wrong):
        raise IndexError(f"index {wrong[0]} is out of range for a packed tensor of shape {list(header.shape)}")
    return numbers


def _decode_entries(
    packed: PackedTensor, out: torch.Tensor, words: int, entries: NDArray[np.int64], places: NDArray[np.int64]
) -> None:
    """Decode entries of ``words`` words to ``out``, each from one of ``places`` on (in words)."""
    header, geometry = packed.header, packed.header.geometry
    chunks = geometry.chunks_of_runs(words)
    count = len(entries) * chunks
    shifts, table, *stored = _arrays(packed)
    numbers = geometry.rows, geometry.columns, geometry.chunk_stages, header.code is Code.QUAD, header.window
    arrays: list[NDArray[Any]] = [words_of(out), entries, places, shifts, table, *stored]
    total = count * 512 * header.chunk_stages
    if openmp.run(decode_loops.decode_task, count, total, arrays, [words, chunks, *numbers, header.max_code_length]):
        return
    run_ranges(decode_loops.decode_entries, count, _grain(count, 512 * header.chunk_stages), *arrays[:3], words,
               chunks, *numbers, shifts, table, header.max_code_length, *stored)  # fmt: skip


def _grain(chunks: int, words: int) -> int:
    """Chunks of ``words`` words for a thread: all of a small tensor, as torch's own threads spin between products."""
    return grain_of(chunks * words, words) if chunks * words > TASK_WORDS else max(1, chunks)


def _arrays(packed: PackedTensor) -> list[NDArray[Any]]:
    """What the loops take of a packed tensor: row shifts, decode table, offsets, planes, streams."""
    header = packed.header
    code, shifts, *arrays = packed.arrays_to_decode(
        ("code", "<u2"), ("row_shifts", "i1"), ("offsets", "<u4"), ("planes", "<u4"), ("streams", "<u4")
    )
    if not header.has_row_shifts:
        shifts = np.array([header.shift], np.int8)
    return [shifts, _table(code.tobytes(), header.max_code_length, header.code), *arrays]


@lru_cache(maxsize=256)  # 16 KB of a quad code, 64 of a single one
def _table(section: bytes, width: int, code: Code) -> NDArray[np.uint16]:
    """Of quads as CanonicalCode.decode_table; of single exponents as several_symbols, four items for each entry."""
    counts_and_symbols = np.frombuffer(section, "<u2")
    check_code(counts_and_symbols, width, code)  # whatever was written since it was validated
    table = CanonicalCode.from_section(counts_and_symbols).decode_table(width)
    if code is Code.SINGLE:
        return decode_loops.several_symbols(table, width).view(np.uint16)
    return table
