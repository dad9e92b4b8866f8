"""Logits and tokens equal to the BF16 model's, byte for byte, whichever way in; every eligible weight packed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

import samebits
from samebits.errors import InputError
from samebits.format.container import Checkpoint
from tests.integrations.models import (
    MIN_WEIGHTS,
    Reference,
    assert_same_bits,
    assert_same_checkpoint,
    compress_folder,
    files,
    make,
    open_reference,
    packed_parameters,
)

MOE = ("mixtral", "qwen3-moe")


def test_compressed_while_loading(reference: Reference, config: samebits.SamebitsConfig) -> None:
    model = reference.load(quantization_config=config)
    reference.assert_all_packed(model)
    reference.assert_same(model)
    assert model.hf_quantizer.report.bits_per_weight < 12


def test_saved_and_loaded_again(reference: Reference, config: samebits.SamebitsConfig, tmp_path: Path) -> None:
    reference.load(quantization_config=config).save_pretrained(tmp_path)
    assert "samebits.safetensors" in files(tmp_path)
    assert_same_checkpoint(tmp_path, reference.folder)
    model = reference.load(tmp_path)
    reference.assert_all_packed(model)
    reference.assert_same(model)


def test_folder_of_the_command_line(reference: Reference, decodes: list[tuple[int, ...]], tmp_path: Path) -> None:
    folder = compress_folder(reference.folder, tmp_path / "compressed")
    model = reference.load(folder)
    assert not decodes, "loading decodes nothing"
    reference.assert_all_packed(model)
    reference.assert_same(model)
    model.save_pretrained(tmp_path / "saved")
    assert_same_checkpoint(tmp_path / "saved", reference.folder)


def test_dequantized(reference: Reference, config: samebits.SamebitsConfig, tmp_path: Path) -> None:
    model = reference.load(quantization_config=config).dequantize()
    assert type(model) is reference.model_class
    assert not list(packed_parameters(model))
    assert model.state_dict().keys() == reference.model.state_dict().keys()
    for name, tensor in reference.model.state_dict().items():
        assert_same_bits(model.state_dict()[name], tensor)
    reference.assert_same(model)
    model.save_pretrained(tmp_path)
    assert "model.safetensors" in files(tmp_path)
    assert_same_checkpoint(tmp_path, reference.folder)


def test_dequantized_after_loading_a_folder(reference: Reference, tmp_path: Path) -> None:
    model = reference.load(compress_folder(reference.folder, tmp_path / "compressed")).dequantize()
    reference.assert_same(model)
    model.save_pretrained(tmp_path / "plain")
    assert_same_checkpoint(tmp_path / "plain", reference.folder)


def test_sharded(reference: Reference, config: samebits.SamebitsConfig, tmp_path: Path) -> None:
    reference.load(quantization_config=config).save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(Checkpoint.open(tmp_path).files) > 1
    assert "samebits.safetensors.index.json" in files(tmp_path)
    assert_same_checkpoint(tmp_path, reference.folder)
    model = reference.load(tmp_path)
    reference.assert_all_packed(model)
    reference.assert_same(model)


def test_auto_class(llama: Reference, llama_folder: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(llama_folder)
    llama.assert_all_packed(model)
    llama.assert_same(model)


def test_base_model_of_a_causal_model(llama: Reference, llama_folder: Path) -> None:
    """The names lose their prefix on the way in."""
    with torch.no_grad():
        expected = transformers.AutoModel.from_pretrained(llama.folder)(llama.tokens).last_hidden_state
        model = transformers.AutoModel.from_pretrained(llama_folder)
        assert {name for name, _, _ in packed_parameters(model)} >= {"embed_tokens.weight"}
        assert_same_bits(model(llama.tokens).last_hidden_state, expected)


def test_compressed_in_place_and_saved(reference: Reference, tmp_path: Path) -> None:
    model = reference.load()
    samebits.compress(model, min_weights=MIN_WEIGHTS)
    reference.assert_all_packed(model)
    reference.assert_same(model)
    model.save_pretrained(tmp_path)
    assert_same_checkpoint(tmp_path, reference.folder)
    reference.assert_same(reference.load(tmp_path))


@pytest.mark.parametrize("options", [{}, {"exclude_embeddings": True}, {"only_trainable": True}], ids=str)
def test_number_of_parameters(reference: Reference, config: samebits.SamebitsConfig, options: dict[str, bool]) -> None:
    model, plain = reference.load(quantization_config=config), reference.load()
    for name, parameter in plain.named_parameters():  # packed weights are frozen
        parameter.requires_grad_(name in dict(model.named_parameters()))
    assert model.num_parameters(**options) == plain.num_parameters(**options)


def test_saved_with_a_state_dict(llama: Reference, llama_folder: Path, tmp_path: Path) -> None:
    """As Trainer saves: what is not packed is taken from it; packed weights must be the model's own."""
    model = llama.load(llama_folder)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state["model.norm.weight"] *= 2
    model.save_pretrained(tmp_path / "given", state_dict=state)
    with torch.no_grad():
        model.model.norm.weight.mul_(2)
    model.save_pretrained(tmp_path / "own")
    assert_same_checkpoint(tmp_path / "given", tmp_path / "own")
    packed = next(name for name in state if name.endswith("sb_packed"))
    other = {**state, packed: torch.zeros_like(state[packed])}
    for wrong in ({}, {**state, "more": state[packed]}, other):
        with pytest.raises(InputError, match="the state_dict is not that of the compressed model; load it into"):
            model.save_pretrained(tmp_path / "wrong", state_dict=wrong)
    assert not files(tmp_path / "wrong")


def test_decompressed_in_place_and_saved(llama: Reference, llama_folder: Path, tmp_path: Path) -> None:
    model = llama.load(llama_folder)
    samebits.decompress(model)
    model.save_pretrained(tmp_path / "plain")
    assert "model.safetensors" in files(tmp_path / "plain")
    llama.assert_same(llama.load(tmp_path / "plain"))
    assert not hasattr(llama.load(tmp_path / "plain").config, "quantization_config")


@pytest.mark.parametrize("name", MOE)
@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_experts_implementations(references, name: str, experts: str, tmp_path: Path) -> None:
    plain = open_reference(name, references(name).folder, experts_implementation=experts)
    model = plain.load(compress_folder(plain.folder, tmp_path / "compressed"), experts_implementation=experts)
    plain.assert_all_packed(model)
    plain.assert_same(model)


@pytest.mark.parametrize("name", MOE)
def test_checkpoint_with_fused_experts(references, name: str, tmp_path: Path) -> None:
    """Names of bare parameters with three dimensions in the file: no pieces."""
    references(name).model.save_pretrained(tmp_path / "plain", save_original_format=False)
    plain = open_reference(name, tmp_path / "plain")
    assert any(entry.name.endswith("experts.gate_up_proj") for entry in Checkpoint.open(plain.folder))
    model = plain.load(compress_folder(plain.folder, tmp_path / "compressed"))
    plain.assert_all_packed(model)
    assert all(len(data) == 1 for _, _, data in packed_parameters(model))
    plain.assert_same(model)


@pytest.mark.parametrize("name", MOE)
def test_experts_of_the_hub_stay_in_pieces(references, name: str, tmp_path: Path) -> None:
    """As many packed tensors as the checkpoint has, put together only while they are used."""
    plain = references(name)
    folder = compress_folder(plain.folder, tmp_path / "compressed")
    experts = [entry for entry in Checkpoint.open(folder) if ".experts." in entry.name]
    assert len(experts) == 2 * 4 * 3
    model = plain.load(folder)
    pieces = [stored for name, _, data in packed_parameters(model) if ".experts." in name for stored in data]
    assert sorted(stored.nbytes for stored in pieces) == sorted(entry.nbytes for entry in experts)


def test_parameters_split_from_one_tensor(tmp_path: Path, config: samebits.SamebitsConfig) -> None:
    """Such tensors are decoded on the way in, and their parts packed again; saving puts them together."""
    plain = make("split", tmp_path / "plain")
    for model in (
        plain.load(quantization_config=config),
        plain.load(compress_folder(plain.folder, tmp_path / "compressed")),
    ):
        plain.assert_all_packed(model)
        plain.assert_same(model)
        model.save_pretrained(tmp_path / "saved")
        assert_same_checkpoint(tmp_path / "saved", plain.folder)
        assert any(entry.name.endswith("gqkv_proj.weight") for entry in Checkpoint.open(tmp_path / "saved"))


@pytest.mark.parametrize("name", ["llama-tied", "mixtral"])
def test_torch_compile(references, name: str, tmp_path: Path) -> None:
    """One graph, and the same bits."""
    plain = references(name)
    model = plain.load(compress_folder(plain.folder, tmp_path))
    with torch.no_grad():
        logits = torch.compile(model, backend="aot_eager", fullgraph=True)(plain.tokens).logits
    assert_same_bits(logits, plain.logits)


def test_tied_head(tmp_path: Path, config: samebits.SamebitsConfig) -> None:
    """A tied embedding is stored once, and shared in memory."""
    tied = make("llama-tied", tmp_path / "plain")
    tied.load(quantization_config=config).save_pretrained(tmp_path / "saved")
    names = [entry.name for entry in Checkpoint.open(tmp_path / "saved")]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    model = tied.load(tmp_path / "saved")
    assert model.lm_head.sb_packed is model.model.embed_tokens.sb_packed
    model.tie_weights()
    assert model.lm_head.sb_packed is model.model.embed_tokens.sb_packed
    tied.assert_same(model)
