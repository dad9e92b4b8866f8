"""benchmarks/training.py in small, on the CPU."""

from __future__ import annotations

import pytest
import torch

import training


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting begins with the same adapters, so the first gradients are the same with checkpointing."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # which it would leave behind: no plan holds then
    seen, measure = [], training.measure
    monkeypatch.setattr(training, "WARM_UP", 0)
    monkeypatch.setattr(training, "REPEATS", 1)
    monkeypatch.setattr(training, "measure", lambda *arguments: (seen.append(measure(*arguments)), seen[-1])[1])
    settings = [training.Setting(2, 8, checkpointing) for checkpointing in (False, True)]
    found = list(training.rows("tiny", settings, "cpu"))
    assert [row["checkpointing"] for row in found] == [False, True]
    assert all(row["same_gradients"] and row["same_adapters"] for row in found)
    assert {row["samebits_peak_bytes"] for row in found} == {None}
    assert all(row["samebits_seconds_fastest"] <= row["samebits_seconds_slowest"] for row in found)
    assert len(seen) == 4
    assert all(training.same_bytes(figures.gradients, seen[0].gradients) for figures in seen)
    assert not training.same_bytes(seen[0].gradients, seen[0].adapters)


def test_gradients_that_say_nothing_are_not_compared() -> None:
    for gradient in (torch.zeros(3), torch.full((3,), torch.nan)):
        with pytest.raises(SystemExit, match="nothing worth comparing"):
            training.same_bytes({"a": gradient}, {"a": gradient})
    ones = torch.ones(3, dtype=torch.bfloat16)
    assert not training.same_bytes({"a": ones}, {"a": -ones})
    assert not training.same_bytes({"a": ones}, {"b": ones})
