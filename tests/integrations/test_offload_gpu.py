"""transformers models that are larger than they may be on a GPU: streamed by samebits, and moved by accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import samebits
from tests.integrations.models import Reference, assert_same_bits, compress_folder, make, outputs

pytestmark = pytest.mark.gpu
NAMES = ["llama-tied", "mixtral", "gpt2"]


def make_deep(name: str, folder: Path) -> Reference:
    return make(name, folder, **({"n_layer": 6} if name == "gpt2" else {"num_hidden_layers": 6}))


def assert_same_on_gpu(plain: Reference, model: Any) -> None:
    tokens = plain.tokens.to("cuda")
    logits, continuation = outputs(model, tokens)
    expected, expected_continuation = outputs(plain.load(device_map="cuda"), tokens)
    assert_same_bits(logits, expected)
    assert continuation is not None
    assert expected_continuation is not None
    assert continuation.tolist() == expected_continuation.tolist()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("folder", [True, False])
def test_streamed(name: str, folder: bool, config: samebits.SamebitsConfig, tmp_path: Path) -> None:
    plain = make_deep(name, tmp_path / "plain")
    options: dict[str, Any] = {"quantization_config": config}
    if folder:
        options = {"folder": compress_folder(plain.folder, tmp_path / "packed")}
    total = sum(parameter.nbytes for parameter in plain.load(**options).parameters())
    model = plain.load(**options, gpu_memory=total * 9 // 10)
    assert vars(model)["sb_offloaded"].report.streamed
    assert model.device.type == "cuda"
    for _ in range(2):
        assert_same_on_gpu(plain, model)


@pytest.mark.parametrize("implementation", ["static", "dynamic"])
def test_generate_does_not_compile(implementation: str, config: samebits.SamebitsConfig, tmp_path: Path) -> None:
    plain = make_deep("llama-tied", tmp_path / "plain")
    total = sum(parameter.nbytes for parameter in plain.load(quantization_config=config).parameters())
    model = plain.load(quantization_config=config, gpu_memory=total * 9 // 10)
    prompt = plain.tokens.to("cuda")
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "cache_implementation": implementation}
    tokens = model.generate(prompt, **options)
    expected = plain.load(device_map="cuda").generate(prompt, **options, disable_compile=True)
    assert tokens.tolist() == expected.tolist()


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("compressed", [True, False])
def test_placed_by_accelerate(
    references, name: str, compressed: bool, config: samebits.SamebitsConfig, tmp_path: Path
) -> None:
    """A layer in main memory, one on disk, everything else on the GPU."""
    plain: Reference = references(name)
    options: dict[str, Any] = {"quantization_config": config}
    if compressed:
        options = {"folder": compress_folder(plain.folder, tmp_path / "packed")}
    places = {"model.embed_tokens": 0, "lm_head": 0, "model.norm": 0, "model.rotary_emb": 0}
    places |= {"model.layers.0": "cpu", "model.layers.1": "disk"}
    model = plain.load(**options, device_map=places, offload_folder=tmp_path / "disk")
    assert_same_on_gpu(plain, model)
    assert_same_on_gpu(plain, model)
    model.save_pretrained(tmp_path / "again")
    plain.assert_same(plain.load(tmp_path / "again"))
    with torch.no_grad():
        assert model(plain.tokens.to("cuda")).logits.is_cuda
