"""Products with routed experts: fused where that gives the bits of vLLM's own Triton kernel, and takes less time.

vLLM's code is left as it is, but for that kernel: it is handed what stands for a packed weight, and multiplies with it.
So sorting, activations, sums over experts and shared experts are its own. Which variant of the kernel is right and
fastest is found for each number of tokens that graphs are captured of, by comparing bytes first, as for linear layers
(samebits.plans). Any other number is multiplied as the rung above it is, if that is right.
"""

from __future__ import annotations

import inspect
import logging
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial, wraps
from typing import Any, NamedTuple

import torch

from samebits.bf16 import same_words
from samebits.errors import DeviceError
from samebits.format.packed import PackedTensor
from samebits.kernels.linear.experts import VARIANTS, experts_product, is_supported, launch_of
from samebits.kernels.ops import decode_experts, decode_packed
from samebits.plans.calibrate import UNSUPPORTED
from samebits.plans.calibrate_experts import PROBES, fitting_variants, probe_of
from samebits.plans.key import ALIGNMENT, ExpertsKey, Operation
from samebits.plans.planner import Mode, mode
from samebits.plans.probe import Probe
from samebits.plans.store import ExpertsOutcome, PlanStore
from samebits.plans.timing import microseconds

FEW_TOKENS = 64  # more are looked for only ahead: those of graphs, and rungs for all others
_FIRST_RUNG = 2 * FEW_TOKENS  # or somewhat more
_MULTIPLE = 16  # of which numbers of tokens mostly are, as Triton tells them apart
_EVERY = 4  # with so many choices for each expert, nearly all are chosen
_ROUTINGS = 12  # that are timed in turn: experts that a cache does not have
_DECODED = 4  # of these, with which decoding first is timed: it writes far more than the cache has
_HOPELESS = 1.5  # times as long as decoding first: with more tokens it takes longer still
_log = logging.getLogger(__name__)

Run = Callable[["torch.Tensor", "Routing", "Sequence[Any]"], torch.Tensor]  # x, its routing, and both weights


class Routing(NamedTuple):
    """What a router says of tokens.

    Attributes:
        scales: float32 [tokens, experts of a token].
        ids: int32, the same shape.
    """

    scales: torch.Tensor
    ids: torch.Tensor

    @classmethod
    def random(cls, tokens: int, experts: int, each: int, device: torch.device, seed: int) -> Routing:
        generator = torch.Generator(device).manual_seed(seed)
        scores, ids = torch.rand(tokens, experts, device=device, generator=generator).topk(each)
        return cls(torch.softmax(scores, -1), ids.to(torch.int32))


class StandIn(ABC):
    """For a packed weight [experts, rows, columns]: vLLM's Triton kernel is handed it, and asks for its shape first."""

    def __init__(self, packed: PackedTensor) -> None:
        self.packed = packed

    @property
    def shape(self) -> torch.Size:
        return self.packed.shape

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def stride(self, dim: int) -> int:
        return (self.shape[1] * self.shape[2], self.shape[2], 1)[dim]

    @abstractmethod
    def multiply(self, original: Callable[..., None], given: dict[str, Any]) -> None:
        """What ``original`` would do, given its arguments by name, with the plain weight as B."""


def _scales(given: dict[str, Any]) -> torch.Tensor | None:
    return given["topk_weights"] if given["mul_routed_weight"] else None


class Comparison:
    """Which variants give the bytes of vLLM's Triton kernel, for weights [experts, rows, columns] of one shape.

    It is asked with a weight of one expert, which stands for all of them: what one adds up does not depend on the
    others, nor on who has been chosen, nor on other tokens, but on how the kernel was compiled (``kind_of``).
    """

    def __init__(self, shape: torch.Size, device: torch.device) -> None:
        self._shape, self._device = shape, device
        self._right: dict[tuple[object, int], bool] = {}  # by kind and variant

    @cached_property
    def _probe(self) -> tuple[Probe, PackedTensor]:
        return probe_of((self._shape[1], self._shape[2]), self._device)

    def forget_probe(self) -> None:
        """Which takes memory, and is made again if it is needed."""
        self.__dict__.pop("_probe", None)

    def is_right(self, original: Callable[..., None], given: dict[str, Any], variant: int) -> bool:
        """Of a variant, as it was found for products of this kind, or is now; while a graph is captured nothing is."""
        key = kind_of(given), variant
        if key not in self._right and not torch.cuda.is_current_stream_capturing():
            self._right[key] = False  # unless it is found
            try:
                self.compare(original, given, [variant])
            except (torch.OutOfMemoryError, DeviceError) as error:
                _log.warning("%d tokens with routed experts: %s; these are decoded first", len(given["A"]), error)
            finally:
                self.forget_probe()  # what is left of the memory is the cache's
        return self._right.get(key, False)

    @torch.inference_mode(False)  # whose tensors have no decode tables, and take longer
    @torch.no_grad()
    def compare(self, original: Callable[..., None], given: dict[str, Any], variants: Sequence[int]) -> list[int]:
        """Those of these that are right; ``original`` is asked with other operands, and its output is written to."""
        x, y, scales = given["A"], given["C"], _scales(given)
        if scales is not None:  # any: the router's may be such that all variants seem right
            scales = torch.rand_like(scales)
        probe, encoded = self._probe
        pairs, weight = y.numel() // self._shape[1], probe.weight.expand(self._shape)
        ids = torch.zeros(pairs, dtype=torch.int32, device=x.device)
        sharing, device = pairs // len(x), x.get_device()
        kind = kind_of(given)
        right = [each for each in variants if launch_of(encoded.header, pairs, sharing, each, device)]
        for seed in range(PROBES):
            made = probe.cancelling(len(x), seed) if seed else probe.plain(len(x), seed)
            asked = {**given, "A": made, "B": weight, **({} if scales is None else {"topk_weights": scales})}
            if kind_of(asked) != kind:  # operands that are not aligned, for example
                right = []
                break
            original(**asked)
            for variant in tuple(right):
                found = torch.full_like(y, torch.nan)
                experts_product(made, encoded, ids, scales, found, variant)
                if not same_words(found, y):
                    right.remove(variant)
        self._right |= {(kind, variant): variant in right for variant in variants}
        return right


def kind_of(given: Mapping[str, Any]) -> tuple[object, ...]:
    """What decides how Triton compiles its kernel, of the arguments of the function that launches it: numbers count as
    1, as multiples of 16, or as others, and addresses as aligned or not; the weight is always alike."""
    tokens, y, config = len(given["A"]), given["C"], given.get("config", {})
    pairs, is_small = y.numel() // y.shape[-1], tokens < config.get("BLOCK_SIZE_M", 0)
    return _number(pairs), is_small, *((name, _kind(value)) for name, value in given.items() if name != "B")


def _kind(value: Any) -> object:
    if isinstance(value, torch.Tensor):
        return value.dtype, value.data_ptr() % 16 == 0, *map(_number, (*value.shape, *value.stride()))
    if isinstance(value, dict):
        return tuple(sorted(value.items()))
    return tuple(value) if isinstance(value, list) else value


def _number(value: int) -> tuple[bool, bool]:
    return value == 1, value % 16 == 0


class RoutedWeight(StandIn):
    """Multiplies with the packed weight.

    Args:
        ids: which expert each pair of a token and an expert has.
        variant: of the kernel.
        comparison: where it has to be right before it is used; None: it is known to be.
    """

    def __init__(
        self, packed: PackedTensor, ids: torch.Tensor, variant: int, comparison: Comparison | None = None
    ) -> None:
        super().__init__(packed)
        self.ids, self.variant, self._comparison = ids, variant, comparison

    def multiply(self, original: Callable[..., None], given: dict[str, Any]) -> None:
        x, y, comparison = given["A"], given["C"], self._comparison
        suits = y.numel() == self.ids.numel() * self.shape[1] and x.is_contiguous() and x.data_ptr() % ALIGNMENT == 0
        if suits and (comparison is None or comparison.is_right(original, given, self.variant)):
            experts_product(x, self.packed, self.ids, _scales(given), y, self.variant)
        else:
            original(**{**given, "B": decoded(self.packed, self.ids)})


class _Compared(StandIn):
    """Finds which variants are right, when ``original`` is to multiply with it.

    Attributes:
        right: variants.
    """

    def __init__(self, packed: PackedTensor, comparison: Comparison, right: Sequence[int]) -> None:
        super().__init__(packed)
        self._comparison, self.right = comparison, list(right)

    def multiply(self, original: Callable[..., None], given: dict[str, Any]) -> None:
        self.right = self._comparison.compare(original, given, self.right)


def multiplying_routed(original: Callable[..., None]) -> Callable[..., None]:
    """In front of the function that launches vLLM's Triton kernel."""
    signature = inspect.signature(original)

    @wraps(original)
    def invoke_fused_moe_triton_kernel(*args: Any, **kwargs: Any) -> None:
        weight = args[1] if len(args) > 1 else kwargs["B"]
        if isinstance(weight, StandIn):
            weight.multiply(original, signature.bind(*args, **kwargs).arguments)
        else:
            original(*args, **kwargs)

    return invoke_fused_moe_triton_kernel


class Chosen(NamedTuple):
    """The variants for the first and the second product of a layer's experts."""

    first: int
    second: int


class Choices:
    """How the experts of layers that are alike are multiplied, by numbers of tokens.

    Args:
        packed: of one of these layers, the first and the second weight.
        each: experts of a token.
        run: vLLM's own products of such a layer, with weights as it gets them.
        decoded: of a routing, the plain weights for ``run``.
        store: where what is found is kept, for other processes; None: nowhere.
        state: what else it depends on.

    Attributes:
        each: as it was given.
        known: what was found, by numbers of tokens.
    """

    def __init__(
        self, packed: Sequence[PackedTensor], each: int, run: Run, decoded: Callable[[Routing], Sequence[torch.Tensor]],
        store: PlanStore | None = None, state: str = "",
    ) -> None:  # fmt: skip
        self._packed, self.each, self._run, self._decoded = packed, each, run, decoded
        self._store, self._state = store, state
        self.known: dict[int, Chosen | None] = {}
        self._hopeless: float = torch.inf  # tokens
        self._comparisons = [Comparison(each.shape, each.device) for each in packed]
        self._ahead: dict[int, Chosen | None] = {}
        self._rungs: list[int] = []

    def of(self, tokens: int, *, ahead: bool = False) -> Chosen | None:
        """None: the experts are decoded first. While a graph is captured nothing is found.

        Args:
            ahead: it is asked before there is anything to do; call ``forget_probes`` behind the last number.
        """
        if tokens in self.known or mode() is Mode.OFF or torch.cuda.is_current_stream_capturing():
            return self.known.get(tokens)
        if tokens > FEW_TOKENS and not ahead:
            return None
        try:
            found = None if tokens >= self._hopeless else self._resolved(tokens, ahead=ahead)
        except (torch.OutOfMemoryError, DeviceError) as error:
            _log.warning("%d tokens with routed experts: %s; these are decoded first", tokens, error)
            found = None
        if not ahead:
            self.forget_probes()  # what is left of the memory is the cache's
        self.known[tokens] = found
        return found

    def weights(self, packed: Sequence[PackedTensor], ids: torch.Tensor) -> list[RoutedWeight] | None:
        """As vLLM is to get those of a layer of this kind; None: as they are, decoded.

        Numbers of tokens that nothing is known of are multiplied as the rung above them is, if that is right.

        Args:
            ids: [tokens, experts of a token].
        """
        tokens, comparisons = len(ids), None
        chosen = self.of(tokens)
        if tokens not in self.known and self._rungs and mode() is not Mode.OFF:
            rung = bisect_left(self._rungs, tokens)
            chosen = self.known[self._rungs[rung]] if rung < len(self._rungs) else None
            comparisons = self._comparisons
        if chosen is None or not fit(packed, ids.numel(), self.each, chosen):
            return None
        return weights(packed, ids, chosen, comparisons)

    def rungs(self, most: int) -> list[int]:
        """Numbers of tokens for ``find_rung``, for any number up to the most that come at once.

        Experts get three quarters of 2, 3, 4, 6, 8 and so on pairs there, on average: for units of so many, of which
        few experts need a second one then.
        """
        pairs = sorted(base << doubled for base in (2, 3) for doubled in range(most.bit_length()))
        multiples = (-(-3 * each * self._packed[0].shape[0] // (4 * self.each * _MULTIPLE)) for each in pairs)
        return [*(rung for each in multiples if _FIRST_RUNG <= (rung := each * _MULTIPLE) < most), most]

    def find_rung(self, tokens: int) -> None:
        """What is known of a number of tokens that stands for those below it, kept until ``climb``.

        Where these are decoded first more of them are, too.
        """
        if None in self._ahead.values():
            self._ahead[tokens] = None
            return
        is_known = tokens in self.known
        self._ahead[tokens] = self.of(tokens, ahead=True)
        if not is_known:
            self.known.pop(tokens, None)

    def climb(self) -> None:
        """From now on what ``find_rung`` has found is looked at, but for numbers that more is known of."""
        self.known = self._ahead | self.known
        self._rungs = sorted(self._ahead)

    def forget_probes(self) -> None:
        """Which take memory; they are made again if they are needed."""
        for comparison in self._comparisons:
            comparison.forget_probe()

    def _resolved(self, tokens: int, *, ahead: bool) -> Chosen | None:
        """As kept by any process, if it is right here, too, else found now."""
        keys = [self._key(packed, tokens, place) for packed, place in zip(self._packed, Chosen._fields, strict=True)]
        stored = self._store.experts() if self._store else {}
        outcome = _joint([stored[key] for key in keys]) if stored.keys() >= {*keys} else None
        if outcome and outcome.chosen and not self._is_right(tokens, outcome.chosen):
            _log.warning("%d tokens with routed experts: what is on disk is not right here and is replaced", tokens)
            outcome = None
        if outcome is None and mode() is Mode.ON:
            outcome = self._found(tokens)
            for key, variant in zip(keys, outcome.variants, strict=True):
                kept = ExpertsOutcome(variant, outcome.reason, outcome.us, outcome.decoded_us)
                if self._store and kept.reason != UNSUPPORTED:
                    self._store.add_experts(key, kept)
        if outcome is None:
            return None
        if ahead and outcome.is_hopeless:
            self._hopeless = tokens
        return outcome.chosen

    def _key(self, packed: PackedTensor, tokens: int, place: str) -> ExpertsKey:
        experts, rows, columns = packed.shape
        return ExpertsKey(Operation.VLLM, experts, rows, columns, tokens * self.each, f"{self._state} product={place}")

    @torch.inference_mode(False)  # as for Comparison
    @torch.no_grad()
    def _is_right(self, tokens: int, chosen: Chosen) -> bool:
        trial = self._trial(tokens)
        fitting = [[each] if each in own else [] for each, own in zip(chosen, trial.fitting, strict=True)]
        return all(fitting) and all(self._agreeing(trial, fitting)) and all(self._are_same(trial, chosen))

    @torch.inference_mode(False)  # as for Comparison
    @torch.no_grad()
    def _found(self, tokens: int) -> _Outcome:
        trial = self._trial(tokens)
        if not all(trial.fitting):
            return _Outcome((None, None), UNSUPPORTED)
        right = self._agreeing(trial, trial.fitting)
        if not all(right):
            _log.warning("%d tokens with routed experts: no variant gives vLLM's bits; these are decoded first", tokens)
            return _Outcome((None, None), "no variant gives vLLM's bits")
        chosen = Chosen(*(self._fastest(trial, *each) for each in zip(self._packed, right, strict=True)))
        if not all(self._are_same(trial, chosen)):
            _log.warning("%d tokens with routed experts: other bits than vLLM's; these are decoded first", tokens)
            return _Outcome((None, None), "a layer's bits are not vLLM's")
        fused = [partial(self._fused, trial.x, routing, chosen) for routing in trial.routings]
        decoded = [partial(self._decode_and_run, trial.x, routing) for routing in trial.routings[:_DECODED]]
        fused_us, decoded_us = microseconds([fused, decoded])
        how = ", ".join(str(VARIANTS[variant]) for variant in chosen) if fused_us < decoded_us else "decoded first"
        _log.info("%d tokens with %s experts: %s, %.0f us, decoding first %.0f us", tokens, self._packed[0].shape, how,
                  fused_us, decoded_us)  # fmt: skip
        return _Outcome(chosen, "" if fused_us < decoded_us else "decoding first is faster", fused_us, decoded_us)

    def _trial(self, tokens: int) -> _Trial:
        first, second = self._packed
        device, pairs = first.device, tokens * self.each
        routings = [Routing.random(tokens, first.shape[0], self.each, device, seed) for seed in range(_ROUTINGS)]
        generator = torch.Generator(device).manual_seed(0)
        x = torch.randn(tokens, first.shape[2], device=device, generator=generator).to(torch.bfloat16)
        return _Trial(x, routings, [fitting_variants(first, pairs, self.each), fitting_variants(second, pairs, 1)])

    def _agreeing(self, trial: _Trial, variants: Sequence[Sequence[int]]) -> list[list[int]]:
        """Of these of either weight those with the bytes of vLLM's kernel."""
        compared = [
            _Compared(packed, comparison, own)
            for packed, comparison, own in zip(self._packed, self._comparisons, variants, strict=True)
        ]
        self._run(trial.x, trial.routings[0], compared)
        return [each.right for each in compared]

    def _are_same(self, trial: _Trial, chosen: Chosen) -> Iterator[bool]:
        """Whether whole layers have vLLM's bytes."""
        for routing in trial.routings[:_DECODED]:
            yield same_words(self._fused(trial.x, routing, chosen), self._decode_and_run(trial.x, routing))

    def _fastest(self, trial: _Trial, packed: PackedTensor, right: Sequence[int]) -> int:
        if len(right) == 1:
            return right[0]
        pairs, device = trial.routings[0].ids.numel(), packed.device
        rows = len(trial.x) if packed is self._packed[0] else pairs
        x = torch.ones(rows, packed.shape[2], dtype=torch.bfloat16, device=device)
        y = torch.empty(pairs, packed.shape[1], dtype=torch.bfloat16, device=device)
        calls = [
            [partial(experts_product, x, packed, routing.ids, None, y, variant) for routing in trial.routings]
            for variant in right
        ]
        times = microseconds(calls)
        return right[times.index(min(times))]

    def _fused(self, x: torch.Tensor, routing: Routing, chosen: Chosen) -> torch.Tensor:
        return self._run(x, routing, weights(self._packed, routing.ids, chosen))

    def _decode_and_run(self, x: torch.Tensor, routing: Routing) -> torch.Tensor:
        return self._run(x, routing, self._decoded(routing))


class _Trial(NamedTuple):
    """What a number of tokens is tried with.

    Attributes:
        x: of the layer.
        fitting: variants, of either weight.
    """

    x: torch.Tensor
    routings: list[Routing]
    fitting: list[list[int]]


class _Outcome(NamedTuple):
    """Of both products of a layer.

    Attributes:
        variants: the fastest of each that is right; None if there is none.
        reason: why experts are decoded first; empty where they are not.
        us, decoded_us: microseconds of the layer, fused and decoded first.
    """

    variants: tuple[int | None, int | None]
    reason: str = ""
    us: float | None = None
    decoded_us: float | None = None

    @property
    def chosen(self) -> Chosen | None:
        first, second = self.variants
        return None if self.reason or first is None or second is None else Chosen(first, second)

    @property
    def is_hopeless(self) -> bool:
        return bool(self.us and self.decoded_us and self.us > _HOPELESS * self.decoded_us)


def _joint(kept: Sequence[ExpertsOutcome]) -> _Outcome:
    """Of what is kept of either product."""
    first, second = kept
    return _Outcome((first.variant, second.variant), first.reason or second.reason, first.fused_us, first.decode_us)


def decoded(packed: PackedTensor, ids: torch.Tensor | None) -> torch.Tensor:
    """The plain weight, at least of the experts ``ids``; None: all of them."""
    if ids is None or ids.numel() >= packed.shape[0] * _EVERY:
        return decode_packed(packed)
    return decode_experts(packed, ids.clamp(0, packed.shape[0] - 1))  # -1: of no token


def weights(
    packed: Sequence[PackedTensor], ids: torch.Tensor, chosen: Chosen, comparisons: Sequence[Comparison] | None = None
) -> list[RoutedWeight]:
    """As vLLM is to get them."""
    asked: Sequence[Comparison | None] = comparisons or [None] * len(packed)
    return [RoutedWeight(each, ids, variant, own) for each, variant, own in zip(packed, chosen, asked, strict=True)]


def are_supported(packed: Sequence[PackedTensor]) -> bool:
    return len(packed) == len(Chosen._fields) and all(is_supported(each.header) for each in packed)


def fit(packed: Sequence[PackedTensor], pairs: int, each: int, chosen: Chosen) -> bool:
    """Whether variants that were found for a layer do for another that is like it: their chunks differ in size."""
    return all(
        not weight.data.data_ptr() % ALIGNMENT
        and launch_of(weight.header, pairs, sharing, variant, weight.data.get_device()) is not None
        for weight, sharing, variant in zip(packed, (each, 1), chosen, strict=True)
    )
