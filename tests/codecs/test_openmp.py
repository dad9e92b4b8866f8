"""Decoding on torch's OpenMP threads: which it takes, and what happens without them."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from typing import Any

import pytest
import torch

import samebits
from samebits.codecs import decode, openmp

TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def weights(rows: int = 300, columns: int = 500) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(0)).mul(0.02).to(torch.bfloat16)


def assert_decoded(plain: torch.Tensor) -> None:
    made = samebits.decode(samebits.encode(plain))
    assert torch.equal(made.view(torch.int16), plain.view(torch.int16))


@pytest.mark.skipif(openmp._parallel() is None, reason="this torch is made without OpenMP")
def test_torchs_threads_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    packed = samebits.encode(weights())
    monkeypatch.setattr(decode, "run_ranges", None)  # ours are not asked
    assert torch.equal(samebits.decode(packed).view(torch.int16), weights().view(torch.int16))


def test_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openmp, "_parallel", lambda: None)
    assert_decoded(weights())


@pytest.mark.parametrize(
    ("rows", "ours", "torchs", "expected"), [(300, 1, 8, 1), (300, 8, 8, 5), (300, 2, 8, 2), (300, 8, 3, 3)]
)
def test_how_many_decode(
    rows: int, ours: int, torchs: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    asked = []

    def parallel(function: int, data: int, threads: int, flags: int) -> None:
        asked.append((threads, flags))
        for _ in range(2):  # whoever comes late finds nothing to do
            TASK(function)(data)

    monkeypatch.setattr(openmp, "_parallel", lambda: parallel)
    monkeypatch.setattr(openmp, "threads", lambda: ours)
    monkeypatch.setattr(torch, "get_num_threads", lambda: torchs)
    assert_decoded(weights(rows))
    assert asked == [(expected, 0)]


def test_what_is_not_done_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def parallel(*arguments: Any) -> None:
        """As if each thread had failed."""

    packed = samebits.encode(weights())
    monkeypatch.setattr(openmp, "_parallel", lambda: parallel)
    with pytest.raises(MemoryError, match="no memory to decode with"):
        samebits.decode(packed)


FORKED = """
import os, sys, torch, samebits
plain = torch.randn(512, 512).to(torch.bfloat16)
packed = samebits.encode(plain)
def is_decoded():
    return (samebits.decode(packed).view(torch.int16).numpy() == plain.view(torch.int16).numpy()).all()
assert is_decoded() and (plain @ plain).any()  # torch's threads are there
child = os.fork()
if not child:
    os._exit(0 if is_decoded() else 3)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_forked_child_has_none_of_them() -> None:
    """It would wait for them for good."""
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
