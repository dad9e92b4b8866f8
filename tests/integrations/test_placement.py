"""Where weights come from and go to: hub caches, device maps, disk; and where pieces of merged tensors lie."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.core_model_loading import Concatenate, MergeModulelist, Transpose, WeightConverter

import samebits
from samebits.errors import InputError
from samebits.integrations.transformers.names import arrange
from tests.integrations.models import Reference, compress_folder, files

DISK = {"model.embed_tokens": "cpu", "lm_head": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
DISK |= {"model.layers.0": "cpu", "model.layers.1": "disk"}


def as_hub_cache(folder: Path, cache: Path) -> Path:
    """The folder as the files of the hub's repository me/model are kept on disk."""
    repository = cache / "models--me--model"
    revision = "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(folder, repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(revision)
    return cache


@pytest.mark.parametrize("shard_size", ["50GB", "60KB"])
def test_hub_id(llama: Reference, config: samebits.SamebitsConfig, tmp_path: Path, shard_size: str) -> None:
    llama.load(quantization_config=config).save_pretrained(tmp_path / "saved", max_shard_size=shard_size)
    cache = as_hub_cache(tmp_path / "saved", tmp_path / "cache")
    model = llama.model_class.from_pretrained("me/model", cache_dir=cache, local_files_only=True)
    llama.assert_all_packed(model)
    llama.assert_same(model)


def test_push_to_hub(llama: Reference, llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved first, then pushed by way of another save."""
    pushed: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(llama.model_class, "push_to_hub", lambda self, name, **options: pushed.append((name, options)))
    llama.load(llama_folder).save_pretrained(llama_folder / "new", push_to_hub=True, private=True)
    llama.load(llama_folder).save_pretrained(llama_folder / "new", push_to_hub=True, repo_id="me/model")
    assert pushed == [("new", {"private": True}), ("me/model", {})]
    llama.assert_same(llama.load(llama_folder / "new"))


@pytest.mark.parametrize("shard_size", ["50GB", "60KB"])
def test_subfolder(llama: Reference, config: samebits.SamebitsConfig, tmp_path: Path, shard_size: str) -> None:
    llama.load(quantization_config=config).save_pretrained(tmp_path / "part", max_shard_size=shard_size)
    llama.assert_same(llama.load(tmp_path, subfolder="part"))


def test_relative_path(llama: Reference, llama_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(llama_folder.parent)
    llama.assert_same(llama.load(Path(llama_folder.name)))


@pytest.mark.parametrize("device_map", ["auto", "cpu", {"": "cpu"}])
def test_device_map(llama: Reference, llama_folder: Path, device_map: Any) -> None:
    model = llama.load(llama_folder, device_map=device_map)
    llama.assert_all_packed(model)
    llama.assert_same(model)


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
@pytest.mark.parametrize("name", ["llama", "llama-tied", "mixtral"])
@pytest.mark.parametrize("compressed", [True, False])
def test_layers_on_disk(
    references, name: str, compressed: bool, config: samebits.SamebitsConfig, tmp_path: Path
) -> None:
    """Packed bytes are what is read from disk for each forward."""
    plain: Reference = references(name)
    options: dict[str, Any] = {"quantization_config": config}
    if compressed:
        plain.load(**options).save_pretrained(tmp_path / "saved")
        options = {"folder": tmp_path / "saved"}
    model = plain.load(**options, device_map=dict(DISK), offload_folder=tmp_path / "disk")
    on_disk = {name: parameter for name, parameter in model.named_parameters() if parameter.device.type == "meta"}
    assert "model.layers.1.self_attn.q_proj.sb_packed" in on_disk
    plain.assert_same(model)
    model.save_pretrained(tmp_path / "again")
    plain.assert_same(plain.load(tmp_path / "again"))


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded modules")
@pytest.mark.parametrize("device_map", [{"": "disk"}, "auto"], ids=str)
@pytest.mark.parametrize("compressed", [True, False])
def test_tied_weights_on_disk(
    references, device_map: Any, compressed: bool, config: samebits.SamebitsConfig, tmp_path: Path
) -> None:
    """They lie there once."""
    plain: Reference = references("llama-tied")
    options: dict[str, Any] = {"quantization_config": config}
    if compressed:
        options = {"folder": compress_folder(plain.folder, tmp_path / "packed")}
    disk, memory = tmp_path / "disk", {"cpu": 1000} if device_map == "auto" else None
    model = plain.load(**options, device_map=device_map, max_memory=memory, offload_folder=disk)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert "model.embed_tokens.sb_packed.safetensors" in files(disk)
    assert "lm_head.sb_packed.safetensors" not in files(disk)
    plain.assert_same(model)
    model.save_pretrained(tmp_path / "again")
    plain.assert_same(plain.load(tmp_path / "again"))


@pytest.mark.parametrize("compressed", [True, False])
def test_what_does_not_fit_goes_to_disk(
    references, config: samebits.SamebitsConfig, compressed: bool, tmp_path: Path
) -> None:
    """accelerate counts the packed bytes. What is on disk cannot be decompressed, and stays as it is then."""
    plain: Reference = references("llama-tied")
    options: dict[str, Any] = {"quantization_config": config}
    size = sum(parameter.nbytes for parameter in plain.load(**options).parameters())
    if compressed:
        plain.load(**options).save_pretrained(tmp_path / "saved")
        options = {"folder": tmp_path / "saved"}
    model = plain.load(
        **options, device_map="auto", max_memory={"cpu": size * 3 // 4}, offload_folder=tmp_path / "disk"
    )
    assert {"cpu", "disk"} == set(model.hf_device_map.values())
    plain.assert_same(model)
    for decompress in (model.dequantize, lambda: samebits.decompress(model)):
        with pytest.raises(InputError, match="no bytes to decode; load the model without offloading"):
            decompress()
    plain.assert_same(model)


def test_private_copy_of_mapped_bytes_is_aligned(llama: Reference, llama_folder: Path) -> None:
    model = llama.load(llama_folder)
    assert files(llama_folder) >= {"samebits.safetensors"}
    assert all(parameter.data_ptr() % 16 == 0 for parameter in model.parameters() if parameter.dtype == torch.uint8)


Parts = Sequence[tuple[str, tuple[int, ...]]]
PARTS = {"experts.*.gate.weight": (6, 8), "experts.*.up.weight": (6, 8)}


def converters() -> Iterator[tuple[Parts, Any]]:
    gate, up = PARTS
    experts = [(name, shape) for _ in range(3) for name, shape in PARTS.items()]
    yield experts, WeightConverter([gate, up], "experts.gate_up", [MergeModulelist(0), Concatenate(1)])
    yield experts, WeightConverter([up, gate], "experts.up_gate", [MergeModulelist(dim=0), Concatenate(dim=-1)])
    yield experts, WeightConverter([gate, up], "experts.gate_up", [MergeModulelist(1), Concatenate(1)])
    yield experts, WeightConverter([gate, up], "experts.gate_up", [Concatenate(0)])
    down = [("experts.*.down.weight", (8, 6))] * 5
    yield down, WeightConverter("experts.*.down.weight", "experts.down", [MergeModulelist(0)])
    qkv = [("q", (4, 8)), ("k", (2, 8)), ("v", (2, 8))]
    yield qkv, WeightConverter(["q", "k", "v"], "qkv", [Concatenate(0)])


@pytest.mark.parametrize(("parts", "converter"), list(converters()))
def test_pieces_lie_where_transformers_puts_them(parts: Parts, converter: Any) -> None:
    layout = arrange(parts, converter)
    assert layout is not None
    shape, places = layout
    tensors = [torch.randn(size) for _, size in parts]
    together = torch.full(shape, torch.nan)
    for tensor, place in zip(tensors, places, strict=True):
        together[place] = tensor
    assert torch.equal(together, convert(parts, tensors, converter))


def convert(parts: Parts, tensors: Sequence[torch.Tensor], converter: Any) -> torch.Tensor:
    for (pattern, _), tensor in zip(parts, tensors, strict=True):
        converter.add_tensor("whole", pattern, pattern, tensor)
    (result,) = converter.convert("whole").values()
    return result[0] if isinstance(result, list) else result


@pytest.mark.parametrize(
    ("parts", "operations"),
    [
        ([("a", (4, 8)), ("b", (4, 8))], [Concatenate(0), Transpose(0, 1)]),
        ([("a", (4, 8)), ("b", (5, 8))], [MergeModulelist(0), Concatenate(1), Transpose(0, 1)]),
        ([("a", (4, 8)), ("a", (5, 8)), ("b", (4, 8))], [MergeModulelist(0), Concatenate(1)]),
        ([("a", (4, 8)), ("b", (4, 9))], [Concatenate(0)]),
        ([("a", (4, 8)), ("b", (4, 8))], [MergeModulelist(0)]),
    ],
)
def test_others_are_not_cut_in_pieces(parts: Parts, operations: list[Any]) -> None:
    assert arrange(parts, WeightConverter(["a", "b"], "c", operations)) is None
