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


class Blocks(nn.Module, PyTorchModelHubMixin):
    """Keeps what it computed last, which nothing can copy."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(4))
        self.bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        self.last = x
        return x


@pytest.mark.parametrize("is_offloaded", [True, False])
def test_nothing_is_copied_to_be_saved(tmp_path: Path, is_offloaded: bool) -> None:
    model, x = Blocks(), torch.randn(3, 64, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "expected")
    assert len(samebits.compress(model, min_weights=1, include=["*.0.weight"]).packed) == 4
    if is_offloaded:
        assert samebits.offload(model, 20_000).streamed
    with torch.set_grad_enabled(not is_offloaded):
        expected = model(x)
    before = [*model.state_dict()]
    model.save_pretrained(tmp_path / "saved")
    assert {path.name: path.read_bytes() for path in (tmp_path / "saved").iterdir()} == {
        path.name: path.read_bytes() for path in (tmp_path / "expected").iterdir()
    }
    assert [*model.state_dict()] == before
    assert_same_bits(Blocks.from_pretrained(tmp_path / "saved")(x), expected)
