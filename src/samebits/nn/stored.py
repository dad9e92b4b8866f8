"""What lies in the slots of packed modules: whether it is what was there before, and can be decoded."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from samebits.errors import DigestError, InputError, SamebitsError
from samebits.format.header import Header
from samebits.format.packed import PackedTensor
from samebits.nn.product import version_of


class Mark(NamedTuple):
    """A parameter that was in a slot, and how often it had been written to."""

    tensor: weakref.ref[torch.Tensor]  # its id may be another one's later
    version: int

    @classmethod
    def of(cls, stored: torch.Tensor) -> Mark:
        return cls(weakref.ref(stored), version_of(stored))

    def is_of(self, stored: torch.Tensor) -> bool:
        return self.tensor() is stored

    def holds(self, stored: torch.Tensor) -> bool:
        """Whether the slot has neither another parameter now, nor its parameter other bytes."""
        return self.is_of(stored) and self.version == version_of(stored)


_NEVER = -1  # is no version

# Of bytes that were accepted for one of those who share them: their version.
_accepted: WeakIdKeyDictionary = WeakIdKeyDictionary()


def accept(stored: torch.Tensor) -> Mark:
    """That its bytes are those that are meant to be there."""
    _accepted[stored] = version_of(stored)
    return Mark.of(stored)


def distrust(stored: torch.Tensor) -> Mark:
    """That its bytes may be any: they are looked at before they are decoded."""
    _accepted.pop(stored, None)
    return Mark(weakref.ref(stored), _NEVER)


def keeps_bytes(convert: Callable[[torch.Tensor], torch.Tensor]) -> bool:
    """Whether what a function makes of bytes are these bytes, unlike what torch's ``to_empty`` makes."""
    probe = torch.frombuffer(bytearray(os.urandom(16)), dtype=torch.uint8)  # what memory held may be an earlier one
    made = convert(probe)
    return made.is_meta or torch.equal(made.cpu(), probe)


def _is_accepted(stored: torch.Tensor) -> bool:
    return bool(_accepted.get(stored) == version_of(stored))


def check(header: Header, stored: torch.Tensor, known: Mark | None, where: str, *, reads: bool) -> None:
    """That what was not looked at before can be decoded.

    Args:
        known: what was in the slot then.
        reads: the header may be read from it, for which what is on its way to a GPU is waited for.

    Raises:
        DigestError, InputError: as the functions that it calls.
    """
    was_written_to = known is not None and known.is_of(stored) and not known.holds(stored)
    if was_written_to and not _is_accepted(stored):
        _refuse_other_bytes(header, stored, where)
    _refuse_other_length(header, stored, where)
    if reads:
        _refuse_other_form(header, stored, where)


def _refuse_other_bytes(header: Header, stored: torch.Tensor, where: str) -> None:
    """
    Raises:
        DigestError: packed bytes are others than they were, and not those of another tensor of the same form.
        InputError: they are others, and cannot be read now.
    """
    if stored.is_meta:
        return
    if stored.is_cuda and torch.cuda.is_current_stream_capturing():
        what = "its packed bytes were written to, and a graph is being captured"
        raise InputError(what, where=where, mend="run the module once before it is captured")
    try:
        packed = PackedTensor.from_data(stored.detach().cpu())
    except SamebitsError:
        packed = None
    if packed and packed.header.has_form_of(header):  # or a decoder would err
        return
    what = "its packed bytes were changed, in a file that was loaded, or by what takes all parameters for numbers"
    mend = "load it again; call samebits.decompress before weights are averaged or trained"
    raise DigestError(what, where=where, mend=mend)


def _refuse_other_length(header: Header, stored: torch.Tensor, where: str) -> None:
    """
    Raises:
        DigestError: somebody put something else in the place of packed bytes, beyond whose end a decoder would read.
    """
    if not header.fits(stored):
        raise DigestError(header.misfit(stored), where=where, mend="load it again")


def _refuse_other_form(header: Header, stored: torch.Tensor, where: str) -> None:
    """
    Raises:
        InputError: packed bytes of another form, which would be decoded as these.
    """
    if not _has_form(header, stored):
        mend = "load them with load_state_dict, or call samebits.decompress first"
        raise InputError("packed bytes of other modules in the place of its own", where=where, mend=mend)


def _has_form(header: Header, stored: torch.Tensor) -> bool:
    """Whether packed bytes are as a header says; True where they cannot be read now, False of several in torch.vmap."""
    if torch._C._functorch.is_batchedtensor(stored):
        return False
    is_usual = type(stored) in (torch.Tensor, nn.Parameter) and not stored.is_meta
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor(stored)
    if not is_usual or is_wrapped or (stored.is_cuda and torch.cuda.is_current_stream_capturing()):
        return True
    with torch._C._DisableFuncTorch(), _disable_current_modes():  # which would have other tensors made of these bytes
        try:
            return Header.of(stored.detach()).has_form_of(header)
        except SamebitsError:
            return False
