"""compress --format df11: the files of the original encoder, and nothing lost where its layout has no room."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from samebits.df11.checkpoint import UNIT_TENSORS, open_checkpoint
from samebits.df11.config import KEY, Df11Config
from samebits.df11.patterns import Patterns
from samebits.df11.unit import Unit
from samebits.df11.unsaid import Unsaid
from samebits.errors import DeviceError, DtypeError, FormatError, InputError, SamebitsError
from samebits.format.container import Checkpoint
from samebits.format.safetensors_file import SafetensorsFile
from samebits.jobs.compress import Compression
from samebits.jobs.compress_df11 import Df11Compression
from samebits.jobs.decompress import Decompression
from samebits.jobs.job import JobReport
from samebits.jobs.options import CompressOptions, RunOptions
from tests.jobs.checkpoints import Tensors, files_of, stored, weights, write_folder

VECTORS = Path(__file__).resolve().parents[1] / "vectors" / "df11"
BLOCKS: Patterns = {r"blocks\.\d+": ["a", "b"]}


def compress(source: Path, destination: Path, patterns: Patterns | None = None, **run: Any) -> JobReport:
    return Df11Compression(Checkpoint.open(source), destination, patterns, RunOptions(**run)).run()


def original(model: str, folder: Path) -> Path:
    """The BF16 model behind a vector; the layout does not tell shapes, so each matrix is one row here."""
    shutil.copytree(VECTORS / model, folder)
    config = json.loads((folder / "config.json").read_text())
    units = Df11Config.parse(config.pop(KEY))
    (folder / "config.json").write_text(json.dumps(config))
    content: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        for unit in sorted(name.removesuffix(".luts") for name in tensors if name.endswith(".luts")):
            found = Unit(**{name: tensors.pop(f"{unit}.{name}").numpy() for name in UNIT_TENSORS})
            words = torch.from_numpy(found.decode()).view(torch.bfloat16).split(found.sizes)
            content |= {name: part[None] for name, part in zip(units.weights(unit) or (), words, strict=True)}
        content |= tensors
        path.unlink()
    save_file(content, folder / "model.safetensors")
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return original("tiny-llama", tmp_path / "llama")


def blocks() -> Tensors:
    """Three blocks, a norm in each, and what is in none; block 1 has an infinity, block 2 only one exponent."""
    content: Tensors = {
        "head.weight": weights(8, 16),
        "steps": torch.arange(3),
        "mask": torch.ones(5, dtype=torch.uint8),
    }
    for block in range(3):
        content |= {f"blocks.{block}.{name}.weight": weights(64, 48, seed=2 * block + (name == "b")) for name in "ab"}
        content[f"blocks.{block}.norm.weight"] = weights(64, seed=block)
        content[f"blocks.{block}.a.bias"] = weights(64, seed=block).float()
    content["blocks.1.b.weight"][3, 5] = float("inf")
    for name in "ab":
        content[f"blocks.2.{name}.weight"] = torch.ones(64, 48, dtype=torch.bfloat16)
    return content


WHY = {"blocks.1": "exponent 255 occurs; the layout has codes for 0 to 239", "blocks.2": "all exponents are equal"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    save_file(blocks(), tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


def decoded(path: Path, unit: str) -> list[bytes]:
    """Each matrix of a unit."""
    with safe_open(path, "np") as file:
        found = Unit(**{name: file.get_tensor(f"{unit}.{name}") for name in UNIT_TENSORS})
    return [part.tobytes() for part in np.split(found.decode(), found.split_positions)]


def test_files_of_units_are_those_of_the_original_encoder(llama: Path, tmp_path: Path) -> None:
    report = compress(llama, tmp_path / "df11")
    ours, theirs = files_of(tmp_path / "df11"), files_of(VECTORS / "tiny-llama")
    assert ours.keys() == theirs.keys()
    for name in ours.keys() - {"config.json", "model.safetensors"}:
        assert ours[name] == theirs[name], name
    assert json.loads(ours["config.json"]) == json.loads(theirs["config.json"])
    assert stored(tmp_path / "df11") == stored(VECTORS / "tiny-llama")
    assert (report.raw_units, report.device, report.resumed_shards) == ({}, "cpu", 0)


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-dit"])
def test_a_single_file_has_the_tensors_of_the_original_encoder(model: str, tmp_path: Path) -> None:
    source = original(model, tmp_path / "source")
    config = json.loads((VECTORS / model / "config.json").read_text())[KEY]
    compress(source / "model.safetensors", tmp_path / "one.safetensors", config["pattern_dict"])
    assert stored(tmp_path / "one.safetensors") == stored(VECTORS / model)
    ours = SafetensorsFile.open(tmp_path / "one.safetensors")
    if model == "tiny-dit":
        theirs = SafetensorsFile.open(VECTORS / model / "model.safetensors")
        assert list(ours.tensors) == list(theirs.tensors)
    unsaid = Unsaid.parse(ours.metadata)
    assert unsaid.config == Df11Config.parse(config)
    assert unsaid.shapes.keys() == stored(source).keys() - stored(tmp_path / "one.safetensors").keys()


def test_what_a_folder_holds(tmp_path: Path) -> None:
    """Files for units, whatever the files of the source; no index; a config.json even where there was none."""
    source = write_folder(tmp_path / "source", config=False)
    report = compress(source, tmp_path / "df11", {r"model\.embed_tokens": [], r"model\.layers\.0": ["q_proj"]})
    units = ["model_embed_tokens.safetensors", "model_layers_0.safetensors"]
    others = ["config.json", "extra/notes.txt", "model.safetensors", "tokenizer.json"]
    assert sorted(files_of(tmp_path / "df11")) == sorted(units + others)
    assert json.loads((tmp_path / "df11" / "config.json").read_text())[KEY]["version"] == "0.5.0"
    assert "model.layers.0.odd" in SafetensorsFile.open(tmp_path / "df11" / units[1]).tensors
    files = [SafetensorsFile.open(path) for path in (tmp_path / "df11").glob("*.safetensors")]
    assert report.sizes.stored_bytes == sum(spec.nbytes for file in files for spec in file.tensors.values())
    unit = SafetensorsFile.open(tmp_path / "df11" / units[0]).tensors.values()
    assert report.sizes.packed_bytes > sum(spec.nbytes for spec in unit) > report.sizes.packed_bytes / 2
    assert (report.sizes.packed_tensors, report.sizes.packed_weights) == (2, 500 * 128 + 128 * 128)
    assert report.skipped_files == ["pytorch_model.bin"]


def test_a_single_file_has_the_units_that_the_configuration_beside_it_asks_for(llama: Path, tmp_path: Path) -> None:
    compress(llama / "model.safetensors", tmp_path / "one.safetensors")
    assert stored(tmp_path / "one.safetensors") == stored(VECTORS / "tiny-llama")


def test_what_cannot_be_opened_is_not_published(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Df11Compression, "convert_config", lambda self, config: {**config, KEY: "torn"})
    with pytest.raises(FormatError, match=KEY):
        compress(llama, tmp_path / "df11")
    assert not (tmp_path / "df11").exists()


def test_what_was_decoded_of_a_unit_takes_no_space_behind_it(tmp_path: Path) -> None:
    plain, df11 = tmp_path / "plain.safetensors", tmp_path / "df11.safetensors"
    save_file({f"blocks.0.{name}.weight": weights(64, 128) for name in "ab"}, plain)
    compress(plain, df11, BLOCKS)
    left: list[int] = []

    def look(done: int, total: int) -> None:
        left.append(len(list(tmp_path.glob("*/spools/*"))))

    options, run = CompressOptions(), RunOptions(device="cpu", workers=1)
    report = Compression(open_checkpoint(df11), tmp_path / "packed.safetensors", options, run, look).run()
    assert report.sizes.packed_tensors == 2
    assert len(left) > 2
    assert not any(left)


def test_diffusers_find_the_rest_under_their_name(llama: Path, tmp_path: Path) -> None:
    (llama / "config.json").write_text('{"_class_name": "NewTransformer"}')
    compress(llama, tmp_path / "df11")
    rest = SafetensorsFile.open(tmp_path / "df11" / "diffusion_pytorch_model.safetensors")
    assert "lm_head.weight" in rest.tensors


@pytest.mark.parametrize("is_folder", [True, False])
def test_units_that_the_layout_cannot_hold_stay_raw(source: Path, tmp_path: Path, is_folder: bool) -> None:
    if is_folder:
        (tmp_path / "source").mkdir()
        source = source.rename(tmp_path / "source" / "model.safetensors")
    target = tmp_path / "df11" if is_folder else tmp_path / "b.safetensors"
    report = compress(source.parent if is_folder else source, target, BLOCKS)
    assert report.raw_units == WHY
    assert report.sizes.packed_weights == 2 * 64 * 48
    files = sorted(target.glob("*.safetensors")) if is_folder else [target]
    original, kept = stored(source), {name: value for path in files for name, value in stored(path).items()}
    unit = {f"blocks.0.{name}" for name in UNIT_TENSORS}
    assert kept.keys() == (original.keys() | unit) - {"blocks.0.a.weight", "blocks.0.b.weight"}
    assert all(kept[name] == original[name] for name in kept.keys() - unit)
    for path in files:
        for spec in SafetensorsFile.open(path).tensors.values():
            assert spec.nbytes == 0 or spec.start % (spec.nbytes // spec.words) == 0, spec.name
    content = blocks()
    expected = [content[f"blocks.0.{name}.weight"].view(torch.uint8).numpy().tobytes() for name in "ab"]
    assert decoded(target / "blocks_0.safetensors" if is_folder else target, "blocks.0") == expected


def test_a_folder_in_which_every_unit_stayed_raw_is_decompressed(tmp_path: Path) -> None:
    """Its config.json names units, so that it is no plain model."""
    source = write_folder(tmp_path / "source")
    for path in source.glob("*.safetensors*"):
        path.unlink()
    content = {"blocks.0.a.weight": torch.full((64, 48), 1.0, dtype=torch.bfloat16), "norm": weights(48)}
    save_file(content, source / "model.safetensors")
    assert compress(source, tmp_path / "df11", {r"blocks\.\d+": ["a"]}).raw_units
    Decompression(open_checkpoint(tmp_path / "df11"), tmp_path / "back", RunOptions(device="cpu")).run()
    assert stored(tmp_path / "back") == stored(source)
    assert json.loads((tmp_path / "back" / "config.json").read_text()).keys().isdisjoint({KEY})


def test_units_whose_files_would_have_the_same_name_share_it(tmp_path: Path) -> None:
    content = {f"{path}.a.weight": weights(64, 64, seed=len(path)) for path in ("x.y", "x_y", "model")}
    (tmp_path / "source").mkdir()
    save_file(content, tmp_path / "source" / "model.safetensors")
    compress(tmp_path / "source", tmp_path / "df11", {"x.y": ["a"], "model": ["a"]})
    assert sorted(path.name for path in (tmp_path / "df11").glob("*.s*")) == ["model.safetensors", "x_y.safetensors"]
    for path in ("x.y", "x_y"):
        words = content[f"{path}.a.weight"].view(torch.uint8).numpy().tobytes()
        assert decoded(tmp_path / "df11" / "x_y.safetensors", path) == [words]


def test_an_interrupted_run_goes_on_and_still_knows_what_stayed_raw(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "source").mkdir()
    source.rename(tmp_path / "source" / "model.safetensors")
    compress(tmp_path / "source", tmp_path / "whole", BLOCKS)
    write, written = Df11Compression.write, []

    def stop_at_the_third(self: Df11Compression, shard: Any, path: Path, pieces: Any) -> None:
        written.append(shard.target)
        if len(written) == 4:
            raise KeyboardInterrupt
        write(self, shard, path, pieces)

    with monkeypatch.context() as patched:
        patched.setattr(Df11Compression, "write", stop_at_the_third)
        with pytest.raises(KeyboardInterrupt):
            compress(tmp_path / "source", tmp_path / "df11", BLOCKS)
    assert not list((tmp_path / "df11").glob("*.safetensors"))
    report = compress(tmp_path / "source", tmp_path / "df11", BLOCKS)
    assert (report.shards, report.resumed_shards, report.raw_units) == (4, 3, WHY)
    assert files_of(tmp_path / "df11") == files_of(tmp_path / "whole")


def test_other_patterns_are_another_job(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(
            "samebits.jobs.workspace.Workspace.publish", lambda self: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            compress(source, tmp_path / "b.safetensors", BLOCKS)
    with pytest.raises(InputError, match="another job has begun here, with patterns "):
        compress(source, tmp_path / "b.safetensors", {r"blocks\.0": ["a"]})
    assert compress(source, tmp_path / "b.safetensors", BLOCKS).resumed_shards == 1


def test_progress_ends_at_the_total(source: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    checkpoint = Checkpoint.open(source)
    Df11Compression(checkpoint, tmp_path / "b.safetensors", BLOCKS, None, lambda *state: seen.append(state)).run()
    total = sum(tensor.nbytes for tensor in blocks().values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_misaligned_tensors_are_read(tmp_path: Path) -> None:
    """Another writer may have put a tensor at any byte."""
    content = {"blocks.0.a.weight": weights(64, 48), "blocks.0.b.weight": weights(64, 48, seed=1)}
    save_file(content, tmp_path / "even.safetensors")
    data = (tmp_path / "even.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    odd = (size + 1).to_bytes(8, "little") + data[8 : 8 + size] + b" " + data[8 + size :]
    (tmp_path / "odd.safetensors").write_bytes(odd)
    for name in ("even", "odd"):
        compress(tmp_path / f"{name}.safetensors", tmp_path / f"{name}-df11.safetensors", BLOCKS)
    assert stored(tmp_path / "even-df11.safetensors") == stored(tmp_path / "odd-df11.safetensors")


@pytest.mark.parametrize(
    ("change", "patterns", "error", "message"),
    [
        ({"blocks.0.a.weight": torch.zeros(64, 48)}, BLOCKS, InputError, r"F32 \[64, 48\] in unit blocks.0"),
        ({"blocks.0.a.weight": weights(4, 4, 4)}, BLOCKS, InputError, r"BF16 \[4, 4, 4\] in unit blocks.0"),
        ({"blocks.0.a.weight": weights(0, 48)}, BLOCKS, InputError, r"BF16 \[0, 48\] in unit blocks.0"),
        ({"blocks.0.luts": torch.zeros(3)}, BLOCKS, FormatError, "blocks.0.luts: a name reserved"),
        ({}, {"none": []}, InputError, "matches no module"),
        ({"../x.0.a.weight": weights(4, 4)}, {r".*x\.0": ["a"]}, InputError, "the file of its unit cannot be called"),
    ],
)
def test_patterns_that_do_not_fit(
    tmp_path: Path, change: Tensors, patterns: Patterns, error: type[SamebitsError], message: str
) -> None:
    (tmp_path / "source").mkdir()
    save_file({**blocks(), **change}, tmp_path / "source" / "model.safetensors")
    with pytest.raises(error, match=message):
        compress(tmp_path / "source", tmp_path / "df11", patterns)
    assert not (tmp_path / "df11").exists()


def test_what_is_refused(llama: Path, source: Path, tmp_path: Path) -> None:
    compress(llama, tmp_path / "df11")
    Compression(Checkpoint.open(llama), tmp_path / "packed", run=RunOptions(device="cpu")).run()
    for folder in ("df11", "packed"):
        with pytest.raises(InputError, match="compressed already"):
            compress(tmp_path / folder, tmp_path / "b")
    with pytest.raises(InputError, match="overlap"):
        compress(llama, llama)
    with pytest.raises(DeviceError, match="on the CPU"):
        compress(llama, tmp_path / "b", device="cuda")
    save_file({name: tensor.float() for name, tensor in load_file(source).items()}, tmp_path / "f.safetensors")
    with pytest.raises(DtypeError, match="the weights are F32"):
        compress(tmp_path / "f.safetensors", tmp_path / "b.safetensors")
    (llama / "config.json").write_text('{"quantization_config": {"quant_method": "gptq"}}')
    with pytest.raises(InputError, match="quantized already"):
        compress(llama, tmp_path / "b")


def test_a_file_without_anything_that_auto_patterns_fit_is_named(tmp_path: Path) -> None:
    save_file({"head.weight": weights(64, 64)}, tmp_path / "a.safetensors")
    with pytest.raises(InputError, match=r"a\.safetensors: no numbered blocks with BF16 matrices"):
        compress(tmp_path / "a.safetensors", tmp_path / "b.safetensors")
