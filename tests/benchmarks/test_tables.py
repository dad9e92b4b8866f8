"""What the benchmarks count and print, checked where it can be known."""

from __future__ import annotations

import datetime
import json
import logging
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

import common
import dfloat11_size
import tables

COMMANDS = [path for path in sorted(common.RESULTS.parent.glob("*.py")) if "__main__" in path.read_text()]

# Exponents of two units of a checkpoint that DFloat11's own encoder wrote, and the bytes that their tensors take there.
HEAD = {
    102: 1, 103: 2, 104: 4, 105: 4, 106: 3, 107: 12, 108: 25, 109: 44, 110: 83, 111: 181, 112: 388, 113: 687, 114: 1363,
    115: 2764, 116: 5481, 117: 10875, 118: 21330, 119: 40122, 120: 65960, 121: 71992, 122: 35520, 123: 5209, 124: 94,
}  # fmt: skip
LAYER = {
    0: 4, 7: 1, 103: 3, 104: 4, 105: 9, 106: 15, 107: 28, 108: 46, 109: 134, 110: 243, 111: 476, 112: 947, 113: 1959,
    114: 3778, 115: 7375, 116: 15252, 117: 30378, 118: 59870, 119: 112809, 120: 181707, 121: 197684, 122: 97177,
    123: 14656, 124: 433, 125: 1, 210: 1, 226: 1, 227: 1,
}  # fmt: skip


def histogram(counts: dict[int, int]) -> np.ndarray:
    result = np.zeros(256, np.int64)
    result[list(counts)] = list(counts.values())
    return result


@pytest.mark.parametrize(("counts", "matrices", "nbytes"), [(HEAD, 1, 359_645), (LAYER, 7, 993_606)])
def test_dfloat11_size_equals_its_own_files(counts: dict[int, int], matrices: int, nbytes: int) -> None:
    assert dfloat11_size.unit_bytes(histogram(counts), matrices) == nbytes


def test_dfloat11_leaves_a_unit_with_high_exponents_uncompressed() -> None:
    assert dfloat11_size.unit_bytes(histogram(HEAD | {240: 1}), 1) == 2 * (sum(HEAD.values()) + 1)


@pytest.mark.parametrize("path", sorted(common.RESULTS.glob("*.json")), ids=lambda path: path.stem)
def test_result_files_have_the_form_of_common(path: Path) -> None:
    content = json.loads(path.read_text())
    assert content.keys() == {"name", "device", "versions", "rows"}
    assert content["name"] == path.stem
    assert all("table" in row and datetime.date.fromisoformat(row["date"]) for row in content["rows"])
    assert not any(isinstance(value, dict | list) for row in content["rows"] for value in row.values())


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.stem)
def test_who_asks_for_help_measures_nothing(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    monkeypatch.setattr(logging.root.manager, "disable", logging.root.manager.disable)
    with pytest.raises(SystemExit, match=r"^0$"):
        runpy.run_path(str(path), run_name="__main__")
    assert path.read_text().partition("\n")[0].removeprefix('"""') in capsys.readouterr().out


def test_a_table_without_columns_of_its_own_shows_all(monkeypatch: pytest.MonkeyPatch) -> None:
    results = {
        "device": "a device",
        "versions": {"torch": "2"},
        "rows": [
            {"table": "speed", "tb_per_s": 2.1, "note": None, "date": "2026-01-02"},
            {"table": "other", "x": 1, "date": "2026-01-03"},
        ],
    }
    monkeypatch.setattr(tables, "read_results", lambda name: results)
    text = tables.with_tables("before\n<!-- table: gpu.speed -->\nold\n<!-- end -->\nafter\n")
    assert text.splitlines()[:6] == [
        "before",
        "<!-- table: gpu.speed -->",
        "| tb per s | note |",
        "| --- | ---: |",
        "| 2.1 |  |",
        "",
    ]
    assert "a device; torch 2; 2026-01-02</sub>" in text
    assert "old" not in text
    assert text.endswith("<!-- end -->\nafter\n")


def test_products_that_are_made_one_by_one_are_called_so(monkeypatch: pytest.MonkeyPatch) -> None:
    times = {
        f"{name}_microseconds{end}": 10.0
        for name in ("bf16", "one_by_one", "together")
        for end in ("", "_slowest", "_fastest")
    }
    row = {"table": "together", "model": "a", "layers": "q, k, v", "tokens": 1} | times
    rows = [row | {"launches": launches, "date": f"2026-01-0{1 + launches}"} for launches in (1, 0)]
    results = {"device": "a device", "versions": {"torch": "2"}, "rows": rows}
    monkeypatch.setattr(tables, "read_results", lambda name: results)
    time = "10.0 (10.0 to 10.0)"
    lines = tables.table_text("linear", "together").splitlines()
    assert lines[5:7] == [
        f"| a | q, k, v | 1 | {time} | {time} | {time} | 1.00 |",
        f"| a | q, k, v | 1 | {time} | {time} | one by one | 1.00 |",
    ]
    assert lines[-1].endswith("a device; torch 2; 2026-01-01 to 2026-01-02</sub>")


def test_quotients() -> None:
    cell = tables.quotient("a", "b")
    assert [cell({"a": a, "b": b}) for a, b in ((3.0, 2.0), (None, 2.0), (3.0, None))] == ["1.50", "", ""]
