"""Logits and tokens equal to the BF16 model's, byte for byte, whichever way in; every eligible weight packed."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter, WeightRenaming

import samebits
from samebits.errors import FormatError, InputError
from samebits.format.container import Checkpoint
from samebits.integrations.transformers import source
from samebits.integrations.transformers.names import Names, arrange, dtype_in_model
from samebits.integrations.transformers.quantizer import compute_as_plain
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


def test_loaded_in_inference_mode(reference: Reference, config: samebits.SamebitsConfig) -> None:
    """The model can be trained around afterwards."""
    with torch.inference_mode():
        model = reference.load(quantization_config=config)
    assert not any(parameter.is_inference() for parameter in model.parameters())
    reference.assert_same(model)


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


@pytest.mark.parametrize("way", ["in place", "while loading", "folder"])
def test_what_sees_images_tells_its_dtype(way: str, config: samebits.SamebitsConfig, tmp_path: Path) -> None:
    """By its first parameter, of which pipelines ask it."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    plain = transformers.SiglipVisionModel(transformers.SiglipVisionConfig(**sizes, image_size=32, patch_size=8))
    plain.to(torch.bfloat16).save_pretrained(tmp_path / "plain")
    options = {} if way == "in place" else {"quantization_config": config}
    folder = tmp_path / "plain" if way != "folder" else compress_folder(tmp_path / "plain", tmp_path / "packed")
    model = transformers.SiglipVisionModel.from_pretrained(folder, dtype=torch.bfloat16, **options)
    if way == "in place":
        samebits.compress(model, min_weights=MIN_WEIGHTS)
    assert next(model.parameters()).dtype == torch.bfloat16
    assert len(list(packed_parameters(model))) > 5
    pixels = torch.randn(2, 3, 32, 32, dtype=torch.bfloat16)
    with torch.no_grad():
        assert_same_bits(model(pixels).pooler_output, plain.eval()(pixels).pooler_output)


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


def test_parts_of_one_tensor_of_which_the_first_stays_plain(tmp_path: Path) -> None:
    """transformers asks about the first only, for all of them."""
    plain = make("split", tmp_path / "plain")
    selection: dict[str, Any] = {"min_weights": MIN_WEIGHTS, "exclude": ["*.self_attn.gate_proj.weight"]}
    model = plain.load(quantization_config=samebits.SamebitsConfig(**selection))
    expected = samebits.compress(plain.model, **selection)
    assert any(name.endswith("self_attn.q_proj.weight") for name in expected.packed)
    assert model.hf_quantizer.report == expected
    plain.assert_same(model)
    model.save_pretrained(tmp_path / "saved")
    assert_same_checkpoint(tmp_path / "saved", plain.folder)


def test_converted_parameters_that_are_kept_in_float32(tmp_path: Path) -> None:
    """Routers that a checkpoint has transposed: decoded on the way in, and then what they are without a quantizer."""
    text = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"intermediate_size": 96, "moe_intermediate_size": [48, 48], "moe_num_experts": 16, "vocab_size": 99}
    text |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 2]}}
    text |= {"mlp_layer_types": ["dense", "sparse"], "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    vision = {"hidden_size": 64, "depth": 1, "num_heads": 4, "intermediate_size": 96}
    config = transformers.Ernie4_5_VLMoeConfig(text_config=text, vision_config=vision)
    transformers.Ernie4_5_VLMoeForConditionalGeneration(config).bfloat16().save_pretrained(tmp_path / "plain")
    plain, model = (
        transformers.Ernie4_5_VLMoeForConditionalGeneration.from_pretrained(folder)
        for folder in (tmp_path / "plain", compress_folder(tmp_path / "plain", tmp_path / "compressed"))
    )
    for name in ("text_moe", "vision_moe"):
        expected, found = (
            each.get_parameter(f"model.language_model.layers.1.mlp.{name}.gate.weight") for each in (plain, model)
        )
        assert found.dtype is expected.dtype is torch.float32
        assert torch.equal(found.view(torch.int32), expected.view(torch.int32))


def test_buffers_that_are_kept_in_float32(tmp_path: Path) -> None:
    """A batch norm's counter is made float32 with what is beside it, though it is a whole number in the files."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
    config = transformers.GraniteSpeech5EncoderConfig(**sizes)
    transformers.GraniteSpeech5Encoder(config).bfloat16().save_pretrained(tmp_path / "plain")
    plain, model = (
        transformers.GraniteSpeech5Encoder.from_pretrained(folder)
        for folder in (tmp_path / "plain", compress_folder(tmp_path / "plain", tmp_path / "compressed"))
    )
    found = dict(model.named_buffers())
    counters = [name for name in found if name.endswith("num_batches_tracked")]
    assert counters
    for name, expected in plain.named_buffers():
        assert found[name].dtype is expected.dtype
        assert torch.equal(found[name], expected)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_compiled_by_inductor(name: str) -> None:
    """What it makes one kernel of, and so where it rounds, is the same for a compressed model."""
    torch.manual_seed(0)
    configs = {
        "llama": transformers.LlamaConfig(
            hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=1000,
        ),
        "gpt2": transformers.GPT2Config(n_embd=256, n_layer=2, n_head=4, vocab_size=1000, n_positions=256),
    }  # fmt: skip
    plain = transformers.AutoModelForCausalLM.from_config(configs[name], dtype=torch.bfloat16).eval()
    packed = copy.deepcopy(plain)
    assert len(samebits.compress(packed).packed) == {"llama": 2 + 3 * 7, "gpt2": 2 + 2 * 4}[name]
    tokens = torch.arange(32).view(16, 2) * 31
    logits = []
    for model in (plain, packed):
        torch.compiler.reset()
        with torch.no_grad():
            logits.append(torch.compile(model.forward)(tokens, use_cache=False).logits)
    assert_same_bits(*logits)


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


def test_tied_head_with_a_packed_bias(tmp_path: Path) -> None:
    """Which is not small beside a narrow matrix: it is packed while the weight is still to be tied."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"n_embd": 32, "n_head": 2, "n_layer": 1, "rotary_dim": 4, "vocab_size": 1500}
    plain = transformers.GPTJForCausalLM(transformers.GPTJConfig(**options, tie_word_embeddings=True)).bfloat16()
    torch.nn.init.normal_(plain.lm_head.bias)
    plain.save_pretrained(tmp_path / "plain")
    expected = plain(torch.arange(9)[None]).logits
    config = samebits.SamebitsConfig(min_weights=MIN_WEIGHTS)
    for model in (
        transformers.GPTJForCausalLM.from_pretrained(tmp_path / "plain", quantization_config=config),
        transformers.GPTJForCausalLM.from_pretrained(compress_folder(tmp_path / "plain", tmp_path / "compressed")),
    ):
        for _ in range(2):
            assert set(model.lm_head.sb_recipes) == {"weight", "bias"}
            assert model.lm_head.sb_data("weight")[0] is model.transformer.wte.sb_data("weight")[0]
            assert_same_bits(model(torch.arange(9)[None]).logits, expected)
            model.tie_weights()
        other = torch.nn.Linear(32, 1500)
        other.weight, other.bias = model.lm_head.weight, model.lm_head.bias  # as a bias is tied
        model._adjust_bias(other, other.weight)
        assert_same_bits(other.bias, plain.lm_head.bias)


def test_languages_are_switched(tmp_path: Path, config: samebits.SamebitsConfig) -> None:
    """Adapters and a head that a model of Wav2Vec2 finds by its parameters' names and dtypes."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"adapter_attn_dim": 64, "num_feat_extract_layers": 2}
    sizes |= {"intermediate_size": 96, "vocab_size": 32, "do_stable_layer_norm": True, "feat_extract_norm": "layer"}
    sizes |= {"conv_dim": [32, 32], "conv_stride": [5, 4], "conv_kernel": [10, 8]}
    auto = transformers.Wav2Vec2ForCTC
    plain = auto(transformers.Wav2Vec2Config(**sizes)).bfloat16()
    plain.save_pretrained(tmp_path)
    weights = {name: torch.randn_like(weight) for name, weight in plain._get_adapters().items()}
    weights |= {"lm_head.weight": torch.randn(40, 64).bfloat16(), "lm_head.bias": torch.randn(40).bfloat16()}
    save_file(weights, tmp_path / "adapter.fra.safetensors")
    expected, model = auto.from_pretrained(tmp_path), auto.from_pretrained(tmp_path, quantization_config=config)
    assert next(packed_parameters(model), None) is not None
    options: dict[str, Any] = {"target_lang": "fra", "ignore_mismatched_sizes": True}
    sound = torch.randn(1, 2000).bfloat16()
    assert_same_bits(model(sound).logits, expected(sound).logits)
    for each in (expected, model):
        each.load_adapter("fra")
    for each in (model, auto.from_pretrained(tmp_path, quantization_config=config, **options)):
        assert_same_bits(each(sound).logits, expected(sound).logits)


def test_packed_biases_that_are_tied_to_a_module_without_weight(tmp_path: Path) -> None:
    """FLAVA's heads have a name of their own for the bias of a layer in them."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 96}
    parts: dict[str, Any] = {
        "text_config": {**sizes, "vocab_size": 1500},
        "image_config": {**sizes, "vocab_size": 1500, "image_size": 32},
        "multimodal_config": sizes,
    }
    config = transformers.FlavaConfig(**parts, hidden_size=64, projection_dim=32, init_codebook=False)
    plain = transformers.FlavaForPreTraining(config).bfloat16()
    torch.nn.init.normal_(plain.mlm_head.decoder.bias)
    plain.save_pretrained(tmp_path / "plain")
    folder = compress_folder(tmp_path / "plain", tmp_path / "compressed")
    head = transformers.FlavaForPreTraining.from_pretrained(folder).mlm_head
    assert head.sb_data("bias")[0] is head.decoder.sb_data("bias")[0]
    assert_same_bits(head.bias, plain.mlm_head.bias)


@pytest.mark.parametrize("patterns", [{"exclude": ["lm_head.weight"]}, {"include": ["lm_head.weight"]}], ids=str)
def test_patterns_for_the_other_name_of_a_tied_weight(tmp_path: Path, patterns: dict[str, list[str]]) -> None:
    """As samebits.compress has them: one name excluded keeps all plain, one included packs all."""
    tied = make("llama-tied", tmp_path)
    model = tied.load(quantization_config=samebits.SamebitsConfig(MIN_WEIGHTS, **patterns))
    other = tied.load()
    samebits.compress(other, min_weights=MIN_WEIGHTS, **patterns)
    names = {name for name, _, _ in packed_parameters(model)}
    assert names == {name for name, _, _ in packed_parameters(other)}
    assert ("lm_head.weight" in names) == ("model.embed_tokens.weight" in names) == ("include" in patterns)
    tied.assert_same(model)


def test_the_dtype_of_a_model_is_not_that_of_what_stays_plain(llama: Reference, tmp_path: Path) -> None:
    """Norms in float32 come first of what is not packed; the embedding comes before."""
    model = llama.load()
    for norm in (*(layer.input_layernorm for layer in model.model.layers), model.model.norm):
        norm.float()
    assert model.dtype == torch.bfloat16
    samebits.compress(model, min_weights=MIN_WEIGHTS)
    assert model.dtype == torch.bfloat16
    model.save_pretrained(tmp_path)
    assert llama.load(tmp_path).dtype == torch.bfloat16


def test_saved_with_a_first_parameter_in_float32(
    config: samebits.SamebitsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers writes its dtype, with which a plain model would be loaded."""
    monkeypatch.setattr(transformers.T5EncoderModel, "_keep_in_fp32_modules_strict", {"shared"})
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 1, "num_heads": 4, "vocab_size": 99}
    transformers.T5EncoderModel(transformers.T5Config(**sizes)).bfloat16().save_pretrained(tmp_path / "plain")
    model = transformers.T5EncoderModel.from_pretrained(tmp_path / "plain", quantization_config=config)
    model.save_pretrained(tmp_path / "saved")
    again = transformers.T5EncoderModel.from_pretrained(tmp_path / "saved")
    assert again.config.dtype is torch.bfloat16
    assert (again.dtype, again.shared.weight.dtype) == (torch.float32, torch.float32)
    expected, found = model.state_dict(), again.state_dict()
    assert expected.keys() == found.keys()
    assert any(tensor.dtype == torch.uint8 for tensor in found.values())
    for name, tensor in expected.items():
        assert found[name].dtype is tensor.dtype
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))


def test_plain_weights_over_compressed_ones(llama: Reference, config: samebits.SamebitsConfig, tmp_path: Path) -> None:
    """The old ones are gone, for those who read files as well."""
    llama.load(quantization_config=config).save_pretrained(tmp_path, max_shard_size="60KB")
    model = llama.load(tmp_path).dequantize()
    with torch.no_grad():
        model.lm_head.weight.mul_(2)
    model.save_pretrained(tmp_path)
    assert [name for name in files(tmp_path) if name.endswith((".safetensors", ".index.json"))] == ["model.safetensors"]
    [entry] = [entry for entry in Checkpoint.open(tmp_path) if entry.name == "lm_head.weight"]
    assert entry.dtype == "BF16"
    assert_same_bits(llama.load(tmp_path).lm_head.weight, model.lm_head.weight)


def test_pushed_with_what_was_asked_for(
    llama: Reference, config: samebits.SamebitsConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[tuple[str, dict[str, object]]] = []
    model = llama.load(quantization_config=config)
    monkeypatch.setattr(type(model), "push_to_hub", lambda self, repo_id, **options: pushed.append((repo_id, options)))
    options = {"push_to_hub": True, "token": "secret", "max_shard_size": "60KB", "repo_id": "me/it", "private": True}
    model.save_pretrained(tmp_path / "first", **options)
    model.save_pretrained(tmp_path / "second", is_main_process=False, **options)
    assert pushed == [("me/it", {"token": "secret", "max_shard_size": "60KB", "private": True})]


def test_made_plain_again_a_model_is_no_quantized_one(llama: Reference, config: samebits.SamebitsConfig) -> None:
    """transformers would refuse to convert or to train it."""
    model = llama.load(quantization_config=config)
    samebits.decompress(model)
    assert not model.is_quantized
    assert not hasattr(model, "hf_quantizer")
    assert not hasattr(model.config, "quantization_config")
    llama.assert_same(model)
    assert model.float().dtype == torch.float32


@pytest.mark.parametrize("way", ["object", "dict"])
def test_a_plain_model_of_a_compressed_ones_config(
    way: str, llama: Reference, llama_folder: Path, tmp_path: Path
) -> None:
    """As a student has its teacher's: it is saved as what it is, and the teacher stays what it was."""
    teacher = llama.load(llama_folder)
    config = teacher.config if way == "object" else transformers.AutoConfig.from_pretrained(llama_folder)
    student = llama.model_class(config).float()
    student.save_pretrained(tmp_path / "student")
    entries = json.loads((tmp_path / "student" / "config.json").read_text())
    assert not {"quantization_config", "transformers_weights"} & entries.keys()
    again = llama.model_class.from_pretrained(tmp_path / "student")
    assert again.dtype == torch.float32
    for name, tensor in student.state_dict().items():
        assert torch.equal(again.state_dict()[name].view(torch.int32), tensor.view(torch.int32))
    teacher.save_pretrained(tmp_path / "teacher")
    llama.assert_same(llama.load(tmp_path / "teacher"))


@pytest.mark.parametrize("way", ["object", "loaded", "dict"])
def test_a_config_of_another_model(
    way: str, llama: Reference, llama_folder: Path, config: samebits.SamebitsConfig
) -> None:
    """What is loaded decides, whether its weights are packed, not the config that comes with it."""
    given = {
        "object": lambda: llama.load(quantization_config=config).config,
        "loaded": lambda: llama.load(llama_folder).config,
        "dict": lambda: transformers.AutoConfig.from_pretrained(llama_folder),
    }[way]()
    plain = llama.load(config=given)
    assert not list(packed_parameters(plain))
    assert not getattr(plain, "is_quantized", False)
    llama.assert_same(plain)
    state = plain.state_dict()
    llama.assert_same(llama.model_class.from_pretrained(None, config=given, state_dict=state))
    for each in (given, plain.config):
        packed = llama.load(llama_folder, config=each)
        llama.assert_all_packed(packed)
        llama.assert_same(packed)
    with pytest.raises(InputError, match="in no files"):
        llama.model_class.from_pretrained(None, config=given, state_dict=packed.state_dict())


def test_a_hub_that_is_not_reached_says_nothing(llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are packed must not be taken for plain ones, which would be missing."""
    config = transformers.AutoConfig.from_pretrained(llama_folder)
    token = source.loading.set(("me/it", {"config": config}))

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError("no network")

    monkeypatch.setattr(source.PreTrainedConfig, "get_config_dict", refuse)
    try:
        source.follow_source(config)
    finally:
        source.loading.reset(token)
    assert source.says_compressed(config)


def test_two_tensors_for_one_parameter(llama: Reference, tmp_path: Path) -> None:
    """The first one is taken, as of a plain checkpoint, whichever of them are packed."""
    name, folder = "model.layers.0.mlp.up_proj.weight", tmp_path / "plain"
    shutil.copytree(llama.folder, folder)
    state = load_file(folder / "model.safetensors")
    for number, other in enumerate((state[name].flip(0), torch.randint(-(2**15), 2**15, state[name].shape))):
        bits = other.to(torch.int16) if number else other.view(torch.int16)  # of which the latter do not get smaller
        save_file(state | {name.removeprefix("model."): bits.view(torch.bfloat16)}, folder / "model.safetensors")
        packed = compress_folder(folder, tmp_path / f"packed {number}")
        expected = llama.load(folder).get_parameter(name)
        assert_same_bits(expected, bits.view(torch.bfloat16))
        assert_same_bits(llama.load(packed).model.layers[0].mlp.up_proj.weight.clone(), expected)


def test_weights_of_another_shape_are_initialised(llama: Reference, llama_folder: Path, tmp_path: Path) -> None:
    """By transformers from 5.21 on; before, it takes any shape for a compressed model."""
    kind = transformers.LlamaForSequenceClassification
    kind.from_pretrained(llama.folder, num_labels=20).save_pretrained(tmp_path / "plain")
    compress_folder(tmp_path / "plain", tmp_path / "packed")

    def load(folder: str) -> Any:
        torch.manual_seed(5)
        return kind.from_pretrained(tmp_path / folder, num_labels=5, ignore_mismatched_sizes=True)

    if Version(transformers.__version__) < Version("5.21"):
        with pytest.raises(FormatError, match=r"score\.weight: shape \[20, .*\] .* \[5, .*transformers 5\.21"):
            load("packed")
    else:
        plain, packed = load("plain"), load("packed")
        assert_same_bits(plain.score.weight, packed.score.weight)
        with torch.no_grad():
            assert_same_bits(plain(llama.tokens[:1]).logits, packed(llama.tokens[:1]).logits)
    with pytest.raises(FormatError, match=r"shape .* where the model has .*ignore_mismatched_sizes=True"):
        kind.from_pretrained(tmp_path / "packed", num_labels=5)


def test_packed_weights_that_are_in_no_files(llama: Reference, llama_folder: Path) -> None:
    config, state = transformers.AutoConfig.from_pretrained(llama_folder), llama.load(llama_folder).state_dict()
    with pytest.raises(InputError, match=r"in no files cannot be loaded here; .*load_state_dict"):
        transformers.LlamaForCausalLM.from_pretrained(None, config=config, state_dict=state)


def test_names_as_transformers_has_them() -> None:
    """Of converters of one pattern the last; what no renaming leads to a parameter keeps its name if that is one."""
    converters = [WeightConverter(["a"], [target], [Concatenate()]) for target in ("b", "c")]
    model = SimpleNamespace(base_model_prefix="model", state_dict=lambda: {"layer.weight": torch.zeros(1)})
    names = Names(model, [WeightRenaming("layer.weight", "gone.weight"), *converters])
    assert names.converter("a") is converters[1]
    assert names.target("layer.weight") == ("layer.weight", None)


@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_parts_are_stacked_along_any_dimension(dim: int) -> None:
    parts = [torch.randn(3, 4) for _ in range(2)]
    converter = WeightConverter(["a"], ["b"], [MergeModulelist(dim=dim)])
    shape, places = arrange([("a", (3, 4))] * 2, converter) or ((), [])
    whole = torch.empty(shape)
    for place, part in zip(places, parts, strict=True):
        whole[place] = part
    assert torch.equal(whole, torch.stack(parts, dim))


def test_parts_that_do_not_fit_together() -> None:
    for operation in (MergeModulelist(dim=0), Concatenate(dim=0)):
        assert arrange([("a", (3, 4)), ("a", (3, 5))], WeightConverter(["a"], ["b"], [operation])) is None


@pytest.mark.parametrize("pattern", ["norm", "layers.*.norm", "*.norm"])
def test_parameters_that_are_kept_in_float32(pattern: str) -> None:
    """By patterns as shells have them."""
    model = SimpleNamespace(_get_dtype_plan=lambda dtype: {pattern: torch.float32})
    weight = torch.zeros(1, dtype=torch.bfloat16)
    assert dtype_in_model(model, "layers.0.norm.weight", weight) is torch.float32
    assert dtype_in_model(model, "layers.0.proj.weight", weight) is torch.bfloat16


class OddConfig(torch.nn.Linear):
    config = 0.5  # as a module of Idefics has it


def test_modules_with_a_config_of_their_own_kind() -> None:
    compute_as_plain(OddConfig(2, 2))
