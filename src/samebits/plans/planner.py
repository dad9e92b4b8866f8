"""Plans of one device: in memory, else on disk, else found now."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, partial
from threading import Lock
from typing import Any, Generic, TypeVar

import torch

from samebits.errors import DeviceError, InputError
from samebits.format.header import Header
from samebits.format.packed import PackedTensor
from samebits.kernels.linear.experts import VARIANTS as EXPERTS_VARIANTS
from samebits.kernels.linear.launch import VARIANTS
from samebits.kernels.linear.products import Operands
from samebits.plans.calibrate import UNSUPPORTED, ProbeWeights, calibrate, compile_ahead, confirm, fastest_together
from samebits.plans.calibrate_experts import calibrate_experts, confirm_experts
from samebits.plans.environment import Environment
from samebits.plans.key import ExpertsKey, PlanKey
from samebits.plans.store import ExpertsOutcome, GroupOutcome, Outcome, PlanStore

MODE_VARIABLE = "SAMEBITS_PLANS"
FEW_TOKENS = 128  # with more, a search waits until their number comes back, and weights may be decoded ahead
LONG_SECONDS = 2.0  # a wait that a user wants to know the reason of
_log = logging.getLogger(__name__)
_Outcome = TypeVar("_Outcome", Outcome, ExpertsOutcome)


class Mode(StrEnum):
    """What SAMEBITS_PLANS may say."""

    ON = "on"
    CACHED = "cached"  # use what is on disk, look for nothing
    OFF = "off"  # always decode first


@cache
def mode() -> Mode:
    """As the environment has it at the first product.

    Raises:
        InputError: SAMEBITS_PLANS is none of these.
    """
    text = os.environ.get(MODE_VARIABLE, Mode.ON)
    if text not in list(Mode):
        raise InputError(f"{MODE_VARIABLE}={text!r} is unknown", mend=f"set it to one of {', '.join(Mode)}")
    return Mode(text)


@dataclass(frozen=True)
class _Search(Generic[_Outcome]):
    """How it is decided for keys of a kind.

    Attributes:
        known: what was decided in this process.
        stored: what is on disk.
        confirm: whether that is right here, too.
        find: decides anew.
        keep: stores.
        nothing: makes an outcome of a reason why there is no plan.
    """

    known: dict[Any, _Outcome]
    stored: Callable[[], Mapping[Any, _Outcome]]
    confirm: Callable[[Any, _Outcome], bool]
    find: Callable[[Any], _Outcome]
    keep: Callable[[Any, _Outcome], None]
    nothing: Callable[[str], _Outcome]


class Planner:
    """The plans of one CUDA device.

    Attributes:
        known: what was decided in this process.
        store: what is on disk.
    """

    def __init__(self, device: torch.device, environment: Environment) -> None:
        self.device = device
        self.known: dict[PlanKey, Outcome] = {}
        self._experts: dict[ExpertsKey, ExpertsOutcome] = {}
        self._together: dict[tuple[PlanKey, ...], GroupOutcome] = {}
        self.store = PlanStore(environment)
        self._lock = Lock()

    @classmethod
    @cache
    def of(cls, device: int) -> Planner:
        """The one for a device's index."""
        return cls(torch.device("cuda", device), Environment.of(device))

    def outcome(self, key: PlanKey, weights: ProbeWeights | None = None) -> Outcome:
        """What is known of a key, or is found now.

        Args:
            weights: for a search, if several share them.
        """
        known = self.known.get(key)
        if known:
            return known
        weights, store = weights or ProbeWeights(self.device), self.store
        return self._resolve(key, _Search(
            self.known, store.read, partial(_is_right, weights), lambda key: calibrate(key, weights), store.add,
            partial(Outcome, None),
        ))  # fmt: skip

    def knows(self, key: ExpertsKey) -> bool:
        """Whether this process has decided for it."""
        return key in self._experts

    def experts(self, key: ExpertsKey, packed: PackedTensor) -> ExpertsOutcome:
        """The same of routed experts.

        Args:
            packed: experts of that kind, for a search.
        """
        known = self._experts.get(key)
        if known:
            return known
        store = self.store
        return self._resolve(key, _Search(
            self._experts, store.experts, partial(_are_right, packed), lambda key: calibrate_experts(key, packed),
            self._keep_experts, partial(ExpertsOutcome, None),
        ))  # fmt: skip

    def outcomes(self, wanted: Sequence[tuple[PlanKey, Header]]) -> Iterator[Outcome]:
        """Of many keys in turn, each with the header of a weight of its shape; those of a shape follow each other.

        Searches share what takes long: kernels are compiled side by side, and a weight is made for each shape.
        """
        self._compile(wanted)
        weights = ProbeWeights(self.device, keeps=True)
        for key, _ in wanted:
            yield self.outcome(key, weights)

    def _compile(self, wanted: Iterable[tuple[PlanKey, Header]]) -> None:
        """What searches for these will need; of numbers of tokens that are alike, the kernels are, too."""
        if mode() is not Mode.ON:
            return
        stored = self.store.read()
        new = {key._replace(tokens=key.tokens.bit_length()): (header, key.tokens)
               for key, header in wanted if key not in self.known and key not in stored}  # fmt: skip
        try:
            with torch.cuda.device(self.device):
                compile_ahead(new.values(), self.device.index)
        except DeviceError as error:
            _log.debug("not compiled ahead: %s", error)  # each search says what it cannot do

    def _keep_experts(self, key: ExpertsKey, outcome: ExpertsOutcome) -> None:
        """Not what holds for these weights, or this memory, alone."""
        if outcome.reason != UNSUPPORTED and (outcome.variant is None or outcome.fused_us is not None):
            self.store.add_experts(key, outcome)

    def _resolve(self, key: PlanKey | ExpertsKey, search: _Search[_Outcome]) -> _Outcome:
        """Decide for a key that is not known yet. During graph capture nothing is decided: the next call will."""
        if mode() is Mode.OFF:
            return search.known.setdefault(key, search.nothing(f"{MODE_VARIABLE}=off"))
        with torch.cuda.device(self.device):
            if torch.cuda.is_current_stream_capturing():
                return search.nothing("not decided during graph capture")
            with self._lock, torch.autocast(self.device.type, enabled=False):
                if key not in search.known:
                    search.known[key] = _decided(key, search)
        return search.known[key]

    def together(self, keys: tuple[PlanKey, ...], x: torch.Tensor, operands: Sequence[Operands]) -> GroupOutcome:
        """What is known of products of one input, or is found now. Not during graph capture."""
        if mode() is Mode.OFF:
            return GroupOutcome(None)
        are_fused = [self.outcome(key).fused is not None for key in keys]
        with torch.cuda.device(self.device), self._lock:
            if keys not in self._together:
                self._together[keys] = self._grouped(keys, x, operands, are_fused)
        return self._together[keys]

    def _grouped(
        self, keys: tuple[PlanKey, ...], x: torch.Tensor, operands: Sequence[Operands], are_fused: Sequence[bool]
    ) -> GroupOutcome:
        """As stored by any process, for whoever uses it compares bytes the first time; else found now."""
        stored = self.store.groups().get(keys)
        is_damaged = stored is not None and stored.variant is not None and stored.variant >= len(VARIANTS)
        if stored is not None and not is_damaged:
            return stored
        if mode() is Mode.CACHED:
            return GroupOutcome(None)
        try:
            found = fastest_together(x, operands, are_fused)
        except (torch.OutOfMemoryError, DeviceError) as error:
            _log.warning("products of one input are made one by one: %s", error)
            return GroupOutcome(None)
        how = "one by one" if found.variant is None else f"one launch: {VARIANTS[found.variant]}"
        _log.info("%s: %s", " and ".join(map(_words, keys)), how)
        self.store.add_group(keys, found)
        return found


def _is_right(weights: ProbeWeights, key: PlanKey, outcome: Outcome) -> bool:
    return outcome.plan is None or confirm(key, outcome.plan, weights)


def _are_right(packed: PackedTensor, key: ExpertsKey, outcome: ExpertsOutcome) -> bool:
    return outcome.variant is None or confirm_experts(key, outcome.variant, packed)


def _decided(key: PlanKey | ExpertsKey, search: _Search[_Outcome]) -> _Outcome:
    try:
        stored = search.stored().get(key)
        if stored is not None and search.confirm(key, stored):
            return stored
        if stored is not None:
            _log.warning("%s: the plan on disk is not right here and is replaced", _words(key))
        return _found(key, search)
    except (torch.OutOfMemoryError, DeviceError) as error:
        reason = str(error) if isinstance(error, DeviceError) else "not enough memory to look for a plan"
        _log.warning("%s: %s; the weight is decoded first", _words(key), reason)
        return search.nothing(reason)


def _found(key: PlanKey | ExpertsKey, search: _Search[_Outcome]) -> _Outcome:
    if mode() is Mode.CACHED:
        return search.nothing(f"no plan on disk, and {MODE_VARIABLE}=cached")
    start = time.monotonic()
    outcome = search.find(key)
    seconds = time.monotonic() - start
    hint = "; samebits.prepare(model) does this ahead" if seconds > LONG_SECONDS else ""
    _log.log(logging.WARNING if hint else logging.INFO, "%s: %s, found in %.1f s%s", _words(key),
             outcome.reason or _how(outcome), seconds, hint)  # fmt: skip
    search.keep(key, outcome)
    return outcome


def _how(outcome: Outcome | ExpertsOutcome) -> str:
    if isinstance(outcome, Outcome):
        return str(outcome.plan)
    return "no plan" if outcome.variant is None else str(EXPERTS_VARIANTS[outcome.variant])


def _words(key: PlanKey | ExpertsKey) -> str:
    if isinstance(key, ExpertsKey):
        return f"{key.pairs} x {key.columns} times {key.experts} experts of {key.rows} x {key.columns}, {key.operation}"
    return f"{key.tokens} x {key.columns} times {key.rows} x {key.columns}{' with bias' if key.has_bias else ''}"
