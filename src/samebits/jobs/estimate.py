"""samebits estimate: what compress would save, from samples or from a full encode, without writing anything."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from samebits.bf16 import entropy, exponent_histogram, round_into
from samebits.codecs.encode import encode_cpu
from samebits.format.container import Checkpoint, Entry
from samebits.format.geometry import ROW_GROUP
from samebits.format.header import MAX_COMPACT_WORDS
from samebits.format.mapping import scratch
from samebits.format.packed import PackedTensor
from samebits.jobs.compress import check_source
from samebits.jobs.options import NOT_GAINED, CompressOptions
from samebits.jobs.summary import bits_per_weight
from samebits.progress import Progress, silent
from samebits.verify import original_bytes

SAMPLE_WORDS = 2 * MAX_COMPACT_WORDS  # tensors up to this size are encoded whole; a sample is too large to be compact
_BLOCKS = 8


@dataclass(frozen=True)
class TensorEstimate:
    """One tensor's estimate.

    Attributes:
        reason: why it would not be packed; None if it would.
        entropy: of the exponents, bits; None for tensors that stay unchanged, which nobody looked into.
        stored_bytes: as it would be in the file.
    """

    name: str
    shape: tuple[int, ...]
    words: int
    original_bytes: int
    stored_bytes: int
    entropy: float | None
    reason: str | None

    @property
    def packed(self) -> bool:
        return self.reason is None

    @property
    def bits_per_weight(self) -> float | None:
        return bits_per_weight(self.stored_bytes, self.words)


@dataclass(frozen=True)
class Estimate:
    """A checkpoint's estimate; ``exact`` if every tensor was encoded in full."""

    tensors: list[TensorEstimate]
    exact: bool

    @property
    def packed(self) -> list[TensorEstimate]:
        return [tensor for tensor in self.tensors if tensor.packed]

    @property
    def original_bytes(self) -> int:
        return sum(tensor.original_bytes for tensor in self.tensors)

    @property
    def stored_bytes(self) -> int:
        return sum(tensor.stored_bytes for tensor in self.tensors)

    @property
    def ratio(self) -> float:
        """Stored over original bytes."""
        return self.stored_bytes / self.original_bytes if self.original_bytes else 1.0

    @property
    def bits_per_weight(self) -> float | None:
        """Of all tensors."""
        return bits_per_weight(self.stored_bytes, sum(tensor.words for tensor in self.tensors))

    @property
    def bits_per_packed_weight(self) -> float | None:
        """Of the tensors that would be packed."""
        return bits_per_weight(sum(tensor.stored_bytes for tensor in self.packed), self._packed_words)

    @property
    def entropy(self) -> float | None:
        """Mean exponent entropy of the tensors that would be packed, bits per weight; None if there are none."""
        bits = sum((tensor.entropy or 0.0) * tensor.words for tensor in self.packed)
        return bits / self._packed_words if self._packed_words else None

    @property
    def _packed_words(self) -> int:
        return sum(tensor.words for tensor in self.packed)


def estimate(
    checkpoint: Checkpoint,
    options: CompressOptions,
    *,
    exact: bool = False,
    progress: Progress = silent,
) -> Estimate:
    """What compressing ``checkpoint`` would give.

    Args:
        exact: encode every tensor in full instead of a sample of its rows.

    Raises:
        InputError, DtypeError: what compress would refuse.
    """
    check_source(checkpoint, options)
    return Estimate(list(_tensors(checkpoint, options, exact, progress)), exact)


def _tensors(
    checkpoint: Checkpoint, options: CompressOptions, exact: bool, progress: Progress
) -> Iterator[TensorEstimate]:
    done, total = 0, sum(entry.original_nbytes for entry in checkpoint)
    for entry in checkpoint:
        reason = options.reason_against(entry)
        yield _estimate(entry, exact) if reason is None else _unchanged(entry, options.unpacked_bytes(entry), reason)
        done += entry.original_nbytes
        progress(done, total)


def _unchanged(entry: Entry, stored: int, reason: str) -> TensorEstimate:
    return TensorEstimate(entry.name, entry.shape, entry.words, entry.original_nbytes, stored, None, reason)


def _estimate(entry: Entry, exact: bool) -> TensorEstimate:
    tensor = entry.spec.typed(original_bytes(entry))
    sample = tensor if exact else sample_rows(tensor)
    if sample.dtype != torch.bfloat16:
        sample = round_into(torch.empty_like(sample, dtype=torch.bfloat16), sample)
    packed = encode_cpu(sample, allocate=scratch)
    stored = 2 * entry.words if packed.is_raw else _scaled_bytes(packed, entry.words)
    bits, reason = entropy(exponent_histogram(sample)), NOT_GAINED if packed.is_raw else None
    return TensorEstimate(entry.name, entry.shape, entry.words, entry.original_nbytes, stored, bits, reason)


def sample_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Over half of SAMPLE_WORDS in evenly spread blocks of whole row groups, [rows, columns]; small tensors whole."""
    if tensor.numel() <= SAMPLE_WORDS or tensor.dim() < 2:
        return tensor[:SAMPLE_WORDS] if tensor.dim() == 1 else tensor
    matrix = tensor.reshape(-1, tensor.shape[-1])
    rows = max(1, SAMPLE_WORDS // _BLOCKS // matrix.shape[1] // ROW_GROUP) * ROW_GROUP
    if _BLOCKS * rows >= matrix.shape[0]:
        return tensor
    step = (matrix.shape[0] - rows) // (_BLOCKS - 1)
    return torch.cat([matrix[block * step : block * step + rows] for block in range(_BLOCKS)])


def _scaled_bytes(packed: PackedTensor, words: int) -> int:
    """The size of a tensor of ``words`` words of which ``packed`` is a sample: the code table does not grow with it."""
    fixed: int = packed.header.sections["code"].stop
    return fixed + (packed.nbytes - fixed) * words // packed.words
