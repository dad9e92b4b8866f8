"""benchmarks/generate.py in small, on the CPU."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import generate  # noqa: E402
from samebits.nn.packed_module import packed_parameters  # noqa: E402


def test_both_models_have_the_same_weights() -> None:
    plain, packed = (generate.build("tiny", "cpu", which) for which in (False, True))
    names = {name for name, _, _ in packed_parameters(packed)}
    assert names == {name for name, parameter in plain.named_parameters() if parameter.dim() == 2}
    for name, module, leaf in packed_parameters(packed):
        assert torch.equal(module.sb_decode(leaf).view(torch.int16), plain.get_parameter(name).view(torch.int16))
    assert not any(tensor.is_meta for tensor in (*packed.parameters(), *packed.buffers()))


def test_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(generate, "REPEATS", 1)
    settings = [generate.Setting(way, 2, 5, 4) for way in generate.WAYS]
    found = list(generate.rows("tiny", settings, "cpu"))
    assert [row["way"] for row in found] == list(generate.WAYS)
    assert all(row["same_tokens"] for row in found)
    assert all(row["speed"] > 0 and row["samebits_first_token_seconds"] > 0 for row in found)
    assert all(row["samebits_peak_bytes"] is None for row in found)


def test_a_prompt_is_the_same_each_time() -> None:
    setting = generate.Setting("eager", 3, 7, 1)
    assert torch.equal(setting.inputs(100, "cpu"), setting.inputs(100, "cpu"))
