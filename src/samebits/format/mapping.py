"""Tensors whose memory is a file: they cost no anonymous memory, however large they are."""

from __future__ import annotations

import os
import tempfile
import warnings
from io import RawIOBase
from pathlib import Path

import numpy as np
import torch

from samebits.errors import InputError

SCRATCH_IN_MEMORY = 64 << 20  # bytes up to which scratch space is plain memory
_WRITTEN = 1 << 20  # bytes at once


def check_regular(path: Path) -> None:
    """Before it is read: a pipe might never give anything, a device never end. What is not there is left to reading.

    Raises:
        InputError: a pipe, a socket or a device.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise InputError("no regular file", where=str(path), mend="remove it, or put a file in its place")


def map_file(path: Path, start: int, nbytes: int) -> torch.Tensor:
    """Bytes [start, start + nbytes) of a file: uint8 [nbytes], read-only (writing to it ends the process).

    Raises:
        InputError: the file ends before them.
    """
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    try:
        array = np.memmap(path, np.uint8, "r", start, (nbytes,))
    except ValueError:
        raise changed(path) from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch knows no read-only tensors and says so
        return torch.from_numpy(array)


def changed(path: Path) -> InputError:
    """Of a file that is not what it was when it was opened."""
    return InputError("the file has changed while it was read", where=str(path), mend="run it again")


def map_writable(path: Path, start: int, nbytes: int) -> torch.Tensor:
    """Bytes [start, start + nbytes) of an existing file: uint8 [nbytes]; what is written to it reaches the file."""
    if nbytes == 0:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.from_numpy(np.memmap(path, np.uint8, "r+", start, (nbytes,)))


def create_mapped(path: Path, nbytes: int) -> torch.Tensor:
    """A new file of zeros, mapped: uint8 [nbytes].

    Raises:
        OSError: no space left. The blocks are reserved here, because a full disk would kill a process that writes
            to a mapping of a file with holes.
    """
    with path.open("wb", buffering=0) as file:
        try:
            _reserve(file, nbytes)
        except OSError as error:
            raise OSError(error.errno, os.strerror(error.errno or 0), str(path)) from error
    return map_writable(path, 0, nbytes)


def _reserve(file: RawIOBase, nbytes: int) -> None:
    """Give an empty file ``nbytes`` zeros of disk space."""
    if nbytes and hasattr(os, "posix_fallocate"):  # macOS has none
        os.posix_fallocate(file.fileno(), 0, nbytes)
        return
    while nbytes:
        nbytes -= file.write(bytes(min(_WRITTEN, nbytes))) or 0


def scratch(nbytes: int) -> torch.Tensor:
    """Working space of ``nbytes`` zeros: memory if small, else a nameless temporary file."""
    if nbytes <= SCRATCH_IN_MEMORY:
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
    descriptor, name = tempfile.mkstemp(prefix="samebits-")
    os.close(descriptor)
    path = Path(name)
    try:
        return create_mapped(path, nbytes)
    finally:
        path.unlink()
