"""What numba keeps of compiled loops: right with several processes, and with other sources."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from samebits import compiled

PACKAGE = Path(compiled.__file__).parent
LOOP = """
from samebits.compiled import compiled
@compiled
def first(array):
    return array[0]
"""
# Both have read an empty index when one writes its own, then the other its own and its code, then the first its code.
MEETING = """
import sys, time
from pathlib import Path
import numpy as np
from numba.core.caching import IndexDataCacheFile
from loop import first

def wait(name):
    end = time.monotonic() + 2
    while not Path(name).exists() and time.monotonic() < end:
        time.sleep(0.01)

def save_index(file, overloads, save=IndexDataCacheFile._save_index):
    Path(kind).touch()
    wait("float64" if kind == "int64" else "int64")
    if kind == "int64":
        wait("index of float64")
    save(file, overloads)
    Path(f"index of {kind}").touch()

def save_data(file, name, data, save=IndexDataCacheFile._save_data):
    if kind == "float64":
        wait("code of int64")
    save(file, name, data)
    Path(f"code of {kind}").touch()

IndexDataCacheFile._save_index, IndexDataCacheFile._save_data = save_index, save_data
kind = sys.argv[1]
first(np.ones(1, kind))
"""


@pytest.fixture
def run(tmp_path: Path):
    """Starts Python on a text in a folder with the loop."""
    (tmp_path / "loop.py").write_text(LOOP)
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(PACKAGE.parent)}

    def start(text: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", f"import sys; sys.path.insert(0, '')\n{text}", *arguments]
        return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)

    return start


def test_processes_that_compile_at_one_time(run) -> None:
    meeting = [run(MEETING, kind) for kind in ("int64", "float64")]
    assert [each.wait() for each in meeting] == [0, 0]
    text = "import numpy as np; from loop import first; print(first(np.ones(1, np.int64)), first(np.ones(1)))"
    assert run(text).communicate()[0].split() == ["1", "1.0"]


@pytest.fixture
def hits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Loads the loop as if for the first time and runs it; returns how often it was found on disk."""
    monkeypatch.setattr("numba.config.CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "loop.py").write_text(LOOP)

    def load() -> int:
        module = ModuleType("loop")
        module.__file__ = str(tmp_path / "loop.py")
        exec(compile(LOOP, module.__file__, "exec"), vars(module))
        assert module.first(np.ones(1)) == 1
        return sum(module.first.stats.cache_hits.values())

    return load


def test_other_sources_are_compiled_anew(hits: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a loop calls in other files, too, at which numba does not look."""
    assert [hits(), hits()] == [0, 1]
    monkeypatch.setattr(compiled, "sources", lambda: ((1, 2),))
    assert [hits(), hits()] == [0, 1]


def test_versions_of_numba_keep_their_own(hits: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments may share a source tree."""
    assert hits() == 0
    with monkeypatch.context() as other:
        other.setattr("numba.__version__", "0.1")
        assert [hits(), hits()] == [0, 1]
    assert hits() == 1


def test_all_files_with_loops_are_among_the_sources() -> None:
    counted = {path for pattern in compiled._WITH_LOOPS for path in PACKAGE.glob(pattern)}
    decorated = re.compile(r"^@(compiled|inlined|callback|intrinsic)\b", re.MULTILINE)
    with_loops = {path for path in PACKAGE.rglob("*.py") if decorated.search(path.read_text())}
    assert len(with_loops) > 8
    assert with_loops <= counted
    assert len(compiled.sources()) == len(counted)
