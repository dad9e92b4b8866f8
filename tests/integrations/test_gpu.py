"""Compressed models on a GPU: loaded there, compressed there, moved there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import samebits
from samebits.nn.packed_module import PackedModule
from tests.integrations.models import (
    Reference,
    assert_same_bits,
    assert_same_checkpoint,
    compress_folder,
    open_reference,
    outputs,
)

pytestmark = pytest.mark.gpu
NAMES = ["llama-tied", "mixtral", "gpt2"]


def assert_same_on_gpu(plain: Reference, model: Any) -> None:
    tokens = plain.tokens.to("cuda")
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    logits, continuation = outputs(model, tokens)
    expected, expected_continuation = outputs(plain.load(device_map="cuda"), tokens)
    assert_same_bits(logits, expected)
    assert continuation.tolist() == expected_continuation.tolist()


@pytest.mark.parametrize("name", NAMES)
def test_compressed_on_the_gpu_while_loading(references, name: str, config, tmp_path: Path) -> None:
    plain = references(name)
    model = plain.load(quantization_config=config, device_map="cuda")
    plain.assert_all_packed(model)
    assert_same_on_gpu(plain, model)
    model.save_pretrained(tmp_path)
    assert_same_checkpoint(tmp_path, plain.folder)


@pytest.mark.parametrize("name", NAMES)
def test_compressed_folder_loaded_to_the_gpu(references, name: str, decodes: list[Any], tmp_path: Path) -> None:
    plain = references(name)
    model = plain.load(compress_folder(plain.folder, tmp_path), device_map="cuda")
    assert not decodes
    plain.assert_all_packed(model)
    assert_same_on_gpu(plain, model)
    plain.assert_same(model.to("cpu"))


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_experts_implementations(references, experts: str, tmp_path: Path) -> None:
    plain = open_reference("mixtral", references("mixtral").folder, experts_implementation=experts)
    folder = compress_folder(plain.folder, tmp_path)
    model = plain.load(folder, device_map="cuda", experts_implementation=experts)
    expected = plain.load(device_map="cuda", experts_implementation=experts)
    tokens = plain.tokens.to("cuda")
    assert_same_bits(outputs(model, tokens)[0], outputs(expected, tokens)[0])


def test_dequantized_on_the_gpu(llama: Reference, llama_folder: Path) -> None:
    assert_same_on_gpu(llama, llama.load(llama_folder, device_map="cuda").dequantize())


def test_decoding_never_waits_for_the_gpu(llama: Reference, config: samebits.SamebitsConfig) -> None:
    """Headers are kept in memory: nothing is read back."""
    model = llama.load(quantization_config=config, device_map="cuda")
    packed = [module for module in model.modules() if isinstance(module, PackedModule)]
    linear = [module for module in packed if isinstance(module, torch.nn.Linear)]
    inputs = {size: torch.randn(2, size, device="cuda", dtype=torch.bfloat16) for size in (64, 96)}
    assert linear
    with torch.no_grad():
        linear[0](inputs[linear[0].in_features])
        torch.cuda.set_sync_debug_mode("error")
        try:
            for layer in linear:
                layer(inputs[layer.in_features])
                assert layer.weight.shape == (layer.out_features, layer.in_features)
        finally:
            torch.cuda.set_sync_debug_mode("default")
