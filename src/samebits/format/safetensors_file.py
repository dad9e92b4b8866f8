"""One safetensors file: its header, checked by the safetensors library, and a writer that learns sizes as it goes."""

from __future__ import annotations

import json
import math
import os
import struct
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open

from samebits.errors import FormatError
from samebits.format.header import align
from samebits.format.mapping import changed, check_regular, map_file

PARTIAL = ".partial"  # behind the name of a file that is being written
SUFFIX = ".safetensors"
SINGLE_SUFFIXES = (SUFFIX, ".sft")  # of files that are a whole model each, as ComfyUI lists them
METADATA = "__metadata__"
FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64}
Stored = tuple[str, str, tuple[int, ...], int]  # name, dtype, shape, bytes
_HEADER_ALIGNMENT = 8  # what the safetensors library pads headers to
_LENGTH_BYTES = 8
_COPY_BYTES = 64 << 20
_DAMAGED = "the file is damaged or incomplete: fetch or write it again"


@dataclass(frozen=True)
class TensorSpec:
    """One tensor as a safetensors header describes it.

    Attributes:
        dtype: the safetensors name, for example "BF16".
        start, stop: its bytes, counted from the start of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    @property
    def words(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    def typed(self, data: torch.Tensor) -> torch.Tensor:
        """uint8 bytes as a tensor of this dtype (a float one) and shape; a view if they are aligned."""
        dtype = FLOATS[self.dtype]
        aligned = data if data.data_ptr() % dtype.itemsize == 0 else data.clone()
        return aligned.view(dtype).reshape(self.shape)


@dataclass(frozen=True)
class SafetensorsFile:
    """A safetensors file's header; ``tensors`` in the order in which the header names them.

    Attributes:
        size: of the file, bytes, when it was opened.
        time: when it had been written to last, ns.
    """

    path: Path
    metadata: dict[str, str]
    tensors: dict[str, TensorSpec]
    size: int
    time: int

    @classmethod
    def open(cls, path: Path) -> SafetensorsFile:
        """Read and check the header of ``path``; no tensor is read.

        Raises:
            FormatError: no valid safetensors file: truncated, overlapping tensors, a name twice, ...
            InputError: no regular file.
            OSError: the file cannot be read.
        """
        check_regular(path)
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            _validate(path)
            (length,) = struct.unpack("<Q", file.read(_LENGTH_BYTES))
            text = file.read(length)
        try:
            header = json.loads(text, object_pairs_hook=_unique)
            metadata = header.pop(METADATA, None) or {}
            first = _LENGTH_BYTES + length
            tensors = {name: _spec(name, entry, first) for name, entry in header.items()}
            return cls(path, metadata, tensors, stat.st_size, stat.st_mtime_ns)
        except FormatError as error:
            raise error.at(str(path)) from None

    def data(self, spec: TensorSpec) -> torch.Tensor:
        """A tensor's bytes: uint8 [nbytes], mapped, read-only."""
        return map_file(self.path, spec.start, spec.nbytes)

    def check_unchanged(self) -> None:
        """Behind reading: bytes that were written meanwhile may be those of another file.

        Raises:
            InputError: it has been written to, or replaced, since it was opened.
            OSError: it is gone.
        """
        stat = self.path.stat()
        if (stat.st_size, stat.st_mtime_ns) != (self.size, self.time):
            raise changed(self.path)


def _validate(path: Path) -> None:
    try:
        with safe_open(path, framework="numpy"):
            pass
    except SafetensorError as error:
        raise FormatError(f"not a valid safetensors file ({error})", where=str(path), mend=_DAMAGED) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
        raise FormatError("the header names it twice", where=twice, mend=_DAMAGED)
    return result


def _spec(name: str, entry: object, first: int) -> TensorSpec:
    if not isinstance(entry, dict):  # the library takes a list of the values, too
        raise FormatError("the header does not describe it by a JSON object", where=name, mend=_DAMAGED)
    if not isinstance(entry["dtype"], str):  # and it takes an object of that one key
        raise FormatError("the header does not give its dtype as a string", where=name, mend=_DAMAGED)
    start, stop = entry["data_offsets"]
    return TensorSpec(name, entry["dtype"], tuple(entry["shape"]), first + start, first + stop)


def header_bytes(specs: Iterable[TensorSpec], metadata: Mapping[str, str], capacity: int = 0) -> bytes:
    """A header (length and JSON) of ``specs``, whose offsets count from the end of it; at least ``capacity`` bytes."""
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    for spec in specs:
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [spec.start, spec.stop]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    end = max(capacity, align(_LENGTH_BYTES + len(text), _HEADER_ALIGNMENT))
    return struct.pack("<Q", end - _LENGTH_BYTES) + text.ljust(end - _LENGTH_BYTES)


def header_size(stored: Iterable[Stored], metadata: Mapping[str, str]) -> int:
    """Bytes of a header for tensors that lie one behind the other."""
    specs: list[TensorSpec] = []
    end = 0
    for name, dtype, shape, nbytes in stored:
        specs.append(TensorSpec(name, dtype, shape, end, end + nbytes))
        end += nbytes
    return len(header_bytes(specs, metadata))


class SafetensorsWriter:
    """Writes one safetensors file front to back; it gets its name when it is complete.

    The header comes first but depends on all sizes, so ``capacity`` bytes are left free for it, and what it does not
    need of them is filled with spaces.
    """

    def __init__(self, path: Path, capacity: int) -> None:
        self._path, self._capacity = path, capacity
        self._partial = path.with_name(path.name + PARTIAL)
        self._file = self._partial.open("wb")
        self._file.seek(capacity)
        self._specs: dict[str, TensorSpec] = {}
        self._end = 0
        self._lock = Lock()

    def append(self, name: str, dtype: str, shape: tuple[int, ...], data: torch.Tensor) -> None:
        """Write the next tensor; ``data`` are its bytes, uint8."""
        for first in range(0, data.numel(), _COPY_BYTES):
            self._file.write(data[first : first + _COPY_BYTES].numpy().data)
        self._add(name, dtype, shape, data.numel())

    def allocate(self, name: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> Callable[[int, memoryview], None]:
        """Room for the next tensor: ``write(start, data)`` puts bytes into it, from any thread, before ``finish``."""
        first = self._capacity + self._end
        self._add(name, dtype, shape, nbytes)
        self._file.seek(first + nbytes)
        self._file.truncate()  # a file of its final size takes data faster than one that grows

        def write(start: int, data: memoryview) -> None:
            view = memoryview(data)
            with self._lock:  # threads that wait here sleep; in the kernel, where they also take turns, they spin
                while view:
                    written = os.pwrite(self._file.fileno(), view, first + start)
                    view, start = view[written:], start + written

        return write

    def _add(self, name: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
        self._specs[name] = TensorSpec(name, dtype, shape, self._end, self._end + nbytes)
        self._end += nbytes

    def finish(self, order: Iterable[str], metadata: Mapping[str, str]) -> None:
        """Write the header, which lists the tensors in ``order``, and let the file appear."""
        header = header_bytes([self._specs[name] for name in order], metadata, self._capacity)
        assert len(header) == self._capacity, "the header needs more than was left free for it"
        self._file.seek(0)
        self._file.write(header)
        self._file.close()
        self._partial.replace(self._path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()
