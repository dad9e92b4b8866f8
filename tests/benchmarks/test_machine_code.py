"""benchmarks/machine_code.py: kernels are told apart by their code, and by nothing else."""

from __future__ import annotations

import shutil
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("cuda.bindings")

ROOT = Path(__file__).resolve().parents[2]

import machine_code  # noqa: E402

FILE = "tables.cu"
TARGET = "sm_90a"

codes_of_tree = machine_code.codes_of_tree
codes_of_own_tree = cache(codes_of_tree)


@pytest.fixture(autouse=True)
def _own_tree_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test changes it."""

    def codes(tree: Path, file: str, target: str) -> dict[str, str]:
        return (codes_of_own_tree if tree == ROOT else codes_of_tree)(tree, file, target)

    monkeypatch.setattr(machine_code, "codes_of_tree", codes)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of the sources, to be changed."""
    shutil.copytree(ROOT / "src/samebits", tmp_path / "src/samebits", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    monkeypatch.setattr(sys, "argv", ["machine_code.py", *arguments])
    return machine_code.main(), capsys.readouterr().out.splitlines()


def change(tree: Path, file: str, old: str, new: str) -> None:
    path = tree / machine_code.CSRC / file
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


def test_every_kernel_has_code() -> None:
    assert machine_code.codes(FILE, TARGET).keys() == {"make_table_quad", "make_table_single"}


def test_comments_change_nothing(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change(tree, "streams.cuh", "#pragma once\n", "#pragma once\n// Said in another way.\n")
    assert run(monkeypatch, capsys, str(tree), "--files", FILE) == (0, ["the same machine code"])


def test_what_differs_is_named(tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    change(tree, "streams.cuh", "0x01010101u", "0x02020202u")  # of quads
    status, lines = run(monkeypatch, capsys, str(tree), "--files", FILE)
    assert (status, lines) == (1, [f"{FILE}: make_table_quad differs", "1 kernels differ"])


def test_new_files(tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tree / machine_code.CSRC / "replay.cu").unlink()
    status, lines = run(monkeypatch, capsys, str(tree), "--files", "replay.cu")
    assert (status, lines) == (1, ["replay.cu: before_replay is new", "1 kernels differ"])


def test_files_that_are_gone_are_among_all(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(tree / machine_code.CSRC / "replay.cu", tree / machine_code.CSRC / "earlier.cu")
    monkeypatch.setattr(machine_code, "codes_of_tree", codes_by_name)
    status, lines = run(monkeypatch, capsys, str(tree))
    assert (status, lines) == (1, ["earlier.cu: earlier is gone", "1 kernels differ"])


def codes_by_name(tree: Path, file: str, target: str) -> dict[str, str]:
    """For tests of which files are compared: one kernel in each, named as the file."""
    return {Path(file).stem: target} if (tree / machine_code.CSRC / file).is_file() else {}


@pytest.mark.parametrize("files", [["--files", "tabels.cu"], ["--files", f"{FILE},tabels.cu"]])
def test_names_that_no_tree_has(
    tree: Path, files: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["machine_code.py", str(tree), *files])
    with pytest.raises(SystemExit, match="2"):
        machine_code.main()
    assert "neither tree has tabels.cu in src/" in capsys.readouterr().err


def test_what_is_no_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["machine_code.py", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        machine_code.main()
    assert "is no tree of the repository" in capsys.readouterr().err


def test_what_cannot_be_compiled(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    change(tree, FILE, "make_table_quad", "make_table_quad)")
    with pytest.raises(SystemExit, match=r"tables.cu cannot be compiled: .*"):
        run(monkeypatch, capsys, str(tree), "--files", FILE)
