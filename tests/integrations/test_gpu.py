"""Compressed models on a GPU: loaded there, compressed there, moved there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import samebits
from samebits.nn.packed_module import PackedModule
from samebits.plans import experts
from tests.integrations.models import (
    Reference,
    assert_same_bits,
    assert_same_checkpoint,
    compress_folder,
    make,
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
    assert not decodes or name == "mixtral"  # whose experts become one tensor
    plain.assert_all_packed(model)
    assert_same_on_gpu(plain, model)
    plain.assert_same(model.to("cpu"))


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_experts_implementations(references, implementation: str, tmp_path: Path) -> None:
    plain = open_reference("mixtral", references("mixtral").folder, experts_implementation=implementation)
    folder = compress_folder(plain.folder, tmp_path)
    model = plain.load(folder, device_map="cuda", experts_implementation=implementation)
    expected = plain.load(device_map="cuda", experts_implementation=implementation)
    tokens = plain.tokens.to("cuda")
    assert_same_bits(outputs(model, tokens)[0], outputs(expected, tokens)[0])


FUSED_SIZES = {
    "hidden_size": 640, "moe_intermediate_size": 640, "num_experts": 16, "num_experts_per_tok": 4, "head_dim": 64,
}  # fmt: skip


@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_fused_experts(config, implementation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each product's bytes, and tokens in graphs and compiled."""
    plain = make("qwen3-moe", tmp_path / "plain", **FUSED_SIZES)
    options = {"device_map": "cuda", "experts_implementation": implementation}
    expected, model = plain.load(**options), plain.load(quantization_config=config, **options)
    fused, original = [], experts.experts_product
    monkeypatch.setattr(experts, "experts_product", lambda *arguments: (fused.append(1), original(*arguments)))
    tokens = plain.tokens.to("cuda")
    assert_same_bits(outputs(model, tokens)[0], outputs(expected, tokens)[0])
    assert fused
    with torch.inference_mode():
        assert_same_bits(model(tokens[:, :3]).logits, expected(tokens[:, :3]).logits)
    static = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": "static", "pad_token_id": 0}
    with samebits.cuda_graphs(expected):
        wanted = expected.generate(tokens, **static).tolist()
    with samebits.cuda_graphs(model):
        assert model.generate(tokens, **static).tolist() == wanted
    for each in (expected, model):
        compiled = torch.compile(each, options={"emulate_precision_casts": True, "deterministic": True})
        with torch.no_grad():
            logits = compiled(tokens).logits
        if each is expected:
            compiled_logits = logits
    assert_same_bits(logits, compiled_logits)


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("implementation", ["batched_mm", "grouped_mm"])
def test_experts_in_a_cuda_graph(config, implementation: str, pieces: bool, tmp_path: Path) -> None:
    """Replays with other routings, and NaNs in all memory that is not written."""
    options = {"num_local_experts": 32, "intermediate_size": 64, "experts_implementation": implementation}
    plain = make("mixtral", tmp_path / "plain", **options)
    if pieces:  # as they stay in main memory
        folder = compress_folder(plain.folder, tmp_path / "packed")
        model = plain.load(folder, experts_implementation=implementation).to("cuda")
    else:
        model = plain.load(quantization_config=config, device_map="cuda", experts_implementation=implementation)
    dense = plain.load(device_map="cuda", experts_implementation=implementation).model.layers[0].mlp.experts
    packed = model.model.layers[0].mlp.experts
    assert isinstance(packed, PackedModule)
    assert (len(packed.sb_slots) > 2) == pieces
    hidden = torch.randn(3, 64, device="cuda", dtype=torch.bfloat16)
    index = torch.zeros(3, 2, dtype=torch.int64, device="cuda")
    weights = torch.full((3, 2), 0.5, device="cuda", dtype=torch.bfloat16)
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.use_deterministic_algorithms(True, warn_only=True)  # and fills empty tensors with NaNs
    try:
        with torch.no_grad():
            with torch.cuda.stream(side):
                packed(hidden, index, weights)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                output = packed(hidden, index, weights)
            for _ in range(5):
                index.copy_(torch.stack([torch.randperm(32)[:2] for _ in range(3)]))
                hidden.normal_()
                graph.replay()
                assert_same_bits(output, dense(hidden, index, weights))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_only_routed_experts(config, implementation: str, decodes, row_decodes, expert_decodes, tmp_path: Path) -> None:
    """Of 32, two tokens of two each."""
    options = {"num_local_experts": 32, "intermediate_size": 64}
    plain = make("mixtral", tmp_path, **options)
    model = plain.load(quantization_config=config, device_map="cuda", experts_implementation=implementation)
    expected = plain.load(device_map="cuda", experts_implementation=implementation)
    tokens = plain.tokens[:1, :2].to("cuda")
    with torch.no_grad():
        assert_same_bits(model(tokens).logits, expected(tokens).logits)
    assert not [shape for shape in decodes if len(shape) == 3]
    partly = expert_decodes if implementation == "grouped_mm" else row_decodes
    assert {(32, 128, 64), (32, 64, 64)} <= set(partly)


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
