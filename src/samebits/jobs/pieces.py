"""The work on one tensor, as a worker process does it: encode or decode from a mapped file into a spool file."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from samebits.bf16 import round_into
from samebits.codecs.encode import encode_cpu
from samebits.df11.checkpoint import Matrix
from samebits.errors import SamebitsError
from samebits.format.container import Entry
from samebits.format.header import Header
from samebits.format.mapping import create_mapped, map_file
from samebits.format.names import stored_name
from samebits.format.packed import PackedTensor
from samebits.format.safetensors_file import SafetensorsWriter, TensorSpec
from samebits.verify import decode_checked


@dataclass(frozen=True)
class Piece:
    """One tensor ready to be written: bytes [start, start + nbytes) of ``path``.

    Attributes:
        name: under which it is stored.
        is_spool: whether ``path`` was made for it and may go.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    nbytes: int
    is_packed: bool = False
    is_spool: bool = False

    @classmethod
    def of(cls, entry: Entry) -> Piece:
        """A tensor as its file has it."""
        return cls(entry.name, entry.dtype, entry.shape, entry.file.path, entry.spec.start, entry.nbytes)

    def data(self) -> torch.Tensor:
        """uint8 [nbytes], mapped."""
        return map_file(self.path, self.start, self.nbytes)

    @property
    def width(self) -> int:
        """Bytes of one value."""
        return self.nbytes // max(1, math.prod(self.shape))

    def append_to(self, writer: SafetensorsWriter) -> None:
        """Write it, and drop its spool file."""
        writer.append(self.name, self.dtype, self.shape, self.data())
        self.discard()

    def discard(self) -> None:
        if self.is_spool:
            self.path.unlink()


@dataclass(frozen=True)
class Task:
    """What a worker needs to know about a tensor.

    Attributes:
        header: of a packed tensor, which is to be decoded; else the tensor is to be encoded.
        matrix: of a DFloat11 unit, which the tensor is decoded from first.
        pack: False if that, or casting, is all there is to do.
        spool: the file to write to.
        device: "cpu" or "cuda".
    """

    name: str
    path: Path
    spec: TensorSpec
    header: Header | None
    matrix: Matrix | None
    pack: bool
    spool: Path
    device: str

    @property
    def where(self) -> str:
        return f"{self.path}: {self.name}"


def work(task: Task) -> Piece:
    """Encode or decode one tensor.

    Raises:
        FormatError, DigestError: a packed tensor, or a unit, that is damaged.
        OSError: no space left.
    """
    try:
        return _decode(task, task.header) if task.header else _encode(task)
    except SamebitsError as error:
        if task.matrix and error.where:  # the unit's place in its file
            raise
        raise error.at(task.where) from None


def _decode(task: Task, header: Header) -> Piece:
    data = map_file(task.path, task.spec.start, task.spec.nbytes)
    packed = PackedTensor.from_data(data, header=header)
    nbytes = 2 * packed.words
    spool = create_mapped(task.spool, nbytes)
    decode_checked(packed, spool.view(torch.bfloat16).reshape(packed.shape), task.device)
    return Piece(task.name, "BF16", header.shape, task.spool, 0, nbytes, is_spool=True)


def _encode(task: Task) -> Piece:
    spec = task.spec
    source = Piece(task.name, spec.dtype, spec.shape, task.path, spec.start, spec.nbytes)
    if task.matrix:
        source = _restore(task, task.matrix)
    elif spec.dtype != "BF16":
        source = _cast(task, source)
    packed = _pack(task, source) if task.pack else None
    if packed is None:
        return source
    source.discard()
    return packed


def _restore(task: Task, matrix: Matrix) -> Piece:
    path = task.spool.with_suffix(".words")
    nbytes = 2 * task.spec.words
    matrix.decode(create_mapped(path, nbytes).view(torch.bfloat16), task.device)
    return Piece(task.name, "BF16", task.spec.shape, path, 0, nbytes, is_spool=True)


def _cast(task: Task, source: Piece) -> Piece:
    path = task.spool.with_suffix(".cast")
    nbytes = 2 * task.spec.words
    round_into(create_mapped(path, nbytes).view(torch.bfloat16), task.spec.typed(source.data()))
    return replace(source, dtype="BF16", path=path, start=0, nbytes=nbytes, is_spool=True)


def _pack(task: Task, source: Piece) -> Piece | None:
    spec = replace(task.spec, dtype="BF16")
    tensor = spec.typed(source.data())
    packed = encode_on(tensor, task.device, task.spool)
    if packed.is_raw:
        return None
    nbytes = packed.nbytes
    return Piece(stored_name(task.name), "U8", (nbytes,), task.spool, 0, nbytes, is_packed=True, is_spool=True)


def encode_on(tensor: torch.Tensor, device: str, spool: Path) -> PackedTensor:
    """Encode a mapped BF16 tensor; unless it is RAW, the packed bytes are in the new file ``spool``."""
    if device == "cpu":
        return encode_cpu(tensor, allocate=lambda nbytes: create_mapped(spool, nbytes))
    from samebits.kernels.encode import encode_cuda

    packed = encode_cuda(tensor.to(device))
    if packed.is_raw:
        return packed
    data = create_mapped(spool, packed.nbytes).copy_(packed.data)
    return replace(packed, data=data)
