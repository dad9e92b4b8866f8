"""FORMAT.md 7.2: how the names of packed tensors map to the originals; and which tensors are packed."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

WEIGHT = ".weight"
PACKED = ".sb_packed"  # X.weight -> X.sb_packed
BARE = ".sb_bare"  # Y -> Y.sb_bare
MIN_WEIGHTS = 4096  # of a tensor that is packed, if nothing else is said


def stored_name(original: str) -> str:
    """The name under which ``original`` is stored once packed."""
    return original.removesuffix(WEIGHT) + PACKED if original.endswith(WEIGHT) else original + BARE


def original_name(stored: str) -> str | None:
    """The original name behind ``stored``, or None if this is not the name of a packed tensor."""
    if stored.endswith(PACKED):
        return stored.removesuffix(PACKED) + WEIGHT
    return stored.removesuffix(BARE) if stored.endswith(BARE) else None


def is_selected(name: str, include: Iterable[str], exclude: Iterable[str]) -> bool:
    """Whether ``name`` matches one of the shell patterns ``include`` (none given: always) and none of ``exclude``."""
    patterns = list(include)
    included = not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
    return included and not any(fnmatchcase(name, pattern) for pattern in exclude)
