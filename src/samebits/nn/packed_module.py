"""Modules whose weights are packed: subclasses made by swapping a module's class, so that it stays what it was.

The bytes are parameters of the module, uint8 without gradient, one per packed tensor. Under its old name the weight is
a property: a plain tensor while the module's own forward runs (decoded at its first use there, dropped when forward
returns), and a LazyWeight elsewhere. An embedding's forward decodes the rows that it looks up.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from types import FrameType
from typing import Any, ClassVar, NamedTuple, cast

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.fx import Tracer
from torch.fx._symbolic_trace import is_fx_symbolic_tracing
from torch.nn import functional as F
from torch.nn.utils._named_member_accessor import swap_tensor

from samebits.errors import DtypeError, FormatError, InputError, SamebitsError
from samebits.format.names import BARE, PACKED, WEIGHT
from samebits.format.packed import PackedTensor
from samebits.nn.held import loading, modules
from samebits.nn.lazy import LazyTensor, LazyWeight
from samebits.nn.product import version_of
from samebits.nn.recipe import Piece, Recipe, is_sharded, showing
from samebits.nn.saved import Saved, drop, hooks_around
from samebits.nn.stored import Mark, accept, check, distrust, keeps_bytes

Names = tuple[str, ...]
PIECE = "sb_piece_"  # how slots of pieces begin


def check_module(module: object, mend: str) -> None:
    """
    Raises:
        InputError: it is none.
    """
    if not isinstance(module, nn.Module):
        raise InputError(f"{type(module).__name__} is no torch module", mend=mend)


def _is_traced() -> bool:
    """Whether this thread's calls are recorded by torch.fx without tensors; make_fx has some, and keeps packed ones.

    The module's inputs do not tell: they may be in lists, or there may be none; nor does the flag of all threads.
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    if get_proxy_mode() is not None:
        return False
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not Tracer.trace.__code__:
        frame = frame.f_back
    return frame is not None


class PackedModule(nn.Module):
    """What the subclasses share; their other base is the module's original class.

    Attributes:
        sb_has_signature: whether the kind's forward is written as that of its modules' classes, not for any arguments.
        sb_kept: names of what a module has in its own dict while it is packed.
    """

    sb_has_signature: ClassVar[bool] = False
    sb_kept: ClassVar[Names] = ("sb_recipes", "sb_versions")
    sb_base: type[nn.Module]
    sb_recipes: dict[str, Recipe]
    sb_versions: dict[str, Mark]  # by slot, as it was when it was last looked at

    def __new__(cls, *args: Any, **kwargs: Any) -> PackedModule:
        """One that is filled by a class that copies itself: it is known from here on."""
        make = cls.sb_base.__new__
        made: PackedModule = object.__new__(cls) if make is object.__new__ else make(cls, *args, **kwargs)
        modules.add(made)
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """A module that is made by ``type(module)(...)`` becomes one of the original class: it has nothing packed."""
        self.__class__ = self.sb_base  # type: ignore[assignment]
        self.__init__(*args, **kwargs)  # type: ignore[misc]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, PackedModule):  # any more: whoever hooks into a module keeps the method that it had
            return type(self).forward(self, *args, **kwargs)
        if torch.compiler.is_compiling():  # a graph keeps no more than it needs
            return super().forward(*args, **kwargs)
        if is_fx_symbolic_tracing() and _is_traced():
            what = "torch.fx.symbolic_trace would keep decoded weights, whatever these are later"
            raise InputError(what, where=self.sb_base.__name__, mend="use torch.export, or samebits.decompress first")
        running, key, decoded = _running.of_module, id(self), _Decoded(args)
        before, hooks = running.get(key), self._sb_hooks()
        running[key] = decoded
        try:
            with hooks:
                result = super().forward(*args, **kwargs)
            decoded.refuse_changes(self)
            return result
        finally:  # no call before this is done: Python raises a KeyboardInterrupt behind one
            if before is None:
                del running[key]
            else:
                running[key] = before
            drop(hooks)

    @property
    def sb_decoded(self) -> _Decoded | None:
        """What is decoded for the forward that this thread runs, if it runs one."""
        return _running.of_module.get(id(self))

    def _sb_hooks(self) -> AbstractContextManager[object]:
        """Has autograd keep packed what it wants to keep of the weights; not in torch.func, which has no such hooks."""
        if not torch.is_grad_enabled() or not torch._C._autograd._saved_tensors_hooks_is_enabled():  # type: ignore[attr-defined]
            return nullcontext()
        pack, unpack = hooks_around()
        return saved_tensors_hooks(
            lambda tensor: self._sb_saved(tensor) or pack(tensor),
            lambda saved: saved.restore() if isinstance(saved, Saved) else unpack(saved),
        )

    def _sb_saved(self, tensor: torch.Tensor) -> Saved | None:
        if not _has_memory(tensor):
            return None  # a child's weight, say
        for name, weight in (self.sb_decoded or {}).items():
            if not _has_memory(weight):
                continue
            if tensor.dtype == weight.dtype and tensor.untyped_storage().data_ptr() == weight.data_ptr():
                data, offset = self.sb_data(name), int(tensor.storage_offset())
                versions = [version_of(each) for each in data]
                return Saved(self.sb_recipes[name], data, versions, tensor.shape, tensor.stride(), offset)
        return None

    def sb_weight(self, name: str) -> torch.Tensor:
        """What the attribute ``name`` gives."""
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return self.sb_decode(name)
        decoded = self.sb_decoded
        if decoded is None or isinstance(self, nn.Embedding):
            return LazyWeight(self.sb_recipes[name], self.sb_data(name))
        recipe = self.sb_recipes[name]
        weight = decoded.get(name)
        if weight is not None:
            return showing(weight, recipe.shows_requires_grad(weight.device))
        stored = self.sb_known(name)
        weight = None if stored is None else recipe.weight_again(stored)
        if weight is not None:  # a new tensor of the usual kind
            written = _Written(weight._version, weight.data_ptr())
        else:
            weight = recipe.weight(self.sb_data(name))
            written = _Written.of(weight)
        decoded[name], decoded.written[name] = weight, written
        return weight

    def sb_data(self, name: str) -> list[torch.Tensor]:
        """The stored tensors of the weight ``name``, in the order of its recipe's pieces.

        Raises:
            DigestError: somebody took the bytes for numbers and changed them.
        """
        pieces = self.sb_recipes[name].pieces
        data: list[Any] = [self._parameters[piece.slot] for piece in pieces]
        if not torch.compiler.is_compiling():
            for piece, stored in zip(pieces, data, strict=True):
                known = self.sb_versions.get(piece.slot)
                is_known = known is not None and known.holds(stored)
                if not is_known or (piece.header and not piece.header.fits(stored)):
                    if piece.header:  # what accelerate places anew in each pass would have to be waited for
                        where, reads = f"{self.sb_base.__name__}.{name}", ACCELERATE not in self.__dict__
                        check(piece.header, stored, known, where, reads=reads)
                    self.sb_versions[piece.slot] = Mark.of(stored)
        return data

    def sb_known(self, name: str) -> torch.Tensor | None:
        """The bytes of the weight ``name``, where it is one packed tensor and ``sb_data`` has looked at them before."""
        recipe = self.sb_recipes[name]
        slot = recipe.pieces[0].slot
        is_known = recipe.whole is not None and self.sb_is_unchanged(slot)
        return self._parameters[slot] if is_known else None

    def sb_routed_rows(self, tokens: int) -> int | None:
        """How many rows each stack of experts is multiplied with in a step of so many tokens; None: nobody knows."""
        return None

    def sb_is_unchanged(self, slot: str) -> bool:
        """Whether nothing has written to the bytes in a slot since they were last looked at."""
        stored, known = self._parameters[slot], self.sb_versions.get(slot)
        return stored is not None and known is not None and known.holds(stored)

    def sb_accept(self, slots: Iterable[str]) -> None:
        """That the bytes in these slots are those that are meant to be there."""
        for slot in slots:
            stored = self._parameters[slot]
            if stored is not None:
                self.sb_versions[slot] = accept(stored)

    def sb_distrust(self) -> None:
        """That the bytes in all slots may be any."""
        stored = {slot: self._parameters[slot] for slot in self.sb_slots}
        self.__dict__["sb_versions"] = {slot: distrust(each) for slot, each in stored.items() if each is not None}

    def sb_change(self, name: str, **fields: Any) -> None:
        """Give fields of the recipe of the weight ``name`` other values."""
        self.sb_recipes[name] = replace(self.sb_recipes[name], **fields)
        self.sb_recipes_changed()

    def sb_recipes_changed(self) -> None:
        """For what a kind of modules keeps of its recipes."""

    def sb_decode(self, name: str) -> torch.Tensor:
        """The weight ``name``, decoded anew."""
        return self.sb_recipes[name].decode(self.sb_data(name))

    def sb_rows(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """The weight ``name`` at the indices ``ids`` of its first dimension: see Recipe.rows."""
        return self.sb_recipes[name].rows(self.sb_data(name), ids)

    def sb_routed(self, name: str, ids: torch.Tensor) -> torch.Tensor:
        """The weight ``name``, to be read at the indices ``ids`` of its first dimension only: see Recipe.routed."""
        return self.sb_recipes[name].routed(self.sb_data(name), ids)

    @property
    def sb_slots(self) -> set[str]:
        """Names of the parameters that hold packed weights."""
        return {slot for recipe in self.sb_recipes.values() for slot in recipe.slots}

    def _replicate_for_data_parallel(self) -> Any:
        """
        Raises:
            InputError: always. The copies that torch.nn.DataParallel makes of a module have no parameters.
        """
        mend = "use a process for each GPU, with torch.nn.parallel.DistributedDataParallel"
        raise InputError("torch.nn.DataParallel cannot copy packed weights", mend=mend)

    def __prepare_scriptable__(self) -> Any:
        """
        Raises:
            InputError: always. TorchScript compiles a class's code, and none of it decodes.
        """
        mend = "use torch.export or torch.jit.trace, or call samebits.decompress first"
        raise InputError("torch.jit.script cannot compile a packed module", where=self.sb_base.__name__, mend=mend)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__.get("sb_recipes", ()):
            unpack(self, name, None)
            delattr(self, name)  # of the class that it is now
        else:
            super().__delattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        is_packed = name in self.__dict__.get("sb_recipes", ())
        if is_packed and sys._getframe(1).f_code is swap_tensor.__code__:  # it would put it back plain
            what = "torch.func.functional_call cannot put a tensor in the place of a packed weight"
            mend = "exclude it from samebits.compress"
            raise InputError(what, where=f"{self.sb_base.__name__}.{name}", mend=mend)
        if isinstance(value, LazyWeight) and (is_packed or name in self.__dict__.get("_parameters", ())):
            pack(self, name, value.recipe, value.packed)
        elif not is_packed:
            super().__setattr__(name, value)
        elif value is not None and not isinstance(value, nn.Parameter):  # as torch refuses it
            expected = "torch.nn.Parameter or None expected"
            raise TypeError(f"cannot assign {torch.typename(value)!r} as parameter {name!r} ({expected})")
        else:
            unpack(self, name, None)
            setattr(self, name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """
        Raises:
            InputError: it stands for a packed weight, as where torch.nn.utils.prune renames a weight to change it.
        """
        if isinstance(param, LazyTensor):
            what = "a packed weight cannot be put under another name"
            mend = "call samebits.decompress, change the module, and compress it again"
            raise InputError(what, where=f"{self.sb_base.__name__}.{name}", mend=mend)
        if name in self.sb_recipes:
            unpack(self, name, None)
            self.register_parameter(name, param)  # of the class that it is now
        else:
            super().register_parameter(name, param)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> PackedModule:
        check_dtype(fn)
        for probe in (recipe.probe() for recipe in self.sb_recipes.values() if len(recipe.shape) in (4, 5)):
            if fn(probe).stride() != probe.stride():
                mend = "change it before samebits.compress"
                raise InputError("the memory format of packed weights cannot be changed", mend=mend)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if not keeps_bytes(fn):
            self.sb_distrust()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Other bytes have another header, and often another length."""
        *_, messages = args
        for piece in [piece for recipe in self.sb_recipes.values() for piece in recipe.pieces]:
            data = state_dict.get(prefix + piece.slot)
            if isinstance(data, torch.Tensor) and not data.is_contiguous():
                state_dict[prefix + piece.slot] = data = data.contiguous()
            if isinstance(data, torch.Tensor) and (now := loading.now(data, messages)) is not None:
                state_dict[prefix + piece.slot] = data = now.detach()
            self._prepare(piece, data, prefix, messages)
        self._refuse_plain(state_dict, prefix, messages)
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.sb_accept(self.sb_slots)

    def _refuse_plain(self, state_dict: Mapping[str, Any], prefix: str, messages: list[str]) -> None:
        """Of a weight that is packed here and not so there, which ``strict=False`` would leave as it is."""
        for name, recipe in self.sb_recipes.items():
            if any(prefix + slot in state_dict for slot in recipe.slots):
                continue
            if prefix + name in state_dict:
                mend = "call samebits.decompress before it is loaded, and samebits.compress again"
                messages.append(f"{prefix}{name} is packed in the module, and plain in the state dict; {mend}")
            elif {prefix + slot_name(name), prefix + slot_name(name, 0)} & state_dict.keys():
                mend = "load the model as that one was, to a GPU or to main memory"
                messages.append(f"{prefix}{name} is one packed tensor in one of both, and several in the other; {mend}")

    def _prepare(self, piece: Piece, data: torch.Tensor | None, prefix: str, messages: list[str]) -> None:
        """Have all who share a packed tensor hold the other one; nobody decodes what is not whole, in no thread."""
        if not isinstance(data, torch.Tensor) or piece.header is None or data.device.type == "meta":
            return
        header = validated(data, piece.header.shape, prefix + piece.slot).header
        if header == piece.header:
            return
        old = self._parameters[piece.slot]
        assert old is not None
        if is_sharded(old):
            what, mend = "packed bytes of other weights, for a sharded module", "load them before torch's fully_shard"
            raise FormatError(what, where=prefix + piece.slot, mend=mend)
        new = nn.Parameter(data.to(old.device, copy=True), requires_grad=False)  # filled: others may run it
        for module, slots in loading.replace(old, new, messages).items():
            for name, recipe in module.sb_recipes.items():
                pieces = (replace(own, header=header) if own.slot in slots else own for own in recipe.pieces)
                module.sb_change(name, pieces=tuple(pieces))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """For pickle and deepcopy: the class is made, not found."""
        state = self.__getstate__()  # type: ignore[no-untyped-call]
        kept = {name: value for name, value in state.items() if name != "sb_versions"}  # of these parameters
        if all(map(self.sb_is_unchanged, self.sb_slots)):
            kept[_KNOWN] = _NotPickled()
        return _new, (self.sb_base, tuple(self.sb_recipes)), kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        """What a file had is looked at before it is decoded; it may not be in memory yet."""
        is_known = isinstance(state.get(_KNOWN), _NotPickled)
        super().__setstate__({name: value for name, value in state.items() if name != _KNOWN})  # type: ignore[no-untyped-call]
        self.__dict__["sb_versions"] = {}
        if is_known:
            self.sb_accept(self.sb_slots)
        else:
            self.sb_distrust()
        modules.add(self)


_KNOWN = "sb_known_bytes"  # in the state that a copy is made of


class _NotPickled:
    """Stays what it is in copies that are made in memory; a pickle has False in its place."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _NotPickled:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return bool, ()


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether it is a usual tensor, with an address."""
    is_usual = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return is_usual and not (tensor._is_zerotensor() or torch._C._functorch.is_functorch_wrapped_tensor(tensor))


class _Decoded(dict[str, torch.Tensor]):
    """The weights that are decoded while a module's forward runs.

    Attributes:
        arguments: those of the forward that have no name.
        written: how each was when it was decoded.
    """

    def __init__(self, arguments: tuple[Any, ...]) -> None:
        self.arguments = arguments
        self.written: dict[str, _Written] = {}

    def refuse_changes(self, module: PackedModule) -> None:
        """
        Raises:
            InputError: the forward has written to one of its weights.
        """
        for name, before in self.written.items():
            if not before.holds(self[name]):
                what = "its forward writes to this weight, which is packed: that would be lost"
                mend = "call samebits.decompress, and exclude it from samebits.compress"
                raise InputError(what, where=f"{module.sb_base.__name__}.{name}", mend=mend)


class _Written(NamedTuple):
    """How often a weight has been written to, and where it lies: ``weight.data = other`` counts as no write.

    Attributes:
        version, address: None where torch has none.
    """

    version: int | None
    address: int | None

    @classmethod
    def of(cls, weight: torch.Tensor) -> _Written:
        version = None if weight.is_inference() else weight._version
        return cls(version, weight.data_ptr() if _has_memory(weight) else None)

    def holds(self, weight: torch.Tensor) -> bool:
        """Whether it is so still; asks no more than that, as the host waits."""
        is_unwritten = self.version is None or weight._version == self.version
        return is_unwritten and (self.address is None or weight.data_ptr() == self.address)


class _Running(threading.local):
    """A thread's own: others run the same modules with weights that are decoded on streams of theirs.

    Attributes:
        of_module: by a module's id.
    """

    def __init__(self) -> None:
        self.of_module: dict[int, _Decoded] = {}


_running = _Running()


class _EmbeddingRows(nn.Embedding):
    """Stands behind an embedding's own class, in the place of nn.Embedding, where the others' forwards end too."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return look_up(partial(cast(PackedModule, self).sb_rows, "weight"), input)


def look_up(rows: Callable[[torch.Tensor], torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """``rows(ids)``; to Inductor an embedding as ever, which reads its ids and rows.

    What Inductor makes one kernel of behind it, which sums of residuals it stores, and so how norms are summed, depends
    on what an operation reads.

    Args:
        rows: decodes those of a packed embedding.
    """
    if not torch.compiler.is_compiling():
        return rows(ids)
    places = torch.arange(ids.numel(), device=ids.device).view(ids.shape) + (ids ^ ids)
    return F.embedding(places, rows(ids.reshape(-1)))


ACCELERATE = "_hf_hook"  # an attribute of modules whose parameters accelerate moves


Kind = tuple[Callable[[type[nn.Module], Names], bool], type[PackedModule]]
_CLASSES: dict[tuple[type[nn.Module], tuple[str, ...]], type[PackedModule]] = {}
_KINDS: list[Kind] = []


def register_kind(*kind: *Kind) -> None:
    """Have modules become a subclass of PackedModule where their class, and what is packed in them, is accepted."""
    _KINDS.append(kind)
    _CLASSES.clear()  # of those that were made without knowing


def packed_class(base: type[nn.Module], names: tuple[str, ...]) -> type[PackedModule]:
    """The subclass of ``base`` in which the parameters ``names`` are packed."""
    if (base, names) in _CLASSES:
        return _CLASSES[base, names]
    members: dict[str, Any] = {name: _property(name) for name in names}
    members |= {"sb_base": base, "__module__": __name__, "__doc__": f"{base.__name__} with packed weights."}
    kind = next((kind for accepts, kind in _KINDS if accepts(base, names)), PackedModule)
    if not kind.sb_has_signature:
        members["forward"] = _forward_like(base.forward, kind.forward)
    made = type(f"Packed{base.__name__}", _bases(kind, base, names), members)
    return _CLASSES.setdefault((base, names), made)


def _forward_like(seen: Callable[..., Any], made: Callable[..., Any]) -> Callable[..., Any]:
    """``made``, which takes any arguments, with the signature of ``seen``: others ask what a module's forward takes."""

    @wraps(seen)
    def forward(self: PackedModule, *args: Any, **kwargs: Any) -> Any:
        return made(self, *args, **kwargs)

    return forward


def refuses_subclasses(module: nn.Module, names: Names) -> str | None:
    """Why no subclass of a module's class can be made in which the parameters ``names`` are packed; None if one can."""
    try:
        packed_class(_base_of(module), names)
    except Exception as error:  # of the class's own __init_subclass__, say
        return str(error) or type(error).__name__
    return None


def _bases(kind: type[PackedModule], base: type[nn.Module], names: Names) -> tuple[type[nn.Module], ...]:
    if not issubclass(base, nn.Embedding) or WEIGHT[1:] not in names:
        return kind, base
    return (kind, _EmbeddingRows) if base is nn.Embedding else (kind, base, _EmbeddingRows)


def _property(name: str) -> property:
    return property(lambda module: module.sb_weight(name))


def _new(base: type[nn.Module], names: tuple[str, ...]) -> PackedModule:
    return object.__new__(packed_class(base, names))


def check_dtype(convert: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Refuse to apply what changes the dtype of bfloat16 tensors to a compressed model.

    Raises:
        DtypeError: ``convert`` does.
    """
    dtype = convert(torch.empty(0, dtype=torch.bfloat16, device="cpu")).dtype  # whatever torch's default is
    if dtype == torch.bfloat16 and convert(torch.empty(0, dtype=torch.uint8, device="cpu")).dtype != torch.uint8:
        mend = "call module.to, which converts what is floating point alone"
        raise DtypeError("a compressed model's packed bytes cannot become numbers", mend=mend)
    if dtype != torch.bfloat16:
        mend = "call samebits.decompress on it first"
        raise DtypeError(f"a compressed model, which is bfloat16 and packed bytes, cannot become {dtype}", mend=mend)


def slot_name(name: str, piece: int | None = None) -> str:
    """The parameter that holds the packed parameter ``name``, or one of its pieces."""
    if piece is not None:
        return f"{PIECE}{name}_{piece}"
    return PACKED[1:] if name == WEIGHT[1:] else f"{BARE[1:]}_{name}"


def whole(packed: PackedTensor, name: str, parameter: torch.Tensor) -> Recipe:
    """The recipe of a ``parameter`` that is one packed tensor."""
    shape, piece = tuple(packed.shape), Piece(slot_name(name), packed.header)
    is_usual = parameter.stride() == torch.empty(shape, device="meta").stride()
    stride = () if is_usual else tuple(parameter.stride())
    return Recipe(shape, (piece,), requires_grad=parameter.requires_grad, stride=stride)


def pack(module: nn.Module, name: str, recipe: Recipe, data: Sequence[torch.Tensor]) -> None:
    """Replace a parameter by its packed form, in place; the module's class changes.

    Args:
        name: of a parameter of ``module`` itself, packed already or not.
        data: what recipe.decode takes; tensors that are parameters stay shared with their other owners.

    Raises:
        InputError: no subclass can be made of the module's class; the module is as it was.
    """
    refuse_other_class(module)
    recipes = dict(module.sb_recipes) if isinstance(module, PackedModule) else {}
    old = recipes[name].slots if name in recipes else [name]
    if len(recipe.pieces) == 1:  # another module's recipe may name its slot otherwise
        recipe = replace(recipe, pieces=(replace(recipe.pieces[0], slot=slot_name(name)),))
    slots = {slot: _parameter(stored) for slot, stored in zip(recipe.slots, data, strict=True)}
    recipes[name] = recipe
    if refused := refuses_subclasses(module, tuple(recipes)):
        what = f"no subclass of {_base_of(module).__name__} can be made ({refused})"
        raise InputError(what, mend="exclude it from samebits.compress")
    _replace_parameters(module, old, slots)
    _become(module, recipes)


def unpack(module: PackedModule, name: str, parameter: nn.Parameter | None) -> None:
    """Replace a packed parameter by ``parameter``; a module without packed parameters gets its old class back."""
    refuse_other_class(module)
    recipes = dict(module.sb_recipes)
    _replace_parameters(module, recipes.pop(name).slots, {name: parameter})
    _become(module, recipes)


def _base_of(module: nn.Module) -> type[nn.Module]:
    return module.sb_base if isinstance(module, PackedModule) else type(module)


def refuse_other_class(module: nn.Module) -> None:
    """
    Raises:
        InputError: its class was changed since it was packed, so that it cannot be changed back.
    """
    if isinstance(module, PackedModule) and "sb_base" not in vars(type(module)):  # packed_class did not make it
        what = f"the class of a packed {module.sb_base.__name__} has become {type(module).__name__}"
        raise InputError(what, mend="undo that first, such as a parametrization of its other parameters")


def share_ties(model: nn.Module) -> None:
    """Where a LazyWeight was assigned to a plain module as its parameter, share the packed bytes instead."""
    for module in model.modules():
        for name, value in list(module._parameters.items()):
            if isinstance(value, LazyWeight):
                pack(module, name, value.recipe, value.packed)


def sharers() -> dict[tuple[int, ...], list[tuple[PackedModule, str]]]:
    """All packed weights there are, also outside of a module at hand: by the ids of the parameters that hold them."""
    found: dict[tuple[int, ...], list[tuple[PackedModule, str]]] = {}
    for module in [module for module in modules.now() if isinstance(module, PackedModule)]:
        for name, recipe in vars(module).get("sb_recipes", {}).items():  # it may be filled just now
            found.setdefault(tuple(id(module._parameters.get(slot)) for slot in recipe.slots), []).append(
                (module, name)
            )
    return found


def packed_parameters(model: nn.Module) -> Iterator[tuple[str, PackedModule, str]]:
    """Every packed weight: its full name, its module, its name there."""
    for prefix, module in list(model.named_modules()):
        for name in list(module.sb_recipes) if isinstance(module, PackedModule) else ():
            yield f"{prefix}.{name}" if prefix else name, module, name


def validated(data: torch.Tensor, shape: tuple[int, ...], key: str) -> PackedTensor:
    """The packed tensor that a state dict has under ``key``, for a parameter of that shape.

    Raises:
        FormatError, DigestError: it is damaged, or of another shape.
    """
    try:
        packed = PackedTensor.from_data(_gathered(data))
    except SamebitsError as error:
        raise error.at(key) from None
    if packed.shape != shape:
        what = f"shape {list(packed.shape)} where the module has {list(shape)}"
        raise FormatError(what, where=key, mend="load a state dict of the same model")
    return packed


def _gathered(data: torch.Tensor) -> torch.Tensor:
    """All of a tensor of which each process has a part."""
    return cast(Any, data).full_tensor() if is_sharded(data) else data


def _parameter(stored: torch.Tensor) -> nn.Parameter:
    return stored if isinstance(stored, nn.Parameter) else nn.Parameter(stored, requires_grad=False)


def _replace_parameters(module: nn.Module, old: Sequence[str], new: Mapping[str, nn.Parameter | None]) -> None:
    """At the place of the first, so that the order of a state dict stays; in a new dict, for copy.copy shares it."""
    entries = type(module._parameters)()
    for name, parameter in module._parameters.items():
        if name == old[0]:
            entries.update(new)
        elif name not in old:
            entries[name] = parameter
    module.__dict__["_parameters"] = entries


def _become(module: nn.Module, recipes: dict[str, Recipe]) -> None:
    base = _base_of(module)
    for name in module.sb_kept if isinstance(module, PackedModule) else ():
        module.__dict__.pop(name, None)
    if recipes:
        module.__dict__["sb_recipes"] = recipes
        module.__dict__["sb_versions"] = {}
        module.__class__ = packed_class(base, tuple(recipes))
        packed = cast(PackedModule, module)
        packed.sb_recipes_changed()
        packed.sb_accept(packed.sb_slots)
        modules.add(packed)
    else:
        module.__class__ = base
