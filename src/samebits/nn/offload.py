"""Models that are larger than the card: what does not fit lies packed in main memory and is streamed through it.

The blocks of a model are the entries of its outermost lists (nn.ModuleList). As many as fit stay on the card, with
everything that is in no block; the others are spread evenly among them, so that copies run behind as much computing as
there is. Their matrices are streamed (see streaming.py), a third less than in BF16; norms and biases stay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from samebits.errors import InputError
from samebits.format.packed import existing
from samebits.nn.df11 import holds_units
from samebits.nn.packed_module import PackedModule, check_module
from samebits.nn.streaming import Block, Owners, Streamer, block_bytes, lane_to
from samebits.sizes import parse_size, size

BUFFERS = 2  # one that is computed from, one that is copied to
STATE = "sb_offloaded"  # where an offloaded module keeps its state
_MAP = "hf_device_map"  # where transformers, diffusers and PEFT look for what is where
_MEND = "call samebits.onload on the whole model first"
_Weights = list[tuple[nn.Parameter, Owners]]


@dataclass(frozen=True)
class Offloaded:
    """What is where.

    Attributes:
        device: that computes.
        blocks: how many the model has.
        streamed: names of those whose weights lie in main memory.
        resident_bytes: of all weights and buffers that stay on the device.
        staging_bytes: on the device, through which streamed weights go.
        streamed_bytes: in main memory.
    """

    device: torch.device
    blocks: int
    streamed: tuple[str, ...]
    resident_bytes: int
    staging_bytes: int
    streamed_bytes: int

    @property
    def device_bytes(self) -> int:
        """What weights take on the device; activations, cache and a decoded layer come on top."""
        return self.resident_bytes + self.staging_bytes

    def __str__(self) -> str:
        here = f"{self.blocks - len(self.streamed)} of {self.blocks} blocks stay on {self.device}"
        sizes = f"{size(self.device_bytes)} there, {size(self.streamed_bytes)} in main memory"
        return f"{here}, {len(self.streamed)} are streamed: {sizes}"


class _StreamedForward:
    """A block's forward, with its weights on the device while it runs; an attribute of the module, in front of its own.

    torch.compile leaves it out of its graphs.
    """

    def __init__(self, module: nn.Module, block: Block, streamer: Streamer) -> None:
        self.module, self.block, self.streamer = module, block, streamer
        self.was_attribute = "forward" in module.__dict__
        self.__wrapped__: Callable[..., Any] = module.forward
        self._run = torch.compiler.disable(self._streamed)
        module.__dict__["forward"] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def _streamed(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(map(_has_gradient, (args, kwargs, list(self.module.parameters())))):
            mend = f"call it in torch.no_grad(), or {_MEND}"
            raise InputError("no gradient passes through streamed weights", where=self.block.name, mend=mend)
        with self.streamer.staged(self.block):
            return self.__wrapped__(*args, **kwargs)

    def remove(self) -> None:
        del self.module.__dict__["forward"]
        if self.was_attribute:
            self.module.__dict__["forward"] = self.__wrapped__
        self.block.release()

    def __reduce__(self) -> Any:
        raise InputError("an offloaded model cannot be copied or pickled", mend=_MEND)


def _has_gradient(values: Any) -> bool:
    return any(isinstance(value, torch.Tensor) and value.requires_grad for value in tree_leaves(values))


@dataclass(frozen=True)
class _State:
    report: Offloaded
    forwards: Sequence[_StreamedForward]
    placed: Any  # what _MAP was before


def offload(module: nn.Module, gpu_memory: int | str, *, device: torch.device | str | None = None) -> Offloaded:
    """Move a module to a device whose memory it does not fit into; its outputs stay the same, bit for bit.

    For inference: no parameter has a gradient afterwards. Its state dict and its saving are what they were. A module
    that is offloaded already is offloaded anew; if that is refused, it stays as it is. Where all of it fits it is only
    moved.

    Args:
        module: of any class, packed or not, on any device. Weights are packed before: see ``compress``.
        gpu_memory: bytes, or a size such as "24GiB", that weights and staging buffers may take on the device. Leave
            room for activations, the cache and one decoded layer (``samebits estimate --context`` tells).
        device: that computes; None: the current GPU, or the CPU where there is none.

    Raises:
        InputError: it is no module, or does not fit even with every block streamed; or its weights are not in memory or
            moved by accelerate, or in DFloat11's own layout; or ``gpu_memory`` is neither a whole number nor a
            size.
        DeviceError: there is no such GPU.
        ResourceError: main memory cannot be pinned; the module is not offloaded then.
    """
    check_module(module, "give a model, of a pipeline one of its parts")
    budget = _bytes(gpu_memory)
    device = _full(device)
    _check(module)
    found = _Blocks(module)
    chosen = _choose(found, budget)
    onload(module)
    with torch.inference_mode(False), torch.no_grad():
        return _offload(module, found, chosen, device)


def _bytes(gpu_memory: int | str) -> int:
    if isinstance(gpu_memory, str):
        return parse_size(gpu_memory)
    if isinstance(gpu_memory, bool) or not hasattr(gpu_memory, "__index__"):
        mend = "give a whole number, or a size such as 24GiB"
        raise InputError(f"gpu_memory is {gpu_memory!r}, which is no number of bytes", mend=mend)
    return index(gpu_memory)


def onload(module: nn.Module) -> None:
    """Undo offload: streamed weights stay in main memory, all others where they are, and may be moved again.

    Args:
        module: of any class; where nothing is offloaded, nothing happens.
    """
    for owner in module.modules():
        state = owner.__dict__.pop(STATE, None)
        if state is not None:
            del owner.__dict__["_apply"], owner.__dict__[_MAP]
            if state.placed is not None:
                owner.__dict__[_MAP] = state.placed
            for forward in state.forwards:
                forward.remove()


def streaming_device(module: nn.Module) -> torch.device | None:
    """The device that computes, if blocks in ``module`` are streamed."""
    return next((forward.streamer.device for forward in _forwards(module)), None)


def _forwards(module: nn.Module) -> Iterator[_StreamedForward]:
    found = (owner.__dict__.get("forward") for owner in module.modules())
    return (forward for forward in found if isinstance(forward, _StreamedForward))


def refuse_offloaded(module: nn.Module) -> None:
    """
    Raises:
        InputError: blocks in it are streamed, or see refuse_grouped.
    """
    if streaming_device(module) is not None:
        raise InputError("the weights of an offloaded model cannot be replaced", mend=_MEND)
    refuse_grouped(module)


def refuse_grouped(module: nn.Module, *, on_disk: bool = False) -> None:
    """
    Args:
        on_disk: whether only weights on disk matter, of which nothing is in memory but their shape.

    Raises:
        InputError: diffusers' group offloading moves weights of it.
    """
    registries = (vars(part).get("_diffusers_hook") for part in module.modules())
    hooks = (registry.get_hook("group_offloading") for registry in registries if registry)
    if any(hook and (hook.config.offload_to_disk_path or not on_disk) for hook in hooks):
        what = f"diffusers' group offloading moves the weights of this model{' to disk' if on_disk else ''}"
        raise InputError(what, mend="compress, decompress or save it before enable_group_offload")


def _check(module: nn.Module) -> None:
    """Whether it can be offloaded once ``onload`` was called."""
    own = {forward for owner in module.modules() if STATE in vars(owner) for forward in vars(owner)[STATE].forwards}
    if not own.issuperset(_forwards(module)):
        raise InputError("part of an offloaded model", mend=_MEND)
    if holds_units(module):
        mend = "load the checkpoint without keep_format"
        raise InputError("a model that keeps DFloat11's layout cannot be offloaded", mend=mend)
    others = (owner for owner in module.modules() if STATE not in vars(owner))
    if any(len(set(getattr(owner, _MAP, {}).values())) > 1 for owner in others):
        raise InputError("accelerate has placed this model on several devices", mend="load it without device_map")
    for name, parameter in module.named_parameters():
        if parameter.is_meta:
            mend = "load the model, without offloading it"
            raise InputError("on the meta device there are no weights to move", where=name, mend=mend)
        if parameter.is_inference():
            raise InputError("made in torch.inference_mode", where=name, mend="load the model outside of it")


def _full(device: torch.device | str | None) -> torch.device:
    """With its index."""
    device = existing(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return torch.device("cuda", torch.cuda.current_device()) if str(device) == "cuda" else device


class _Blocks:
    """The blocks of a module, and which of their weights can be streamed.

    Attributes:
        names, modules, weights: of the blocks; those weights that nothing outside of their block has.
        total: bytes of all parameters and buffers.
    """

    def __init__(self, module: nn.Module) -> None:
        self.names: list[str] = []
        self.modules: list[nn.Module] = []
        self._seen: set[nn.Module] = set()
        self._walk("", module)
        homes = defaultdict(set)
        for number, block in enumerate(self.modules):
            for part in block.modules():
                homes[part].add(number)
        for part in self._seen:
            homes[part].add(-1)
        owners: defaultdict[int, list[tuple[nn.Module, str]]] = defaultdict(list)
        parameters: dict[int, nn.Parameter] = {}
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None:
                    owners[id(parameter)].append((part, name))
                    parameters[id(parameter)] = parameter
        self.weights: list[_Weights] = [[] for _ in self.modules]
        for key, parameter in parameters.items():
            numbers = set().union(*(homes[part] for part, _ in owners[key]))
            if len(numbers) == 1 and -1 not in numbers and all(_is_matrix(*owned) for owned in owners[key]):
                self.weights[numbers.pop()].append((parameter, owners[key]))
        self.total = sum(tensor.nbytes for tensor in (*parameters.values(), *module.buffers()))

    def resident_bytes(self, streamed: Sequence[int]) -> int:
        """Of everything but those blocks' weights."""
        return self.total - sum(weight.nbytes for number in streamed for weight, _ in self.weights[number])

    def staging_bytes(self, streamed: Sequence[int]) -> int:
        sizes = (block_bytes([weight for weight, _ in self.weights[number]]) for number in streamed)
        return BUFFERS * max(sizes, default=0)

    def _walk(self, path: str, module: nn.Module) -> None:
        """An entry of a list is a block if it runs by itself and is made of other modules."""
        if module in self._seen or module in self.modules:
            return
        self._seen.add(module)
        for name, child in module.named_children():
            full = f"{path}.{name}" if path else name
            is_list = isinstance(child, (nn.ModuleList, nn.ModuleDict))
            if isinstance(module, nn.ModuleList) and not is_list and next(child.children(), None) is not None:
                if child not in self.modules:
                    self.names.append(full)
                    self.modules.append(child)
            else:
                self._walk(full, child)


def _is_matrix(owner: nn.Module, name: str) -> bool:
    """Packed, or of two dimensions and more."""
    if isinstance(owner, PackedModule) and name in owner.sb_slots:
        return True
    parameter = owner._parameters[name]
    return type(parameter) is nn.Parameter and parameter.dim() > 1 and parameter.is_contiguous()


def _choose(found: _Blocks, budget: int) -> list[int]:
    """The fewest blocks to stream, spread evenly among all.

    Raises:
        InputError: the others do not fit even if all are streamed that can be.
    """
    least = found.total
    able = [number for number, weights in enumerate(found.weights) if weights]
    counts = range(BUFFERS + 1, len(able) + 1) if least > budget else ()
    for count in counts:
        chosen = [able[i] for i in range(len(able)) if (i + 1) * count // len(able) > i * count // len(able)]
        needed = found.resident_bytes(chosen) + found.staging_bytes(chosen)
        if needed <= budget:
            return chosen
        least = min(least, needed)
    if least > budget:
        what = f"gpu_memory is {budget:,} bytes, and this model needs {least:,} at least"
        raise InputError(what, mend="give it more, or pack more of its weights")
    return []


def _offload(module: nn.Module, found: _Blocks, chosen: Sequence[int], device: torch.device) -> Offloaded:
    module.requires_grad_(False)
    for parameter in module.parameters():
        parameter.grad = None
    lane = lane_to(device)
    blocks = [Block(found.names[i], found.weights[i], lane) for i in chosen]
    streamed = {id(weight) for i in chosen for weight, _ in found.weights[i]}
    module._apply(lambda tensor: tensor if id(tensor) in streamed else tensor.to(device))
    names = tuple(block.name for block in blocks)
    resident, staging = found.resident_bytes(chosen), found.staging_bytes(chosen)
    report = Offloaded(device, len(found.modules), names, resident, staging, found.total - resident)
    if blocks:
        streamer = Streamer(blocks, device, BUFFERS, lane)
        forwards = [
            _StreamedForward(found.modules[i], block, streamer) for i, block in zip(chosen, blocks, strict=True)
        ]
        module.__dict__[STATE] = _State(report, forwards, module.__dict__.get(_MAP))
        module.__dict__["_apply"] = _staying(module, device)
        module.__dict__[_MAP] = {"": str(device)} | dict.fromkeys(names, "cpu")
    return report


def _staying(module: nn.Module, device: torch.device) -> Callable[..., nn.Module]:
    """What takes the place of a module's _apply: for ``to`` where it changes nothing, as pipelines call it."""

    def _apply(fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> nn.Module:
        probe = torch.empty(2, 2, 2, 2, dtype=torch.bfloat16, device=device)
        result = fn(probe)
        if (result.device, result.dtype, result.stride()) != (device, probe.dtype, probe.stride()):
            raise InputError("an offloaded model cannot be moved or converted", mend=_MEND)
        return module

    return _apply
