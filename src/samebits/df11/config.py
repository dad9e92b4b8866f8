"""``dfloat11_config`` in config.json: which version wrote a checkpoint, and which matrices its units hold."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from samebits.errors import FormatError, InputError, VersionError

KEY = "dfloat11_config"
PICKLED = (0, 1)
VERSIONS = ((0, 2), (0, 5))  # first and last whose tensors are those of unit.py
THREADS_PER_BLOCK = [512]
BYTES_PER_THREAD = 8
_MAX_PATH = 255
_MAX_STEPS = 200_000_000  # in which a pattern may fail to match a path, some seconds
_MEND = f"mend {KEY} in config.json"


@dataclass(frozen=True)
class Df11Config:
    """What config.json says of a checkpoint's units.

    Attributes:
        patterns: regular expressions of module paths; the attributes whose weights make up the unit there, in order.
            No attributes: the module's own weight.
        version: of the package that wrote it.
    """

    patterns: Mapping[str, Sequence[str]]
    version: str = "0.5.0"
    _compiled: Mapping[re.Pattern[str], Sequence[str]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        compiled = {compile_pattern(pattern): names for pattern, names in self.patterns.items()}
        object.__setattr__(self, "_compiled", compiled)

    @classmethod
    def parse(cls, entry: object) -> Df11Config:
        """Read the value of ``dfloat11_config``.

        Raises:
            VersionError: of a version whose files have another layout.
            FormatError: malformed.
        """
        if not isinstance(entry, dict):
            raise FormatError(f"{KEY} is no JSON object", mend=_MEND)
        _check_version(entry.get("version"))
        for key, expected in (("threads_per_block", THREADS_PER_BLOCK), ("bytes_per_thread", BYTES_PER_THREAD)):
            if entry.get(key, expected) != expected:
                what = f"{key} is {entry[key]!r}, all published checkpoints have {expected}"
                raise FormatError(what, mend="compress the BF16 original again")
        patterns = entry.get("pattern_dict")
        if not isinstance(patterns, dict) or not all(are_names(names) for names in patterns.values()):
            raise FormatError("pattern_dict does not map patterns to lists of different attributes", mend=_MEND)
        return cls(patterns, entry["version"])

    def to_dict(self) -> dict[str, Any]:
        """The value of ``dfloat11_config``, its keys in the order of the original package."""
        patterns = {pattern: list(names) for pattern, names in self.patterns.items()}
        return {"version": self.version, "threads_per_block": THREADS_PER_BLOCK, "bytes_per_thread": BYTES_PER_THREAD,
                "pattern_dict": patterns}  # fmt: skip

    def weights(self, path: str) -> list[str] | None:
        """Names of the weights that make up the unit of module ``path``, in order; None if no pattern matches it."""
        for pattern, names in self._compiled.items():
            if len(path) <= _MAX_PATH and pattern.fullmatch(path):
                return [f"{path}.{name}.weight" for name in names] or [f"{path}.weight"]
        return None


def are_names(names: object) -> bool:
    """Whether these can be the attributes of a pattern: a list of different names."""
    return (
        isinstance(names, list)
        and all(isinstance(name, str) and name for name in names)
        and (len(set(names)) == len(names))
    )


def _check_version(version: object) -> None:
    match = re.fullmatch(r"(\d{1,4})\.(\d{1,4})(\..*)?", version) if isinstance(version, str) else None
    if match is None:
        raise FormatError(f"DFloat11 version {version!r} is no version", mend=_MEND)
    found = int(match[1]), int(match[2])
    if found == PICKLED:
        mend = "fetch a later revision of the model, or compress the BF16 original"
        raise VersionError(f"DFloat11 {version} stored pickles, which can run code: they are not opened", mend=mend)
    first, last = VERSIONS
    if not first <= found <= last:
        raise VersionError(f"DFloat11 version {version}", mend="this samebits reads versions 0.2 to 0.5")


def compile_pattern(pattern: str) -> re.Pattern[str]:
    """A pattern of module paths; one that could take forever to match is refused.

    Raises:
        InputError: not a regular expression, or one with repeated groups, references to groups, too many repetitions
            and alternatives, or groups of another kind than "(" and "(?:", which may say that blanks do not count.
    """
    plain = re.sub(r"\\.", lambda escape: escape[0] if escape[0][1] in "123456789" else "_", pattern)
    plain = plain.replace("(?:", "(")
    if re.search(r"\)[*+{]|\(\?|\\", plain) or _steps(plain) > _MAX_STEPS:
        what = (
            "repeated groups, groups of another kind, references, or too many repetitions or alternatives in a pattern"
        )
        raise InputError(what, where=repr(pattern), mend=_MEND)
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise InputError(f"no regular expression ({error})", where=repr(pattern), mend=_MEND) from None


def _steps(plain: str) -> float:
    """At most about so many, for the longest path: ways in which repetitions end, and of groups to take an alternative,
    times what is walked of the pattern for each."""
    repeats, groups = len(re.findall(r"[*+?{]", plain)), max(plain.count("("), 1)
    alternatives = (plain.count("|") + groups) / groups  # of each group, if that makes most of them
    exponent = repeats * math.log(_MAX_PATH) - math.lgamma(repeats + 1) + groups * math.log(alternatives)
    return math.exp(min(exponent, 100.0)) * len(plain) / alternatives
