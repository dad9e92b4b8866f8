"""Whole diffusers pipelines: images and latents equal to the uncompressed one's, and what of them is left alone."""

from __future__ import annotations

import re
import subprocess
import sys
from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
import diffusers
from diffusers import DiffusionPipeline, PipelineQuantizationConfig
from diffusers.hooks import apply_group_offloading
from diffusers.pipelines import pipeline_loading_utils, pipeline_utils
from examples.diffusion_pipeline import tiny_pipeline

import samebits
from samebits.errors import DtypeError, InputError
from tests.fresh import run_python
from tests.integrations.diffusers_models import ARCHITECTURES, assert_same_bytes
from tests.integrations.models import MIN_WEIGHTS, files, packed_parameters

PACKED = ("transformer", "text_encoder", "text_encoder_2")
CONFIGS = {
    "by component": {"quant_mapping": dict.fromkeys(PACKED, samebits.SamebitsConfig(MIN_WEIGHTS))},
    "by name": {"quant_backend": "samebits", "quant_kwargs": {"min_weights": MIN_WEIGHTS}},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pipeline") / "plain"
    tiny_pipeline().save_pretrained(folder)
    return folder


def load(folder: Path, **options) -> DiffusionPipeline:
    pipeline = DiffusionPipeline.from_pretrained(folder, **{"dtype": torch.bfloat16, **options})
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def drawn(pipeline: DiffusionPipeline) -> torch.Tensor:
    """Latents of two steps, followed by the image."""
    options = {"height": 32, "width": 32, "num_inference_steps": 2, "max_sequence_length": 16, "output_type": "pt"}
    seen = []

    def keep(pipeline, step, time, values):
        seen.append(values["latents"])
        return values

    image = pipeline("And the earth", generator=torch.Generator().manual_seed(3), callback_on_step_end=keep, **options)
    tensors = [*seen, image.images]
    assert all(tensor.isfinite().all() and tensor.unique().numel() > 100 for tensor in tensors)
    return torch.cat([tensor.float().flatten() for tensor in tensors])


@pytest.mark.parametrize("way", CONFIGS)
def test_pipeline(plain: Path, way: str, tmp_path: Path) -> None:
    expected = drawn(load(plain))
    packed = load(plain, quantization_config=PipelineQuantizationConfig(**CONFIGS[way]))
    assert_same_bytes(drawn(packed), expected)
    packed.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert_same_bytes(drawn(again), expected)
    for name in PACKED:
        assert "samebits.safetensors" in files(tmp_path / name)
        for pipeline in (packed, again):
            assert len(list(packed_parameters(getattr(pipeline, name)))) > 10
    for pipeline in (packed, again):
        assert not list(packed_parameters(pipeline.vae))
        assert not hasattr(pipeline.vae, "hf_quantizer")
    assert "diffusion_pytorch_model.safetensors" in files(tmp_path / "vae")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One text encoder in FP16, one in FP32; the weights are of a variant."""
    pipeline = tiny_pipeline()
    pipeline.text_encoder.half()
    pipeline.text_encoder_2.float()
    folder = tmp_path_factory.mktemp("pipeline") / "mixed"
    pipeline.save_pretrained(folder, variant="fp16")
    return folder


@pytest.mark.parametrize("way", CONFIGS)
def test_parts_that_are_not_bf16(mixed: Path, way: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They stay what they are without compression, and are named; the others are packed."""
    expected = drawn(load(mixed, variant="fp16"))
    config = PipelineQuantizationConfig(**CONFIGS[way])
    packed = load(mixed, variant="fp16", quantization_config=config)
    assert_same_bytes(drawn(packed), expected)
    packed.save_pretrained(tmp_path)
    again = load(tmp_path)
    assert_same_bytes(drawn(again), expected)
    for pipeline in (packed, again):
        assert len(list(packed_parameters(pipeline.transformer))) > 10
        assert not list(packed_parameters(pipeline.text_encoder))
        assert not list(packed_parameters(pipeline.text_encoder_2))
    for name, dtype in (("text_encoder", torch.float16), ("text_encoder_2", torch.float32)):
        message = rf"^{name} of the pipeline is not compressed: .*{name}/model.fp16.*\({dtype}\): only BF16 weights"
        assert sum(bool(re.match(message, record.getMessage())) for record in caplog.records) == 1
        assert name not in config.config_mapping
    assert "transformer" in config.config_mapping


def test_a_pipeline_in_another_dtype(plain: Path) -> None:
    """Its denoiser computes in FP16 with packed weights, which text encoders do not."""
    config = PipelineQuantizationConfig(**CONFIGS["by name"])
    packed = load(plain, dtype=torch.float16, quantization_config=config)
    assert_same_bytes(drawn(packed), drawn(load(plain, dtype=torch.float16)))
    assert list(packed_parameters(packed.transformer))
    assert not list(packed_parameters(packed.text_encoder))
    assert packed.text_encoder_2.dtype == torch.float16


def test_a_compressed_part_in_another_dtype_is_refused(plain: Path, tmp_path: Path) -> None:
    config = PipelineQuantizationConfig(**CONFIGS["by name"])
    load(plain, quantization_config=config).save_pretrained(tmp_path)
    for options in ({}, {"quantization_config": config}):
        with pytest.raises(DtypeError, match=r"text_encoder(_2)?: the model is to be loaded as torch\.float16"):
            load(tmp_path, dtype=torch.float16, **options)


def test_autoencoder_by_name(plain: Path) -> None:
    """Left alone unless it is asked for."""
    config = PipelineQuantizationConfig(**CONFIGS["by name"], components_to_quantize=["vae"])
    pipeline = load(plain, quantization_config=config)
    assert list(packed_parameters(pipeline.vae))
    assert not list(packed_parameters(pipeline.transformer))
    assert_same_bytes(drawn(pipeline), drawn(load(plain)))


@pytest.mark.parametrize("part", ["transformer", "vae"])
def test_single_file_of_a_part(plain: Path, part: str) -> None:
    """What the file has is packed, but for the autoencoder: it may be converted, as pipelines do before they decode."""
    others = {name: each for name, each in load(plain).components.items() if name != part}
    options = {
        "config": str(plain),
        "dtype": torch.bfloat16,
        "quantization_config": samebits.SamebitsConfig(MIN_WEIGHTS),
    }
    file = plain / part / "diffusion_pytorch_model.safetensors"
    pipeline = diffusers.FluxPipeline.from_single_file(str(file), **others, **options)
    pipeline.set_progress_bar_config(disable=True)
    assert bool(list(packed_parameters(getattr(pipeline, part)))) == (part == "transformer")
    assert_same_bytes(drawn(pipeline), drawn(load(plain)))
    assert pipeline.vae.to(torch.float32).dtype == torch.float32


def test_compressed_transformer_in_a_plain_pipeline(plain: Path) -> None:
    config = samebits.SamebitsConfig(MIN_WEIGHTS)
    options = {"subfolder": "transformer", "dtype": torch.bfloat16, "quantization_config": config}
    transformer = diffusers.FluxTransformer2DModel.from_pretrained(plain, **options)
    assert_same_bytes(drawn(load(plain, transformer=transformer)), drawn(load(plain)))


@pytest.mark.parametrize("options", [{"variant": "fp16"}, {"safe_serialization": False}], ids=str)
def test_refused_before_a_part_is_written(plain: Path, options: dict[str, Any], tmp_path: Path) -> None:
    packed = load(plain, quantization_config=PipelineQuantizationConfig(**CONFIGS["by name"]))
    with pytest.raises(InputError, match=f"cannot be saved with {next(iter(options))}"):
        packed.save_pretrained(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()
    samebits.decompress(packed.transformer)  # the text encoders are compressed yet
    with pytest.raises(InputError, match=f"cannot be saved with {next(iter(options))}"):
        packed.save_pretrained(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["transformer", "text_encoder"])
def test_a_part_whose_weights_lie_on_disk(plain: Path, name: str, tmp_path: Path) -> None:
    packed = load(plain, quantization_config=PipelineQuantizationConfig(**CONFIGS["by name"]))
    apply_group_offloading(
        getattr(packed, name),
        torch.device("cpu"),
        offload_type="leaf_level",
        offload_to_disk_path=str(tmp_path / "disk"),
    )
    for each in (packed, getattr(packed, name)):
        with pytest.raises(InputError, match=r"group offloading .* to disk.* before enable_group_offload"):
            each.save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_made_from_another_without_a_dtype(plain: Path) -> None:
    """diffusers would convert it to float32; the error says what to pass, and nothing has changed."""
    packed = load(plain)
    samebits.compress(packed.transformer)  # which would come behind other parts
    with pytest.raises(
        DtypeError, match=r"from_pipe without a dtype converts to float32.*; pass dtype=torch\.bfloat16"
    ):
        diffusers.FluxImg2ImgPipeline.from_pipe(packed)
    assert {part.dtype for part in (packed.vae, packed.text_encoder, packed.transformer)} == {torch.bfloat16}


@pytest.mark.parametrize("how", [((torch.float32,), {}), (("cpu", torch.float16), {}), ((), {"dtype": torch.float32})])
def test_conversions_to_others(plain: Path, how: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
    """Refused before another part is converted."""
    packed = load(plain)
    samebits.compress(packed.transformer)
    with pytest.raises(DtypeError, match=r"cannot become torch\.float.*; call samebits\.decompress"):
        packed.to(*how[0], **how[1])
    assert {part.dtype for part in (packed.vae, packed.text_encoder, packed.transformer)} == {torch.bfloat16}
    assert_same_bytes(drawn(packed.to("cpu")), drawn(load(plain)))


def test_conversions_to_bf16(plain: Path) -> None:
    """Of a whole pipeline, and while another is made from it."""
    packed = load(plain, quantization_config=PipelineQuantizationConfig(**CONFIGS["by name"]))
    assert_same_bytes(drawn(packed.to("cpu", torch.bfloat16)), drawn(load(plain)))
    other = diffusers.FluxImg2ImgPipeline.from_pipe(packed, torch_dtype=torch.bfloat16)
    assert list(packed_parameters(other.transformer))


# name: pipeline class, the name of its denoiser in it, its autoencoder
KL = ("AutoencoderKL", {"block_out_channels": (16,), "latent_channels": 4, "norm_num_groups": 2, "shift_factor": 0.1})
WAN = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 1, 1, 1], "num_res_blocks": 1}
STATISTICS = {"latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
OTHERS = {
    "sd3": ("StableDiffusion3Pipeline", "transformer", KL),
    "sdxl": ("StableDiffusionXLPipeline", "unet", KL),
    "wan": ("WanPipeline", "transformer", ("AutoencoderKLWan", WAN | STATISTICS)),
    "qwen-image": ("QwenImagePipeline", "transformer", ("AutoencoderKLQwenImage", WAN | STATISTICS)),
}


def tiny(name: str) -> DiffusionPipeline:
    """A pipeline without text encoders."""
    class_name, part, (vae_name, vae_options) = OTHERS[name]
    model_name, model_options = ARCHITECTURES[name]
    torch.manual_seed(0)
    flow = diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=name == "qwen-image")
    given = {
        "scheduler": diffusers.EulerDiscreteScheduler() if name == "sdxl" else flow,
        "vae": getattr(diffusers, vae_name)(**vae_options),
        part: getattr(diffusers, model_name)(**model_options),
    }
    pipeline_class = getattr(diffusers, class_name)
    return pipeline_class(**without_texts(name) | given).to(torch.bfloat16)


def without_texts(name: str) -> dict[str, None]:
    """Components that ``tiny`` leaves out, as arguments."""
    names = signature(getattr(diffusers, OTHERS[name][0])).parameters
    return {name: None for name in names if name.startswith(("text_encoder", "tokenizer"))}


def made(name: str, pipeline: DiffusionPipeline) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    text = torch.randn(1, 8, 64, generator=generator).to(torch.bfloat16)
    options = {"prompt_embeds": text, "height": 32, "width": 32, "num_inference_steps": 2, "output_type": "pt"}
    pooled = {"pooled_prompt_embeds": text[:, 0], "negative_pooled_prompt_embeds": text[:, 1]}
    if name in ("sd3", "sdxl"):
        options |= pooled
    if name == "wan":
        options |= {"num_frames": 5}
    if name == "qwen-image":
        options |= {"prompt_embeds_mask": torch.ones(1, 8, dtype=torch.int64), "true_cfg_scale": 1.0}
    else:
        options |= {"negative_prompt_embeds": text.flip(1)}
    result = pipeline(**options, generator=generator, return_dict=False)[0]
    assert result.isfinite().all()
    assert result.unique().numel() > 100
    return result


@pytest.mark.parametrize("name", OTHERS)
def test_other_pipelines(name: str, tmp_path: Path) -> None:
    tiny(name).save_pretrained(tmp_path / "plain")
    texts = without_texts(name)
    expected = made(name, load(tmp_path / "plain", **texts))
    packed = load(tmp_path / "plain", **texts, quantization_config=PipelineQuantizationConfig(**CONFIGS["by name"]))
    assert len(list(packed_parameters(getattr(packed, OTHERS[name][1])))) > 10
    assert_same_bytes(made(name, packed), expected)
    packed.to("cpu").save_pretrained(tmp_path / "packed")
    assert_same_bytes(made(name, load(tmp_path / "packed", **texts)), expected)


def test_files_on_the_hub() -> None:
    """A compressed pipeline's weights are among what is fetched, as safetensors, and what else is there is not."""
    weights = {
        "transformer/samebits-00001-of-00002.safetensors",
        "transformer/samebits-00002-of-00002.safetensors",
        "transformer/samebits.safetensors.index.json",
        "text_encoder/samebits.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
    }
    others = {"model_index.json", "transformer/config.json", "samebits-notes.txt", "vae/other.safetensors"}
    assert pipeline_utils.variant_compatible_siblings(weights | others) == (weights, set())
    assert pipeline_loading_utils.is_safetensors_compatible(weights)
    assert not pipeline_loading_utils.is_safetensors_compatible({*weights, "unet/diffusion_pytorch_model.bin"})


def test_diffusers_before_samebits(plain: Path, tmp_path: Path) -> None:
    """Alone it stops at a compressed model, and afterwards it loads it."""
    pipeline = load(plain, quantization_config=PipelineQuantizationConfig(**CONFIGS["by name"]))
    pipeline.transformer.save_pretrained(tmp_path)
    code = """
import sys
from diffusers import FluxPipeline, FluxTransformer2DModel
try:
    FluxTransformer2DModel.from_pretrained(sys.argv[1])
except ValueError as error:
    assert "Unknown quantization type, got samebits" in str(error)
else:
    raise SystemExit("a model was made")
import samebits
model = FluxTransformer2DModel.from_pretrained(sys.argv[1])
assert model.hf_quantizer.report.packed
"""
    run_python(code, str(tmp_path))


def test_example() -> None:
    script = Path(__file__).parents[2] / "examples" / "diffusion_pipeline.py"
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("the same image, byte for byte: True\n")
