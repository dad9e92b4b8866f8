"""Processes that torchrun starts, two of them, one for each rank."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
RANKS, TRIES = 2, 3
TWO_GPUS = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < RANKS, reason="needs two GPUs")]
_DIED = ("SIGABRT", "SIGSEGV")


def torchrun(device: str, *command: str | Path) -> str:
    """What the ranks print to stdout.

    On a CPU they start anew where one dies by a signal: a thread of Gloo's may let go of a tensor while Python does, or
    ends (pytorch issue 190489). One that always dies fails.
    """
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    environment["PYTHONFAULTHANDLER"] = "1"
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", *command]
    for left in reversed(range(TRIES if device == "cpu" else 1)):
        done = subprocess.run(run, env=environment, capture_output=True, text=True, timeout=300)
        if not (left and any(signal in done.stderr for signal in _DIED)):
            break
        warnings.warn(f"a rank died:\n{done.stderr}", stacklevel=2)
    assert done.returncode == 0, done.stderr
    return done.stdout


def leave() -> None:
    """End a rank that has done its work, without what Python does then: see above."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
