"""A file imports only from lower layers: read from the source with ast, nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[1] / "src"
PACKAGE = SOURCE / "samebits"

# Lowest first. A name covers what lies below it, unless a longer one does; those of one line may not import each other.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("samebits.errors",),
    ("samebits.cached", "samebits.progress", "samebits.sizes"),
    ("samebits.compiled", "samebits.parallel", "samebits.vectors"),
    ("samebits.bf16", "samebits.digest"),
    ("samebits.format",),
    ("samebits.codecs",),
    ("samebits.kernels",),
    ("samebits.api",),
    ("samebits.plans",),
    ("samebits.df11",),
    ("samebits.nn",),
    ("samebits.verify",),
    ("samebits.jobs",),
    ("samebits.integrations",),
    ("samebits",),
    ("samebits.cli",),
    ("samebits.__main__",),
)
# Of these, only the named parts of the package may know.
FRAMEWORKS = {
    "transformers": ("samebits.integrations", "samebits.cli"),
    "diffusers": ("samebits.integrations", "samebits.cli"),
    "vllm": ("samebits.integrations",),
    "accelerate": ("samebits.integrations",),
    "peft": ("samebits.integrations",),
    "typer": ("samebits.cli",),
    "rich": ("samebits.cli",),
    "cuda": ("samebits.kernels", "samebits.cli"),
}
FORBIDDEN = (
    ("samebits.codecs.reference", "samebits.codecs.encode", "the oracle shares no code with what it judges"),
    ("samebits.codecs.reference", "samebits.codecs.decode", "the oracle shares no code with what it judges"),
    ("samebits.format.container", "samebits.codecs", "a container holds bytes, whatever they mean"),
)


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def imported_names(node: ast.AST) -> list[str]:
    """What one import statement asks for; ``from package import x`` counts as ``package.x`` where that is a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    assert node.module, "imports are written in full"
    submodules = [f"{node.module}.{alias.name}" for alias in node.names]
    found = [name for name in submodules if name in MODULES]
    return found if len(found) == len(submodules) else [*found, node.module]


def imports_of(module: str) -> Iterator[str]:
    """Every module that ``module`` imports anywhere: at its top, inside functions, or for types only."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        yield from imported_names(node)


def layer_of(module: str) -> tuple[int, str]:
    """Level and name of the layer with the longest name that covers ``module``."""
    covering = [(level, name) for level, names in enumerate(LAYERS) for name in names if is_within(module, name)]
    return max(covering, key=lambda found: len(found[1]))


def may_import(importer: str, imported: str) -> bool:
    if importer == "samebits":  # the root names its public parts; it loads them at first use (test_import.py)
        return not is_within(imported, "samebits.cli")
    (above, layer), (below, other) = layer_of(importer), layer_of(imported)
    return layer == other or below < above


@pytest.mark.parametrize("module", MODULES)
def test_imports_only_lower_layers(module: str) -> None:
    wrong = [name for name in imports_of(module) if is_within(name, "samebits") and not may_import(module, name)]
    assert not wrong, f"{module} lies below {wrong}"


@pytest.mark.parametrize("module", MODULES)
def test_frameworks_stay_in_their_layers(module: str) -> None:
    asked = {name.partition(".")[0] for name in imports_of(module)} & FRAMEWORKS.keys()
    wrong = [name for name in asked if not any(is_within(module, home) for home in FRAMEWORKS[name])]
    assert not wrong, f"{module} must not import {wrong}"


def test_every_module_has_a_layer_of_its_own() -> None:
    """Only the package's root may fall into the root's layer."""
    homeless = [
        name for name in MODULES if layer_of(name)[1] == "samebits" and name not in ("samebits", "samebits.__main__")
    ]
    assert not homeless, f"give {homeless} a place in LAYERS"


@pytest.mark.parametrize(("importer", "imported", "reason"), FORBIDDEN)
def test_forbidden_imports(importer: str, imported: str, reason: str) -> None:
    wrong = [name for name in imports_of(importer) if is_within(name, imported)]
    assert not wrong, reason


def reachable(module: str, graph: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    waiting = list(graph[module])
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            waiting += graph[name]
    return found


def test_no_import_cycles() -> None:
    """Not even inside one layer; the root is left out, as everything below it is imported through it."""
    modules = MODULES.keys() - {"samebits"}
    graph = {module: set(imports_of(module)) & modules for module in modules}
    cyclic = sorted(module for module in modules if module in reachable(module, graph))
    assert not cyclic


@pytest.mark.parametrize(
    ("importer", "imported", "allowed"),
    [
        ("samebits.codecs.encode", "samebits.bf16", True),
        ("samebits.bf16", "samebits.codecs.encode", False),
        ("samebits.bf16", "samebits.digest", False),
        ("samebits.format.packed", "samebits.format.geometry", True),
        ("samebits.nn.linear", "samebits.integrations.transformers", False),
        ("samebits.codecs.encode", "samebits", False),
        ("samebits.cli.main", "samebits", True),
    ],
)
def test_the_rule_itself(importer: str, imported: str, allowed: bool) -> None:
    assert may_import(importer, imported) is allowed
