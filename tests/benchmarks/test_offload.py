"""benchmarks/offload.py in small, on the CPU."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import common
import offload


def test_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In all ways something is offloaded, and the tokens are the same."""
    monkeypatch.setattr(offload, "LONG", 0.0)
    (row,) = offload.rows("tiny", offload.CASES["tiny"], offload.WAYS, "cpu")
    assert (row["table"], row["card"], row["cap_bytes"]) == ("streamed", "emulated in memory only", 1_500_000)
    for way in offload.WAYS:
        assert row[f"{way}_offloaded_bytes"] > 0
        assert row[f"{way}_tokens_per_s"] > 0
        assert row[f"{way}_peak_bytes"] is None
    assert row["samebits_offloaded_bytes"] < row["bf16_streamed_offloaded_bytes"]
    assert row["bf16_streamed_same_tokens"] is row["samebits_same_tokens"] is True


def test_resident_and_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits packed is not streamed. Where memory is not enough there is no figure."""
    monkeypatch.setattr(offload, "LONG", 0.0)
    generate = offload.generate

    def once(model: object, batch: int, device: str, graphs: bool) -> offload.Figures:
        assert not graphs  # on a CPU
        if batch == 3:
            raise torch.OutOfMemoryError
        return generate(model, batch, device, graphs)

    monkeypatch.setattr(offload, "generate", once)
    case = replace(offload.CASES["tiny"], cap=2_400_000, batches=(1, 3))
    first, second = offload.rows("tiny", case, ("bf16_streamed", "samebits"), "cpu")
    assert first["table"] == second["table"] == "resident"
    assert first["samebits_offloaded_bytes"] == 0 < first["bf16_streamed_offloaded_bytes"]
    assert first["samebits_same_tokens"]
    assert second["samebits_tokens_per_s"] is None
    assert second["samebits_speed"] is second["samebits_same_tokens"] is None


def test_only_the_same_case_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever another device measured goes, also rows of another benchmark."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["offload.py", "--cases", "tiny", "--device", "cpu", "--name", "trial"])
    common.write_results("trial", "another device", [{"table": "eager", "model": "tiny"}])
    for batches, same in (((2, 4), True), ((8,), True), ((4,), False)):
        made = [{"table": "streamed", "case": "tiny", "batch": size, "samebits_same_tokens": same} for size in batches]
        monkeypatch.setattr(offload, "rows", lambda *arguments, made=made: made)
        assert offload.main() == (not same)
    found = common.read_results("trial")
    assert found["device"] == common.cpu_name()
    assert [(row["batch"], row["samebits_same_tokens"]) for row in found["rows"]] == [(2, True), (4, False), (8, True)]
