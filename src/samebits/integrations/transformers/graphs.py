"""CUDA graphs for transformers' ``generate``: a decoding step is one launch, without Python for every layer.

The step is the model's forward for one more token of each sequence, of BF16 models as of compressed ones. In each call
of ``generate`` one step is captured, and those behind it are replays; once more where a sliding window has become full.
Two steps in front of it run as they are, unless an earlier call has captured a step of this model with as many
sequences and as large a cache. Prompts run as they are, as does what cannot be captured, which the log says: caches
that grow, for example, states that each step puts elsewhere, kernels that depend on values.

Whether a text has ended is read a step later, so the next step is prepared while the GPU is busy; what a step behind
the end has done is undone. Where that cannot be, as a cache that has sliding windows or states is one's own or
returned, the host waits for each token.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from transformers.cache_utils import Cache, StaticCache, StaticSlidingWindowLayer

from samebits.integrations.module_state import ModuleState
from samebits.integrations.replayed import Capture
from samebits.integrations.transformers.ahead import ask, may_run_ahead
from samebits.plans.environment import blas_state

Place = tuple[str, ...]  # of an argument, with the names of the dicts that it is in
Windows = list[StaticSlidingWindowLayer]  # of a cache: layers that keep a window of tokens, and count them in Python
_COMPILED = "get_compiled_call"  # of a model: what generate asks for the step
_NUMBERS = (bool, int, float, str, type(None))  # compared by value
_known: WeakKeyDictionary[nn.Module, set[int]] = WeakKeyDictionary()  # signatures of captured steps
_log = logging.getLogger(__name__)


@contextmanager
def decoding_steps(model: Any, capture: Capture) -> Iterator[None]:
    """Has each ``generate`` call a step of its own where it would call the compiled model."""
    steps = 0

    def step(compile_config: object = None) -> DecodingStep:
        nonlocal steps
        steps += 1
        ask()
        return DecodingStep(model, capture, known)

    known = _known.setdefault(model, set())
    before = vars(model).get(_COMPILED)
    vars(model)[_COMPILED] = step
    try:
        with may_run_ahead():
            yield
    finally:
        del vars(model)[_COMPILED]
        if before:
            vars(model)[_COMPILED] = before
    if not steps:
        _log.warning(
            'samebits.cuda_graphs: nothing was replayed; generate(..., cache_implementation="static") asks for it'
        )


class DecodingStep:
    """Stands for a model in decoding: runs it as it is, twice at least, captures it, and replays what it has captured.

    From call to call the contents of tensors may change, those in dicts too (a mask for each kind of attention). Where
    anything else does, such as the cache, which the graph writes to, it begins anew.

    Args:
        known: signatures of steps that were captured before; these are captured at once.
    """

    EAGER_CALLS = 2  # as many as products that share an input need to be made by one launch
    MAX_EAGER_CALLS = 4  # until its modules stay as they are

    def __init__(self, model: Callable[..., Any], capture: Capture, known: set[int] | None = None) -> None:
        self.model, self.capture, self.calls = model, capture, 0
        self._known: set[int] = set() if known is None else known
        self._signature = 0
        self._eager_calls = self.EAGER_CALLS
        self._inputs: dict[Place, torch.Tensor] = {}
        self._others: dict[Place, Any] = {}
        self._windows: Windows = []
        self._full: list[bool] = []  # of the windows
        self._replay: Callable[[], Any] | None = None
        self._captures = False  # or it stays as it is

    def __call__(self, **arguments: Any) -> Any:
        leaves = dict(_leaves(arguments))
        inputs = {place: value for place, value in leaves.items() if isinstance(value, torch.Tensor)}
        others = {place: value for place, value in leaves.items() if place not in inputs}
        alike = self.calls and _are_alike(inputs, self._inputs) and _are_same(others, self._others)
        if not alike or (self._captures and _are_full(self._windows) != self._full):
            self._begin(inputs, others)
        self.calls += 1
        if self.calls <= self._eager_calls or not self._captures:
            return self._called(arguments)
        if self._replay is None:
            self._replay = self._captured(inputs)
        if self._replay is None:
            return self._called(arguments)
        for place, value in inputs.items():
            self._inputs[place].copy_(value)
        counts = _counts_of(self._windows)
        output = self._replay()
        for window, count in zip(self._windows, counts, strict=True):
            window.cumulative_length_int = count + 1
        return output

    def _begin(self, inputs: dict[Place, torch.Tensor], others: dict[Place, Any]) -> None:
        self.calls, self._inputs, self._others, self._replay = 0, inputs, others, None
        self._windows = _windows_of(others)
        self._full, self._captures = _are_full(self._windows), True
        if obstacle := _obstacle(inputs, others, self._windows):
            self._refuse(obstacle)
            return
        self._signature = _signature(self.model, inputs, others, self._full)
        self._eager_calls = 0 if self._signature in self._known else self.EAGER_CALLS

    def _refuse(self, obstacle: str) -> None:
        self._captures = False
        _log.warning("samebits.cuda_graphs: the decoding step runs as it is: %s", obstacle)

    def _called(self, arguments: dict[str, Any]) -> Any:
        """The step as it is; the last one before the capture shows what it does in Python, which no replay does."""
        if not self._captures or self.calls < self.EAGER_CALLS:
            return self.model(**arguments)
        counts, before = _counts_of(self._windows), self._cache_state()
        model = self._model_state()
        output = self.model(**arguments)
        counted = {now - then for now, then in zip(_counts_of(self._windows), counts, strict=True)}
        changed = sorted(place for place, _ in before.items() ^ self._cache_state().items())
        if changed:
            self._refuse(f"each step changes {changed[0]} in Python, which no replay does")
        elif model and model.opaque:
            self._refuse(f"its modules hold what cannot be compared ({model.opaque})")
        elif model and not model.is_unchanged():
            if self.calls < self.MAX_EAGER_CALLS:  # the first ones may fill what later ones find
                self._eager_calls = self.calls + 1
            else:
                self._refuse("each step changes what its modules hold in Python, which no replay does")
        elif counted - {1}:
            self._refuse("a sliding window does not take in one token a step")
        return output

    def _model_state(self) -> ModuleState | None:
        """But for the cache, and what stands for the model; tensors may be written to, as replays do that too."""
        if not isinstance(self.model, nn.Module):
            return None
        without = (_cache_of(self._others), vars(self.model).get(_COMPILED))
        return ModuleState(self.model, contents=False, without=without)

    def _cache_state(self) -> dict[str, Any]:
        """What a step may go on from in the cache, but for the counts of windows."""
        state: dict[str, Any] = {}
        for number, layer in enumerate(_cache_of(self._others).layers):
            for name, value in vars(layer).items():
                if name != "cumulative_length_int" or layer not in self._windows:
                    _note(state, f"its cache's layers[{number}].{name}", value)
        return state

    def _captured(self, inputs: dict[Place, torch.Tensor]) -> Callable[[], Any] | None:
        """None where it cannot be, or not yet; then nothing was launched."""
        self._inputs = {place: value.clone() for place, value in inputs.items()}
        try:
            with _as_captured(self._windows):
                replay = self.capture(partial(self.model, **_nested(self._inputs | self._others)))
        except RuntimeError as error:
            if self._eager_calls:
                self._refuse(f"it cannot be captured: {error}")
            else:  # what runs for the first time may not be captured
                self._known.discard(self._signature)
                self._eager_calls = self.EAGER_CALLS
            return None
        self._known.add(self._signature)
        return replay


def _windows_of(others: dict[Place, Any]) -> Windows:
    layers = getattr(_cache_of(others), "layers", ())
    return [layer for layer in layers if getattr(type(layer), "update", None) is StaticSlidingWindowLayer.update]


def _counts_of(windows: Windows) -> list[int]:
    """Of tokens so far."""
    return [window.cumulative_length_int for window in windows]


def _are_full(windows: Windows) -> list[bool]:
    """Whether each window moves on by a token with each step."""
    return [window.cumulative_length_int >= window.max_cache_len for window in windows]


def _note(state: dict[str, Any], place: str, value: Any) -> None:
    """A value by itself, a tensor by where it is, whatever is in it."""
    if isinstance(value, torch.Tensor):
        state[place] = (value.data_ptr(), value.shape, value.stride(), value.dtype)
    elif isinstance(value, list | tuple | dict):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            _note(state, f"{place}[{name}]", inner)
    else:
        state[place] = value if isinstance(value, _NUMBERS) else id(value)


@contextmanager
def _as_captured(windows: Windows) -> Iterator[None]:
    """Has windows that are full move by what can be captured, and none count a step that is not done yet."""
    counts = _counts_of(windows)
    for window, full in zip(windows, _are_full(windows), strict=True):
        if full:
            vars(window)["update"] = partial(_move, window)
    try:
        yield
    finally:
        for window, count in zip(windows, counts, strict=True):
            vars(window).pop("update", None)
            window.cumulative_length_int = count


def _move(window: StaticSlidingWindowLayer, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> Any:
    """``window.update`` of one token without an index from the host, which would have to wait for it."""
    for kept, new in ((window.keys, keys), (window.values, values)):
        kept.copy_(torch.cat((kept[:, :, 1:], new), dim=-2))
    return window.keys, window.values


def _signature(
    model: Callable[..., Any], inputs: dict[Place, torch.Tensor], others: dict[Place, Any], full: list[bool]
) -> int:
    """The same for steps of which one may be captured at once if another was.

    That is with the same parameters, torch's settings as they were, inputs of the same shapes and a cache of the same
    layers. Contents do not count, nor which cache it is.
    """
    modules = model.modules() if isinstance(model, nn.Module) else ()
    weights = tuple((type(module), *map(id, module._parameters.values())) for module in modules)
    shapes = tuple((place, value.shape, value.dtype, value.device) for place, value in inputs.items())
    numbers = tuple((place, type(value), value if type(value) in _NUMBERS else None) for place, value in others.items())
    cache = tuple(
        (type(layer), *((name, value.shape) for name, value in vars(layer).items() if isinstance(value, torch.Tensor)))
        for layer in _cache_of(others).layers
    )
    return hash((blas_state(), weights, shapes, numbers, cache, tuple(full)))


def _cache_of(others: dict[Place, Any]) -> Any:
    """By its class: transformers 5.24 calls it cache, before it was past_key_values."""
    return next((value for value in others.values() if isinstance(value, Cache)), None)


def _obstacle(inputs: dict[Place, torch.Tensor], others: dict[Place, Any], windows: Windows) -> str | None:
    """Why a step cannot be replayed, as far as its arguments tell."""
    cache = _cache_of(others)
    if not isinstance(cache, StaticCache):
        return f"its cache is {'missing' if cache is None else f'a {type(cache).__name__}'}, not a StaticCache"
    if cache.offloading:
        return "its cache is offloaded"
    masks = [value.ndim for place, value in inputs.items() if any("mask" in name for name in place)]
    if windows and (not masks or min(masks) < 4):
        return "masks of a sliding window are made in the model, by what Python has counted"
    kept = [name for name in ("output_attentions", "output_hidden_states") if others.get((name,))]
    return f"{kept[0]} keeps tensors that the next replay overwrites" if kept else None


def _are_alike(inputs: dict[Place, torch.Tensor], before: dict[Place, torch.Tensor]) -> bool:
    return inputs.keys() == before.keys() and all(
        (value.shape, value.dtype, value.device) == (before[place].shape, before[place].dtype, before[place].device)
        for place, value in inputs.items()
    )


def _are_same(others: dict[Place, Any], before: dict[Place, Any]) -> bool:
    return others.keys() == before.keys() and all(
        value is before[place]
        or (type(value) in _NUMBERS and type(value) is type(before[place]) and value == before[place])
        for place, value in others.items()
    )


def _leaves(arguments: dict[str, Any], above: Place = ()) -> Iterator[tuple[Place, Any]]:
    for name, value in arguments.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*above, name))
        else:
            yield (*above, name), value


def _nested(leaves: dict[Place, Any]) -> dict[str, Any]:
    """The arguments that have these leaves."""
    arguments: dict[str, Any] = {}
    for (*above, name), value in leaves.items():
        inner = arguments
        for each in above:
            inner = inner.setdefault(each, {})
        inner[name] = value
    return arguments
