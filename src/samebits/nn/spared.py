"""Parameters that stay plain for what is done with them, or since it is not worth it.

Some models ask a part of theirs, such as a vision tower, for the dtype of its first parameter, and convert their inputs
to it: packed bytes would say uint8. Adapters are trained, saved and switched by libraries that know them as they are.
A matrix that a module reads by code of its own, such as the router of a mixture of experts, is decoded for each use;
where it is as nothing beside the model, that takes more than it saves.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, cast

from torch import nn
from torch.nn.parameter import is_lazy

from samebits.nn.questions import CHILDREN, EVERY, LAST, Path, asked_parts

_ASKED = "tells the model's code the dtype to compute with"
_TRAINED = "belongs to an adapter"
_SMALL = "small beside the model, and decoded for each use"
_SMALL_SHARE = 1 << 14  # so many times smaller than the model
_ITSELF: Path = ()
_KNOWN = "belongs to a block, which diffusers knows by its class"

_reasons: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()


def spare(root: nn.Module) -> None:
    """Find these parameters, in a module and what is below; asked before any of it is packed."""
    for module in root.modules():  # adapters may be gone, and this root smaller; what modules above ask is as it was
        reasons = _reasons.get(module, {})
        for leaf in [leaf for leaf, reason in reasons.items() if reason in (_TRAINED, _SMALL)]:
            del reasons[leaf]
    weights = sum(parameter.numel() for parameter in root.parameters() if not is_lazy(parameter))
    for module in root.modules():
        for path in (*asked_parts(cast(Any, type(module))), *([_ITSELF] if _sees(module) else ())):
            for asked in _parts(module, path):
                parameters = list(_parameters(asked))
                for owner, leaf in parameters[-1:] if path[-1:] == (LAST,) else parameters[:1]:
                    _reasons.setdefault(owner, {})[leaf] = _ASKED
        for leaf in _small_matrices(module, most=weights // _SMALL_SHARE):
            _reasons.setdefault(module, {})[leaf] = _SMALL
        for block in _blocks(module):
            _reasons.setdefault(block, {}).update(dict.fromkeys(block._parameters, _KNOWN))
        for name in _adapters(module):
            part = getattr(module, name, None)
            for owner, leaf in _parameters(part) if isinstance(part, nn.Module) else ():
                _reasons.setdefault(owner, {})[leaf] = _TRAINED
        for name in _switched(module):
            path, _, leaf = name.rpartition(".")
            _reasons.setdefault(module.get_submodule(path), {})[leaf] = _TRAINED


def reason_to_spare(module: nn.Module, name: str) -> str | None:
    """Why the parameter ``name`` of a module stays plain."""
    return _reasons.get(module, {}).get(name)


def _parts(module: nn.Module, path: Path) -> Iterator[nn.Module]:
    """The modules to which a path leads."""
    found: list[Any] = [module]
    for step in path if path[-1:] != (LAST,) else path[:-1]:
        found = [each for part in found for each in _next(part, step)]
        if step == EVERY:
            break
    return (part for part in found if isinstance(part, nn.Module))


def _next(part: Any, step: str) -> Iterable[Any]:
    if isinstance(part, nn.Module):
        if step == EVERY:
            return part.modules()
        if step == CHILDREN or step.startswith("["):
            child = part._modules.get(step[1:-1])
            return part.children() if child is None else [child]
        return [getattr(part, step, None)]
    return part.values() if isinstance(part, dict) else part if isinstance(part, (list, tuple)) else ()


def _parameters(root: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name


def _sees(model: nn.Module) -> bool:
    """Whether it is a model of transformers for images, which pipelines of others ask for their dtype."""
    takes_images = getattr(model, "main_input_name", None) == "pixel_values"
    return takes_images and ("transformers", "PreTrainedModel") in _bases(model)


def _bases(module: nn.Module) -> list[tuple[str, str]]:
    """A module's classes: the package of each, and its name."""
    return [(base.__module__.partition(".")[0], base.__name__) for base in type(module).__mro__]


def _small_matrices(module: nn.Module, most: int) -> Iterator[str]:
    """Of up to so many weights, of a module that computes with them by code of its own, not as torch's layers do."""
    bases = type(module).__mro__
    if not any(base.__module__.startswith("torch.nn.modules.") and base is not nn.Module for base in bases):
        made = ((leaf, each) for leaf, each in module._parameters.items() if each is not None and not is_lazy(each))
        yield from (leaf for leaf, each in made if each.dim() > 1 and each.numel() <= most)


def _blocks(model: nn.Module) -> Iterator[nn.Module]:
    """Of a model of diffusers: what has others in it, by whose class caches, skipped layers and compilers find it."""
    if ("diffusers", "ModelMixin") in _bases(model):
        own = (module for module in model.modules() if not type(module).__module__.startswith("torch.nn."))
        yield from (module for module in own if module._modules and module is not model)


def _adapters(module: nn.Module) -> tuple[str, ...]:
    """As PEFT has them: what a layer of its says is one, among it copies of modules that are trained; and prompts."""
    names = getattr(module, "adapter_layer_names", ())
    prompts = ("prompt_encoder",) if hasattr(module, "peft_config") else ()
    return (*(names if isinstance(names, (tuple, list)) else ()), *prompts)


def _switched(model: nn.Module) -> list[str]:
    """Parameters that a model of transformers looks up by name to switch to a language, as Wav2Vec2 says which."""
    told = getattr(model, "_get_adapters", None)
    if told is None or ("transformers", "PreTrainedModel") not in _bases(model):
        return []
    try:
        return list(told())
    except ValueError:  # it has none
        return []
