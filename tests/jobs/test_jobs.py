"""compress and decompress: whole checkpoints there and back."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import DryRunFileInfo
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from samebits.df11.checkpoint import open_checkpoint
from samebits.digest import digest
from samebits.errors import DeviceError, DigestError, DtypeError, FormatError, InputError, SamebitsError
from samebits.format.container import Checkpoint, Entry
from samebits.format.safetensors_file import SafetensorsFile
from samebits.jobs.compress import Compression
from samebits.jobs.decompress import Decompression
from samebits.jobs.device import resolve_device
from samebits.jobs.hub import HubFolder, resolve_source
from samebits.jobs.job import JobReport
from samebits.jobs.options import CompressOptions, RunOptions
from samebits.jobs.source import other_files
from samebits.jobs.summary import kind_of
from samebits.jobs.workers import MAX_WORKERS, worker_count
from samebits.verify import verify_against, verify_digests
from tests.df11.checkpoints import copy
from tests.jobs.checkpoints import (
    CONFIG,
    files_of,
    random_words,
    shards,
    stored,
    tensors,
    weights,
    write_file,
    write_folder,
)

ELIGIBLE = {name for name, t in tensors().items() if t.dtype == torch.bfloat16 and t.numel() >= 4096}
GAINS = ELIGIBLE - {"model.layers.0.random"}


def compress(source: Path, destination: Path, options: CompressOptions | None = None, **run: Any) -> JobReport:
    return Compression(Checkpoint.open(source), destination, options, RunOptions(device="cpu", **run)).run()


def decompress(source: Path, destination: Path, **run: Any) -> JobReport:
    return Decompression(Checkpoint.open(source), destination, RunOptions(device="cpu", **run)).run()


def packed_names(path: Path) -> set[str]:
    return {entry.name for entry in Checkpoint.open(path) if entry.is_packed}


def in_planes(entry: Entry) -> int:
    """Where in its file a byte lies that is a word's own: in the planes of a packed tensor, anywhere in another."""
    return entry.spec.start + (entry.header.sections["planes"].start + 500 if entry.header else 5)


@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_a_folder_comes_back_byte_for_byte(tmp_path: Path, sharded: bool, config: bool) -> None:
    source = write_folder(tmp_path / "source", sharded=sharded, config=config)
    compress(source, tmp_path / "packed")
    decompress(tmp_path / "packed", tmp_path / "back")
    expected = files_of(source)
    del expected["pytorch_model.bin"]
    assert files_of(tmp_path / "back") == expected


@pytest.mark.clause("7.1", "7.2", "7.4")
def test_what_a_compressed_folder_holds(tmp_path: Path) -> None:
    report = compress(write_folder(tmp_path / "source"), tmp_path / "packed")
    names = [f"samebits-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    others = ["config.json", "extra/notes.txt", "samebits.safetensors.index.json", "tokenizer.json"]
    assert sorted(files_of(tmp_path / "packed")) == sorted(names + others)
    assert packed_names(tmp_path / "packed") == GAINS
    assert (report.not_gained, report.skipped_files) == (["model.layers.0.random"], ["pytorch_model.bin"])
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    quantization = config.pop("quantization_config")
    assert config == CONFIG
    assert (quantization["quant_method"], quantization["version"]) == ("samebits", 1)
    index = json.loads((tmp_path / "packed" / "samebits.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == report.sizes.stored_bytes
    assert set(index["weight_map"].values()) == set(names)


@pytest.mark.clause("7.3")
def test_digests_of_unchanged_tensors_are_recorded(tmp_path: Path) -> None:
    compress(write_file(tmp_path / "a.safetensors"), tmp_path / "b.safetensors")
    for entry in Checkpoint.open(tmp_path / "b.safetensors"):
        original = tensors()[entry.name].reshape(-1).view(torch.uint8)
        assert entry.digest == digest(original), entry.name
    assert SafetensorsFile.open(tmp_path / "b.safetensors").metadata["format"] == "pt"


@pytest.mark.clause("7.5")
def test_report_counts_what_is_on_disk(tmp_path: Path) -> None:
    report = compress(write_file(tmp_path / "a.safetensors"), tmp_path / "b.safetensors")
    packed = [entry for entry in Checkpoint.open(tmp_path / "b.safetensors") if entry.is_packed]
    assert report.sizes.packed_bytes == sum(entry.nbytes for entry in packed)
    assert report.sizes.original_bytes == sum(tensor.nbytes for tensor in tensors().values())
    assert report.sizes.packed_weights == sum(tensors()[name].numel() for name in GAINS)
    assert all(entry.nbytes < entry.original_nbytes for entry in packed)


@pytest.mark.parametrize("suffix", [".safetensors", ".sft"])
def test_a_single_file_comes_back_byte_for_byte(suffix: str, tmp_path: Path) -> None:
    source, packed, back = tmp_path / f"a{suffix}", tmp_path / "new" / f"b{suffix}", tmp_path / f"c{suffix}"
    write_file(source)
    compress(source, packed)
    assert packed_names(packed) == GAINS
    decompress(packed, back)
    assert back.read_bytes() == source.read_bytes()
    assert {path.name for path in packed.parent.iterdir()} == {packed.name}


def test_files_of_folders_have_the_usual_names(tmp_path: Path) -> None:
    """Loaders look for no others, whatever a file was called when it was a model alone."""
    source = write_file(tmp_path / "a.sft")
    compress(source, tmp_path / "b.sft")
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "b.sft").rename(folder / "samebits.safetensors")
    decompress(folder, tmp_path / "plain")
    assert (tmp_path / "plain" / "model.safetensors").read_bytes() == source.read_bytes()


def test_packed_tensors_lie_aligned_and_the_file_is_the_same_for_any_number_of_workers(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source")
    compress(source, tmp_path / "one", workers=1)
    compress(source, tmp_path / "two", workers=2)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    for entry in Checkpoint.open(tmp_path / "one"):
        assert entry.spec.start % (16 if entry.is_packed else entry.nbytes // max(1, entry.words) or 1) == 0


def test_what_is_not_packed_lies_aligned(tmp_path: Path) -> None:
    """Also where the shorter numbers came first in the original, which other writers than safetensors' may do."""
    header = (
        b'{"a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},'
        b' "b": {"dtype": "F32", "shape": [5], "data_offsets": [3, 23]}}'
    )
    (tmp_path / "plain.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(range(23)))
    compress(tmp_path / "plain.safetensors", tmp_path / "packed.safetensors")
    assert Checkpoint.open(tmp_path / "packed.safetensors").entries["b"].spec.start % 4 == 0
    assert stored(tmp_path / "packed.safetensors") == stored(tmp_path / "plain.safetensors")


def test_tensors_of_more_dimensions_than_the_format_has(tmp_path: Path) -> None:
    shape = (2,) * 8 + (64, 64)
    tensor = weights(256, 64 * 64).reshape(shape)
    save_file({"deep": tensor, "wide": weights(64, 64)}, tmp_path / "source.safetensors")
    report = compress(tmp_path / "source.safetensors", tmp_path / "packed.safetensors")
    assert packed_names(tmp_path / "packed.safetensors") == {"wide"}
    assert report.not_gained == []


def test_no_more_workers_than_there_is_work_for() -> None:
    assert worker_count(100_000, tasks=3, nbytes=1) == 3
    assert worker_count(100_000, tasks=0, nbytes=0) == 1
    assert worker_count(100_000, tasks=100_000, nbytes=1) < 10_000
    assert worker_count(2, tasks=3, nbytes=1) == 2
    assert worker_count(None, tasks=3, nbytes=1) == 1


def test_as_many_workers_as_the_work_is_worth(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no number is asked for; and no more than there are threads for, nor very many."""
    monkeypatch.setattr("samebits.jobs.workers.threads", lambda: 6)
    assert [worker_count(None, tasks=100, nbytes=gigabytes << 30) for gigabytes in (1, 2, 50)] == [2, 4, 6]
    monkeypatch.setattr("samebits.jobs.workers.threads", lambda: 100)
    assert worker_count(None, tasks=100, nbytes=50 << 30) == MAX_WORKERS


@pytest.mark.parametrize("missing", ["cuda", "cuda.core", None])
def test_a_gpu_without_what_builds_kernels_is_not_chosen(missing: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("samebits.jobs.device.find_spec", lambda name: name != missing)
    found = [resolve_device(device) for device in ("auto", "cpu", "cuda")]
    assert found == ["cpu" if missing else "cuda", "cpu", "cuda"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == "cpu"
    with pytest.raises(DeviceError, match="no CUDA device is available"):
        resolve_device("cuda")


@pytest.mark.parametrize(
    ("run", "message"), [({"workers": 0}, "0 workers"), ({"device": "tpu"}, "unknown device 'tpu'")]
)
def test_how_no_job_runs(run: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        RunOptions(**run)


def test_kinds_of_tensors() -> None:
    """Every number that is a part of a name by itself is left out."""
    assert kind_of("model.layers.10.mlp.experts.3.w1.weight") == "model.layers.*.mlp.experts.*.w1.weight"
    assert kind_of("block1.conv2.weight") == "block1.conv2.weight"


def test_decompress_reports_what_compress_did(tmp_path: Path) -> None:
    compressed = compress(write_folder(tmp_path / "source"), tmp_path / "packed")
    assert decompress(tmp_path / "packed", tmp_path / "back").sizes == compressed.sizes


def test_decompress_with_several_workers(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source")
    compress(source, tmp_path / "packed")
    decompress(tmp_path / "packed", tmp_path / "back", workers=2)
    assert stored(tmp_path / "back") == stored(source)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (CompressOptions(min_weights=20000), {"model.embed_tokens.weight", "lm_head.weight"}),
        (CompressOptions(min_weights=6000), GAINS - {"model.layers.0.odd"}),
        (CompressOptions(include=("*q_proj*", "lm_*")), {"model.layers.0.q_proj.weight", "lm_head.weight"}),
        (CompressOptions(exclude=("model.*",)), {"lm_head.weight"}),
        (
            CompressOptions(include=("*.weight",), exclude=("*embed*", "lm_head.weight")),
            {"model.layers.0.q_proj.weight"},
        ),
    ],
)
def test_which_tensors_are_packed(tmp_path: Path, options: CompressOptions, expected: set[str]) -> None:
    source = write_file(tmp_path / "a.safetensors")
    compress(source, tmp_path / "b.safetensors", options)
    assert packed_names(tmp_path / "b.safetensors") == expected
    assert verify_against(Checkpoint.open(tmp_path / "b.safetensors"), Checkpoint.open(source)).identical


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_refused_unless_cast(tmp_path: Path, dtype: torch.dtype) -> None:
    content = {name: tensor.to(dtype) for name, tensor in shards()[0].items()}
    folder = write_folder(tmp_path / "source", sharded=False)
    write_file(folder / "model.safetensors", content)
    config = {"dtype": str(dtype).removeprefix("torch."), "text_config": {"torch_dtype": "float32"}, "size": 3}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DtypeError, match=r"--cast bf16"):
        compress(folder, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()
    compress(folder, tmp_path / "packed", CompressOptions(cast=True))
    decompress(tmp_path / "packed", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(
        torch.equal(back[name].view(torch.int16), content[name].to(torch.bfloat16).view(torch.int16))
        for name in content
    )
    changed = json.loads((tmp_path / "back" / "config.json").read_text())
    assert changed == {"dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16"}, "size": 3}


def test_a_configuration_says_how_tensors_were_chosen(tmp_path: Path) -> None:
    options = CompressOptions(min_weights=20000, include=("*.weight",), exclude=("lm_*", "*norm*"))
    compress(write_folder(tmp_path / "source"), tmp_path / "packed", options)
    found = json.loads((tmp_path / "packed" / "config.json").read_text())["quantization_config"]
    assert found == {
        "quant_method": "samebits", "version": 1, "min_weights": 20000, "include": ["*.weight"],
        "exclude": ["lm_*", "*norm*"],
    }  # fmt: skip


def test_a_configuration_of_another_dtype_stays_so_unless_that_is_cast(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source")
    (source / "config.json").write_text(json.dumps({"torch_dtype": "float32"}, indent=2) + "\n")
    compress(source, tmp_path / "packed")
    assert json.loads((tmp_path / "packed" / "config.json").read_text())["torch_dtype"] == "float32"
    decompress(tmp_path / "packed", tmp_path / "back")
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()


def test_cast_with_a_deep_configuration(tmp_path: Path) -> None:
    source, depth = write_folder(tmp_path / "source", sharded=False), 800
    config = '{"dtype": "float32", "a": ' * depth + "1" + "}" * depth
    (source / "config.json").write_text(config)
    compress(source, tmp_path / "packed", CompressOptions(cast=True))
    written = (tmp_path / "packed" / "config.json").read_text()
    assert written.count('"dtype": "bfloat16"') == depth


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_bf16_in_disguise(tmp_path: Path, dtype: torch.dtype) -> None:
    """All values are BF16's, also zeros with a sign, infinities and what is subnormal in FP16."""
    content = {name: tensor.to(torch.float16).to(dtype) for name, tensor in shards()[0].items()}
    content["edges"] = torch.tensor([-0.0, 0.0, float("inf"), float("-inf"), 2**-24, -3 * 2**-24, 65280.0], dtype=dtype)
    source = write_file(tmp_path / "a.safetensors", content)
    with pytest.raises(DtypeError, match=r"BF16 has all their values; add --cast bf16 .* changes no value"):
        compress(source, tmp_path / "b.safetensors")
    compress(source, tmp_path / "b.safetensors", CompressOptions(cast=True))
    decompress(tmp_path / "b.safetensors", tmp_path / "c.safetensors")
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    for name, tensor in load_file(tmp_path / "c.safetensors").items():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor.to(dtype).view(words), content[name].view(words)), name
    content["edges"][-1] = 1 + 2**-10
    write_file(source, content)
    with pytest.raises(DtypeError, match=r"a\.safetensors: edges: .*--cast bf16 .* loses bits"):
        compress(source, tmp_path / "d.safetensors")
    with pytest.raises(DtypeError, match="changes no value"):
        compress(source, tmp_path / "d.safetensors", CompressOptions(exclude=("edges",)))


def test_a_cast_tensor_that_does_not_gain_is_stored_cast(tmp_path: Path) -> None:
    finite = random_words(8192).nan_to_num()
    save_file({"a": weights(64, 64).float(), "b": finite.float()}, tmp_path / "a.safetensors")
    report = compress(tmp_path / "a.safetensors", tmp_path / "b.safetensors", CompressOptions(cast=True))
    assert report.not_gained == ["b"]
    assert torch.equal(load_file(tmp_path / "b.safetensors")["b"].view(torch.int16), finite.view(torch.int16))


def test_a_few_fp32_tensors_beside_bf16_are_stored_unchanged(tmp_path: Path) -> None:
    save_file({"a": weights(128, 128), "router": torch.randn(64, 64)}, tmp_path / "a.safetensors")
    compress(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert packed_names(tmp_path / "b.safetensors") == {"a"}
    assert stored(tmp_path / "b.safetensors")["router"] == stored(tmp_path / "a.safetensors")["router"]


def test_a_checkpoint_in_which_nothing_is_large_enough(tmp_path: Path) -> None:
    save_file({"a.weight": weights(8, 8)}, tmp_path / "a.safetensors")
    report = compress(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert report.sizes.packed_tensors == 0
    decompress(tmp_path / "b.safetensors", tmp_path / "c.safetensors")
    assert stored(tmp_path / "c.safetensors") == stored(tmp_path / "a.safetensors")


def test_an_empty_checkpoint(tmp_path: Path) -> None:
    save_file({}, tmp_path / "a.safetensors")
    compress(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
    assert len(Checkpoint.open(tmp_path / "b.safetensors").entries) == 0


def test_what_compress_refuses(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source")
    compress(source, tmp_path / "packed")
    single = write_file(tmp_path / "a.safetensors")
    save_file({"x.sb_packed": weights(64, 64)}, tmp_path / "reserved.safetensors")
    cases: list[tuple[Path, Path, CompressOptions | None, type[SamebitsError], str]] = [
        (tmp_path / "packed", tmp_path / "b", None, InputError, "already compressed"),
        (source, source, None, InputError, "overlap"),
        (source, source / "inside", None, InputError, "overlap"),
        (source, tmp_path, None, InputError, "overlap"),
        (single, single, None, InputError, "overlap"),
        (single, tmp_path / "folder", None, InputError, "ends in .safetensors"),
        (source, tmp_path / "b.safetensors", None, InputError, "no name for a folder"),
        (single, tmp_path / "packed", None, InputError, "not a safetensors file name"),
        (source, single, None, InputError, "a file is in the way"),
        (source, tmp_path / "packed", None, InputError, "the folder is not empty"),
        (source, tmp_path / "b", CompressOptions(include=("x*",)), InputError, "no tensor's name matches --include"),
        (tmp_path / "reserved.safetensors", tmp_path / "b.safetensors", None, FormatError, "not as one-dimensional U8"),
    ]  # fmt: skip
    before = files_of(tmp_path)
    for origin, target, options, error, message in cases:
        with pytest.raises(error, match=message):
            compress(origin, target, options)
        assert files_of(tmp_path) == before, message


@pytest.mark.parametrize("name", ["x.sb_packed", "x.sb_bare"])
def test_names_reserved_for_packed_tensors_beside_units_of_dfloat11(tmp_path: Path, name: str) -> None:
    source = copy("tiny-dit", tmp_path / "source")
    save_file({name: torch.zeros(4, dtype=torch.uint8)}, source / "more.safetensors")
    with pytest.raises(FormatError, match=f"more.safetensors: {name}: a name reserved for packed tensors"):
        Compression(open_checkpoint(source), tmp_path / "packed", run=RunOptions(device="cpu"))


def test_places_that_a_link_or_a_name_hides(tmp_path: Path) -> None:
    """A folder that is called like a file is a folder, and what lies behind a link is where that leads."""
    source, single = write_folder(tmp_path / "source"), write_file(tmp_path / "a.safetensors")
    folder, link = tmp_path / "folder.safetensors", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(source)
    with pytest.raises(InputError, match="not a safetensors file name"):
        compress(single, folder, overwrite=True)
    with pytest.raises(InputError, match="source and destination overlap"):
        compress(source, link / "inside")
    compress(source, folder)
    assert packed_names(folder) == GAINS


@pytest.mark.parametrize("entry", [{"quant_method": "gptq"}, "gptq"])
def test_a_model_quantized_otherwise_is_refused(tmp_path: Path, entry: object) -> None:
    source = write_folder(tmp_path / "source")
    (source / "config.json").write_text(json.dumps({"quantization_config": entry}))
    with pytest.raises(InputError, match=r"config.json: the model is quantized already \(gptq\)"):
        compress(source, tmp_path / "packed")


def test_decompress_refuses_what_is_plain(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="not compressed"):
        decompress(write_folder(tmp_path / "source"), tmp_path / "back")


def test_overwrite_replaces_weights_and_nothing_else(tmp_path: Path) -> None:
    destination = write_folder(tmp_path / "packed")
    (destination / "mine.txt").write_text("mine")
    compress(write_folder(tmp_path / "source", sharded=False), destination, overwrite=True)
    assert sorted(path.name for path in destination.glob("*.safetensors*")) == ["samebits.safetensors"]
    assert (destination / "mine.txt").read_text() == "mine"
    assert packed_names(destination) == GAINS
    compress(tmp_path / "source", tmp_path / "again", overwrite=True)
    single = write_file(tmp_path / "a.safetensors")
    write_file(tmp_path / "b.safetensors", shards()[2])
    compress(single, tmp_path / "b.safetensors", overwrite=True)
    assert packed_names(tmp_path / "b.safetensors") == GAINS


def test_a_damaged_unit_of_dfloat11_is_named_once(tmp_path: Path) -> None:
    folder = copy("tiny-llama", tmp_path / "df11")
    unit = folder / "lm_head.safetensors"
    tensors = load_file(unit)
    tensors["lm_head.encoded_exponent"][5000:20000] = 0xFF
    save_file(tensors, unit)
    with pytest.raises(FormatError) as caught:
        Compression(open_checkpoint(folder), tmp_path / "packed", run=RunOptions(device="cpu")).run()
    assert caught.value.where == f"{unit}: lm_head"
    assert not (tmp_path / "packed").exists()


def test_a_damaged_tensor_is_never_written(tmp_path: Path) -> None:
    compress(write_folder(tmp_path / "source"), tmp_path / "packed")
    for name in ("lm_head.weight", "model.norm.weight"):
        entry = Checkpoint.open(tmp_path / "packed").entries[name]
        data = bytearray(entry.file.path.read_bytes())
        data[in_planes(entry)] ^= 4
        damaged = tmp_path / f"{name}.safetensors"
        damaged.write_bytes(data)
        with pytest.raises(DigestError, match=name):
            decompress(damaged, tmp_path / "back.safetensors")
        assert not (tmp_path / "back.safetensors").exists()
        assert not list(tmp_path.glob(".*"))


def test_files_without_a_recorded_name_get_the_usual_ones(tmp_path: Path) -> None:
    compress(write_folder(tmp_path / "source"), tmp_path / "packed")
    for path in (tmp_path / "packed").glob("*.safetensors"):
        save_file(load_file(path), path)
    decompress(tmp_path / "packed", tmp_path / "back")
    assert stored(tmp_path / "back") == stored(tmp_path / "source")
    assert Checkpoint.open(tmp_path / "back").files[0].path.name == "model-00001-of-00003.safetensors"
    assert verify_digests(Checkpoint.open(tmp_path / "packed")).unchecked == len(tensors()) - len(GAINS)


def test_files_that_had_the_same_name_get_the_usual_ones(tmp_path: Path) -> None:
    """As where they come from folders of their own: none takes the other's place."""
    (tmp_path / "packed").mkdir()
    for number, shard in enumerate(shards()[1:], 1):
        write_file(tmp_path / "model.safetensors", shard)
        compress(tmp_path / "model.safetensors", tmp_path / "packed" / f"samebits-{number:05}-of-00002.safetensors")
    decompress(tmp_path / "packed", tmp_path / "back")
    names = {path.name for path in (tmp_path / "back").glob("*.safetensors")}
    assert names == {f"model-{number:05}-of-00002.safetensors" for number in (1, 2)}
    assert verify_against(Checkpoint.open(tmp_path / "packed"), Checkpoint.open(tmp_path / "back")).identical


@pytest.mark.parametrize("sharded", [True, False])
def test_files_of_diffusers_get_its_names(tmp_path: Path, sharded: bool) -> None:
    """Also where they were saved from memory, without a name."""
    source = write_folder(tmp_path / "source", sharded=sharded)
    (source / "config.json").write_text('{"_class_name": "Transformer2DModel"}')
    compress(source, tmp_path / "packed")
    for path in (tmp_path / "packed").glob("*.safetensors"):
        save_file(load_file(path), path)
    decompress(tmp_path / "packed", tmp_path / "back")
    assert stored(tmp_path / "back") == stored(source)
    names = {path.name for path in (tmp_path / "back").glob("*.safetensors*")}
    shards = {f"diffusion_pytorch_model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)}
    index = {"diffusion_pytorch_model.safetensors.index.json"}
    assert names == (shards | index if sharded else {"diffusion_pytorch_model.safetensors"})


@pytest.mark.parametrize("stem", ["model", "diffusion_pytorch_model"])
@pytest.mark.parametrize("prefix", ["pytorch_model", "shard"])
def test_an_index_that_is_not_called_as_its_shards(tmp_path: Path, prefix: str, stem: str) -> None:
    """It comes back under the name by which loaders look for it."""
    source = write_folder(tmp_path / "source")
    if stem != "model":
        (source / "config.json").write_text('{"_class_name": "Transformer2DModel"}')
    index = source / "model.safetensors.index.json"
    text = index.read_text().replace("model-0000", f"{prefix}-0000")
    index.unlink()
    (source / f"{stem}.safetensors.index.json").write_text(text)
    for shard in source.glob("*.safetensors"):
        shard.rename(source / shard.name.replace("model-", f"{prefix}-"))
    compress(source, tmp_path / "packed")
    decompress(tmp_path / "packed", tmp_path / "back")
    expected = files_of(source)
    del expected["pytorch_model.bin"]
    assert files_of(tmp_path / "back") == expected | {"config.json": (tmp_path / "back" / "config.json").read_bytes()}


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize(
    "name", ["model-00001-of-00001", "diffusion_pytorch_model-00001-of-00001", "model-00002-of-00003"]
)
def test_one_numbered_shard(tmp_path: Path, name: str, has_index: bool) -> None:
    """The only one, or the only one that the index names: its name comes back, and an index, as loaders look for it."""
    source = tmp_path / "source"
    source.mkdir()
    write_file(source / f"{name}.safetensors")
    index = f"{name.partition('-')[0]}.safetensors.index.json"
    weight_map = dict.fromkeys(sorted(tensors()), f"{name}.safetensors")
    if has_index:
        (source / index).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    elif "00003" in name:
        with pytest.raises(FormatError, match=r"model-00001-of-00003.safetensors is missing"):
            Checkpoint.open(source)
        return
    compress(source, tmp_path / "packed")
    assert {path.name for path in (tmp_path / "packed").iterdir()} == {"samebits.safetensors"}
    decompress(tmp_path / "packed", tmp_path / "back")
    assert {path.name for path in (tmp_path / "back").iterdir()} == {f"{name}.safetensors", index}
    assert json.loads((tmp_path / "back" / index).read_text())["weight_map"] == weight_map
    assert stored(tmp_path / "back") == stored(source)
    assert verify_against(Checkpoint.open(tmp_path / "back"), Checkpoint.open(source)).identical


def test_progress_ends_at_the_total(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    checkpoint = Checkpoint.open(write_folder(tmp_path / "source"))
    run = RunOptions(device="cpu")
    Compression(checkpoint, tmp_path / "b", run=run, progress=lambda done, total: seen.append((done, total))).run()
    total = sum(tensor.nbytes for tensor in tensors().values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


OTHERS = {
    "tokenizer.model": True, "merges.txt": True, "sub/model.safetensors": True, "special.bin": True,
    "odd[1]*.txt": True, "consolidated.safetensors": False, "pytorch_model-00001-of-2.bin": False,
    "openvino_model.bin": False, "pytorch_model.bin.index.json": False, "flax_model.msgpack": False,
    "tf_model.h5": False, "model.gguf": False, "colbert_linear.pt": True, "model.pt": False,
    "spk_dict.pt": True, "voices/one.pt": True, "2_Dense/pytorch_model.bin": True, "sub/original/x.pt": True,
    "text_encoder/model.onnx": True, "original/params.json": True, "original/consolidated.00.pth": False,
    "original/model.safetensors": False, "original/model.safetensors.index.json": False,
    "original/mp/pytorch_model.bin": False, "gguf/model-q4.gguf": False,
    "onnx/model.onnx": False, "onnx/model.onnx_data": False, "onnx/model.onnx_data_1": False, "onnx/config.json": True,
    "openvino/openvino_model.bin": False, "openvino/openvino_model.xml": True,
    "coreml/float32_model.mlpackage/Data/com.apple.CoreML/weights/weight.bin": False,
}  # fmt: skip
HIDDEN = (".git/config", "sub/.cache/huggingface/x", "__pycache__/module.pyc", ".samebits-job/lock")


def test_which_other_files_go_along(tmp_path: Path) -> None:
    further = {"adapter_model.safetensors", "model.safetensors.index.json"}  # which the hub's weights could be
    for name in [*OTHERS, *further, *HIDDEN]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    copied, skipped = other_files(tmp_path, set())
    assert {str(path) for path in copied} == {name for name, goes in OTHERS.items() if goes}
    assert {str(path) for path in skipped} == {name for name, goes in OTHERS.items() if not goes} | further


def test_the_same_files_come_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json", "config.json"]
    taken: list[str] = []

    def download(name: str, revision: None, dry_run: bool = False, **patterns: list[str]) -> str | list[DryRunFileInfo]:
        if dry_run:
            return []
        taken.extend(filter_repo_objects([*OTHERS, *weights, *HIDDEN, "odd1.txt"], **patterns))
        return name

    names = [*OTHERS, *weights, *HIDDEN]
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", lambda api, name, revision: names)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_source("some/model") == Path("some/model")
    assert taken == [*(name for name, goes in OTHERS.items() if goes), *weights]


def test_what_was_downloaded_is_found_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is asked for that would not have been downloaded: the hub's library takes it for incomplete then."""
    asked: list[str] = []

    def download(name: str, revision: None, **patterns: list[str]) -> str:
        asked.extend(filter_repo_objects([*OTHERS, "model.safetensors"], **patterns))
        return name

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", offline)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert resolve_source("some/model") == Path("some/model")
    assert "model.safetensors" in asked
    assert all(OTHERS.get(name, True) for name in asked)


def offline(api: object, name: str, revision: None) -> list[str]:
    raise OfflineModeIsEnabled("offline")


def test_what_cannot_be_copied_is_seen_before_anything_is_written(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source")
    (source / "extra" / "endless.bin").symlink_to("/dev/zero")
    with pytest.raises(InputError, match=r"source/extra/endless.bin: no regular file; remove it"):
        compress(source, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_what_may_not_be_read_is_seen_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, opened = write_folder(tmp_path / "source"), Path.open

    def deny(path: Path, *arguments: Any, **options: Any) -> Any:
        if path.name == "tokenizer.json":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", deny)
    with pytest.raises(PermissionError, match=r"source/tokenizer.json"):
        compress(source, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_a_subfolder_that_may_not_be_read_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, scan = write_folder(tmp_path / "source"), os.scandir

    def deny(path: Any) -> Any:
        if str(path).endswith("extra"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", deny)
    with pytest.raises(PermissionError, match=r"source/extra"):
        compress(source, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_an_empty_tensor_with_a_dimension_that_torch_does_not_know(tmp_path: Path) -> None:
    """It has no values to cast."""
    header = {"a": {"dtype": "F32", "shape": [0, 1 << 63], "data_offsets": [0, 0]}}
    text = json.dumps(header).encode()
    source, packed = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    source.write_bytes(len(text).to_bytes(8, "little") + text)
    compress(source, packed, CompressOptions(cast=True, min_weights=0))
    entry = Checkpoint.open(packed).entries["a"]
    assert (entry.dtype, entry.shape) == ("F32", (0, 1 << 63))


def test_a_link_that_leads_nowhere(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source")
    (source / "extra" / "gone.txt").symlink_to(tmp_path / "gone")
    with pytest.raises(InputError, match=r"source/extra/gone.txt: the link leads nowhere; remove it"):
        compress(source, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_linked_folders_go_along(tmp_path: Path) -> None:
    """And one that leads back to a folder that it is in ends there, as one that leads to the destination does."""
    source, elsewhere = write_folder(tmp_path / "source"), tmp_path / "elsewhere"
    (elsewhere / "deep").mkdir(parents=True)
    (elsewhere / "deep" / "notes.txt").write_text("notes")
    (elsewhere / "deep" / "back").symlink_to(source)
    places = {"one": elsewhere, "two": elsewhere, "itself": source, "above": tmp_path, "result": tmp_path / "packed"}
    for name, target in places.items():
        (source / name).symlink_to(target)
    for overwrite in (False, True):
        compress(source, tmp_path / "packed", overwrite=overwrite)
    others = {str(path.relative_to(tmp_path / "packed")) for path in (tmp_path / "packed").glob("*/**/*.txt")}
    assert others == {"extra/notes.txt", "one/deep/notes.txt", "two/deep/notes.txt"}
    assert not (tmp_path / "packed" / "one").is_symlink()


@pytest.mark.parametrize("linked", ["model-00002-of-00003.safetensors", "config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("through_another", [True, False])
def test_files_that_are_links_into_the_destination(tmp_path: Path, through_another: bool, linked: str) -> None:
    """They would be removed as weights that the destination holds."""
    source, destination = write_folder(tmp_path / "source"), tmp_path / "packed"
    destination.mkdir()
    (source / linked).rename(tmp_path / linked)
    if through_another:
        (destination / linked).symlink_to(tmp_path / linked)
    else:
        (tmp_path / linked).rename(destination / linked)
    (source / linked).symlink_to(Path("..", "packed", linked))
    before = files_of(tmp_path)
    with pytest.raises(InputError, match=r"packed: source and destination overlap; choose a destination elsewhere"):
        compress(source, destination, overwrite=True)
    assert files_of(tmp_path) == before


def test_a_hub_id_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, **_: object) -> str:
        raise LocalEntryNotFoundError("offline\nand more lines")

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", offline)
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(
        InputError, match=r"some/model: no such path, and not available on the hub \(offline\)"
    ) as caught:
        resolve_source("some/model")
    assert caught.value.mend is not None
    assert "OWNER/NAME[@REVISION][/FOLDER]" in caught.value.mend


def test_a_folder_that_is_called_like_a_hub_id_is_not_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", offline)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: "downloaded")
    monkeypatch.chdir(tmp_path)
    assert resolve_source("some/model") == Path("downloaded")
    (tmp_path / "some" / "model").mkdir(parents=True)
    assert resolve_source("some/model") == Path("some/model")
    assert HubFolder.parse("some/model.safetensors") is None


TRANSPORT_ERROR: type[Exception] = HfHubHTTPError.__mro__[1]


@pytest.mark.parametrize(
    ("name", "reason"), [("some/model", "no route"), ("some/mo--del", "Cannot have -- or .. in repo_id")]
)
def test_a_hub_that_cannot_be_reached_or_does_not_know_such_a_name(
    name: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was downloaded before is looked for where the hub cannot say what it has."""
    asked: list[str] = []

    def no_route(api: object, name: str, revision: None) -> list[str]:
        raise TRANSPORT_ERROR("no route")

    def download(name: str, **_: object) -> str:
        asked.append(name)
        raise TRANSPORT_ERROR("no route")

    if "--" not in name:
        monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", no_route)
    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(InputError, match=rf"{name}: no such path, and not available on the hub \({reason}"):
        resolve_source(name)
    assert asked == ([] if "--" in name else [name])


@pytest.mark.gpu
def test_a_gpu_writes_the_same_files(tmp_path: Path) -> None:
    source = write_folder(tmp_path / "source")
    for device in ("cpu", "cuda"):
        Compression(Checkpoint.open(source), tmp_path / device, run=RunOptions(device=device)).run()
    assert files_of(tmp_path / "cuda") == files_of(tmp_path / "cpu")
    packed = Checkpoint.open(tmp_path / "cuda")
    assert verify_against(packed, Checkpoint.open(source), "cuda").identical
    Decompression(packed, tmp_path / "back", RunOptions(device="cuda")).run()
    assert stored(tmp_path / "back") == stored(source)
