"""The proof over model families, for a few of them; ``python benchmarks/families.py`` makes the whole table."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import common
import families

SAME = {"logits": True, "greedy": True, "sampled": True}


@pytest.mark.parametrize(
    "name",
    [
        "t5",
        "deepseek_v3",
        "mamba",
        "olmo",  # no parameter is left to tell the model's dtype
        "falcon_mamba",  # rounds otherwise if its config says that it is quantized
    ],
)
def test_the_same_bits(name: str, tmp_path: Path) -> None:
    row = families.prove(name, tmp_path)
    assert {key: row[key] for key in SAME} == SAME
    assert row["packed_cache"] is (True if name in ("deepseek_v3", "olmo") else None)
    assert row["note"] is None
    assert row["packed_of_weights"] > 0.93


def test_an_encoder_has_logits_only(tmp_path: Path) -> None:
    row = families.prove("bert", tmp_path)
    assert (row["logits"], row["greedy"], row["sampled"]) == (True, None, None)


def test_a_family_that_cannot_run_is_listed_with_the_reason(tmp_path: Path) -> None:
    row = families.prove("rwkv", tmp_path)
    assert row["logits"] is None
    assert "does not run: a packed weight cannot be changed" in row["note"]


def test_a_difference_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compressed = families.compressed

    def damaged(*arguments):  # type: ignore[no-untyped-def]
        for way, model in compressed(*arguments):
            if way == "saved and loaded":
                model.model.norm.weight.data[0] += 2**-7
            yield way, model

    monkeypatch.setattr(families, "compressed", damaged)
    row = families.prove("llama", tmp_path)
    assert row["logits"] is False
    assert "logits differ: saved and loaded" in row["note"]


def test_zeros_of_either_sign_differ() -> None:
    assert not families.same(torch.tensor([0.0]), torch.tensor([-0.0]))


def test_some_are_only_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(families, "prove", lambda name, folder: SAME | {"packed_cache": None, "family": name})
    for arguments, printed in (["t5", "bert"], 2), (["--name", "trial"], len(families.FAMILIES)):
        monkeypatch.setattr(sys, "argv", ["families.py", *arguments])
        assert families.main() == 0
        assert capsys.readouterr().out.count("'family': ") == printed
    assert [path.name for path in tmp_path.iterdir()] == ["trial.json"]
    monkeypatch.setattr(sys, "argv", ["families.py", "t6"])
    with pytest.raises(SystemExit, match="2"):
        families.main()


def test_every_family_is_in_the_results() -> None:
    rows = common.read_results("families")["rows"]
    assert [row["family"] for row in rows] == list(families.FAMILIES)
