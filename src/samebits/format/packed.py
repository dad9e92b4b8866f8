"""One packed tensor: its bytes, and what is checked of them before a decoder trusts them."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from samebits.digest import digest
from samebits.errors import DeviceError, DigestError, DtypeError, InputError
from samebits.format.geometry import RUN_WORDS, Code, Layout
from samebits.format.header import (
    COUNTS,
    ESCAPE,
    EXPONENTS,
    MAX_SHIFT,
    QUAD_SYMBOLS,
    STATES,
    STORED_DIGEST_END,
    Header,
    Section,
    need,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)  # a tensor's bytes are no truth value
class PackedTensor:
    """A BF16 tensor in packed form, or (code RAW) its original words where packing gains nothing.

    Attributes:
        header: what FORMAT.md 2.2 stores; for RAW only code, shape and original_digest mean something.
        data: uint8, one-dimensional: the packed tensor's bytes (RAW: the BF16 bytes), on any device.
    """

    header: Header
    data: torch.Tensor

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled as its bytes, which are validated when they come back."""
        return (_raw_again, (self.header, self.data)) if self.is_raw else (PackedTensor.from_data, (self.data,))

    @property
    def shape(self) -> torch.Size:
        """Of the BF16 tensor."""
        return torch.Size(self.header.shape)

    @property
    def device(self) -> torch.device:
        """Where the bytes are."""
        return self.data.device

    @property
    def code(self) -> Code:
        return self.header.code

    @property
    def is_raw(self) -> bool:
        """True if the tensor did not gain and holds its original words."""
        return self.header.code is Code.RAW

    @property
    def nbytes(self) -> int:
        """Bytes held, everything counted: nothing else stays in memory for this tensor."""
        return self.data.numel()

    @property
    def words(self) -> int:
        """Number of BF16 values."""
        return self.header.words

    @property
    def bits_per_weight(self) -> float:
        """Of 16: all bytes counted; 0 of an empty tensor."""
        return 8 * self.nbytes / self.words if self.words else 0.0

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedTensor:
        """The same packed tensor on another device.

        Raises:
            DeviceError: there is no such GPU.
        """
        return replace(self, data=self.data.to(existing(device), non_blocking=non_blocking))

    def section(self, name: Section) -> torch.Tensor:
        """A section's bytes (uint8 view)."""
        return self.data[self.header.sections[name]]

    def array(self, name: Section, dtype: str) -> NDArray[Any]:
        """A section as a NumPy view (CPU only)."""
        [array] = self.arrays((name, dtype))
        return array

    def check_not_freed(self) -> None:
        """
        Raises:
            InputError: the bytes are no longer there, as behind a forward pass under torch's fully_shard.
        """
        if not self.data.data_ptr():
            check_in_memory(self.data)

    def arrays(self, *sections: tuple[Section, str]) -> list[NDArray[Any]]:
        """Sections as NumPy views (CPU only), each of the dtype beside its name.

        By DLPack: behind Tensor.numpy() the memory can never be resized again, as torch's fully_shard does with what it
        gathers. NumPy before 2.1 lets nobody write to such views.

        Raises:
            InputError: the memory was freed.
        """
        return self._arrays_in(self._bytes(), sections)

    def arrays_to_decode(self, *sections: tuple[Section, str]) -> list[NDArray[Any]]:
        """``arrays`` of bytes that begin with the header.

        Raises:
            InputError: as ``arrays``.
            DigestError: they begin otherwise: others were written to their memory, of which nobody was told.
        """
        whole = self._bytes()
        if not self.header.begins(whole):
            what = "its packed bytes are others than they were"
            raise DigestError(what, mend="load it again, by load_state_dict and not through .data")
        return self._arrays_in(whole, sections)

    def _bytes(self) -> NDArray[Any]:
        self.check_not_freed()
        view: NDArray[Any] = np.from_dlpack(self.data)
        return view if view.flags.writeable else self.data.numpy()

    def _arrays_in(self, whole: NDArray[Any], sections: Iterable[tuple[Section, str]]) -> list[NDArray[Any]]:
        return [whole[self.header.sections[name]].view(np.dtype(dtype)) for name, dtype in sections]

    @classmethod
    def raw(cls, tensor: torch.Tensor, original_digest: int) -> PackedTensor:
        """Wrap a contiguous BF16 tensor that is not worth packing."""
        header = Header(Code.RAW, Layout.FLAT, tuple(tensor.shape), 1, 1, 0, 0, 0, False, 0, 0, original_digest)
        words = tensor.contiguous().as_strided((tensor.numel(),), (1,))  # reshape leaves one word's stride at 0
        return cls(header, words.view(torch.uint8))

    @classmethod
    def from_data(cls, data: torch.Tensor, *, header: Header | None = None) -> PackedTensor:
        """Wrap and validate the bytes of a packed tensor.

        Args:
            data: uint8, one-dimensional, contiguous, any device. What is on a GPU is read back.
            header: of them, where their digest was compared, or will be; less is read back then.

        Raises:
            InputError, DtypeError: not a one-dimensional uint8 tensor whose values are in memory.
            FormatError: not a valid packed tensor.
            DigestError: one whose bytes are not those that its digest was made of.
        """
        if not isinstance(data, torch.Tensor):
            raise InputError(f"{type(data).__name__} is no tensor", mend="torch.frombuffer makes one of bytes")
        check_in_memory(data)
        if data.dtype != torch.uint8 or data.dim() != 1:
            what = f"a packed tensor is one-dimensional uint8, not {tuple(data.shape)} of {data.dtype}"
            raise DtypeError(what, mend="give the `data` of a PackedTensor")
        known = header or Header.of(data)
        packed = cls(known, data.contiguous())
        packed.validate()
        if header is None and digest(packed.data[STORED_DIGEST_END:].cpu()) != known.stored_digest:
            raise DigestError("the bytes differ from their digest", mend="they are damaged: fetch or make them again")
        return packed

    def validate(self) -> None:
        """Bound everything a decoder will trust: length, code tables, offsets, shifts.

        These are FORMAT.md 2.2, 3.2, 3.6, 4.3, 6.1 and 6.7.

        Raises:
            FormatError: the first clause that is violated.
        """
        if self.is_raw:
            need(self.nbytes == 2 * self.words, "raw words do not fill the shape")
            return
        header = self.header
        need(self.nbytes == header.nbytes, f"{self.nbytes} bytes where the header asks for {header.nbytes}")
        if header.code is Code.COMPACT:
            frequencies_of(self.section("code").cpu().numpy())
            self._validate_runs()
            return
        check_code(self.section("code").cpu().numpy().view("<u2"), header.max_code_length, header.code)
        self._validate_offsets()
        shifts = self.section("row_shifts").view(torch.int8)
        need(not len(shifts) or int(shifts.to(torch.int16).abs().max()) <= MAX_SHIFT, "a row shift out of range")

    def _validate_offsets(self) -> None:
        header = self.header
        offsets = self.section("offsets")
        offsets = offsets.clone() if offsets.storage_offset() % 4 else offsets
        values = offsets.view(torch.int32).to(torch.int64) & 0xFFFFFFFF
        steps = values[1:] - values[:-1]
        ends = values[[0, -1]].tolist()
        smallest, largest = (int(steps.min()), int(steps.max())) if len(steps) else (0, 0)
        need(ends == [0, header.stream_words], "chunk offsets do not cover the streams")
        need(smallest >= 1 and largest <= header.max_chunk_words, "a chunk offset out of range")

    def _validate_runs(self) -> None:
        lengths = self.section("offsets").cpu().numpy().view("<u2").astype(np.int64)
        words = np.full(lengths.size, RUN_WORDS)
        words[-1] = self.words - RUN_WORDS * (lengths.size - 1)
        need(bool(((lengths >= 8) & (lengths <= 8 + 16 * words)).all()), "a run's length out of range")
        need(-(-int(lengths.sum()) // 32) == self.header.stream_words, "the runs do not fill the streams")


def _raw_again(header: Header, data: torch.Tensor) -> PackedTensor:
    packed = PackedTensor(header, data)
    packed.validate()
    if digest(data.cpu()) != header.original_digest:
        raise DigestError("the words differ from their digest", mend="they are damaged: fetch or make them again")
    return packed


def existing(device: object) -> torch.device:
    """
    Raises:
        DeviceError: a GPU that is not there, or no device that tensors can be on here.
    """
    found: torch.device | None = None
    with suppress(RuntimeError, TypeError):
        found = torch.device(device)  # type: ignore[call-overload]
    if found is None or found.type not in ("cpu", "cuda", "meta"):
        raise DeviceError(f"{device!r} is no device for packed tensors", mend="take cpu, or cuda")
    if found.type == "cuda" and not (found.index or 0) < torch.cuda.device_count():
        raise DeviceError(f"no device {found} is available", mend="take the CPU, or see `samebits doctor`")
    return found


def check_in_memory(tensor: torch.Tensor) -> None:
    """
    Raises:
        InputError: the values of ``tensor`` are not all in memory, one after the other.
    """
    if tensor.is_nested:
        raise InputError("a nested tensor is several", mend="pack those of unbind() one by one")
    if tensor.layout is not torch.strided or tensor.is_meta:
        what, mend = (
            ("is on the meta device", "load it") if tensor.is_meta else (f"is {tensor.layout}", "call to_dense()")
        )
        raise InputError(f"a tensor {what}, so its values are not all in memory", mend=f"{mend} first")
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    ends = (tensor.storage_offset() + last + 1) * tensor.element_size()
    if tensor.numel() and ends > tensor.untyped_storage().nbytes():  # as sharding leaves parameters
        raise InputError("a tensor's memory was freed, so its values are not there", mend="gather or load it first")


def check_code(section: NDArray[np.uint16], longest: int, code: Code) -> None:
    """That a quad or single code section says what a decoder can trust (FORMAT.md 3.2).

    Args:
        longest: its max_code_length.

    Raises:
        FormatError: it does not.
    """
    counts, symbols = section[:COUNTS].astype(np.int64), section[COUNTS:]
    lengths = np.arange(COUNTS)
    need(int(counts.sum()) == len(symbols), "the code's counts do not add up")
    need(not counts[lengths > longest].any() and counts[0] == 0, "a code length out of range")
    kraft = int((counts << (COUNTS - lengths)).sum())
    need(kraft == 1 << COUNTS or (len(symbols) == 1 and counts[1] == 1), "an incomplete or impossible code")
    limit = QUAD_SYMBOLS if code is Code.QUAD else EXPONENTS
    distinct = int(symbols.max()) < limit and len(np.unique(symbols)) == len(symbols)
    need(distinct, "a code's symbols out of range or twice")
    ascending = np.diff(symbols.astype(np.int64)) > 0
    next_length = np.cumsum(counts)[:-1]  # where a symbol may be smaller than the one before
    ascending[next_length[(next_length > 0) & (next_length < len(symbols))] - 1] = True
    need(bool(ascending.all()), "a code's symbols out of order")


def frequencies_of(section: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The compact code's frequencies as its code section stores them: int64 [257], the escape's last (FORMAT.md 3.6).

    Raises:
        FormatError: more exponents or states than there are, or the section ends within a skip.
    """
    frequencies = np.zeros(EXPONENTS + 1, np.int64)
    exponent, content = 0, iter(section.tolist())
    for byte in content:
        skipped = 0 if byte else next(content, 0)
        need(byte > 0 or skipped > 0, "a skip of no exponents")
        need(exponent + max(1, skipped) <= EXPONENTS, "frequencies of more than 256 exponents")
        frequencies[exponent] = byte
        exponent += max(1, skipped)
    frequencies[ESCAPE] = STATES - frequencies.sum()
    need(int(frequencies[ESCAPE]) >= 0, "the frequencies add up to more than 256")
    return frequencies
