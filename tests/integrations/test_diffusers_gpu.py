"""Compressed diffusers models on a GPU: loaded there, compressed there, moved there, offloaded from there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import samebits
from tests.integrations.models import MIN_WEIGHTS, compress_folder, packed_parameters

pytest.importorskip("diffusers")
from diffusers import PipelineQuantizationConfig
from examples.diffusion_pipeline import tiny_pipeline

from tests.integrations import diffusers_models
from tests.integrations.diffusers_models import ARCHITECTURES, Reference, assert_same_bytes, eligible, make
from tests.integrations.test_diffusers_pipeline import drawn, load

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=ARCHITECTURES)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make(request.param, tmp_path_factory.mktemp(request.param))


def assert_same_on_gpu(reference: Reference, model: Any) -> None:
    assert {name for name, _, _ in packed_parameters(model)} == set(eligible(reference.model))
    expected = diffusers_models.output(reference.name, reference.load(device_map="cuda"), "cuda")
    assert_same_bytes(diffusers_models.output(reference.name, model, "cuda"), expected)


def test_compressed_on_the_gpu_while_loading(reference: Reference, config: samebits.SamebitsConfig) -> None:
    model = reference.load(quantization_config=config, device_map="cuda")
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    assert_same_on_gpu(reference, model)


def test_compressed_folder_loaded_to_the_gpu(reference: Reference, tmp_path: Path) -> None:
    model = reference.load(compress_folder(reference.folder, tmp_path), device_map="cuda")
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    assert_same_on_gpu(reference, model)


def test_moved(reference: Reference, config: samebits.SamebitsConfig) -> None:
    model = reference.load(quantization_config=config)
    assert_same_on_gpu(reference, model.to("cuda"))
    reference.assert_same(model.to("cpu"))


def test_offloaded_to_the_cpu(reference: Reference, config: samebits.SamebitsConfig) -> None:
    """What a pipeline's enable_sequential_cpu_offload does to its models."""
    from accelerate import cpu_offload

    model = reference.load(quantization_config=config)
    cpu_offload(model, torch.device("cuda"))
    assert_same_on_gpu(reference, model)


def test_pipeline(tmp_path: Path) -> None:
    tiny_pipeline().save_pretrained(tmp_path)
    config = PipelineQuantizationConfig(quant_backend="samebits", quant_kwargs={"min_weights": MIN_WEIGHTS})
    expected = drawn(load(tmp_path).to("cuda"))
    assert_same_bytes(drawn(load(tmp_path, quantization_config=config).to("cuda")), expected)
    for offload in ("enable_model_cpu_offload", "enable_sequential_cpu_offload"):
        pipeline = load(tmp_path, quantization_config=config)
        getattr(pipeline, offload)()
        assert_same_bytes(drawn(pipeline), expected)
