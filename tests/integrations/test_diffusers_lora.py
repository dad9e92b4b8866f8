"""diffusers' own ways to LoRA on compressed models: loaded, combined and unloaded with the plain model's bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("diffusers")
from diffusers import DiffusionPipeline, FluxControlPipeline, PipelineQuantizationConfig
from examples.diffusion_pipeline import tiny_pipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file

import samebits
from samebits.errors import DtypeError, InputError
from samebits.integrations.replayed import replayed
from tests.integrations.diffusers_models import assert_same_bytes, make, output
from tests.integrations.models import MIN_WEIGHTS, packed_parameters
from tests.integrations.tape import Tapes
from tests.integrations.test_diffusers_pipeline import drawn, load

IMAGE_PARTS = ("image_encoder", "feature_extractor")  # not of a control pipeline
PARTS = ("transformer", "text_encoder")
LAYERS = {"transformer": ["to_q", "to_v", "proj_mlp", "context_embedder"], "text_encoder": ["q_proj", "v_proj", "fc1"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline, and two LoRA files for it."""
    folder = tmp_path_factory.mktemp("pipeline")
    tiny_pipeline().save_pretrained(folder / "plain")
    for seed in (1, 2):
        pipeline = load(folder / "plain")
        layers = {}
        torch.manual_seed(seed)
        for part in PARTS:
            model = getattr(pipeline, part)
            model.add_adapter(LoraConfig(r=4, target_modules=LAYERS[part], init_lora_weights=False))
            layers[f"{part}_lora_layers"] = get_peft_model_state_dict(model)
        pipeline.save_lora_weights(folder / f"lora-{seed}", **layers)
    return folder


def pair(folder: Path, device: str = "cpu") -> tuple[DiffusionPipeline, DiffusionPipeline]:
    config = PipelineQuantizationConfig(quant_backend="samebits", quant_kwargs={"min_weights": MIN_WEIGHTS})
    return load(folder / "plain").to(device), load(folder / "plain", quantization_config=config).to(device)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_load_lora_weights(device: str, folder: Path) -> None:
    plain, packed = pair(folder, device)
    names = {part: {name for name, _, _ in packed_parameters(getattr(packed, part))} for part in PARTS}
    seen = [drawn(plain)]
    assert_same_bytes(drawn(packed), seen[0])
    for pipeline in (plain, packed):
        pipeline.load_lora_weights(folder / "lora-1", adapter_name="one")
    seen.append(drawn(plain))
    assert_same_bytes(drawn(packed), seen[-1])
    for pipeline in (plain, packed):
        pipeline.load_lora_weights(folder / "lora-2", adapter_name="two")
        pipeline.set_adapters(["one", "two"], [0.5, -0.25])
    seen.append(drawn(plain))
    assert_same_bytes(drawn(packed), seen[-1])
    for part in PARTS:
        found = {name.replace(".base_layer", "") for name, _, _ in packed_parameters(getattr(packed, part))}
        assert found == names[part]
    packed.unload_lora_weights()
    assert_same_bytes(drawn(packed), seen[0])
    assert len({tuple(tensor.tolist()) for tensor in seen}) == 3


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_adapters_of_steps_that_are_replayed(device: str, folder: Path) -> None:
    """Loaded, scaled and unloaded between images, inside of samebits.cuda_graphs."""
    changes = [
        lambda pipeline: None,
        lambda pipeline: pipeline.load_lora_weights(folder / "lora-1", adapter_name="one"),
        lambda pipeline: pipeline.set_adapters(["one"], [0.5]),
        lambda pipeline: pipeline.load_lora_weights(folder / "lora-2", adapter_name="two"),
        lambda pipeline: pipeline.set_adapters(["one", "two"], [0.5, -0.25]),
        lambda pipeline: pipeline.unload_lora_weights(),
    ]
    plain, packed = pair(folder, device)
    capture = Tapes()
    replays = replayed(packed.transformer, capture) if device == "cpu" else samebits.cuda_graphs(packed.transformer)
    with replays:
        for change in changes:
            for pipeline in (plain, packed):
                change(pipeline)
            for _ in range(2):
                assert_same_bytes(drawn(packed), drawn(plain))
        stands_for = vars(packed.transformer)["forward"]
    assert stands_for.count == 3 * len(changes)  # of four steps each, but for the first of them
    assert capture.captures == (len(changes) if device == "cpu" else 0)


def control_lora(folder: Path) -> dict[str, torch.Tensor]:
    """A LoRA for a transformer that takes a picture beside the latents: its first layer is wider."""
    transformer = load(folder / "plain").transformer
    transformer.x_embedder = torch.nn.Linear(32, transformer.x_embedder.out_features).to(torch.bfloat16)
    torch.manual_seed(0)
    targets = ["x_embedder", "to_q", "context_embedder"]
    transformer.add_adapter(LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    return {f"transformer.{name}": tensor for name, tensor in get_peft_model_state_dict(transformer).items()}


def test_control_lora(folder: Path) -> None:
    """The layer that diffusers makes wider for it is packed again once it is unloaded."""
    plain, packed = pair(folder)
    expected, names = drawn(plain), {name for name, _, _ in packed_parameters(packed.transformer)}
    layers = control_lora(folder)
    assert "x_embedder.weight" in names
    for _ in range(2):
        states = []
        for pipeline in (plain, packed):
            parts = {name: part for name, part in pipeline.components.items() if name not in IMAGE_PARTS}
            control = FluxControlPipeline(**parts)
            control.load_lora_weights(dict(layers))
            assert pipeline.transformer.x_embedder.in_features == 32
            states.append(pipeline.transformer.x_embedder.base_layer.weight)
            control.unload_lora_weights(reset_to_overwritten_params=True)
            assert pipeline.transformer.config.in_channels == 16
            assert_same_bytes(drawn(pipeline), expected)
        assert_same_bytes(*states)
        assert {name for name, _, _ in packed_parameters(packed.transformer)} == names


FUSES = {
    "pipeline": lambda pipeline: pipeline.fuse_lora(["transformer", "text_encoder"], lora_scale=0.5),
    "model": lambda pipeline: pipeline.transformer.fuse_lora(0.5),
}


@pytest.mark.parametrize("by", FUSES)
def test_fusing_is_refused(by: str, folder: Path) -> None:
    """Before anything has changed, also in what is plain and comes first."""
    plain, packed = pair(folder)
    for pipeline in (plain, packed):
        pipeline.load_lora_weights(folder / "lora-1")
    samebits.decompress(packed.transformer if by == "pipeline" else packed.transformer.context_embedder)
    expected = drawn(packed)
    with pytest.raises(InputError, match=r"an adapter cannot be merged.*samebits\.decompress"):
        FUSES[by](packed)
    assert_same_bytes(drawn(packed), expected)
    for part in PARTS:
        samebits.decompress(getattr(packed, part))
    for pipeline in (plain, packed):
        FUSES[by](pipeline)
    assert_same_bytes(drawn(packed), drawn(plain))


@pytest.mark.parametrize("name", ["sd3", "wan", "qwen-image", "hidream", "sdxl"])
def test_adapters_of_other_models(name: str, config: samebits.SamebitsConfig, tmp_path: Path) -> None:
    """By the transformer's own load_lora_adapter, and back out of it; SDXL's convolutions too."""
    reference = make(name, tmp_path / "plain")
    model = reference.load()
    torch.manual_seed(1)
    model.add_adapter(
        LoraConfig(r=4, target_modules=["to_q", "to_v", "conv1", "proj_out", "linear"], init_lora_weights=False)
    )
    model.save_lora_adapter(tmp_path / "lora")
    expected = output(name, model)
    packed = reference.load(quantization_config=config)
    packed.load_lora_adapter(tmp_path / "lora", prefix=None, use_safetensors=True)
    assert_same_bytes(output(name, packed), expected)
    assert not torch.equal(expected, reference.output)
    packed.unload_lora()
    reference.assert_same(packed)


@pytest.mark.parametrize("name", ["flux", "sdxl"])
def test_an_adapter_is_saved(name: str, config: samebits.SamebitsConfig, tmp_path: Path) -> None:
    """By the model itself, and loaded again; only what converts all weights first is refused."""
    reference, file, found = make(name, tmp_path / "plain"), "lora.safetensors", []
    models = reference.load(), reference.load(quantization_config=config)
    for model in models:
        torch.manual_seed(1)
        model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False))
        model.save_lora_adapter(tmp_path, weight_name=file)
        with safe_open(tmp_path / file, "pt") as saved:
            described = {key: json.loads(text) for key, text in saved.metadata().items() if key != "format"}
        found.append((load_file(tmp_path / file), described, output(name, model)))
    assert found[1][1] == found[0][1]
    assert found[1][0].keys() == found[0][0].keys()
    for key, tensor in found[0][0].items():
        assert_same_bytes(found[1][0][key], tensor)
    packed = models[1]
    with pytest.raises(DtypeError, match=r"cannot become torch\.float32"):
        packed.save_lora_adapter(tmp_path, upcast_before_saving=True)
    packed.unload_lora()
    reference.assert_same(packed)
    packed.load_lora_adapter(tmp_path, prefix=None, weight_name=file)
    assert_same_bytes(output(name, packed), found[0][2])
