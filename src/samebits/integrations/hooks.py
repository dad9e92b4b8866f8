"""Registration with other libraries when they are imported, whichever comes first.

Nothing here imports such a library: if it is loaded already, its integration is loaded at once,
and else right after it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from samebits.integrations import MINIMUM, is_too_old

# The module that integrations extend, and these, which are imported once that is loaded.
INTEGRATIONS = {
    "huggingface_hub.hub_mixin": ["hub_mixin"],
    "peft": ["peft"],
    "sentence_transformers.base.model": ["sentence_transformers"],
    "torch._export.serde.serialize": ["programs"],
    "torch.export.pt2_archive._package": ["programs"],
    "transformers.integrations.moe": ["transformers.experts"],
    "transformers.quantizers.auto": ["transformers.quantizer"],
    "transformers.modeling_utils": ["transformers.model", "transformers.df11"],
    "diffusers.quantizers.auto": ["diffusers.quantizer"],
    "diffusers.models.modeling_utils": ["diffusers.model", "diffusers.copies", "diffusers.single_file"],
    "diffusers.hooks.layerwise_casting": ["diffusers.casting"],
    "diffusers.loaders.peft": ["diffusers.fuse"],
    "diffusers.loaders.lora_pipeline": ["diffusers.lora"],
    "diffusers.pipelines.pipeline_utils": ["diffusers.hub", "diffusers.parts"],
}
NEEDED = {"diffusers": "transformers"}  # by the integration, which is left out without it


def register_on_import() -> None:
    """Register with every library of INTEGRATIONS: now if it is loaded, else when it is."""
    waiting = [name for name in INTEGRATIONS if not _is_loaded(name)]
    for name in INTEGRATIONS.keys() - waiting:
        _register(name)
    if waiting and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _is_loaded(name: str) -> bool:
    """False too for a module that is being loaded."""
    spec = getattr(sys.modules.get(name), "__spec__", None)
    return spec is not None and not getattr(spec, "_initializing", False)


def _register(name: str) -> None:
    """An integration registers at its own end: it may be half loaded now, if it is what imports the other library.

    If one cannot be imported, neither can what it extends, and who tries again gets another one: all register anew.
    """
    if _is_supported(name.partition(".")[0]):
        integrations = [f"samebits.integrations.{integration}" for integration in INTEGRATIONS[name]]
        try:
            for integration in integrations:
                import_module(integration)
        except BaseException:
            for integration in integrations:
                sys.modules.pop(integration, None)
            raise


@cache
def _is_supported(package: str) -> bool:
    if package not in MINIMUM:
        return True
    from importlib.metadata import PackageNotFoundError, version

    try:
        found = version(package)
    except PackageNotFoundError:
        return False
    return not is_too_old(package, found) and _is_supported(NEEDED.get(package, ""))


class _Finder(MetaPathFinder):
    """Finds nothing itself: it has the other finders find, and puts a _Loader around what they found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in INTEGRATIONS:
            return None
        others = [finder for finder in sys.meta_path if not isinstance(finder, _Finder)]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((spec for spec in found if spec), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    """Loads with another loader, then registers."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self.loader  # what inspect and pkgutil ask for
        self.loader.exec_module(module)
        package, _, name = module.__name__.rpartition(".")
        if package:  # as Python does next: integrations ask it, and it may know one whose import was interrupted
            setattr(sys.modules[package], name, module)
        _register(module.__name__)
