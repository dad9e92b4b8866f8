"""What compress --format df11 writes is read again, without a model's class and without a config."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file

from samebits.format.container import Checkpoint
from tests.cli.conftest import Command
from tests.jobs.checkpoints import stored
from tests.jobs.test_compress_df11 import BLOCKS, blocks

KING_JAMES = Path(__file__).resolve().parents[2] / "examples" / "king-james" / "model"


@pytest.mark.parametrize("is_folder", [True, False])
def test_the_example_model(samebits: Command, tmp_path: Path, is_folder: bool) -> None:
    source = KING_JAMES if is_folder else Path(shutil.copy(KING_JAMES / "model.safetensors", tmp_path))
    suffix = "" if is_folder else ".safetensors"
    df11, back = tmp_path / f"df11{suffix}", tmp_path / f"back{suffix}"
    assert samebits("compress", "--format", "df11", source, df11).code == 0
    assert samebits("verify", df11, "--against", source, "--json").json["identical"]
    assert samebits("decompress", df11, back).code == 0
    assert stored(back) == stored(source)
    assert all("dfloat11" not in file.metadata for file in Checkpoint.open(back).files)
    assert samebits("inspect", df11, "--json").json["layout"] == "dfloat11"


def test_units_that_stayed_raw(samebits: Command, tmp_path: Path) -> None:
    save_file(blocks(), tmp_path / "a.safetensors")
    (tmp_path / "patterns.json").write_text(json.dumps(BLOCKS))
    names = [tmp_path / f"{name}.safetensors" for name in "abc"]
    samebits("compress", "--format", "df11", "--patterns", tmp_path / "patterns.json", names[0], names[1])
    assert samebits("decompress", names[1], names[2]).code == 0
    assert stored(names[2]) == stored(names[0])
