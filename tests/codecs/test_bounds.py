"""No access of the compiled loops leaves its array, whatever the streams hold (FORMAT.md 6.6)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.clause("6.6")
def test_every_access_stays_inside(pytestconfig: pytest.Config) -> None:
    """In a process of its own, where numba checks each access; its compiled code is kept apart from the usual."""
    assert pytestconfig.cache is not None
    environment = {
        **os.environ,
        "NUMBA_BOUNDSCHECK": "1",
        "NUMBA_CACHE_DIR": str(pytestconfig.cache.mkdir("numba-boundscheck")),
    }
    command = [sys.executable, "-m", "tests.codecs.bounds"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
