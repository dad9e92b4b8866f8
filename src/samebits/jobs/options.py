"""What a job is asked to do."""

from __future__ import annotations

from dataclasses import dataclass

from samebits.codecs.plan import can_be_packed
from samebits.errors import InputError
from samebits.format.container import Entry
from samebits.format.header import MAX_DIMENSIONS
from samebits.format.names import MIN_WEIGHTS, is_selected
from samebits.format.safetensors_file import FLOATS
from samebits.jobs.ranks import ALONE, Ranks

NOT_GAINED = "not made smaller by packing"  # why a tensor that is to be packed is not
_NOT_BF16 = "not BF16"


@dataclass(frozen=True)
class CompressOptions:
    """Which tensors are packed.

    Attributes:
        min_weights: smaller tensors are stored unchanged.
        include: shell patterns of original names; empty: all.
        exclude: shell patterns of names to leave unchanged.
        cast: first round F64, F32 and F16 tensors to BF16, which loses bits unless BF16 has all their values.
    """

    min_weights: int = MIN_WEIGHTS
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    cast: bool = False

    def matches(self, name: str) -> bool:
        return is_selected(name, self.include, self.exclude)

    def is_large(self, entry: Entry) -> bool:
        """Whether it would be packed if its dtype were BF16."""
        return self.reason_against(entry) in (None, _NOT_BF16)

    def casts(self, entry: Entry) -> bool:
        if not self.cast or not entry.words or entry.dtype == "BF16":
            return False
        return entry.dtype in FLOATS and self.matches(entry.name)

    def unpacked_bytes(self, entry: Entry) -> int:
        """Of a tensor before it is packed: its own, or those that it has once it is cast."""
        return 2 * entry.words if self.casts(entry) else entry.original_nbytes

    def packs(self, entry: Entry) -> bool:
        return self.reason_against(entry) is None

    def reason_against(self, entry: Entry) -> str | None:
        """Why a tensor is not to be packed; None if it is."""
        if not self.matches(entry.name):
            return "excluded"
        if entry.words < max(1, self.min_weights):
            return "too small"
        if not can_be_packed(entry.shape):
            return f"of more than {MAX_DIMENSIONS} dimensions"
        return None if entry.dtype == "BF16" or self.casts(entry) else _NOT_BF16


@dataclass(frozen=True)
class RunOptions:
    """How a job runs; nothing here changes the bytes it writes.

    Attributes:
        workers: processes at most; None: as many as the work and the machine ask for.
        device: "cpu", "cuda", or "auto" for a GPU if there is one.
        overwrite: replace weights that the destination already holds.
        ranks: processes that do it together, inside of ``ranks.together()``; all must see the same files.
    """

    workers: int | None = None
    device: str = "auto"
    overwrite: bool = False
    ranks: Ranks = ALONE

    def __post_init__(self) -> None:
        if self.workers is not None and self.workers < 1:
            raise InputError(f"{self.workers} workers", mend="give 1 or more")
        if self.device not in ("auto", "cpu", "cuda"):
            raise InputError(f"unknown device {self.device!r}", mend="give auto, cpu or cuda")
