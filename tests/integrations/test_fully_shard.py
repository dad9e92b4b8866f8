"""torch's fully_shard over a compressed model: each rank holds a part of the packed bytes, and trains the same LoRA."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.integrations import sharded_ranks
from tests.integrations.models import assert_same_bits
from tests.integrations.torchrun import RANKS, ROOT, TWO_GPUS, torchrun

MODEL = ROOT / "examples" / "king-james" / "model"


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=TWO_GPUS)])
def found(request: pytest.FixtureRequest, references, tmp_path_factory) -> list[dict[str, Any]]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("sharded")
    for file in references("llama").folder.iterdir():
        (folder / file.name).symlink_to(file)
    torchrun(request.param, sharded_ranks.__file__, folder, request.param)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


@pytest.mark.parametrize("way", sharded_ranks.WAYS)
def test_the_same_training(found: list[dict[str, Any]], way: str) -> None:
    for each in found:
        plain, packed = each[way][False], each[way][True]
        assert_same_bits(packed["logits"], plain["logits"])
        assert packed["adapters"].keys() == plain["adapters"].keys() != set()
        for name, adapter in plain["adapters"].items():
            assert adapter.dtype is packed["adapters"][name].dtype is torch.float32
            assert torch.equal(packed["adapters"][name].view(torch.int32), adapter.view(torch.int32)), name
            assert adapter.any(), name


@pytest.mark.skipif(not sharded_ranks.shards_bytes(), reason="this torch's fully_shard takes no parameters of integers")
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=TWO_GPUS)])
def test_example(device: str, tmp_path: Path) -> None:
    torchrun(device, ROOT / "examples" / "lora_sharded.py", MODEL, tmp_path / "adapter")
    base = AutoModelForCausalLM.from_pretrained(MODEL)
    model = PeftModel.from_pretrained(base, tmp_path / "adapter")
    adapters = [each for name, each in model.named_parameters() if "lora_B" in name]
    assert len(adapters) == 28
    assert all(each.any() for each in adapters)  # trained, and whole


def test_a_weight_of_which_each_rank_has_a_part(found: list[dict[str, Any]]) -> None:
    for each in found:
        assert "is sharded" in each["as it is"][True]["refused"]
        assert not each["packed weights ignored"][True]["refused"]
        assert not each["as it is"][False]["refused"]


def test_ranks_hold_parts_of_packed_bytes(found: list[dict[str, Any]]) -> None:
    """Of the plain weights all hold the half; ignored ones are whole on each."""
    for each in found:
        assert each["as it is"][True]["held"] < 0.8 * each["as it is"][False]["held"]
        assert each["packed weights ignored"][True]["held"] > 1.5 * each["as it is"][True]["held"]
