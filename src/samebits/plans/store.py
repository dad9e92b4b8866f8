"""Plans on disk: one JSON file for each environment, read and written by several processes at once.

A file is replaced as a whole, under a lock, so that a reader sees it before or after a change. What cannot be read is
ignored and written anew: the worst that can happen is that plans are found once more.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from filelock import FileLock, Timeout

from samebits.errors import InputError
from samebits.format.mapping import check_regular
from samebits.kernels.linear.products import LinearPlan
from samebits.plans.environment import Environment
from samebits.plans.key import ExpertsKey, Operation, PlanKey

CACHE_VARIABLE = "SAMEBITS_CACHE"
_VERSION = 8
_LOCK_SECONDS = 10.0
# What a file may cause: the disk; other content than ours, too deep, with too large a number, or too large for memory.
_UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, OverflowError, MemoryError,
               InputError)  # fmt: skip
_MAX_BYTES = 64 << 20  # of a file: a thousand times what it takes
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What was found for a key.

    Attributes:
        plan: the fastest fused product with cuBLAS's bits; None if there is none.
        reason: why the weight is decoded first; empty where it is not.
        fused_us, decode_us: microseconds of the fused product under its plan, and of decoding and cuBLAS.
        carried_us: microseconds more for each weight of another product that its launch decodes on the way; None where
            it cannot, or has no time for as many weights as it multiplies.
    """

    plan: LinearPlan | None
    reason: str = ""
    fused_us: float | None = None
    decode_us: float | None = None
    carried_us: float | None = None

    @property
    def fused(self) -> LinearPlan | None:
        """The plan of a product made alone; None: decode, then cuBLAS."""
        return None if self.reason else self.plan

    @property
    def gained_us(self) -> float:
        """Microseconds that the plan's product takes less than decoding first; negative if it takes more."""
        return self.decode_us - self.fused_us if self.plan and self.decode_us and self.fused_us else 0.0

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Outcome:
        """Raises KeyError, TypeError or ValueError for anything else than asdict's."""
        plan = entry["plan"]
        if plan is not None:
            plan = LinearPlan(_count(plan["split"], 1), _count(plan["variant"], 0))
        times = (_microseconds(entry[name]) for name in ("fused_us", "decode_us", "carried_us"))
        return cls(plan, str(entry["reason"]), *times)


@dataclass(frozen=True)
class GroupOutcome:
    """What was found for products of one input.

    Attributes:
        variant: of one launch that makes them all; None: one by one is faster.
        gained_us: microseconds that it takes less than one by one; if it takes more, it is for launches that decode
            other weights on the way.
        carried_us: as Outcome's.
    """

    variant: int | None
    gained_us: float = 0.0
    carried_us: float | None = None

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> GroupOutcome:
        """Raises as Outcome's."""
        variant = entry["variant"]
        times = float(entry["gained_us"]), _microseconds(entry["carried_us"])
        return cls(None if variant is None else _count(variant, 0), *times)


@dataclass(frozen=True)
class ExpertsOutcome:
    """What was found for a product with routed experts.

    Attributes:
        variant: the fastest with the bits of torch's operation; None if there is none.
        reason, fused_us, decode_us: as Outcome's.
    """

    variant: int | None
    reason: str = ""
    fused_us: float | None = None
    decode_us: float | None = None

    @property
    def fused(self) -> int | None:
        """The variant to use; None: decode first."""
        return None if self.reason else self.variant

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> ExpertsOutcome:
        """Raises as Outcome's."""
        variant = entry["variant"]
        times = (_microseconds(entry[name]) for name in ("fused_us", "decode_us"))
        return cls(None if variant is None else _count(variant, 0), str(entry["reason"]), *times)


Groups = dict[tuple[PlanKey, ...], GroupOutcome]
Experts = dict[ExpertsKey, ExpertsOutcome]


class Stored(NamedTuple):
    """What a file has.

    Attributes:
        environment: that it is for.
        groups: of products of one input.
        experts: of products with routed experts.
    """

    environment: dict[str, Any]
    outcomes: dict[PlanKey, Outcome]
    groups: Groups
    experts: Experts

    def to_json(self) -> dict[str, Any]:
        plans = [{**key._asdict(), **asdict(self.outcomes[key])} for key in sorted(self.outcomes)]
        groups = [
            {"products": [key._asdict() for key in keys], **asdict(self.groups[keys])} for keys in sorted(self.groups)
        ]
        experts = [{**key._asdict(), **asdict(self.experts[key])} for key in sorted(self.experts)]
        return {"environment": self.environment, "plans": plans, "groups": groups, "experts": experts}


def folder() -> Path:
    """Where plans are kept: below SAMEBITS_CACHE, else in the user's cache folder."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).absolute() / "plans"
    root = os.environ.get("XDG_CACHE_HOME", "")  # which does not count if it is relative
    return Path(root if os.path.isabs(root) else os.path.expanduser("~/.cache")) / "samebits" / "plans"


class PlanStore:
    """The plans of one environment. Nothing here raises because of the disk: without it plans live in memory."""

    def __init__(self, environment: Environment, where: Path | None = None) -> None:
        self.environment = environment
        self.path = (where or folder()) / f"{environment.digest}.json"
        self._last: tuple[tuple[int, ...], Stored] | None = None

    def read(self) -> dict[PlanKey, Outcome]:
        """All outcomes that are stored now."""
        return self._read().outcomes

    def groups(self) -> Groups:
        """All groups that are stored now."""
        return self._read().groups

    def experts(self) -> Experts:
        """All products with routed experts that are stored now."""
        return self._read().experts

    def _read(self) -> Stored:
        """The file's content, as it was read last if it is the same file: each change makes another one."""
        try:
            found = os.stat(self.path)
        except OSError:
            return read(self.path)
        same = found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
        if self._last is None or self._last[0] != same:
            self._last = same, read(self.path)
        return self._last[1]

    def add(self, key: PlanKey, outcome: Outcome) -> None:
        """Store one more outcome, beside what other processes have stored meanwhile."""
        self._add(outcomes={key: outcome})

    def add_group(self, keys: tuple[PlanKey, ...], group: GroupOutcome) -> None:
        """Store one more group, likewise."""
        self._add(groups={keys: group})

    def add_experts(self, key: ExpertsKey, outcome: ExpertsOutcome) -> None:
        """Store one more product with routed experts, likewise."""
        self._add(experts={key: outcome})

    def _add(self, **found: Mapping[Any, Any]) -> None:
        try:
            if not self.path.is_absolute():
                raise FileNotFoundError(f"{self.path.parent}: there is no home folder")
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.path.with_suffix(".lock"), timeout=_LOCK_SECONDS):
                stored = self._read()
                every = {name: {**getattr(stored, name), **more} for name, more in found.items()}
                self._replace(stored._replace(environment=asdict(self.environment), **every))
        except (OSError, Timeout, NotImplementedError) as error:  # the last where files cannot be locked
            _log.warning("plans are not kept on disk: %s; set %s to a writable folder", error, CACHE_VARIABLE)

    def _replace(self, stored: Stored) -> None:
        made = self.path.with_suffix(f".{os.getpid()}.new")  # by the one process that has the lock
        made.unlink(missing_ok=True)
        try:
            with made.open("x", encoding="utf-8") as file:  # others may read it, as the user's umask says
                json.dump({"version": _VERSION, **stored.to_json()}, file, indent=1)
            os.replace(made, self.path)
        finally:
            made.unlink(missing_ok=True)


def read(path: Path) -> Stored:
    """A file's content; nothing, with a warning, if it cannot be used."""
    nothing = Stored({}, {}, {}, {})
    try:
        check_regular(path)
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError(f"larger than {_MAX_BYTES} bytes")
        content = json.loads(path.read_text(encoding="utf-8"), parse_float=_finite, parse_constant=_finite)
        if content["version"] != _VERSION:
            _log.warning("%s: plans of version %s are ignored", path, content["version"])
            return nothing
        outcomes = {_key(entry): Outcome.from_json(entry) for entry in content["plans"]}
        groups = {_keys(entry["products"]): GroupOutcome.from_json(entry) for entry in content["groups"]}
        experts = {_experts_key(entry): ExpertsOutcome.from_json(entry) for entry in content["experts"]}
        return Stored(dict(content["environment"]), outcomes, groups, experts)
    except FileNotFoundError:
        return nothing
    except _UNREADABLE as error:
        _log.warning("%s: these plans cannot be read and are ignored (%r)", path, error)
        return nothing


def stored_files() -> Iterator[Path]:
    """Every file of plans, of all environments."""
    return iter(sorted(folder().glob("*.json")))


def clear() -> int:
    """Forget all plans on disk; returns how many files there were."""
    files = [path for path in stored_files() if path.is_symlink() or not path.is_dir()]  # a folder is nobody's plans
    for path in (*files, *folder().glob("*.lock"), *folder().glob("*.new")):
        path.unlink(missing_ok=True)
    return len(files)


def _key(entry: Mapping[str, Any]) -> PlanKey:
    has_bias, state = entry["has_bias"], entry["state"]
    if not isinstance(has_bias, bool) or not isinstance(state, str):
        raise TypeError("has_bias or state")
    rows, columns, tokens = (_count(entry[name], 1) for name in ("rows", "columns", "tokens"))
    return PlanKey(rows, columns, tokens, has_bias, state)


def _keys(entries: Sequence[Mapping[str, Any]]) -> tuple[PlanKey, ...]:
    if len(entries) < 2:
        raise ValueError("a group of fewer than two products")
    return tuple(map(_key, entries))


def _experts_key(entry: Mapping[str, Any]) -> ExpertsKey:
    if not isinstance(entry["state"], str):
        raise TypeError("state")
    experts, rows, columns, pairs = (_count(entry[name], 1) for name in ("experts", "rows", "columns", "pairs"))
    return ExpertsKey(Operation(entry["operation"]), experts, rows, columns, pairs, entry["state"])


def _finite(text: str) -> float:
    """A number in a file; Python reads and writes some that JSON does not have."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is no finite number")
    return value


def _microseconds(value: Any) -> float | None:
    return None if value is None else float(value)


def _count(value: Any, least: int) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"{value!r} is no whole number from {least} on")
    return value
