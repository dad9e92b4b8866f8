"""benchmarks/parallel.py in small, on the CPU: the tensor-parallel ranks are two processes."""

from __future__ import annotations

from pathlib import Path

import generate
import parallel

SIZES = ["--model", "tiny", "--device", "cpu", "--batches", "2", "--prompt", "8", "--tokens", "3"]


def test_rows(tmp_path: Path) -> None:
    generate.build("tiny", "cpu", packed=False).save_pretrained(tmp_path)
    (whole,) = parallel.run(tmp_path, "auto", SIZES, "cpu")
    (divided,) = parallel.run(tmp_path, "tensor", SIZES, "cpu")
    assert divided["placement"] == "tensor"
    for row in (whole, divided):
        assert row["same_tokens"]
        assert row["same_logits"]
        assert row["samebits_weights_bytes"] < 0.8 * row["bf16_weights_bytes"]
    assert divided["bf16_weights_bytes"] < 0.6 * whole["bf16_weights_bytes"]


def test_ranks_are_merged() -> None:
    rows = [
        {"speed": 1.0, "peak_bytes": 5, "same_tokens": True, "bf16_repeats": True},
        {"speed": 2.0, "peak_bytes": 7, "same_tokens": False, "bf16_repeats": False},
    ]
    merged = {"speed": 1.0, "peak_bytes": 7, "same_tokens": False, "bf16_repeats": False}
    assert parallel.merge([[row] for row in rows]) == [merged]
