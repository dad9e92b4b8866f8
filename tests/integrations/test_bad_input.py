"""Damaged, foreign and unfit checkpoints: one clear error, never a model with other weights."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import samebits
from samebits.errors import DigestError, DtypeError, FormatError, InputError, SamebitsError, VersionError
from tests.integrations.models import Reference, files

FILE = "samebits.safetensors"


@pytest.fixture
def shards(llama: Reference, config: samebits.SamebitsConfig, tmp_path: Path) -> Path:
    llama.load(quantization_config=config).save_pretrained(tmp_path / "shards", max_shard_size="60KB")
    return tmp_path / "shards"


def edit_config(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    edit(config)
    path.write_text(json.dumps(config))


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Rewrite the file with other tensors, and without digests of the unpacked."""
    with safe_open(folder / FILE, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    edit(tensors)
    save_file(tensors, folder / FILE, metadata={"samebits": '{"version": 1}'})


def test_missing_shard(llama: Reference, shards: Path) -> None:
    missing = sorted(shards.glob("samebits-*"))[1]
    missing.unlink()
    with pytest.raises(FormatError, match=f"the shard {missing.name} is missing"):
        llama.load(shards)


def test_missing_index(llama: Reference, shards: Path) -> None:
    (shards / "samebits.safetensors.index.json").unlink()
    with pytest.raises(FormatError, match="without their index"):
        llama.load(shards)


def test_index_without_metadata(llama: Reference, shards: Path) -> None:
    """Which transformers asks for."""
    path = shards / "samebits.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": json.loads(path.read_text())["weight_map"]}))
    with pytest.raises(FormatError, match=r"index\.json: the index has no metadata"):
        llama.load(shards)


def test_missing_weights(llama: Reference, llama_folder: Path) -> None:
    (llama_folder / FILE).unlink()
    with pytest.raises(SamebitsError, match="no safetensors files"):
        llama.load(llama_folder)


@pytest.mark.parametrize("left", [0, 7, 1000, -16, -1])
def test_truncated_file(llama: Reference, llama_folder: Path, left: int) -> None:
    path = llama_folder / FILE
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(FormatError, match=FILE):
        llama.load(llama_folder)


def test_truncated_packed_tensor(llama: Reference, llama_folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.sb_packed"
    edit_tensors(llama_folder, lambda tensors: tensors.update({name: tensors[name][:-16].clone()}))
    with pytest.raises(FormatError, match=r"model\.layers\.0\.mlp\.up_proj\.weight: \d+ bytes where the header asks"):
        llama.load(llama_folder)


@pytest.mark.parametrize("position", [20, 100, 500, -100])
def test_flipped_bit_of_a_packed_tensor(llama: Reference, llama_folder: Path, position: int) -> None:
    def flip(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.sb_packed"][position] ^= 16

    edit_tensors(llama_folder, flip)
    with pytest.raises(FormatError, match=r"lm_head\.weight"):
        llama.load(llama_folder)


def test_flipped_bit_of_another_tensor(llama: Reference, llama_folder: Path) -> None:
    path = llama_folder / FILE
    data = bytearray(path.read_bytes())
    with safe_open(path, "pt") as file:
        norm = file.get_tensor("model.norm.weight")
    position = data.index(norm.view(torch.uint8).numpy().tobytes())  # of one of the norms, which are all alike
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(DigestError, match=r"norm\.weight: the bytes differ"):
        llama.load(llama_folder)


def test_two_tensors_exchanged(llama: Reference, llama_folder: Path) -> None:
    """The same bytes under other names: their shapes tell."""

    def exchange(tensors: dict[str, torch.Tensor]) -> None:
        up, down = (f"model.layers.0.mlp.{name}_proj.sb_packed" for name in ("up", "down"))
        tensors[up], tensors[down] = tensors[down], tensors[up]

    edit_tensors(llama_folder, exchange)
    with pytest.raises(FormatError, match=r"shape \[.*\] where the model has \[.*\]"):
        llama.load(llama_folder)


def test_config_of_another_size(llama: Reference, llama_folder: Path) -> None:
    edit_config(llama_folder, lambda config: config.update(intermediate_size=128))
    with pytest.raises(FormatError, match=r"shape .* where the model has .*; these weights do not belong"):
        llama.load(llama_folder)


def test_config_of_another_size_while_compressing(
    llama: Reference, config: samebits.SamebitsConfig, tmp_path: Path
) -> None:
    folder = shutil.copytree(llama.folder, tmp_path / "plain")
    edit_config(folder, lambda config: config.update(intermediate_size=128))
    refused = FormatError if Version(transformers.__version__) < Version("5.21") else RuntimeError
    with pytest.raises(refused, match="ignore_mismatched_sizes"):
        llama.load(folder, quantization_config=config)


def test_piece_of_another_shape(references, config: samebits.SamebitsConfig, tmp_path: Path) -> None:
    mixtral = references("mixtral")
    mixtral.load(quantization_config=config).save_pretrained(tmp_path)
    edit_config(tmp_path, lambda config: config.update(num_local_experts=5))
    with pytest.raises(FormatError, match=r"shape \[4, .*\] where the model has \[5, .*\]"):
        mixtral.load(tmp_path)


def test_later_version(llama: Reference, llama_folder: Path) -> None:
    edit_config(llama_folder, lambda config: config["quantization_config"].update(version=2))
    with pytest.raises(VersionError, match="upgrade"):
        llama.load(llama_folder)


def test_unknown_key(llama: Reference, llama_folder: Path) -> None:
    edit_config(llama_folder, lambda config: config["quantization_config"].update(bits=4))
    with pytest.raises(InputError, match="unknown key 'bits'"):
        llama.load(llama_folder)


def test_config_without_entry(llama: Reference, llama_folder: Path) -> None:
    """transformers then looks for a file that is not there, as it does without samebits."""
    edit_config(llama_folder, lambda config: config.pop("quantization_config"))
    with pytest.raises(OSError, match=r"model\.safetensors"):
        llama.load(llama_folder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_compressed_folder_as_another_dtype(llama: Reference, llama_folder: Path, dtype: torch.dtype) -> None:
    with pytest.raises(DtypeError, match=f"{dtype}.*pass dtype=torch.bfloat16"):
        llama.load(llama_folder, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_checkpoint_of_another_dtype(
    llama: Reference, config: samebits.SamebitsConfig, tmp_path: Path, dtype: torch.dtype
) -> None:
    llama.load(dtype=dtype).save_pretrained(tmp_path)
    with pytest.raises(DtypeError, match=f"loaded as {dtype}.*--cast bf16.*samebits.compress"):
        llama.load(tmp_path, quantization_config=config)
    with pytest.raises(DtypeError, match=f"{dtype}.*only BF16 weights.*--cast bf16"):
        llama.load(tmp_path, quantization_config=config, dtype=torch.bfloat16)
    model = llama.load(tmp_path, dtype=torch.bfloat16)  # as the error says
    expected = {name: tensor.view(torch.int16).clone() for name, tensor in model.state_dict().items()}
    samebits.compress(model, min_weights=config.min_weights)
    model.save_pretrained(tmp_path / "packed")
    packed = llama.load(tmp_path / "packed")
    assert packed.is_quantized
    samebits.decompress(packed)
    assert packed.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor.view(torch.int16), expected[name]) for name, tensor in packed.state_dict().items())


def test_a_few_weights_of_another_dtype(llama: Reference, config: samebits.SamebitsConfig, tmp_path: Path) -> None:
    """Become BF16 as without compression."""
    folder = shutil.copytree(llama.folder, tmp_path / "plain")
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["lm_head.weight"].float()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    llama.assert_same(llama.load(folder, quantization_config=config, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    "convert", [lambda model: model.half(), lambda model: model.float(), lambda model: model.double(),
                lambda model: model.to(torch.float16), lambda model: model.to("cpu", torch.float32)]
)  # fmt: skip
def test_conversion_to_another_dtype(llama: Reference, llama_folder: Path, convert: Callable[[Any], Any]) -> None:
    model = llama.load(llama_folder)
    with pytest.raises((DtypeError, ValueError), match=r"compressed model|not supported for quantized model"):
        convert(model)
    llama.assert_same(model)  # nothing was converted
    llama.assert_same(model.to("cpu"))


def test_no_dtype_in_the_config(llama: Reference, llama_folder: Path) -> None:
    edit_config(llama_folder, lambda config: config.pop("dtype"))
    llama.assert_same(llama.load(llama_folder))


def test_stale_files_go(llama: Reference, config: samebits.SamebitsConfig, shards: Path) -> None:
    """From plain to shards to one file, and back to plain."""
    folder = shards
    llama.model.save_pretrained(folder, max_shard_size="60KB")
    llama.load(quantization_config=config).save_pretrained(folder)
    assert files(folder) == {"config.json", "generation_config.json", FILE}
    llama.assert_same(llama.load(folder))


def test_saved_into_the_folder_it_was_loaded_from(llama: Reference, llama_folder: Path) -> None:
    model = llama.load(llama_folder)
    model.save_pretrained(llama_folder, max_shard_size="60KB")
    llama.assert_same(model)
    llama.assert_same(llama.load(llama_folder))


def test_failed_save_leaves_the_folder_as_it_was(
    llama: Reference, llama_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from samebits.integrations import weight_files

    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError(28, "No space left on device")

    before = {path.name: path.read_bytes() for path in llama_folder.iterdir()}
    monkeypatch.setattr(weight_files, "save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        llama.load(llama_folder).save_pretrained(llama_folder)
    assert {path.name: path.read_bytes() for path in llama_folder.iterdir()} == before


@pytest.mark.parametrize("name", ["generation_config.json", "pytorch_model.bin"])
def test_a_folder_in_the_place_of_a_file_that_is_saved(llama: Reference, llama_folder: Path, name: str) -> None:
    model = llama.load(llama_folder)
    (llama_folder / name).unlink(missing_ok=True)
    (llama_folder / name).mkdir()
    before = (llama_folder / FILE).read_bytes()
    with pytest.raises(InputError, match="a folder is in the way; remove it"):
        model.save_pretrained(llama_folder)
    assert (llama_folder / FILE).read_bytes() == before


@pytest.mark.parametrize("option", [{"variant": "fp16"}, {"distributed_checkpoint": True}])
def test_options_of_saving_that_do_not_apply(llama: Reference, llama_folder: Path, option: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=next(iter(option))):
        llama.load(llama_folder).save_pretrained(llama_folder / "again", **option)


def test_kernel_failure_while_loading_is_reported(
    llama: Reference, config: samebits.SamebitsConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers swallows errors of its conversions; the first comes out all the same."""
    from samebits.errors import DeviceError
    from samebits.nn import convert

    def broken(tensor: torch.Tensor) -> None:
        raise DeviceError("no kernel", mend="see samebits doctor")

    monkeypatch.setattr(convert, "encode", broken)
    with pytest.raises(DeviceError, match=r"weight: no kernel; see samebits doctor"):
        llama.load(quantization_config=config)
