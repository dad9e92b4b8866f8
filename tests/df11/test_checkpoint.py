"""DFloat11 checkpoints as checkpoints of BF16 tensors: names, shapes and bytes; and refusals instead of guesses."""

from __future__ import annotations

import hashlib
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from samebits.df11.architectures import PUBLISHED
from samebits.df11.checkpoint import Df11Checkpoint, UnitEntry, open_checkpoint
from samebits.df11.unit import Unit
from samebits.errors import FormatError, InputError, SamebitsError, VersionError
from samebits.format.container import Checkpoint
from samebits.verify import original_bytes, verify_digests
from tests.df11.checkpoints import (
    MODELS,
    VECTORS,
    Stored,
    change_config,
    copy,
    originals,
    regroup,
    tensors_of,
    write_units,
)

HIDDEN = 256  # of tiny-llama
LAYER = "model.layers.1"


def contents(checkpoint: Checkpoint) -> Stored:
    result = {}
    for entry in checkpoint:
        digest = hashlib.sha256(original_bytes(entry).numpy().tobytes()).hexdigest()
        result[entry.name] = ("torch.bfloat16" if entry.dtype == "BF16" else entry.dtype, entry.shape, digest)
    return result


def words(count: int, seed: int = 0) -> NDArray[np.uint16]:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(count, generator=generator) * 0.02).bfloat16().view(torch.uint16).numpy()


@pytest.mark.parametrize("model", MODELS)
def test_what_the_original_encoder_wrote(model: str) -> None:
    checkpoint = open_checkpoint(VECTORS / model)
    assert isinstance(checkpoint, Df11Checkpoint)
    assert (checkpoint.version, checkpoint.is_packed) == ("0.5.0", True)
    assert contents(checkpoint) == originals(model)


def test_bytes_add_up() -> None:
    checkpoint = open_checkpoint(VECTORS / "tiny-llama")
    stored = sum(spec.nbytes for file in checkpoint.files for spec in file.tensors.values())
    assert sum(entry.nbytes for entry in checkpoint) == stored


def test_other_checkpoints_open_as_before(tmp_path: Path) -> None:
    save_file({"x.weight": torch.ones(3, 4)}, tmp_path / "model.safetensors")
    assert type(open_checkpoint(tmp_path)) is Checkpoint
    assert type(open_checkpoint(tmp_path / "model.safetensors")) is Checkpoint


# Files


def test_all_in_one_file(tmp_path: Path) -> None:
    folder = copy("tiny-llama", tmp_path / "df11")
    regroup(folder, {"anything.safetensors": list(tensors_of(folder))})
    assert contents(open_checkpoint(folder)) == originals("tiny-llama")
    assert contents(open_checkpoint(folder / "anything.safetensors")) == originals("tiny-llama")


@pytest.mark.parametrize("index", [False, True])
def test_units_spread_over_shards(tmp_path: Path, index: bool) -> None:
    folder = copy("tiny-llama", tmp_path / "df11")
    names = sorted(tensors_of(folder))
    groups = {f"model-{part + 1:05}-of-00003.safetensors": names[part::3] for part in range(3)}
    regroup(folder, groups)
    if index:
        weight_map = {name: file for file, names in groups.items() for name in names}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert contents(open_checkpoint(folder)) == originals("tiny-llama")
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FormatError, match="is missing"):
        open_checkpoint(folder)


def test_a_file_of_one_unit(tmp_path: Path) -> None:
    folder = copy("tiny-llama", tmp_path / "df11")
    expected = {name: value for name, value in originals("tiny-llama").items() if LAYER in name}
    assert contents(open_checkpoint(folder / "model_layers_1.safetensors")) == expected


@pytest.mark.parametrize(
    "missing", ["luts", "gaps", "split_positions", "sign_mantissa", "output_positions", "encoded_exponent"]
)
def test_a_unit_without_one_of_its_tensors(tmp_path: Path, missing: str) -> None:
    folder = copy("tiny-llama", tmp_path / "df11")
    names = [name for name in tensors_of(folder) if name != f"{LAYER}.{missing}"]
    regroup(folder, {"model.safetensors": names})
    with pytest.raises(FormatError, match=rf"model.safetensors: {LAYER}: the unit has no {missing}; fetch"):
        open_checkpoint(folder)


def test_a_tensor_twice(tmp_path: Path) -> None:
    folder = copy("tiny-llama", tmp_path / "df11")
    save_file({f"{LAYER}.luts": torch.zeros(3, 256, dtype=torch.uint8)}, folder / "other.safetensors")
    with pytest.raises(FormatError, match="also in another file"):
        open_checkpoint(folder)


def test_a_weight_both_plain_and_in_a_unit(tmp_path: Path) -> None:
    folder = copy("tiny-llama", tmp_path / "df11")
    save_file({"lm_head.weight": torch.zeros(4, 4)}, folder / "other.safetensors")
    with pytest.raises(FormatError, match="twice"):
        open_checkpoint(folder)


def test_no_files(tmp_path: Path) -> None:
    folder = copy("tiny-llama", tmp_path / "df11")
    regroup(folder, {})
    with pytest.raises(InputError, match="no safetensors files"):
        open_checkpoint(folder)


# Versions


class Bomb:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("it was unpickled",))


def test_pickles_are_refused_and_never_opened(tmp_path: Path) -> None:
    folder = copy("tiny-llama", tmp_path / "df11", version="0.1.0")
    for file in folder.glob("*.safetensors"):
        file.with_suffix(".pkl").write_bytes(pickle.dumps(Bomb()))
        file.unlink()
    with pytest.raises(VersionError, match="pickles"):
        open_checkpoint(folder)
    with pytest.raises(InputError, match="not a safetensors file"):
        open_checkpoint(next(folder.glob("*.pkl")))
    save_file({"x": torch.ones(3)}, folder / "plain.safetensors")
    assert open_checkpoint(folder / "plain.safetensors").entries.keys() == {"x"}


@pytest.mark.parametrize("version", ["0.2.0", "0.3.1", "0.3.2"])
def test_earlier_versions_of_the_layout(tmp_path: Path, version: str) -> None:
    checkpoint = open_checkpoint(copy("tiny-dit", tmp_path / "df11", version=version))
    assert contents(checkpoint) == originals("tiny-dit")


# Names and shapes


def test_shapes_of_the_model_come_first() -> None:
    asked: list[str] = []

    def transposed(folder: Path, names: Any) -> dict[str, tuple[int, ...]]:
        asked.extend(names)
        return {"lm_head.weight": (HIDDEN, 1024)}

    checkpoint = open_checkpoint(VECTORS / "tiny-llama", transposed)
    assert checkpoint.entries["lm_head.weight"].shape == (HIDDEN, 1024)
    assert len(asked) == 2 + 3 * 7


def test_shapes_that_do_not_fit_the_model() -> None:
    with pytest.raises(FormatError, match="do not make up"):
        open_checkpoint(VECTORS / "tiny-llama", lambda folder, names: {"lm_head.weight": (HIDDEN, 1000)})


def test_a_bias_that_does_not_fit(tmp_path: Path) -> None:
    folder = copy("tiny-dit", tmp_path / "df11")
    tensors = load_file(folder / "model.safetensors")
    tensors["transformer_blocks.1.to_q.bias"] = torch.zeros(191)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(FormatError, match="to_q"):
        open_checkpoint(folder)


def test_shapes_that_nothing_says(tmp_path: Path) -> None:
    folder = copy("tiny-dit", tmp_path / "df11")
    names = [name for name in tensors_of(folder) if name != "transformer_blocks.1.to_q.bias"]
    regroup(folder, {"model.safetensors": names})
    with pytest.raises(InputError, match=r"to_q.weight: its shape is not known.*config\.json"):
        open_checkpoint(folder)


def test_a_unit_of_another_number_of_matrices(tmp_path: Path) -> None:
    folder = copy("tiny-dit", tmp_path / "df11", pattern_dict={r"transformer_blocks\.\d+": ["to_q", "to_k"]})
    with pytest.raises(FormatError, match="6 matrices, where dfloat11_config names 2"):
        open_checkpoint(folder)


def test_a_unit_that_no_pattern_matches(tmp_path: Path) -> None:
    folder = copy("tiny-dit", tmp_path / "df11", pattern_dict={"nothing": []})
    with pytest.raises(InputError, match="which matrices this unit holds"):
        open_checkpoint(folder)


def test_a_flux_file_without_a_config(tmp_path: Path) -> None:
    """Names come from the table of known units, shapes from biases."""
    names = {path: list(attributes) for path, attributes in PUBLISHED["FluxTransformer2DModel"].items()}
    units, expected, biases = {}, {}, {}
    for number, (pattern, attributes) in enumerate(names.items()):
        path = pattern.replace(r"\.\d+", ".0")
        units[path] = [words(64 * (8 + i), seed=100 * number + i) for i in range(len(attributes))]
        for i, attribute in enumerate(attributes):
            biases[f"{path}.{attribute}.bias"] = 8 + i
            expected[f"{path}.{attribute}.weight"] = ((8 + i, 64), units[path][i].tobytes())
    checkpoint = open_checkpoint(write_units(tmp_path / "flux.safetensors", units, biases))
    found = {e.name: (e.shape, original_bytes(e).numpy().tobytes()) for e in checkpoint if isinstance(e, UnitEntry)}
    assert found == expected


def test_a_language_model_file_without_a_config(tmp_path: Path) -> None:
    sizes = [64 * rows for rows in (64, 32, 32, 64, 96, 96, 96)]
    units = {"model.layers.0": [words(size, seed) for seed, size in enumerate(sizes)], "lm_head": [words(64 * 100)]}
    vectors = {"model.layers.0.input_layernorm.weight": 64, "model.norm.weight": 64}
    checkpoint = open_checkpoint(write_units(tmp_path / "llama.safetensors", units, vectors))
    shapes = {entry.name.removeprefix("model.layers.0."): entry.shape for entry in checkpoint}
    assert shapes["self_attn.k_proj.weight"] == (32, 64)
    assert shapes["mlp.down_proj.weight"] == (64, 96)
    assert shapes["lm_head.weight"] == (100, 64)


def test_a_projection_of_an_unknown_unit(tmp_path: Path) -> None:
    """Its name alone does not say how it is shaped."""
    path = write_units(tmp_path / "model.safetensors", {"decoder.0": [words(64 * 64)]}, {"model.norm.weight": 64})
    entry = {"version": "0.5.0", "pattern_dict": {r"decoder\.\d+": ["q_proj"]}}
    (tmp_path / "config.json").write_text(json.dumps({"dfloat11_config": entry}))
    with pytest.raises(InputError, match="its shape is not known"):
        open_checkpoint(path)


# Damage


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("luts", torch.zeros(4, 255, dtype=torch.uint8)),
        ("luts", torch.zeros(1024, dtype=torch.uint8)),
        ("luts", torch.full((4, 256), 255, dtype=torch.uint8)),
        ("gaps", torch.zeros(7040, dtype=torch.int8)),
        ("gaps", torch.zeros(320, dtype=torch.uint8)),
        ("encoded_exponent", torch.zeros(0, dtype=torch.uint8)),
        ("encoded_exponent", torch.zeros(5000, dtype=torch.uint8)),
        ("sign_mantissa", torch.zeros(0, dtype=torch.uint8)),
        ("sign_mantissa", torch.zeros(262143, dtype=torch.uint8)),
        ("output_positions", torch.zeros(0, dtype=torch.uint8)),
        ("output_positions", torch.zeros(91, dtype=torch.uint8)),
        ("output_positions", torch.full((92,), 255, dtype=torch.uint8)),
        ("split_positions", torch.tensor([0])),
        ("split_positions", torch.tensor([-5])),
        ("split_positions", torch.tensor([-(1 << 63), (1 << 63) - 1])),
        ("split_positions", torch.tensor([262144])),
        ("split_positions", torch.tensor([100])),
        ("split_positions", torch.tensor(100)),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, name: str, value: torch.Tensor) -> None:
    folder = copy("tiny-llama", tmp_path / "df11")
    tensors = load_file(folder / "lm_head.safetensors")
    save_file({**tensors, f"lm_head.{name}": value}, folder / "lm_head.safetensors")
    with pytest.raises(FormatError, match="lm_head"):
        open_checkpoint(folder)


def test_nothing_at_all_in_a_unit(tmp_path: Path) -> None:
    folder = copy("tiny-llama", tmp_path / "df11")
    tensors = {name: tensor[:0] for name, tensor in load_file(folder / "lm_head.safetensors").items()}
    save_file(tensors, folder / "lm_head.safetensors")
    with pytest.raises(FormatError, match="lm_head"):
        open_checkpoint(folder)


def test_a_stream_that_does_not_fit_its_tables(tmp_path: Path) -> None:
    folder = copy("tiny-llama", tmp_path / "df11")
    tensors = load_file(folder / "lm_head.safetensors")
    tensors["lm_head.encoded_exponent"][5000:20000] = 0xFF
    save_file(tensors, folder / "lm_head.safetensors")
    checkpoint = open_checkpoint(folder)
    with pytest.raises(FormatError, match=r"lm_head.*does not fit its tables"):
        verify_digests(checkpoint)


@given(st.integers(0, 360132), st.binary(min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_any_damage_gives_words_or_one_error(tmp_path_factory: pytest.TempPathFactory, at: int, noise: bytes) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    whole = (VECTORS / "tiny-llama" / "lm_head.safetensors").read_bytes()
    (folder / "lm_head.safetensors").write_bytes((whole[:at] + noise + whole[at + len(noise) :])[: len(whole)])
    (folder / "config.json").write_text((VECTORS / "tiny-llama" / "config.json").read_text())
    try:
        checkpoint = open_checkpoint(folder, lambda folder, names: {"lm_head.weight": (1024, HIDDEN)})
        assert verify_digests(checkpoint).identical
    except SamebitsError as error:
        assert "lm_head" in str(error)  # noqa: PT017  it may also be none


def test_config_is_named_in_its_errors(tmp_path: Path) -> None:
    folder = copy("tiny-llama", tmp_path / "df11")
    change_config(folder, pattern_dict=None)
    with pytest.raises(FormatError, match=r"config\.json"):
        open_checkpoint(folder)


# Parts of units


@pytest.fixture(scope="module")
def unit() -> Unit:
    tensors = load_file(VECTORS / "tiny-llama" / "model_layers_1.safetensors")
    return Unit(**{name: tensors[f"{LAYER}.{name}"].numpy() for name in Unit.__dataclass_fields__})


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_part(unit: Unit, data: st.DataObject) -> None:
    whole = unit.decode()
    borders = unit.output_positions.view("<u4").tolist()
    border = st.sampled_from(borders).flatmap(lambda at: st.integers(at - 1, at + 1))
    ends = st.one_of(st.integers(0, unit.words), border).map(lambda at: min(max(at, 0), unit.words))
    first, last = sorted((data.draw(ends), data.draw(ends)))
    if first == last:
        return
    part, before = unit.part(first, last)
    assert part.decode()[before : before + last - first].tobytes() == whole[first:last].tobytes()
    assert part.decode(np.empty(last - first, np.uint16), before).tobytes() == whole[first:last].tobytes()
    assert before + last - first <= part.words <= last - first + 2 * max(np.diff(borders))


def test_part_of_a_unit_with_one_position_less(unit: Unit) -> None:
    """None stands for a last block in which no code starts, if the stream ends with a whole byte."""
    longer, _ = unit.part(0, unit.words // 2)
    shorter = replace(longer, output_positions=longer.output_positions[:-4])
    assert shorter.output_positions.size // 4 == shorter.blocks
    words = shorter.decode()
    for first in (0, words.size // 3, words.size - 1):
        part, before = shorter.part(first, words.size)
        assert (
            part.decode()[before:].tobytes() == words[first:].tobytes() == unit.decode()[first : words.size].tobytes()
        )
