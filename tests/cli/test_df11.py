"""The commands on DFloat11 checkpoints."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from samebits.format.container import Checkpoint
from samebits.jobs import job
from tests.cli.conftest import Command
from tests.df11.checkpoints import MODELS, VECTORS, copy, originals, regroup, tensors_of
from tests.jobs.checkpoints import stored


@pytest.mark.parametrize("model", MODELS)
def test_decompress(samebits: Command, tmp_path: Path, model: str) -> None:
    outcome = samebits("decompress", VECTORS / model, tmp_path / "bf16")
    assert (outcome.code, outcome.err) == (0, "")
    assert stored(tmp_path / "bf16") == originals(model)
    config = json.loads((tmp_path / "bf16" / "config.json").read_text())
    expected = json.loads((VECTORS / model / "config.json").read_text())
    assert config == {key: value for key, value in expected.items() if key != "dfloat11_config"}
    assert samebits("verify", VECTORS / model, "--against", tmp_path / "bf16").code == 0


@pytest.mark.parametrize("model", MODELS)
def test_compress(samebits: Command, tmp_path: Path, model: str) -> None:
    """To samebits' own format, and from there to plain files that are found by their names."""
    report = samebits("compress", VECTORS / model, tmp_path / "packed", "--json").json
    assert report["sizes"]["ratio"] < 0.68
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "samebits"
    assert "dfloat11_config" not in config
    assert samebits("verify", tmp_path / "packed", "--against", VECTORS / model).code == 0
    assert "every digest is right" in samebits("verify", tmp_path / "packed").out
    assert samebits("decompress", tmp_path / "packed", tmp_path / "plain").code == 0
    assert stored(tmp_path / "plain") == originals(model)
    assert len(Checkpoint.open(tmp_path / "plain").entries) == len(originals(model))


def test_what_is_not_packed_is_decoded(samebits: Command, tmp_path: Path) -> None:
    samebits("compress", VECTORS / "tiny-dit", tmp_path / "packed", "--include", "*to_q*")
    checkpoint = Checkpoint.open(tmp_path / "packed")
    assert {entry.name.split(".", 2)[2] for entry in checkpoint if entry.is_packed} == {"to_q.weight"}
    assert samebits("verify", tmp_path / "packed", "--against", VECTORS / "tiny-dit").code == 0


def test_a_single_file(samebits: Command, tmp_path: Path) -> None:
    source = VECTORS / "tiny-dit" / "model.safetensors"
    assert samebits("decompress", source, tmp_path / "plain.safetensors").code == 0
    assert stored(tmp_path / "plain.safetensors") == originals("tiny-dit")
    assert samebits("compress", source, tmp_path / "packed.safetensors").code == 0
    assert samebits("verify", tmp_path / "packed.safetensors", "--against", tmp_path / "plain.safetensors").code == 0


def test_weights_of_diffusers_keep_their_name(samebits: Command, tmp_path: Path) -> None:
    folder = copy("tiny-dit", tmp_path / "df11")
    names = sorted(tensors_of(folder))
    regroup(folder, {"diffusion_pytorch_model.safetensors": names[:9], "transformer_blocks_2.safetensors": names[9:]})
    samebits("decompress", folder, tmp_path / "plain")
    found = {path.name for path in (tmp_path / "plain").iterdir() if path.name != "config.json"}
    shards = {f"diffusion_pytorch_model-0000{number}-of-00002.safetensors" for number in (1, 2)}
    assert found == shards | {"diffusion_pytorch_model.safetensors.index.json"}
    assert stored(tmp_path / "plain") == originals("tiny-dit")


def test_inspect(samebits: Command) -> None:
    report = samebits("inspect", VECTORS / "tiny-llama", "--json").json
    assert (report["layout"], report["compressed"]) == ("dfloat11", True)
    assert {tensor["name"]: tuple(tensor["shape"]) for tensor in report["tensors"]} == {
        name: shape for name, (_, shape, _) in originals("tiny-llama").items()
    }
    assert 10.8 < report["total"]["bits_per_weight"] < 11.1
    out = samebits("inspect", VECTORS / "tiny-llama").out
    assert "DFloat11 0.5.0" in out
    assert "model.layers.*.mlp.down_proj.weight" in out


def test_verify_without_the_original(samebits: Command) -> None:
    out = samebits("verify", VECTORS / "tiny-llama").out
    assert "every tensor can be read" in out
    assert "30 tensors have no digest" in out


def test_estimate(samebits: Command) -> None:
    report = samebits("estimate", VECTORS / "tiny-dit", "--exact", "--json").json
    assert report["original_bytes"] == sum(
        torch.Size(shape).numel() * 2 for _, shape, _ in originals("tiny-dit").values()
    )
    assert 10 < report["bits_per_weight"] < 10.9


def test_damage(samebits: Command, tmp_path: Path) -> None:
    folder = copy("tiny-llama", tmp_path / "df11")
    tensors = load_file(folder / "model_layers_1.safetensors")
    tensors["model.layers.1.encoded_exponent"][5000:] = 0xFF
    save_file(tensors, folder / "model_layers_1.safetensors")
    for command in (("verify", folder), ("decompress", folder, tmp_path / "a"), ("compress", folder, tmp_path / "b")):
        outcome = samebits(*command)
        assert outcome.code == 2
        assert "model.layers.1" in outcome.error
    assert not (tmp_path / "a").exists()


def test_one_bit_is_found_by_comparison(samebits: Command, tmp_path: Path) -> None:
    folder = copy("tiny-llama", tmp_path / "df11")
    tensors = load_file(folder / "lm_head.safetensors")
    tensors["lm_head.sign_mantissa"][1000] ^= 0x80
    save_file(tensors, folder / "lm_head.safetensors")
    outcome = samebits("verify", folder, "--against", VECTORS / "tiny-llama")
    assert outcome.code == 1
    assert "lm_head.weight[3, 232]" in outcome.error


def test_pickles(samebits: Command, tmp_path: Path) -> None:
    folder = copy("tiny-llama", tmp_path / "df11", version="0.1.0")
    assert "pickles" in samebits("inspect", folder).error


def test_an_interrupted_run_goes_on(
    samebits: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    calls, work = [], job.work

    def until_the_tenth(task: job.Task) -> job.Piece:
        calls.append(task.name)
        if len(calls) == 10:
            raise KeyboardInterrupt
        return work(task)

    command = ("compress", VECTORS / "tiny-llama", tmp_path / "packed", "--json", "--workers", 1)
    monkeypatch.setattr(job, "work", until_the_tenth)
    assert samebits(*command).code == 128 + signal.SIGINT
    assert samebits(*command).json["resumed_shards"] > 0
    assert samebits("verify", tmp_path / "packed", "--against", VECTORS / "tiny-llama").code == 0


def test_worker_processes(samebits: Command, tmp_path: Path) -> None:
    command = ("decompress", VECTORS / "tiny-dit", tmp_path / "plain", "--workers", 2)
    assert samebits(*command).code == 0
    assert stored(tmp_path / "plain") == originals("tiny-dit")


def test_a_model_that_cannot_be_made(samebits: Command, tmp_path: Path) -> None:
    folder = copy("tiny-llama", tmp_path / "df11")
    config = json.loads((folder / "config.json").read_text())
    changes: list[dict[str, Any]] = [{"model_type": "no such"}, {"num_hidden_layers": 10**9}, {"hidden_size": "wide"}]
    for change in changes:
        (folder / "config.json").write_text(json.dumps({**config, **change}))
        outcome = samebits("inspect", folder)
        assert outcome.code == 2
        assert "config.json" in outcome.error


def test_a_config_that_names_no_model_class(samebits: Command, tmp_path: Path) -> None:
    """Then norms tell the shapes."""
    folder = copy("tiny-llama", tmp_path / "df11")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["pipeline"]}))
    assert samebits("verify", folder, "--against", VECTORS / "tiny-llama").code == 0


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS)
def test_on_a_gpu(samebits: Command, tmp_path: Path, model: str) -> None:
    assert samebits("decompress", VECTORS / model, tmp_path / "plain", "--device", "cuda").code == 0
    assert stored(tmp_path / "plain") == originals(model)
    assert samebits("compress", VECTORS / model, tmp_path / "packed", "--device", "cuda").code == 0
    assert samebits("verify", tmp_path / "packed", "--against", VECTORS / model, "--device", "cuda").code == 0
