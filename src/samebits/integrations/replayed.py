"""A module's forward, replayed: a denoising step of a diffusion model is one launch then.

For each kind of inputs, that is tensors of the same shapes and everything else the same, the first call finds the plans
(samebits.prepare) and runs as it is, the second is captured, and it and later ones copy their inputs to where the graph
reads them, replay it and give copies of what it made. A graph holds for torch's settings and the module as they were:
weights and whatever else its modules hold are compared at each call, by identity, and captured anew if another is
there, as where an adapter's scale is set.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from samebits.nn.prepare import prepare
from samebits.nn.product import version_of
from samebits.plans.environment import blas_state
from samebits.plans.key import ALIGNMENT

Capture = Callable[[Callable[[], Any]], Callable[[], Any]]  # makes of a function one that replays it
MAX_GRAPHS = 8  # kinds of inputs; a graph keeps memory for all that is made between input and output
_VALUES = (bool, int, float, str, type(None), torch.dtype, torch.device)  # as arguments
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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() or torch.compiler.is_compiling() or _is_capturing(self._device):
            return self._forward(*args, **kwargs)
        given = _Given(args, kwargs)
        graph = self._graph_of(given)
        if graph.is_refused:
            return self._forward(*args, **kwargs)
        if graph.state is None:
            return self._first(graph, given, args, kwargs)
        if not graph.state.is_unchanged():
            self._graphs.remove(graph)
            return self(*args, **kwargs)
        if graph.replay is None:
            graph.replay = self._captured(graph, given)
        if graph.replay is None:
            return self._forward(*args, **kwargs)
        graph.read(given)
        self.count += 1
        return tree_map(_copied, graph.replay())

    def _graph_of(self, given: _Given) -> _Graph:
        kind = _settings(self._device), given.spec, list(map(_form, given.leaves))
        for graph in self._graphs:
            if graph.kind == kind:
                return graph
        made = _Graph(kind)
        self._graphs = [*self._graphs[1 - MAX_GRAPHS :], made]
        if obstacle := given.obstacle(self._device):
            made.refuse(obstacle)
        return made

    def _first(self, graph: _Graph, given: _Given, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As it is, which shows what it does in Python, as no replay does."""
        run, marks = partial(self._forward, *args, **kwargs), given.marks()
        prepare(self._model, call=run)
        run()
        before = _State(self._model)
        output = run()
        if not before.is_unchanged():
            graph.refuse("each step changes what its modules hold, which no replay does")
        elif not given.is_same(_Given(args, kwargs)) or given.marks() != marks:
            graph.refuse("it changes what it is given, which no replay does")
        else:
            graph.state = before
        return output

    def _captured(self, graph: _Graph, given: _Given) -> Callable[[], Any] | None:
        """None where it cannot be."""
        try:
            args, kwargs = tree_unflatten(graph.made_static(given), given.spec)
            return self._capture(partial(self._forward, *args, **kwargs))
        except RuntimeError as error:
            graph.refuse(f"it cannot be captured: {error}")
            return None


class _Given:
    """The arguments of a call, flattened."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.leaves, self.spec = tree_flatten((args, kwargs))

    def tensors(self) -> dict[int, torch.Tensor]:
        """By their numbers among the leaves."""
        return {number: leaf for number, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)}

    def marks(self) -> list[tuple[int, int, int]]:
        """Of tensors, which may be written to."""
        return list(map(_mark, self.tensors().values()))

    def is_same(self, other: _Given) -> bool:
        """Whether what was given is still the same things: caches are filled."""
        return self.spec == other.spec and all(map(operator.is_, self.leaves, other.leaves))

    def obstacle(self, device: torch.device) -> str | None:
        """Why they cannot be replayed; a graph would read them where they are now, or have them aligned otherwise."""
        for leaf in self.leaves:
            if type(leaf) in _VALUES:
                continue
            if not isinstance(leaf, torch.Tensor):
                return f"an argument is a {type(leaf).__name__}, which may change from call to call"
            if type(leaf) not in (torch.Tensor, nn.Parameter) or leaf.layout is not torch.strided:
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
        state: the module's; None before the first call has ended.
        static: where it reads each tensor, by its number; as far as memory is there once, see _root.
        replay: None until it is captured.
    """

    kind: tuple[Any, ...]
    state: _State | None = None
    static: dict[int, torch.Tensor] = field(default_factory=dict)
    replay: Callable[[], Any] | None = None
    is_refused: bool = False

    def refuse(self, obstacle: str) -> None:
        self.is_refused = True
        _log.warning("samebits.cuda_graphs: calls run as they are: %s", obstacle)

    def made_static(self, given: _Given) -> list[Any]:
        """What was given, with tensors of its own, which lie in memory as those do."""
        leaves = [*given.leaves]
        for number, tensor in given.tensors().items():
            root = _root(tensor)
            own = torch.empty_strided(root.shape, root.stride(), dtype=root.dtype, device=root.device)
            self.static[number] = own
            leaves[number] = own.expand(tensor.shape)
        self.read(given)
        return leaves

    def read(self, given: _Given) -> None:
        """Copy a call's inputs."""
        for number, own in self.static.items():
            own.copy_(_root(given.leaves[number]))


_WITHOUT_STATE = (Replays, nn.Module, torch.Tensor, type, ModuleType, FunctionType, MethodType)


class _State:
    """What a module's forward may depend on besides inputs and settings: all that its modules hold.

    That is attributes, parameters, submodules and hooks, attributes of objects among these, as configurations and
    processors, and what is in lists, sets and dicts: by identity, and of tensors also where they lie, and how often
    torch has written to them.
    """

    def __init__(self, model: nn.Module) -> None:
        self._containers = list(_containers(model))
        self._sizes = list(map(len, self._containers))
        filled = (each for each in self._containers if each)  # few are
        self._iterators = [each.values if isinstance(each, dict) else each.__iter__ for each in filled]
        self._values = list(self._now())
        self._tensors = [value for value in self._values if type(value) in (torch.Tensor, nn.Parameter)]
        # which no others can have the ids of
        self._storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in self._tensors]
        self._marks = list(map(_mark, self._tensors))

    def is_unchanged(self) -> bool:
        return (
            list(map(len, self._containers)) == self._sizes
            and all(map(operator.is_, self._now(), self._values))
            and list(map(_mark, self._tensors)) == self._marks
        )

    def _now(self) -> Iterator[Any]:
        return chain.from_iterable(map(operator.call, self._iterators))


def _containers(model: nn.Module) -> Iterable[Any]:
    found: dict[int, Any] = {}
    for module in model.modules():
        own = vars(module)
        for attributes in (own, *(vars(value) for value in own.values() if _has_attributes(value))):
            found[id(attributes)] = attributes
            found |= {id(value): value for value in attributes.values() if isinstance(value, dict | list | set)}
    return found.values()


def _has_attributes(value: Any) -> bool:
    """Of its own, which are not looked at elsewhere."""
    return hasattr(value, "__dict__") and not isinstance(value, _WITHOUT_STATE)


def _mark(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Changes where another memory is its, or torch has written to it."""
    return tensor.data_ptr(), tensor.untyped_storage()._cdata, version_of(tensor)


def _settings(device: torch.device) -> tuple[Any, ...]:
    kind, sdpa = device.type, torch.backends.cuda
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0  # others may run meanwhile
    return (
        stream,
        blas_state(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        (sdpa.flash_sdp_enabled(), sdpa.mem_efficient_sdp_enabled(), sdpa.math_sdp_enabled(), sdpa.cudnn_sdp_enabled()),
    )


def _form(leaf: Any) -> tuple[Any, ...]:
    """All that counts of an argument for a graph, which others may have as well; values as texts tell -0.0 from 0.0."""
    kind = type(leaf)
    if not isinstance(leaf, torch.Tensor):
        return kind, repr(leaf) if kind in _VALUES else None
    if leaf.layout is not torch.strided:
        return kind, leaf.shape, leaf.layout
    return kind, leaf.shape, leaf.stride(), leaf.dtype, leaf.device, leaf.requires_grad, _misalignment(leaf)


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


def _copied(value: Any) -> Any:
    """The next replay writes where the tensors of this one are."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
