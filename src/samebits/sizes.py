"""Amounts of memory, as people write them."""

from __future__ import annotations

import re

from samebits.errors import InputError

_SIZE = re.compile(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT]?)(i?)B", re.IGNORECASE)
_POWERS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


def size(nbytes: float) -> str:
    """Bytes for people: decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


def parse_size(text: str) -> int:
    """Bytes of a size such as 24GiB or 80 GB.

    Raises:
        InputError: something else.
    """
    match = _SIZE.fullmatch(text.strip())
    if not match:
        raise InputError(f"{text!r} is no size", mend="give one such as 24GiB or 80GB")
    number, prefix, binary = match.groups()
    return int(float(number) * (1024 if binary else 1000) ** _POWERS[prefix.upper()])
