"""Compress and decompress the weights of any torch module, in place."""

from __future__ import annotations

import gc
import json
import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from functools import wraps
from itertools import accumulate
from typing import Any, cast

import torch
from torch import nn

from samebits.api import encode
from samebits.codecs.memory import staying
from samebits.errors import DtypeError, InputError, SamebitsError
from samebits.format.names import MIN_WEIGHTS, is_selected
from samebits.format.packed import PackedTensor
from samebits.nn.df11 import holds_units
from samebits.nn.offload import refuse_offloaded
from samebits.nn.packed_module import (
    PackedModule,
    check_module,
    pack,
    packed_parameters,
    refuse_other_class,
    share_ties,
    sharers,
    unpack,
    whole,
)
from samebits.nn.selection import Owned, Selection, held, tied, unpacked
from samebits.nn.spared import spare
from samebits.progress import Progress

_TAKES = "give a model, of a pipeline one of its parts; samebits.encode and samebits.decode take single tensors"


@dataclass(frozen=True)
class Size:
    """Of one packed parameter."""

    words: int
    nbytes: int


@dataclass
class Report:
    """What is packed, and what is not and why; by full parameter name. A tied parameter counts once.

    Attributes:
        packed: ``words`` and ``nbytes`` of each parameter that is.
        raw: why, of each that is not.
        unmatched: patterns of ``include`` and ``exclude`` that are the name of no parameter.
    """

    packed: dict[str, Size] = field(default_factory=dict)
    raw: dict[str, str] = field(default_factory=dict)
    unmatched: list[str] = field(default_factory=list)

    @property
    def bits_per_weight(self) -> float:
        """Of what is packed."""
        words = sum(size.words for size in self.packed.values())
        return 8 * sum(size.nbytes for size in self.packed.values()) / words if words else 0.0

    def to_json(self) -> str:
        """One JSON object: bits_per_weight, packed (words and nbytes of each), raw (why), unmatched."""
        return json.dumps({"bits_per_weight": self.bits_per_weight, **asdict(self)})

    def __str__(self) -> str:
        packed = f"{len(self.packed)} packed with {self.bits_per_weight:.2f} bits per weight"
        head = f"{packed if self.packed else 'nothing packed'}, {len(self.raw)} unchanged"
        others = [f"  {pattern}: the name of no parameter" for pattern in self.unmatched]
        return "\n".join([head, *others, *(f"  {name}: {reason}" for name, reason in self.raw.items())])

    def warn(self) -> None:
        """Of patterns that are of no use: a slip, most likely."""
        outcome = "" if self.packed else ", and nothing is packed"
        for pattern in self.unmatched:
            warnings.warn(f"samebits: the pattern {pattern!r} is the name of no parameter{outcome}", stacklevel=3)


def compress(
    module: nn.Module,
    *,
    min_weights: int = MIN_WEIGHTS,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    progress: Progress | None = None,
) -> Report:
    """Pack the weights of a module and its submodules in place; its outputs stay the same, bit for bit.

    A weight that a module outside shares stays plain, so that it stays shared.

    Args:
        module: any torch module with bfloat16 weights, on the CPU or a CUDA device.
        min_weights: smaller parameters stay as they are.
        include: shell patterns of full parameter names; empty: all.
        exclude: shell patterns of parameters to leave alone.
        progress: is called with the number of weights that are done and of all that are to be packed, behind each
            parameter.

    Returns:
        What is packed now, and what is not and why.

    Raises:
        DtypeError: there are weights that could be packed, but none is bfloat16, and nothing is packed yet.
        InputError: not a module, or an offloaded one, or weights on the meta device; or choices of a wrong type, or
            ``include`` matches no name.
        DeviceError: on a GPU whose kernels cannot be compiled.
    """
    check_module(module, _TAKES)
    refuse_offloaded(module)
    selection = Selection(min_weights, include, exclude)
    _check_includes(module, selection.include)
    spare(module)
    share_ties(module)
    groups = [owned for owned in tied(list(unpacked(module))) if selection.reason_against_tied(owned) is None]
    if next(packed_parameters(module), None) is None:
        _check_dtypes([owned[0] for owned in groups])
    shared = _shared_outside(module, groups)
    for owned in _tracked([owned for owned in groups if owned not in shared], progress):
        _give_back(_pack_tied(owned))
    result = report(module, selection)
    result.raw.update({owned[0][0]: "tied to a weight of a module outside" for owned in shared})
    result.warn()
    return result


def decompress(module: nn.Module, *, progress: Progress | None = None) -> None:
    """Undo compress, or the loading of a compressed model: plain parameters again, and the original classes.

    Who shares a packed weight with ``module`` has the plain one afterwards too, so that ties stay.

    Args:
        module: of any class; what is not packed stays as it is.
        progress: as in compress.

    Raises:
        InputError: not a module, or one in DFloat11's layout, or offloaded, or weights are on the meta device, where
            accelerate leaves those it offloads; or a module's class was changed since it was packed. Nothing is decoded
            then.
    """
    check_module(module, _TAKES)
    if holds_units(module):
        mend = "load the model anew without keep_format, or give its folder to `samebits decompress`"
        raise InputError("the model keeps its weights in DFloat11's layout", mend=mend)
    refuse_offloaded(module)
    share_ties(module)
    groups = tied(list(packed_parameters(module)))
    for full_name, owner, name in (owned[0] for owned in groups):
        if any(stored.is_meta for stored in cast(PackedModule, owner).sb_data(name)):
            mend = "load the model without offloading it before decompressing"
            raise InputError("on the meta device there are no bytes to decode", where=full_name, mend=mend)
    everywhere = sharers()
    for slots in (held(owned[0]) for owned in groups):
        for owner, _ in everywhere[slots]:  # all of them before the first is plain, so that ties stay
            refuse_other_class(owner)
    for owned in _tracked(groups, progress):
        first, first_name = cast(PackedModule, owned[0][1]), owned[0][2]
        recipe, slots = first.sb_recipes[first_name], held(owned[0])
        with torch.inference_mode(False), staying():  # also when that mode is left
            weight = nn.Parameter(first.sb_decode(first_name), requires_grad=recipe.requires_grad)
        for owner, name in everywhere[slots]:
            unpack(owner, name, weight)
        _give_back(weight.device)
    for part in module.modules():  # models of transformers and diffusers say of themselves that they are compressed
        if told := getattr(vars(part).get("hf_quantizer"), "sb_decompressed", None):  # their own, no wrapped model's
            told(part)


def saving_plain(original: Callable[..., None]) -> Callable[..., None]:
    """A method of others' modules that saves a state dict, which has the weights of a compressed one decoded."""

    @wraps(original)
    def save(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        made: dict[tuple[int, ...], torch.Tensor] = {}  # so that ties stay

        def decode_own(module: PackedModule, state: dict[str, Any], prefix: str, _: Any) -> None:
            for name, recipe in module.sb_recipes.items():
                key = held((prefix + name, module, name))
                if key not in made:
                    made[key] = module.sb_decode(name).cpu()
                state[prefix + name] = made[key]
                for slot in recipe.slots:
                    del state[prefix + slot]

        with ExitStack() as stack:
            for module in self.modules():
                if isinstance(module, PackedModule):
                    handle = module.register_state_dict_post_hook(decode_own)  # type: ignore[no-untyped-call]
                    stack.callback(handle.remove)
            original(self, *args, **kwargs)

    return save


def _tracked(groups: Sequence[list[Owned]], progress: Progress | None) -> Iterator[list[Owned]]:
    """The groups; ``progress`` is called behind each."""
    ends = list(accumulate(_numel(owned[0]) for owned in groups))
    for owned, done in zip(groups, ends, strict=True):
        yield owned
        if progress:
            progress(done, ends[-1])


def _numel(owned: Owned) -> int:
    """Of a parameter, packed or not."""
    _, owner, name = owned
    recipe = owner.sb_recipes.get(name) if isinstance(owner, PackedModule) else None
    return math.prod(recipe.shape) if recipe else cast(nn.Parameter, owner._parameters[name]).numel()


def _give_back(device: torch.device) -> None:
    """Have torch return to a GPU what nothing uses.

    Else the next packed bytes would take two thirds of the block where a weight was, which then never is given back.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _unmatched(module: nn.Module, patterns: Sequence[str]) -> list[str]:
    """Those that are the name of no parameter."""
    names = [full_name for full_name, _, _ in (*packed_parameters(module), *unpacked(module))]
    return [each for each in patterns if not any(is_selected(name, (each,), ()) for name in names)]


def _check_includes(module: nn.Module, include: Sequence[str]) -> None:
    """
    Raises:
        InputError: nothing is included.
    """
    if include and len(_unmatched(module, include)) == len(include):
        what = f"no parameter's name matches include, {list(include)}"
        raise InputError(what, mend="see the names in module.named_parameters()")


def report(module: nn.Module, selection: Selection) -> Report:
    """What of a module is packed, and why the rest is not, if ``selection`` decided that."""
    result, packed, plain = Report(), list(packed_parameters(module)), list(unpacked(module))
    result.unmatched = _unmatched(module, (*selection.include, *selection.exclude))
    for owned in tied(packed):
        full_name, owner, name = owned[0]
        recipe, data = cast(PackedModule, owner).sb_recipes[name], cast(PackedModule, owner).sb_data(name)
        result.packed[full_name] = Size(math.prod(recipe.shape), sum(stored.nbytes for stored in data))
    for owned in tied(plain):
        full_name, owner, name = owned[0]
        dtype = getattr(owner, name).dtype
        eligible = "packing does not make it smaller" if dtype == torch.bfloat16 else f"{dtype}, not bfloat16"
        result.raw[full_name] = selection.reason_against_tied(owned) or eligible
    return result


def counting_weights(original: Callable[..., int]) -> Callable[..., int]:
    """``num_parameters`` of transformers' and diffusers' models, which counts weights for packed bytes too."""

    @wraps(original)
    def num_parameters(self: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        count = original(self, only_trainable=only_trainable, exclude_embeddings=exclude_embeddings)
        return count if only_trainable else count + hidden_weights(self, exclude_embeddings)

    return num_parameters


def hidden_weights(module: nn.Module, exclude_embeddings: bool = False) -> int:
    """How many weights more than elements the packed parameters have, each tied one once."""
    more = 0
    for _, owner, name in (group[0] for group in tied(list(packed_parameters(module)))):
        more -= sum(stored.numel() for stored in cast(PackedModule, owner).sb_data(name))
        if not (exclude_embeddings and isinstance(owner, nn.Embedding)):
            more += math.prod(cast(PackedModule, owner).sb_recipes[name].shape)
    return more


def encode_parameter(weight: torch.Tensor, full_name: str) -> PackedTensor | None:
    """Encode a parameter's new value, on the device it is on; None if it is not bfloat16 or would not get smaller."""
    if weight.dtype != torch.bfloat16:
        return None
    if weight.is_meta:
        mend = "load the model, or bring offloaded weights back, before compressing"
        raise InputError("on the meta device there are no values to pack", where=full_name, mend=mend)
    try:
        with torch.inference_mode(False):  # it stays when that mode is left
            packed = encode(weight.detach())
    except SamebitsError as error:
        raise error.at(full_name) from None
    return None if packed.is_raw else packed


def _check_dtypes(owners: Sequence[Owned]) -> None:
    dtypes = {getattr(owner, name).dtype for _, owner, name in owners}
    if dtypes and torch.bfloat16 not in dtypes:
        from samebits.bf16 import is_bf16

        weights: Iterator[nn.Parameter] = (getattr(owner, name) for _, owner, name in owners)
        is_exact = all(not weight.is_meta and is_bf16(weight) for weight in weights)
        effect = "changes none of those to be packed: BF16 has all their values" if is_exact else "loses bits"
        mend = f"convert it explicitly with .to(torch.bfloat16), which {effect}"
        raise DtypeError(f"the weights are {dtypes.pop()}, only bfloat16 can be packed", where=owners[0][0], mend=mend)


def _shared_outside(module: nn.Module, groups: Sequence[list[Owned]]) -> list[list[Owned]]:
    """Those of a module's parameters that other modules own, too.

    All objects there are have to be looked at for that, unless no parameter has more references than known owners.
    """
    suspects = {id(owned[0][1]._parameters[owned[0][2]]): owned for owned in groups if _has_more_references(owned)}
    if not suspects:
        return []
    inside = {id(owner) for owner in module.modules()}
    if not suspects.keys() & _owned_outside(inside):
        return []
    gc.collect()  # modules that are gone own nothing
    owned_outside = _owned_outside(inside)
    return [owned for key, owned in suspects.items() if key in owned_outside]


def _owned_outside(inside: Collection[int]) -> set[int]:
    """Parameters of all modules but those ``inside``, each by its id."""
    modules = (found for found in gc.get_objects() if issubclass(type(found), nn.Module) and id(found) not in inside)
    return {id(parameter) for outside in modules for parameter in vars(outside).get("_parameters", {}).values()}


def _has_more_references(owned: Sequence[Owned]) -> bool:
    _, first, name = owned[0]
    argument = 1  # that of getrefcount itself
    return sys.getrefcount(first._parameters[name]) - argument > len(owned)


def _pack_tied(owned: list[Owned]) -> torch.device:
    """Returns where it is."""
    full_name, first, first_name = owned[0]
    weight: nn.Parameter = getattr(first, first_name)
    packed = encode_parameter(weight, full_name)
    if packed is not None:
        with torch.inference_mode(False):
            data = nn.Parameter(packed.data, requires_grad=False)
        for _, owner, name in owned:
            pack(owner, name, whole(packed, name, weight), [data])
    return weight.device
