"""SamebitsConfig: what it selects, and what it refuses."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

import samebits
from samebits.errors import FormatError, InputError, VersionError
from tests.integrations.models import MIN_WEIGHTS, Reference, packed_parameters


def test_round_trip() -> None:
    config = samebits.SamebitsConfig(min_weights=10, include=["model.*"], exclude=["*.lm_head.*"])
    entry = config.to_dict()
    assert entry == {
        "quant_method": "samebits",
        "version": 1,
        "min_weights": 10,
        "include": ["model.*"],
        "exclude": ["*.lm_head.*"],
    }
    assert samebits.SamebitsConfig.from_dict(entry) == config == copy.deepcopy(config)
    assert pickle.loads(pickle.dumps(config)) == config
    assert config != samebits.SamebitsConfig()


def test_only_the_version_is_needed() -> None:
    minimal = {"quant_method": "samebits", "version": 1}
    assert samebits.SamebitsConfig.from_dict(minimal) == samebits.SamebitsConfig()


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ({"version": 2}, VersionError),
        ({"version": "1"}, FormatError),
        ({}, FormatError),
        ({"version": 1, "min_weight": 5}, InputError),
        ({"version": 1, "min_weights": "many"}, InputError),
        ({"version": 1, "min_weights": True}, InputError),
        ({"version": 1, "min_weights": 0}, InputError),
        ({"version": 1, "exclude": "lm_head*"}, InputError),
        ({"version": 1, "include": [5]}, InputError),
    ],
)
def test_bad_entries(entry: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        samebits.SamebitsConfig.from_dict(entry)


def test_unknown_arguments() -> None:
    with pytest.raises(TypeError, match="min_weight"):
        samebits.SamebitsConfig(min_weight=5)  # type: ignore[call-arg]


def test_cannot_be_changed() -> None:
    with pytest.raises(InputError, match="min_weights"):
        samebits.SamebitsConfig().min_weights = 5


def test_include_and_exclude(llama: Reference) -> None:
    config = samebits.SamebitsConfig(MIN_WEIGHTS, include=["*.mlp.*", "lm_head.*"], exclude=["*.layers.1.*"])
    model = llama.load(quantization_config=config)
    assert {name for name, _, _ in packed_parameters(model)} == {
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "lm_head.weight",
    }
    assert model.hf_quantizer.report.raw["model.embed_tokens.weight"] == "not selected"
    llama.assert_same(model)


def test_min_weights(llama: Reference) -> None:
    model = llama.load(quantization_config=samebits.SamebitsConfig())
    llama.assert_all_packed(model, min_weights=4096)
    llama.assert_same(model)


def test_saved_in_config_json(llama: Reference, config: samebits.SamebitsConfig, tmp_path: Any) -> None:
    llama.load(quantization_config=config).save_pretrained(tmp_path)
    assert llama.load(tmp_path).config.quantization_config == config


def test_report(llama: Reference, config: samebits.SamebitsConfig) -> None:
    report = llama.load(quantization_config=config).hf_quantizer.report
    words = {name: parameter.numel() for name, parameter in llama.model.named_parameters()}
    assert {name: size.words for name, size in report.packed.items()}.items() <= words.items()
    assert report.packed.keys() | report.raw.keys() == words.keys()
    assert report.raw["model.norm.weight"] == f"fewer than {MIN_WEIGHTS} weights"
    assert str(report).startswith(f"{len(report.packed)} packed with {report.bits_per_weight:.2f} bits per weight")
