"""Parameters that stay plain for what else than computing is done with them.

Some models ask a part of theirs, such as a vision tower, for the dtype of its first parameter, and convert their inputs
to it: packed bytes would say uint8. Adapters are trained, saved and switched by libraries that know them as they are.
"""

from __future__ import annotations

import inspect
import re
import sys
import weakref
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, cast

from torch import nn

# In a class: the first parameter of itself or of a part, but for its device; several in a line.
_ASKS = re.compile(r"next\(\s*(?:(?:iter|(?:itertools\.)?chain)\(\s*)*self((?:\.\w+)*)\.parameters\((?=([^\n]*))")
_HARMLESS = re.compile(r"[\w=, ]*\)+\.(device|is_cuda|requires_grad|is_meta)\b")
_ASKED = "tells the model's code the dtype to compute with"
_TRAINED = "belongs to an adapter"

_reasons: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()


def spare(root: nn.Module) -> None:
    """Find these parameters, in a module and what is below; asked before any of it is packed."""
    for module in root.modules():
        for path in _asked_parts(cast(Any, type(module))):
            part = _part(module, path)
            first = next(_parameters(part), None) if part is not None else None
            if first is not None:
                _reasons.setdefault(first[0], {})[first[1]] = _ASKED
        for name in _adapters(module):
            part = getattr(module, name, None)
            for owner, leaf in _parameters(part) if isinstance(part, nn.Module) else ():
                _reasons.setdefault(owner, {})[leaf] = _TRAINED


def reason_to_spare(module: nn.Module, name: str) -> str | None:
    """Why the parameter ``name`` of a module stays plain."""
    return _reasons.get(module, {}).get(name)


@lru_cache(maxsize=1024)
def _asked_parts(cls: Any) -> frozenset[tuple[str, ...]]:
    """Paths from a module to those whose first parameter is asked for, from the source of its class."""
    found: set[tuple[str, ...]] = set()
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in ("torch", "builtins", "samebits"):
            continue
        if _may_ask(base.__module__):
            asked = _ASKS.findall(_source(base))
            found |= {tuple(path.split(".")[1:]) for path, rest in asked if not _HARMLESS.match(rest)}
    return frozenset(found)


@lru_cache(maxsize=1024)
def _may_ask(module: str) -> bool:
    """Whether a class of a Python module may: to find one in the source takes a hundred times as long."""
    source = _source(sys.modules.get(module))
    return not source or _ASKS.search(source) is not None


def _source(of: Any) -> str:
    """Of a module or class; empty where there is none, as of what was made in a session, or by code."""
    try:
        return inspect.getsource(of)
    except (OSError, TypeError):
        return ""


def _part(module: nn.Module, path: tuple[str, ...]) -> nn.Module | None:
    for name in path:
        found = getattr(module, name, None)
        if not isinstance(found, nn.Module):
            return None
        module = found
    return module


def _parameters(root: nn.Module) -> Iterator[tuple[nn.Module, str]]:
    for module in root.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name


def _adapters(module: nn.Module) -> tuple[str, ...]:
    """As PEFT has them: what a layer of its says is one, among it copies of modules that are trained; and prompts."""
    names = getattr(module, "adapter_layer_names", ())
    prompts = ("prompt_encoder",) if hasattr(module, "peft_config") else ()
    return (*(names if isinstance(names, (tuple, list)) else ()), *prompts)
