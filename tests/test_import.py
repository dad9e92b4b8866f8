"""``import samebits`` is free: it loads no framework, and nothing of samebits that needs one."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

HEAVY = ("torch", "transformers", "diffusers", "accelerate", "numba", "numpy", "safetensors", "cuda", "typer", "rich")


def run_python(code: str) -> str:
    """Standard output of a fresh interpreter."""
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_import_loads_no_framework() -> None:
    loaded = set(run_python("import sys, samebits; print(*sys.modules)").split())
    assert "samebits" in loaded
    assert loaded.isdisjoint(HEAVY)


def test_first_use_loads_torch_but_touches_no_gpu() -> None:
    code = "import sys, samebits; samebits.encode; print(sys.modules['torch'].cuda.is_initialized())"
    assert run_python(code).split() == ["False"]


def test_every_public_name_resolves() -> None:
    code = "import samebits; print(*[name for name in samebits.__all__ if getattr(samebits, name) is not None])"
    import samebits

    assert run_python(code).split() == samebits.__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    import samebits

    with pytest.raises(AttributeError, match="no attribute 'compres'"):
        samebits.compres  # noqa: B018


def test_where_no_folder_can_be_written() -> None:
    """Then nothing that numba compiles is kept, and the doctor says so."""
    code = """
import torch
from numba.core import caching

def refuse(self):
    raise OSError("read-only file system")

for locator in (caching.InTreeCacheLocator, caching.UserWideCacheLocator):
    locator.ensure_cache_path = refuse

from samebits.cli.doctor import _loop_cache
from samebits.digest import digest

print(digest(torch.arange(8, dtype=torch.uint8)), _loop_cache().mend)
"""
    from samebits.cli.doctor import _loop_cache
    from samebits.digest import digest

    found = digest(torch.arange(8, dtype=torch.uint8))
    assert run_python(code) == f"{found} set NUMBA_CACHE_DIR to a writable folder\n"
    assert _loop_cache().mend == ""
    assert _loop_cache().found.endswith("__pycache__")
