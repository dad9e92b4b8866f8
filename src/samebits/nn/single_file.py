"""One safetensors file, compressed or not, for programs that build their models themselves."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open

from samebits.api import decode
from samebits.df11.checkpoint import Df11Checkpoint, open_checkpoint
from samebits.errors import InputError
from samebits.format.container import Checkpoint
from samebits.format.folder import KEY
from samebits.format.packed import PackedTensor, existing
from samebits.format.safetensors_file import SINGLE_SUFFIXES, SUFFIX
from samebits.nn.packed_module import slot_name

_ALIGNMENT = 16  # of tensors in memory, in bytes; in a file they lie anywhere


class SingleFile:
    """A safetensors file by the names, shapes and dtypes that its tensors had before they were compressed.

    This interface is stable: later versions add to it and take nothing away. Opening reads headers alone.

    Args:
        path: of a ``.safetensors`` file, compressed or plain.
        prefix: only tensors whose names begin so, without it: checkpoints hold models under names such as
            ``model.diffusion_model.``.

    Attributes:
        shapes, dtypes: of the tensors, by name; dtypes as safetensors names them ("BF16").
        metadata: what the file says of itself, such as a license or how it was trained.
        nbytes, original_nbytes: of the tensors as stored, and uncompressed.
        is_packed: whether the file is compressed.

    Raises:
        InputError: no such file, or no safetensors file by its name, or DFloat11's, or no tensor has the prefix.
        FormatError: a damaged file.
        VersionError: a file of a later version.
        OSError: it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str], prefix: str = "") -> None:
        self.path, self.prefix = Path(path), prefix
        if not self.path.exists():
            raise InputError("no such file", where=str(path), mend="check the path")
        if self.path.is_dir():
            raise InputError("a folder", where=str(path), mend=f"give one {SUFFIX} file")
        if self.path.suffix not in SINGLE_SUFFIXES:
            raise InputError("not a safetensors file", where=str(path), mend=f"give one {SUFFIX} file")
        self._checkpoint = checkpoint = open_file(self.path)
        self.is_packed = checkpoint.is_packed
        self.metadata = {key: value for key, value in checkpoint.files[0].metadata.items() if key != KEY}
        self._entries = {
            entry.name.removeprefix(prefix): entry for entry in checkpoint if entry.name.startswith(prefix)
        }
        if not self._entries:
            raise InputError(f"no tensor's name begins with {prefix!r}", where=str(path), mend="give another prefix")
        self.shapes: Mapping[str, tuple[int, ...]] = {name: entry.shape for name, entry in self._entries.items()}
        self.dtypes: Mapping[str, str] = {name: entry.dtype for name, entry in self._entries.items()}
        self.nbytes = sum(entry.nbytes for entry in self._entries.values())
        self.original_nbytes = sum(entry.original_nbytes for entry in self._entries.values())

    def state_dict(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """The plain tensors, those of the original file byte for byte; what is packed is decoded on ``device``.

        Raises:
            FormatError, DigestError: a damaged file.
            InputError: it was written to, or replaced, since it was opened.
            OSError: it is gone.
            DeviceError: there is no such GPU.
        """
        tensors = self._tensors(device)
        for name, entry in self._entries.items():
            if entry.header is not None:
                tensors[name] = decode(PackedTensor(entry.header, tensors[name]))
        return tensors

    def packed_state_dict(self, device: torch.device | str = "cpu") -> dict[str, torch.Tensor]:
        """The tensors as they are stored, under the names of a compressed module: for ``samebits.load_state_dict``.

        Raises:
            FormatError, DigestError: a damaged file.
            InputError: it was written to, or replaced, since it was opened.
            OSError: it is gone.
            DeviceError: there is no such GPU.
        """
        tensors = self._tensors(device)
        return {_stored(name) if self._entries[name].is_packed else name: tensor for name, tensor in tensors.items()}

    def _tensors(self, device: torch.device | str) -> dict[str, torch.Tensor]:
        device = existing(device)
        if device.type == "meta":
            raise InputError("tensors of a file, on the meta device", where=str(self.path), mend="take cpu, or cuda")
        for entry in self._entries.values():
            entry.check()
        with safe_open(self.path, framework="pt", device=str(device)) as file:
            tensors = {name: file.get_tensor(entry.spec.name) for name, entry in self._entries.items()}
        self._checkpoint.check_unchanged()
        return {name: tensor.clone() if tensor.data_ptr() % _ALIGNMENT else tensor for name, tensor in tensors.items()}


def open_file(path: Path) -> Checkpoint:
    """A safetensors file by its header.

    Raises:
        InputError, FormatError, VersionError, OSError: as SingleFile.
    """
    checkpoint = open_checkpoint(path)
    if isinstance(checkpoint, Df11Checkpoint):
        mend = "give `samebits decompress` the file, and take what it writes"
        raise InputError("in the layout of DFloat11", where=str(path), mend=mend)
    return checkpoint


def _stored(name: str) -> str:
    """How a compressed module names the parameter ``name``."""
    path, dot, leaf = name.rpartition(".")
    return path + dot + slot_name(leaf)
