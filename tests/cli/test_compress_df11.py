"""samebits compress --format df11: options, reports, errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from samebits.df11.config import KEY
from tests.cli.conftest import Command
from tests.jobs.checkpoints import Tensors, weights
from tests.jobs.test_compress_df11 import WHY, blocks

PATTERNS = {r"blocks\.\d+": ["a", "b"]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A file of an architecture that is not known, two of its three units beyond the layout."""
    save_file(blocks(), tmp_path / "a.safetensors")
    return tmp_path / "a.safetensors"


@pytest.fixture
def patterns(tmp_path: Path) -> Path:
    path = tmp_path / "patterns.json"
    path.write_text(json.dumps(PATTERNS))
    return path


def test_a_report_says_what_stayed_raw_and_why(samebits: Command, model: Path, patterns: Path, tmp_path: Path) -> None:
    outcome = samebits("compress", "--format", "df11", "--patterns", patterns, model, tmp_path / "b.safetensors")
    assert (outcome.code, outcome.err) == (0, "")
    assert f"2 of {len(blocks())} tensors packed" in outcome.out
    for unit, why in WHY.items():
        assert f"stored unchanged, {why}: {unit}\n" in outcome.out


def test_json(samebits: Command, model: Path, patterns: Path, tmp_path: Path) -> None:
    arguments = ("compress", model, tmp_path / "b.safetensors", "--format", "df11", "--patterns", patterns, "--json")
    report = samebits(*arguments).json
    assert report["raw_units"] == WHY
    assert report["sizes"]["original_bytes"] == sum(tensor.nbytes for tensor in blocks().values())
    assert report["sizes"]["packed_weights"] == 2 * 64 * 48
    assert samebits("compress", model, tmp_path / "native.safetensors", "--json").json["raw_units"] == {}


def test_auto_is_the_default(samebits: Command, tmp_path: Path) -> None:
    content: Tensors = {
        f"model.layers.0.{name}.weight": weights(32, 32) for name in ("self_attn.q_proj", "mlp.up_proj")
    }
    for folder, kind in (("known", "llama"), ("unknown", "new")):
        (tmp_path / folder).mkdir()
        save_file({**content, "model.norm.weight": torch.ones(32).bfloat16()}, tmp_path / folder / "model.safetensors")
        (tmp_path / folder / "config.json").write_text(json.dumps({"model_type": kind}))
        for extra in ((), ("--patterns", "auto")):
            target = tmp_path / f"{folder}{len(extra)}"
            outcome = samebits("compress", tmp_path / folder, target, "--format", "df11", *extra)
            assert outcome.code == 0
            assert ("each numbered block became a unit" in outcome.err) is (kind == "new")
            config = json.loads((target / "config.json").read_text())
            assert set(config[KEY]["pattern_dict"][r"model\.layers\.\d+"]) == {"self_attn.q_proj", "mlp.up_proj"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--patterns", "auto"], "--patterns goes with --format df11"),
        (["--format", "df11", "--cast", "bf16"], "--format df11 takes --patterns"),
        (["--format", "df11", "--include", "x"], "--format df11 takes --patterns"),
        (["--format", "df11", "--min-weights", "7"], "--format df11 takes --patterns"),
        (["--format", "df12"], "df12"),
        (["--format", "df11", "--patterns", "none.json"], "none.json: no such file; give auto, or a JSON file"),
        (["--format", "df11", "--device", "cuda"], "on the CPU; use --device cpu"),
    ],
)
def test_options_that_cannot_be_used(
    samebits: Command, model: Path, tmp_path: Path, options: list[str], message: str
) -> None:
    outcome = samebits("compress", model, tmp_path / "b.safetensors", *options)
    assert outcome.code == 2
    assert message in outcome.error
    assert not (tmp_path / "b.safetensors").exists()
