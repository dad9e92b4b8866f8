"""Compressed modules of huggingface_hub's PyTorchModelHubMixin."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from huggingface_hub import PyTorchModelHubMixin
from safetensors.torch import load_file
from torch import nn

import samebits
from tests.integrations.models import assert_same_bits


class Model(nn.Module, PyTorchModelHubMixin):
    """With a tied weight, and one that stays plain."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64, bias=False)
        self.last.weight = self.first.weight
        self.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.norm(self.first(x)))
        return y


@pytest.mark.parametrize("strict", [True, False])
def test_saved_as_plain_weights(tmp_path: Path, strict: bool) -> None:
    model, x = Model(), torch.randn(3, 64, dtype=torch.bfloat16)
    packed = copy.deepcopy(model)
    assert [*samebits.compress(packed, min_weights=1).packed] == ["first.weight"]
    model.save_pretrained(tmp_path / "expected")
    packed.save_pretrained(tmp_path / "saved")
    assert {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "expected").iterdir()
    }
    assert "first.weight" in load_file(tmp_path / "saved" / "model.safetensors")
    loaded = Model.from_pretrained(tmp_path / "saved", strict=strict)
    assert_same_bits(loaded(x), model(x))
    assert_same_bits(packed(x), model(x))
    assert [*samebits.compress(loaded, min_weights=1).packed] == ["first.weight"]
