"""Pictures are drawn from the results that there are, and say of which."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import common
import plots
import tables

ROOF = "roof: fill the output, read samebits' bytes"
PEER = {"table": "decode", "matrix": "8 x 8", "bits_per_weight": 10.8, "of_roof": 0.5, "timed_by": "", "note": None}
ROWS: dict[str, list[dict[str, Any]]] = {
    "linear": [
        {"table": "few", "matrix": "8 x 8", "speed_at_1": 1.2, "speed_at_16": 1.1, "packed_bytes": 80,
         "read_tb_per_s": 4.0, "samebits_microseconds_at_1": 1e-4},
        {"table": "few", "matrix": "5000 x 5000", "speed_at_1": 1.2},
        {"table": "many", "matrix": "8 x 8", "tokens": 64, "speed": 0.9},
        {"table": "prefill", "tokens": 128, "overhead": 0.2},
        {"table": "prefill", "tokens": 4096, "overhead": 0.05},
    ],
    "h200": [
        {"table": "codec", "matrix": "8 x 8", "bits_per_weight": 8.0, "decode_tb_per_s": 2.0, "roof_tb_per_s": 2.5},
    ],
    "growth": [
        {"table": "growth", "weights": weights, **dict.fromkeys(
            (f"{name}_microseconds" for name in ("roof", "decode", "encode", "bf16", "samebits")), weights)}
        for weights in (10**6, 10**8)
    ],
    "peers": [
        {**PEER, "decoder": ROOF, "decode_tb_per_s": 2.0},
        {**PEER, "decoder": "samebits", "decode_tb_per_s": 1.5, "decode_tb_per_s_slowest": 1.4,
         "decode_tb_per_s_fastest": 1.6},
        {**PEER, "decoder": "nvCOMP ANS, exponents alone", "decode_tb_per_s": None, "bits_per_weight": None,
         "of_roof": None, "note": "not installed"},
    ],
}  # fmt: skip


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where results lie; none so far."""
    folder = tmp_path / "results"
    folder.mkdir()
    monkeypatch.setattr(common, "RESULTS", folder)
    monkeypatch.setattr(plots, "DOCS", tmp_path)
    return folder


def write(folder: Path, name: str) -> None:
    rows = [row | {"date": "2026-01-01"} for row in ROWS[name]]
    content = {"name": name, "device": "a device", "versions": {}, "rows": rows}
    (folder / f"{name}.json").write_text(json.dumps(content))


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["plots.py", *arguments])
    return plots.main()


def texts(picture: Path) -> list[str]:
    """What is written in an SVG."""
    return [text.text or "" for text in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text")]


def test_the_pictures_are_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, "--check") == 0, "run `make tables`"


def test_nothing_is_drawn_without_results(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch) == 0
    assert not list(results.parent.glob("*.svg"))


def test_all_pictures(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ROWS:
        write(results, name)
    assert run(monkeypatch) == 0
    speed, moved, grown = (texts(results.parent / f"{name}.svg") for name in plots.PICTURES)
    assert {"less than 16 million", "tokens", "times as fast", "more time, %", "4096"} <= set(speed)
    assert "16 to 48 million" not in speed  # not measured with many tokens
    assert {"3.00, 80 %", "0.80, 20 %", "1.50, 75 %"} <= set(moved)  # 2 of 2.5 with a packed byte for two written
    assert not [text for text in moved if "nvCOMP" in text]
    assert {"million weights", "µs", "product with one token, BF16"} <= set(grown)


def test_a_panel_without_results_is_left_out(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(results, "h200")
    assert run(monkeypatch) == 0
    assert [path.name for path in results.parent.glob("*.svg")] == ["bytes-by-matrix.svg"]
    assert not [text for text in texts(results.parent / "bytes-by-matrix.svg") if "token" in text]


def test_other_results_are_noticed(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(results, "growth")
    assert run(monkeypatch, "--check") == 1
    assert run(monkeypatch) == 0
    assert run(monkeypatch, "--check") == 0
    text = (results / "growth.json").read_text()
    (results / "growth.json").write_text(text.replace("100000000", "100000001"))
    assert run(monkeypatch, "--check") == 1


def test_the_same_results_give_the_same_bytes(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(results, "growth")
    run(monkeypatch)
    shutil.move(results.parent / "growth.svg", results.parent / "first")
    run(monkeypatch)
    assert (results.parent / "growth.svg").read_bytes() == (results.parent / "first").read_bytes()


def test_the_table_of_peers(results: Path) -> None:
    marked = "<!-- table: peers.decode -->\n<!-- end -->\n"
    assert tables.with_tables(marked) == marked
    write(results, "peers")
    text = tables.with_tables(marked)
    assert "| 8 x 8 | samebits | 10.80 | 1.50 (1.40 to 1.60) | 50.0 % |  |" in text
    assert f"| 8 x 8 | {ROOF} | 10.80 | 2.00 | 50.0 % |  |" in text
    assert "| 8 x 8 | nvCOMP ANS, exponents alone |  | not installed |  |  |" in text
    assert text.splitlines()[1] == tables.CAPTIONS["peers.decode"].splitlines()[0]
    assert tables.with_tables(text) == text


def test_pictures_are_shown_if_there_are_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    marked = "<!-- plot: growth -->\n<!-- end -->\n"
    assert tables.with_tables(marked) == marked
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "growth.svg").touch()
    assert f"![{tables.PLOTS['growth']}](docs/growth.svg)\n" in tables.with_tables(marked)


def test_every_picture_has_a_title() -> None:
    assert tables.PLOTS.keys() == plots.PICTURES.keys()
