"""Registration with other libraries when they are imported, whichever comes first.

Nothing here imports such a library: if it is loaded already, its integration is loaded at once,
and else right after it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# The module that an integration extends, and the integration, which is imported once that is loaded.
INTEGRATIONS = {
    "peft": "samebits.integrations.peft",
    "transformers.integrations.moe": "samebits.integrations.transformers_experts",
    "transformers.quantizers.auto": "samebits.integrations.transformers",
    "transformers.modeling_utils": "samebits.integrations.transformers_model",
    "diffusers.quantizers.auto": "samebits.integrations.diffusers",
    "diffusers.models.modeling_utils": "samebits.integrations.diffusers_model",
    "diffusers.hooks.layerwise_casting": "samebits.integrations.diffusers_casting",
    "diffusers.loaders.peft": "samebits.integrations.diffusers_fuse",
    "diffusers.loaders.lora_pipeline": "samebits.integrations.diffusers_lora",
    "diffusers.pipelines.pipeline_utils": "samebits.integrations.diffusers_hub",
}


# Older versions are left alone.
MINIMUM = {"transformers": (5, 17), "diffusers": (0, 42), "peft": (0, 21)}
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
    """An integration registers at its own end: it may be half loaded now, if it is what imports the other library."""
    if _is_supported(name.partition(".")[0]):
        import_module(INTEGRATIONS[name])


def _is_supported(package: str) -> bool:
    if package not in MINIMUM:
        return True
    from importlib.metadata import PackageNotFoundError, version

    try:
        major, minor = version(package).split(".")[:2]
    except PackageNotFoundError:
        return False
    return (int(major), int(minor)) >= MINIMUM[package] and _is_supported(NEEDED.get(package, ""))


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
        _register(module.__name__)
