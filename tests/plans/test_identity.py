"""benchmarks/identity.py: that it draws what it should, counts right, and would notice a wrong word."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import identity
import linear
from samebits.kernels import nvrtc
from tests.plans.conftest import FakeGpu, is_supported


def small(count: int, seed: int) -> list[identity.Combination]:
    """Every kind of operands and of values, in matrices that a CPU multiplies at once."""
    operands, values = list(identity.OPERANDS), list(identity.VALUES)
    base = identity.Combination(128, 512, 3, False, "", "", seed)
    return [
        replace(base, operands=operands[i % len(operands)], values=values[i % len(values)], has_bias=i % 3 == 0)
        for i in range(count)
    ]


@pytest.fixture
def cpu(gpu: FakeGpu, monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    monkeypatch.setattr(identity, "DEVICE", "cpu")
    monkeypatch.setattr(identity, "combinations", small)
    monkeypatch.setattr(linear, "is_supported", is_supported)
    monkeypatch.setattr(identity, "F", SimpleNamespace(linear=lambda *arguments: gpu.linear(*arguments)))
    monkeypatch.setattr(nvrtc, "where", lambda device: nvrtc.Where(7, 0))
    return gpu


def test_counts_what_was_fused(cpu: FakeGpu) -> None:
    table = {row["products"]: row for row in identity.run(30, 0)}
    assert table["all"] == {
        "table": "identity", "products": "all", "fused": 14, "decoded_first": 16, "different": 0,
    }  # fmt: skip
    fused = {name.removeprefix("operands: ") for name, row in table.items() if row["fused"] and "operands" in name}
    assert fused == {*identity.PLAIN, "16 bytes further", "misaligned bias"}


def test_notices_a_wrong_word(
    cpu: FakeGpu, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = cpu.fused

    def wrong(x: torch.Tensor, *arguments: object) -> torch.Tensor:
        y = right(x, *arguments)
        y.view(torch.int16)[-1, -1] ^= 1
        return y

    identity.run(30, 0)
    cpu.fused = wrong
    assert identity.run(30, 0)[0]["different"] == 14
    assert "4 words differ, fused: Combination(" in capsys.readouterr().out


def test_draws_of_everything() -> None:
    drawn = list(identity.combinations(1000, 0))
    assert drawn == list(identity.combinations(1000, 0))
    assert {case.operands for case in drawn} == identity.OPERANDS.keys()
    assert {case.values for case in drawn} == identity.VALUES.keys()
    assert len({(case.rows, case.columns) for case in drawn}) > 900
    fusible = Counter(case.columns % 64 == 0 and case.rows % 8 == 0 and case.tokens <= 128 for case in drawn)
    assert fusible[True] > 700
    assert sum(case.tokens == 1 for case in drawn) > 200
    assert sum(case.rows % 8 != 0 or case.columns % 8 != 0 for case in drawn) > 50
