"""``make demo`` in small: the whole job on the embedded model, as a user runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[1] / "examples" / "demo.py"
PNG_MAGIC = b"\x89PNG"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_demo_reports_identical_and_draws(device: str, tmp_path: Path) -> None:
    arguments = ["--out", str(tmp_path), "--device", device, "--tokens", "12"]
    done = subprocess.run([sys.executable, str(DEMO), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical to" in done.stdout
    assert "identical: 10,819,200 bytes of weights, 12,582,912 logits, " in done.stdout
    assert "NOT IDENTICAL" not in done.stdout
    assert "And it came to pass, when" in done.stdout
    assert "peak memory of this process: " in done.stdout
    assert (tmp_path / "model" / "samebits.safetensors").stat().st_size < 0.68 * 10_819_200
    assert (tmp_path / "where-the-bits-go.png").read_bytes().startswith(PNG_MAGIC)
    assert "exponent" in (tmp_path / "where-the-bits-go.svg").read_text(encoding="utf-8")
