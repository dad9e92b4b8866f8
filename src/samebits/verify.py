"""Proof that nothing was lost: comparison byte by byte, and digests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from samebits.bf16 import round_into
from samebits.codecs.decode import decode_cpu
from samebits.df11.checkpoint import UnitEntry
from samebits.digest import digest
from samebits.errors import CHANGED, DigestError, SamebitsError
from samebits.format.container import Checkpoint, Entry
from samebits.format.header import STORED_DIGEST_END
from samebits.format.mapping import scratch
from samebits.format.packed import PackedTensor
from samebits.format.safetensors_file import FLOATS
from samebits.progress import Progress, silent

if TYPE_CHECKING:
    from numpy.typing import NDArray

_COMPARE_BYTES = 16 << 20


@dataclass(frozen=True)
class Mismatch:
    """The first difference found in a tensor.

    Attributes:
        index: of the value in the tensor, None if something about the tensor differs, or a byte that holds several.
        found, expected: both values as hexadecimal words, or what differs in words.
    """

    tensor: str
    index: tuple[int, ...] | None
    found: str
    expected: str

    def __str__(self) -> str:
        place = f"{self.tensor}{list(self.index)}" if self.index is not None else self.tensor
        return f"{place}: {self.found} instead of {self.expected}"


@dataclass(frozen=True)
class Verdict:
    """What a verification found.

    Attributes:
        tensors, nbytes: compared, of the uncompressed checkpoint.
        unchecked: tensors for which no digest is recorded.
        mismatches: one for each tensor that differs.
        cast_tensors: of the original, that were rounded first.
    """

    tensors: int
    nbytes: int
    unchecked: int
    mismatches: list[Mismatch]
    cast_tensors: int = 0

    @property
    def identical(self) -> bool:
        return not self.mismatches


@contextmanager
def repeatable_attention() -> Iterator[None]:
    """To compare what two models compute: meanwhile torch's attention is any but cuDNN's, in the whole process.

    With 16 sequences or more, cuDNN's does not repeat itself: one BF16 model, decoding from the same input, gives
    other bits from run to run, so a difference would say nothing about weights (H200, torch 2.11, which prefers it).
    The kernels that torch takes instead gave the same in every run. Changes nothing on a CPU. Decorates functions, too.
    """
    before = torch.backends.cuda.cudnn_sdp_enabled()
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def decode_checked(packed: PackedTensor, out: torch.Tensor, device: str = "cpu") -> torch.Tensor:
    """Decode into ``out`` (bfloat16, CPU, for example mapped) and compare with the digest of the original words.

    Raises:
        DigestError: they differ; ``out`` must not be used.
    """
    if device == "cpu":
        decode_cpu(packed, out=out)
    else:
        from samebits.kernels.ops import decode_packed

        out.copy_(decode_packed(packed.to(device)))
    if digest(out) != packed.header.original_digest:
        raise DigestError("the decoded words differ from their digest", mend=CHANGED)
    return out


def original_bytes(entry: Entry, device: str = "cpu") -> torch.Tensor:
    """A tensor's original bytes, decoded and checked if packed: uint8 [original_nbytes], read-only.

    Raises:
        FormatError, DigestError: a damaged packed tensor.
    """
    if not entry.is_packed:
        return entry.data()
    out = scratch(entry.original_nbytes).view(torch.bfloat16).reshape(entry.shape)
    if isinstance(entry, UnitEntry):
        return entry.matrix.decode(out, device).reshape(-1).view(torch.uint8)
    packed = entry.packed()
    try:
        return decode_checked(packed, out, device).reshape(-1).view(torch.uint8)
    except SamebitsError as error:
        raise error.at(entry.where) from None


def verify_digests(checkpoint: Checkpoint, device: str = "cpu", progress: Progress = silent) -> Verdict:
    """Check every tensor against the digests stored with it: of the stored bytes, and of the decoded words.

    Raises:
        FormatError: a tensor that is not even well formed.
        InputError: a file was written to meanwhile.
    """
    unchecked = sum(entry.digest is None for entry in checkpoint)
    verdict = _verdict([*checkpoint], lambda entry: _digest_mismatch(entry, device), progress, unchecked)
    checkpoint.check_unchanged()
    return verdict


def _verdict(
    entries: Sequence[Entry], find: Callable[[Entry], Mismatch | None], progress: Progress, unchecked: int = 0
) -> Verdict:
    done, total, found = 0, sum(entry.original_nbytes for entry in entries), []
    for entry in entries:
        if mismatch := find(entry):
            found.append(mismatch)
        done += entry.original_nbytes
        progress(done, total)
    return Verdict(len(entries), done, unchecked, found)


def _digest_mismatch(entry: Entry, device: str) -> Mismatch | None:
    if isinstance(entry, UnitEntry):  # no digest, but a code can be seen to be broken
        original_bytes(entry, device)
        return None
    if entry.header is None:
        found = digest(entry.data())  # also where there is none to compare it with: that it can be read is said
        return _differ(entry, found, entry.digest, "bytes") if entry.digest is not None else None
    if mismatch := _stored_mismatch(entry):
        return mismatch
    try:
        original_bytes(entry, device)
    except DigestError:
        return _damaged(entry)
    return None


def _stored_mismatch(entry: Entry) -> Mismatch | None:
    """Of a packed tensor's bytes, some of which no word depends on."""
    if entry.header is None:
        return None
    stored = digest(entry.data()[STORED_DIGEST_END:])
    return _differ(entry, stored, entry.header.stored_digest, "stored bytes")


def _damaged(entry: Entry) -> Mismatch:
    return Mismatch(entry.name, None, "decoded words with another digest", f"{entry.digest:016x}")


def _differ(entry: Entry, found: int, expected: int | None, what: str) -> Mismatch | None:
    if found == expected:
        return None
    return Mismatch(entry.name, None, f"digest {found:016x} of the {what}", f"{expected:016x}")


def verify_against(
    checkpoint: Checkpoint,
    original: Checkpoint,
    device: str = "cpu",
    progress: Progress = silent,
    *,
    cast: bool = False,
) -> Verdict:
    """Compare every tensor of two checkpoints (either may be packed) byte by byte; of packed ones also stored digests.

    Args:
        cast: where the original has another float dtype than BF16, and ``checkpoint`` BF16, compare with its values
            rounded as compress --cast rounds them.

    Raises:
        FormatError: a tensor that is not even well formed.
        DigestError: a damaged packed tensor of the original.
        InputError: a file was written to meanwhile.
    """
    unpaired = [
        Mismatch(name, None, *(("missing", "present") if name in original.entries else ("present", "missing")))
        for name in sorted({*checkpoint.entries} ^ {*original.entries})
    ]
    paired = [entry for entry in checkpoint if entry.name in original.entries]
    rounded = {entry.name for entry in cast_entries(checkpoint, original)} if cast else set()
    verdict = _verdict(
        paired, lambda entry: _compare(entry, original.entries[entry.name], device, entry.name in rounded), progress
    )
    checkpoint.check_unchanged()
    original.check_unchanged()
    return replace(verdict, mismatches=[*unpaired, *verdict.mismatches], cast_tensors=len(rounded))


def cast_entries(checkpoint: Checkpoint, original: Checkpoint) -> list[Entry]:
    """Tensors of ``original`` that compress --cast would have given the dtype that they have in ``checkpoint``."""
    pairs = ((checkpoint.entries.get(entry.name), entry) for entry in original)
    return [entry for found, entry in pairs if found and is_cast(found, entry)]


def is_cast(entry: Entry, original: Entry) -> bool:
    """Whether a tensor has the dtype and shape that compress --cast gives it, and ``original`` another dtype."""
    casts = original.dtype in FLOATS and original.dtype != "BF16" and original.words > 0
    return casts and (entry.dtype, entry.shape) == ("BF16", original.shape)


def _compare(entry: Entry, expected: Entry, device: str, cast: bool) -> Mismatch | None:
    described, wanted = (f"{e.dtype} {list(e.shape)}" for e in (entry, expected))
    if described != wanted and not cast:
        return Mismatch(entry.name, None, described, wanted)
    right = (_rounded_bytes(expected) if cast else original_bytes(expected, device)).numpy()
    try:
        left = original_bytes(entry, device).numpy()
    except DigestError:
        return _damaged(entry)
    first = first_difference(left, right)
    return _stored_mismatch(entry) if first is None else _mismatch_at(entry, left, right, first)


def _rounded_bytes(entry: Entry) -> torch.Tensor:
    out = scratch(2 * entry.words)
    round_into(out.view(torch.bfloat16), entry.tensor())
    return out


def first_difference(left: NDArray[np.uint8], right: NDArray[np.uint8]) -> int | None:
    """Where two byte arrays of equal length first differ."""
    for start in range(0, left.size, _COMPARE_BYTES):
        block = slice(start, start + _COMPARE_BYTES)
        if not np.array_equal(left[block], right[block]):
            return start + int(np.argmax(left[block] != right[block]))
    return None


def _mismatch_at(entry: Entry, left: NDArray[np.uint8], right: NDArray[np.uint8], first: int) -> Mismatch:
    width = left.size // entry.words
    if not width:  # several values in a byte
        return Mismatch(entry.name, None, *(f"0x{array[first]:02x} in byte {first}" for array in (left, right)))
    position = first // width
    value = slice(position * width, (position + 1) * width)
    found, expected = ("0x" + array[value][::-1].tobytes().hex() for array in (left, right))
    index: list[int] = []
    for size in reversed(entry.shape):  # of any number of dimensions, more than NumPy's 64
        position, place = divmod(position, size)
        index.insert(0, place)
    return Mismatch(entry.name, tuple(index), found, expected)
