"""The closed set of errors. Each says what happened, where, and how to mend it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

# Mends of bytes that are not what was written.
DAMAGED = "the file is damaged or was not written by samebits"
CHANGED = "the file is damaged: fetch or write it again"


class SamebitsError(Exception):
    """Base of every error that samebits raises on purpose.

    Args:
        what: one sentence, without a full stop.
        where: the file, tensor or chunk concerned, if there is one.
        mend: what the reader can do about it.
    """

    def __init__(self, what: str, *, where: str | None = None, mend: str | None = None) -> None:
        self.what, self.where, self.mend = what, where, mend
        super().__init__(what, where, mend)

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}; {self.mend}" if self.mend else text

    def __reduce__(self) -> tuple[Callable[[str], SamebitsError], tuple[str]]:
        """How errors travel between processes: pickle knows no keyword arguments."""
        return partial(type(self), where=self.where, mend=self.mend), (self.what,)

    def at(self, where: str) -> SamebitsError:
        """The same error, with ``where`` put in front of what it already names."""
        place = f"{where}: {self.where}" if self.where else where
        return type(self)(self.what, where=place, mend=self.mend)


class FormatError(SamebitsError):
    """Bytes that are not a valid packed tensor or container: truncated, corrupted or hostile."""


class VersionError(FormatError):
    """A format version that this release does not know."""


class DigestError(FormatError):
    """Bytes that differ from the digest stored with them."""


class DtypeError(SamebitsError):
    """A tensor or a checkpoint of a dtype that cannot be coded without loss."""


class InputError(SamebitsError):
    """An argument, path or option that cannot be used."""


class DeviceError(SamebitsError):
    """A device that is missing, or on which a kernel cannot be built or run."""


class ResourceError(SamebitsError):
    """Not enough disk space or memory, or another job holds the destination."""


class MismatchError(SamebitsError):
    """A comparison of bytes that failed: the data are readable but not identical."""
