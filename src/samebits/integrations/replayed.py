"""A module's forward, replayed: a denoising step of a diffusion model is one launch then.

For each kind of inputs, that is tensors of the same shapes and everything else the same, the first call runs as it is,
and shows what it does beside giving its output: no replay does that, so a forward that changes what its modules hold or
what it is given, or that draws random numbers, runs as it is ever after. Else the second call finds the plans
(samebits.prepare) and is captured, and it and later ones copy their inputs to where the graph reads them, replay it and
give copies of what it made. A graph holds for torch's settings and the module as they were: what can be reached from it
(module_state.py) is compared at each call, and captured anew if anything is another, as where an adapter's scale is
set. Tensors are compared before the graph is launched, since it reads them, and all else while the GPU works: a replay
changes nothing that others see.
"""

from __future__ import annotations

import logging
import operator
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from itertools import chain
from threading import RLock
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from samebits.integrations.module_state import ModuleState, mark
from samebits.nn.prepare import prepare
from samebits.plans.environment import getters, is_transformed
from samebits.plans.key import ALIGNMENT

Capture = Callable[[Callable[[], Any]], Callable[[], Any]]  # makes of a function one that replays it
MAX_GRAPHS = 8  # kinds of inputs; a graph keeps memory for all that is made between input and output
MAX_FIRST_CALLS = 4  # of a kind, of which one must find its modules as the one before, and leave them so
MAX_USELESS_CALLS = 32  # that were looked at in a row, and none replayed
_VALUES = (bool, int, float, str, type(None), torch.dtype, torch.device)  # as arguments, or in an output
_PRECISIONS = (("cuda", "matmul"), ("cuda", "conv"), ("cuda", "rnn"), ("mkldnn", "matmul"), ("mkldnn", "conv"))
_log = logging.getLogger(__name__)


@contextmanager
def replayed(model: nn.Module, capture: Capture) -> Iterator[None]:
    """Has the calls of a module replayed.

    Args:
        model: all of it is on one device.
    """
    before = vars(model).get("forward")
    replays = Replays(model, model.forward, capture)
    vars(model)["forward"] = replays
    try:
        yield
    finally:
        del vars(model)["forward"]
        if before is not None:
            vars(model)["forward"] = before
    if not replays.count:
        _log.warning("samebits.cuda_graphs: nothing was replayed; the second call with inputs of one kind would be")


class Replays:
    """Stands for a module's forward.

    Args:
        forward: the module's own.

    Attributes:
        count: calls that were replays.
    """

    def __init__(self, model: nn.Module, forward: Callable[..., Any], capture: Capture) -> None:
        update_wrapper(self, forward, updated=())  # pipelines ask which arguments it takes
        self.count = 0
        self._model, self._forward, self._capture = model, forward, capture
        self._device = next(chain(model.parameters(), model.buffers())).device
        self._graphs: list[_Graph] = []
        self._useless = 0  # calls that were looked at since the last replay
        self._lock = RLock()  # a graph has one place for its inputs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._useless < MAX_USELESS_CALLS and not _is_seen_through(self._device):
            with self._lock:
                given = _Given(args, kwargs)
                graph = self._graph_of(given)
                if not graph.is_refused:
                    return self._called(graph, given, partial(self._forward, *args, **kwargs))
        return self._forward(*args, **kwargs)

    def _graph_of(self, given: _Given) -> _Graph:
        kind = given.kind(self._device)
        for graph in self._graphs:
            if graph.kind == kind:
                return graph
        made = _Graph(kind)
        self._graphs = [*self._graphs[1 - MAX_GRAPHS :], made]
        if obstacle := given.obstacle(self._device):
            made.refuse(obstacle)
        return made

    def _called(self, graph: _Graph, given: _Given, run: Callable[[], Any]) -> Any:
        if graph.replay is None and graph.state is not None and graph.state.is_unchanged():
            self._capture_it(graph, given, run)
            if graph.is_refused:
                return run()
        if graph.replay is not None and graph.state is not None and graph.state.is_in_place():
            graph.read(given)
            output = tree_map(_copied, graph.replay())
            if graph.state.is_unchanged():  # compared while the GPU works; else what was made is thrown away
                self.count += 1
                self._useless = graph.first_calls = 0
                return output
        return self._looked_at(graph, given, run)

    def _looked_at(self, graph: _Graph, given: _Given, run: Callable[[], Any]) -> Any:
        """As it is."""
        graph.forget()
        self._useless += 1
        if self._useless == MAX_USELESS_CALLS:
            _log.warning(
                "samebits.cuda_graphs: calls run as they are: none of the last %d was like one before", self._useless
            )
        if graph.first_calls == MAX_FIRST_CALLS:
            graph.refuse("what its modules hold is another in each call, which no replay sees")
            return run()
        graph.first_calls += 1
        state, numbers, before = self._state(), _random_numbers(self._device), given.contents()
        output = run()
        if obstacle := _obstacle_of(output):
            graph.refuse(obstacle)
        elif not given.is_unchanged(before):
            graph.refuse("it changes what it is given, which no replay does")
        elif _random_numbers(self._device) != numbers:
            graph.refuse("it draws random numbers")
        elif state.is_too_large:
            graph.refuse("its modules hold more than can be compared at each call")
        elif state.opaque:
            graph.refuse(f"its modules hold what cannot be compared ({state.opaque})")
        elif state.is_unchanged():
            graph.state = state
        elif graph.first_calls == MAX_FIRST_CALLS:  # the first ones may fill what later ones find
            graph.refuse("each step changes what its modules hold, which no replay does")
        return output

    def _capture_it(self, graph: _Graph, given: _Given, run: Callable[[], Any]) -> None:
        """If it can be: of a forward that does nothing but give an output."""
        prepare(self._model, call=run)
        state = self._state()
        caches = torch.is_autocast_cache_enabled()
        torch.set_autocast_cache_enabled(False)  # which is emptied where autocast ends, and has been filled before
        try:
            args, kwargs = tree_unflatten(graph.made_static(given), given.spec)
            replay = self._capture(partial(self._forward, *args, **kwargs))
        except RuntimeError as error:
            graph.refuse(f"it cannot be captured: {error}")
            return
        finally:
            torch.set_autocast_cache_enabled(caches)
        if state.is_unchanged():
            graph.state, graph.replay = state, replay
        else:
            graph.refuse("each step changes what its modules hold, which no replay does")

    def _state(self) -> ModuleState:
        return ModuleState(self._model, without=[self])


class _Given:
    """The arguments of a call, flattened."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._arguments = args, kwargs
        self.leaves, self.spec = tree_flatten(self._arguments)

    def tensors(self) -> dict[int, torch.Tensor]:
        """By their numbers among the leaves."""
        return {number: leaf for number, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)}

    def kind(self, device: torch.device) -> tuple[Any, ...]:
        """All that counts for a graph, which other arguments may have as well; and which of them are the same."""
        numbers = {id(leaf): number for number, leaf in reversed(self.tensors().items())}
        places = [numbers.get(id(leaf)) for leaf in self.leaves]
        return _settings(device), self.spec, list(map(_form, self.leaves)), places

    def contents(self) -> list[Any]:
        """Of tensors, which may be written to; where torch does not count that, a copy."""
        each = self.tensors().values()
        return [(mark(tensor), tensor.clone() if tensor.is_inference() else None) for tensor in each]

    def is_unchanged(self, before: list[Any]) -> bool:
        """Whether what was given is still the same things, and nobody has written to them: caches are filled."""
        now = _Given(*self._arguments)
        if self.spec != now.spec or not all(map(operator.is_, self.leaves, now.leaves)):
            return False
        return all(
            mark(tensor) == marked and (kept is None or _same(kept, tensor))
            for tensor, (marked, kept) in zip(now.tensors().values(), before, strict=True)
        )

    def obstacle(self, device: torch.device) -> str | None:
        """Why they cannot be replayed; a graph would read them where they are now, or have them aligned otherwise."""
        for leaf in self.leaves:
            if type(leaf) in _VALUES:
                continue
            if not isinstance(leaf, torch.Tensor):
                return f"an argument is a {type(leaf).__name__}, which may change from call to call"
            if not _is_plain(leaf):
                return f"an input is a {type(leaf).__name__} of layout {leaf.layout}"
            if leaf.device != device:
                return f"an input of shape {list(leaf.shape)} is on {leaf.device}, the model on {device}"
            if leaf.requires_grad or _misalignment(leaf):
                return f"an input of shape {list(leaf.shape)} has requires_grad, or begins in the middle of another"
        return None


@dataclass(eq=False)
class _Graph:
    """Of one kind of inputs.

    Attributes:
        kind: settings, and forms of the arguments.
        state: the module's; None before a call has left it as it was.
        first_calls: since the last replay.
        static: where it reads each tensor, by its number; as far as memory is there once, see _root.
        replay: None until it is captured.
    """

    kind: tuple[Any, ...]
    state: ModuleState | None = None
    first_calls: int = 0
    static: dict[int, torch.Tensor] = field(default_factory=dict)
    replay: Callable[[], Any] | None = None
    is_refused: bool = False

    def refuse(self, obstacle: str) -> None:
        self.is_refused = True
        self.forget()
        _log.warning("samebits.cuda_graphs: calls run as they are: %s", obstacle)

    def forget(self) -> None:
        """What it holds for the module as it was."""
        self.state, self.replay, self.static = None, None, {}

    def made_static(self, given: _Given) -> list[Any]:
        """What was given, with tensors of its own, which lie in memory as those do."""
        leaves, own = [*given.leaves], dict[int, torch.Tensor]()
        for number, tensor in given.tensors().items():
            if id(tensor) not in own:
                self.static[number] = _like(_root(tensor))
                own[id(tensor)] = self.static[number].expand(tensor.shape)
            leaves[number] = own[id(tensor)]
        self.read(given)
        return leaves

    def read(self, given: _Given) -> None:
        """Copy a call's inputs."""
        for number, own in self.static.items():
            own.copy_(_root(given.leaves[number]))


def _is_seen_through(device: torch.device) -> bool:
    """Whether others see, or change, what happens inside a call, or what it gives is to be more than values."""
    return (
        torch.is_grad_enabled()
        or torch.compiler.is_compiling()
        or is_transformed()
        or forward_ad._current_level >= 0
        or parametrize._cache_enabled > 0  # of weights that are given back behind it
        or nn.modules.module._has_any_global_hook()
        or _is_capturing(device)
    )


def _obstacle_of(output: Any) -> str | None:
    """Why it cannot be copied from where the graph has made it, without which the next replay overwrites it."""
    for leaf in tree_leaves(output):
        if isinstance(leaf, torch.Tensor):
            if not _is_plain(leaf):
                return f"its output has a {type(leaf).__name__} of layout {leaf.layout}"
        elif type(leaf) not in _VALUES:
            return f"its output has a {type(leaf).__name__}, whose tensors the next replay would overwrite"
    return None


def _settings(device: torch.device) -> tuple[Any, ...]:
    kind, cuda, cudnn = device.type, torch.backends.cuda, torch.backends.cudnn
    stream = torch.cuda.current_stream(device).cuda_stream if kind == "cuda" else 0  # others may run meanwhile
    dispatch = sys.modules.get("diffusers.models.attention_dispatch")
    return (
        stream,
        *(getter() for getter in getters()),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        (torch.get_default_dtype(), torch.get_default_device()),
        *(torch._C._get_fp32_precision_getter(*each) for each in _PRECISIONS),
        (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(), cuda.cudnn_sdp_enabled()),
        (cuda.fp16_bf16_reduction_math_sdp_allowed(), tuple(torch._C._get_sdp_priority_order())),
        torch._C._get_cublas_allow_fp16_reduced_precision_reduction(),
        torch._C._get_cublas_allow_fp16_accumulation(),
        (cudnn.enabled, cudnn.benchmark, cudnn.deterministic),
        torch.backends.mha.get_fastpath_enabled(),
        dispatch and dispatch._AttentionBackendRegistry._active_backend,
    )


def _random_numbers(device: torch.device) -> list[Any]:
    """Where generators are that a forward may draw from."""
    numpy = sys.modules.get("numpy")
    own = torch.cuda.default_generators[device.index] if device.type == "cuda" else None
    return [
        random.getstate(),
        bytes(torch.get_rng_state().tolist()),
        own and (own.initial_seed(), own.get_offset()),
        numpy and str(numpy.random.get_state(legacy=False)),
    ]


def _form(leaf: Any) -> tuple[Any, ...]:
    """Values as texts tell -0.0 from 0.0."""
    kind = type(leaf)
    if not isinstance(leaf, torch.Tensor):
        return kind, repr(leaf) if kind in _VALUES else None
    if not _is_plain(leaf):
        return kind, leaf.layout
    return kind, leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, _misalignment(leaf)


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_nested


def _misalignment(tensor: torch.Tensor) -> int:
    """Bytes; 0 of what is too small for an aligned access, as a pipeline's timestep, which is a part of all of them."""
    is_small = _root(tensor).nbytes < ALIGNMENT
    return 0 if is_small else tensor.data_ptr() % ALIGNMENT


def _root(tensor: torch.Tensor) -> torch.Tensor:
    """Of one that is expanded: with what is in memory once, where its strides are 0."""
    for dimension, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """In new memory, with the same strides."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _copied(value: Any) -> Any:
    """The next replay writes where the tensors of this one are."""
    if not isinstance(value, torch.Tensor):
        return value
    root = _root(value)
    return _like(root).copy_(root).expand(value.shape)


def _same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """In bytes."""
    return torch.equal(*(each.contiguous().reshape(-1).view(torch.uint8) for each in (left, right)))


def _is_capturing(device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
