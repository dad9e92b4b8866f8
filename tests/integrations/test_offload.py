"""transformers models larger than the memory they are given: from_pretrained(..., gpu_memory=...)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import samebits
from samebits.errors import InputError
from samebits.nn.packed_module import PackedModule
from tests.df11.checkpoints import VECTORS
from tests.integrations.models import Reference, assert_same_checkpoint, compress_folder, make

NAMES = ["llama-tied", "mixtral", "gpt2"]
_DEEP = {"gpt2": {"n_layer": 5}}


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory):
    """References with enough layers for some to be streamed."""
    made: dict[str, Reference] = {}

    def get(name: str) -> Reference:
        if name not in made:
            options = _DEEP.get(name, {"num_hidden_layers": 5})
            made[name] = make(name, tmp_path_factory.mktemp(name) / "plain", **options)
        return made[name]

    return get


def streamed(model: Any) -> tuple[str, ...]:
    return vars(model)["sb_offloaded"].report.streamed


def budget(model: Any) -> int:
    """With which some layers are streamed, but not all."""
    layers = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    sizes = [sum(parameter.nbytes for parameter in layer.parameters()) for layer in layers]
    return sum(parameter.nbytes for parameter in model.parameters()) - 2 * max(sizes) + max(sizes) // 2


@pytest.mark.parametrize("name", NAMES)
def test_generates_the_same(deep, name: str, config: samebits.SamebitsConfig) -> None:
    plain: Reference = deep(name)
    model = plain.load(quantization_config=config)
    size = budget(model)
    model = plain.load(quantization_config=config, gpu_memory=size)
    assert 2 < len(streamed(model)) <= 5
    plain.assert_all_packed(model)
    plain.assert_same(model)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_compressed_folder(deep, name: str, tmp_path: Path) -> None:
    """A tensor for each expert; saved again from where the bytes are."""
    plain: Reference = deep(name)
    folder = compress_folder(plain.folder, tmp_path / "packed")
    size = budget(plain.load(folder))
    model, info = plain.load(folder, gpu_memory=size, output_loading_info=True)
    assert not info["missing_keys"]
    plain.assert_same(model)
    model.save_pretrained(tmp_path / "again")
    assert_same_checkpoint(tmp_path / "again", plain.folder)
    plain.assert_same(model)
    samebits.onload(model)
    plain.assert_same(model.dequantize())


@pytest.mark.parametrize("experts", ["eager", "batched_mm", "grouped_mm"])
def test_experts(deep, experts: str, config: samebits.SamebitsConfig) -> None:
    plain: Reference = deep("mixtral")
    size = budget(plain.load(quantization_config=config))
    model = plain.load(quantization_config=config, gpu_memory=size, experts_implementation=experts)
    expected = plain.load(experts_implementation=experts)
    with torch.inference_mode():
        assert torch.equal(model(plain.tokens).logits, expected(plain.tokens).logits)


def test_uncompressed(deep) -> None:
    """BF16 streams too."""
    plain: Reference = deep("llama-tied")
    model = plain.load(gpu_memory=budget(plain.model))
    assert streamed(model)
    assert not [module for module in model.modules() if isinstance(module, PackedModule)]
    plain.assert_same(model)


def test_static_cache(deep, config: samebits.SamebitsConfig) -> None:
    """Which transformers would compile a model for, were it not offloaded."""
    plain: Reference = deep("llama-tied")
    model = plain.load(quantization_config=config, gpu_memory=budget(plain.load(quantization_config=config)))
    assert model.hf_device_map[""] == str(model.device)
    assert {device for name, device in model.hf_device_map.items() if name} == {"cpu"}
    tokens = model.generate(
        plain.tokens, max_new_tokens=6, do_sample=False, cache_implementation="static", pad_token_id=0
    )
    assert plain.continuation is not None
    assert tokens.tolist() == plain.continuation.tolist()


def test_through_samebits_offload(deep, config: samebits.SamebitsConfig) -> None:
    plain: Reference = deep("llama-tied")
    model = plain.load(quantization_config=config)
    report = samebits.offload(model, budget(model))
    assert report.streamed == streamed(model)
    assert all(name.startswith("model.layers.") for name in report.streamed)
    plain.assert_same(model)
    for action in (model.dequantize, lambda: model.to("meta")):
        with pytest.raises(InputError, match=r"samebits\.onload"):
            action()


def test_what_cannot_be(llama: Reference, llama_folder: Path) -> None:
    with pytest.raises(InputError, match="leave device_map out"):
        llama.load(llama_folder, gpu_memory="1GiB", device_map="auto")
    with pytest.raises(InputError, match=r"needs .* at least"):
        llama.load(llama_folder, gpu_memory=1000)
    with pytest.raises(InputError, match="'much' is no size"):
        llama.load(llama_folder, gpu_memory="much")
    with pytest.raises(InputError, match="without keep_format"):
        llama.load(VECTORS / "tiny-llama", gpu_memory="1GiB", keep_format=True)
    assert llama.load(llama_folder).device.type == "cpu"


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
def test_accelerate_has_it_already(llama: Reference, llama_folder: Path, tmp_path: Path) -> None:
    layers = {"model.layers.0": "cpu", "model.layers.1": "disk"}
    others = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    model = llama.load(llama_folder, device_map=layers | others, offload_folder=tmp_path / "disk")
    with pytest.raises(InputError, match="accelerate has placed"):
        samebits.offload(model, "1GiB")
    llama.assert_same(model)
