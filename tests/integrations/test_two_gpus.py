"""A model whose layers are on two GPUs: kernels, plans and caches of each of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import samebits
from samebits.errors import InputError
from tests.integrations.models import Reference, assert_same_bits, compress_folder, make, outputs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
# The embedding and the head are on different GPUs.
APART = {"model.embed_tokens": 0, "model.layers.0": 0, "model.layers.1": 1, "model.norm": 1, "model.rotary_emb": 0}
APART |= {"lm_head": 1}


def assert_same_on_both(plain: Reference, model: Any) -> None:
    """The bits of the plain model with the same placement."""
    assert set(model.hf_device_map.values()) == {0, 1}
    assert {parameter.device for parameter in model.parameters()} == {FIRST, SECOND}
    tokens = plain.tokens.to(FIRST)
    logits, continuation = outputs(model, tokens)
    expected, expected_continuation = outputs(plain.load(device_map=model.hf_device_map), tokens)
    assert_same_bits(logits, expected)
    assert continuation.tolist() == expected_continuation.tolist()


def sources(plain: Reference, config: samebits.SamebitsConfig, folder: Path) -> Iterator[dict[str, Any]]:
    """What to load: compressed while loading, and compressed before."""
    yield {"quantization_config": config}
    yield {"folder": compress_folder(plain.folder, folder)}


@pytest.mark.parametrize("name", ["llama", "llama-tied", "mixtral"])
def test_device_map_auto(name: str, config, tmp_path: Path) -> None:
    plain = make(name, tmp_path / "plain", num_hidden_layers=8)
    room = sum(parameter.numel() for parameter in plain.model.parameters()) * 4 // 5  # of about 1.4 bytes for each
    for source in sources(plain, config, tmp_path / "packed"):
        model = plain.load(**source, device_map="auto", max_memory={0: room, 1: 1 << 30})
        plain.assert_all_packed(model)
        assert_same_on_both(plain, model)


def test_head_and_embedding_apart(llama: Reference, config, tmp_path: Path) -> None:
    for source in sources(llama, config, tmp_path / "packed"):
        model = llama.load(**source, device_map=dict(APART))
        assert {parameter.device for parameter in model.lm_head.parameters()} == {SECOND}
        assert_same_on_both(llama, model)
    model.save_pretrained(tmp_path / "saved")
    llama.assert_same(llama.load(tmp_path / "saved"))


def test_tied_head_and_embedding_apart(references, config, tmp_path: Path) -> None:
    """accelerate gives tied modules one tensor, on one device, so neither model runs."""
    plain = references("llama-tied")
    for source in ({}, *sources(plain, config, tmp_path / "packed")):
        model = plain.load(**source, device_map=dict(APART))
        with pytest.raises((RuntimeError, InputError), match="cuda:0"):
            outputs(model, plain.tokens.to(FIRST))


def test_products_on_the_device_that_is_not_current(config, tmp_path: Path) -> None:
    """Large enough for fused products, with plans found ahead, on the second GPU while the first is current."""
    options = {"hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "head_dim": 64}
    plain = make("llama", tmp_path, **options)
    model = plain.load(quantization_config=config, device_map={"": 1})
    assert torch.cuda.current_device() == 0
    prepared = samebits.prepare(model, (1, 2))
    dense = plain.load(device_map={"": 1})
    for batch in (1, 2, 18):
        tokens = plain.tokens.repeat(9, 1)[:batch, :1].to(SECOND)
        with torch.no_grad():
            assert_same_bits(model(tokens).logits, dense(tokens).logits)
    assert prepared.products
    assert torch.cuda.current_device() == 0


def test_moved_to_the_other_device(llama: Reference, llama_folder: Path) -> None:
    tokens = llama.tokens.to(SECOND)
    expected = outputs(llama.load(device_map={"": 1}), tokens)[0]
    model = llama.load(llama_folder, device_map={"": 0})
    outputs(model, llama.tokens.to(FIRST))
    assert_same_bits(outputs(model.to(SECOND), tokens)[0], expected)


def test_encoded_on_either_device(llama: Reference) -> None:
    """The same bytes."""
    weight = llama.model.model.embed_tokens.weight.detach()
    first, second = (samebits.encode(weight.to(device)) for device in (FIRST, SECOND))
    assert torch.equal(first.data.cpu(), second.data.cpu())
    assert second.device == SECOND
    assert torch.equal(samebits.decode(second).view(torch.int16).cpu(), weight.view(torch.int16))
