"""What users of a terminal see beside results."""

from __future__ import annotations

import signal
import sys

import pytest
from numba import njit

from samebits.cli import console
from samebits.cli.console import compilation_noted, print_table
from samebits.cli.failure import interruption, sayer


def test_a_terminal_hears_of_compilation_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    double = njit(lambda value: 2 * value)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with compilation_noted():
        assert [double(1), double(1.0), double(2)] == [2, 2.0, 4]  # two signatures
    assert capsys.readouterr().err.count("compiling the CPU codec") == 1
    with compilation_noted():
        double(3)
    assert capsys.readouterr().err == ""


def test_nothing_else_does(capsys: pytest.CaptureFixture[str]) -> None:
    halve = njit(lambda value: value / 2)
    with compilation_noted():
        assert halve(3.0) == 1.5
    assert capsys.readouterr().err == ""


def test_a_narrow_terminal_cuts_no_figures(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "30")
    name, figures = "model.layers.0.self_attn.q_proj.weight", ["4096 x 4096", "33.55 MB", "22.45 MB", "10.70"]
    print_table("title", ["tensor", "shape", "original", "stored", "bits/weight"], [[name, *figures]])
    out = capsys.readouterr().out
    assert all(figure in out for figure in figures)
    assert "".join(line[1:].split("│")[0].strip() for line in out.splitlines() if line.startswith("│")) == name


@pytest.mark.parametrize(("terminal", "start"), [("xterm", "\r\x1b[2K\x1b[?25h"), ("dumb", "")])
def test_a_signal_ends_the_bar_of_progress(
    terminal: str, start: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there can be one: a dumb terminal would show the codes."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", terminal)
    sayer(["verify"])(signal.SIGINT)
    assert capfd.readouterr().err == f"{start}samebits: interrupted\n"


@pytest.mark.parametrize("command", ["compress", "decompress", "verify"])
def test_what_goes_on_where_it_stopped(command: str) -> None:
    mend = None if command == "verify" else "the same command goes on where it stopped"
    assert interruption([command, "model"]).mend == mend


def test_progress_on_a_dumb_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines, as a bar cannot be drawn anew there: neither silence nor an empty line."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(console, "_SECONDS_BETWEEN_LINES", 0)
    with console.progress_bar("compress") as progress:
        progress(500, 1000)
    assert capsys.readouterr().err == "compress: 50 % (500 B of 1.00 kB)\n"


def test_progress_that_stands_still(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    lines = console.Lines("compress")
    for now[0] in (101.0, 107.0):
        lines.show(1000, 10000)
    assert capsys.readouterr().err == "compress: 10 % (1.00 kB of 10.00 kB)\n"


def test_small_tensors_before_a_compilation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Say nothing of the speed behind it."""
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    lines = console.Lines("compress")
    for seconds, done in ((1, 10), (2, 20), (12, 30), (12.1, 1030), (17.1, 6030)):
        now[0] = 100 + seconds
        lines.show(done, 10000)
    assert capsys.readouterr().err.splitlines() == [
        "compress: 0 % (30 B of 10.00 kB)",
        "compress: 60 % (6.03 kB of 10.00 kB), 1.00 kB/s, 4 s left",
    ]


def test_progress_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line every five seconds, with the speed since some of it was done."""
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    lines = console.Lines("compress")
    for seconds, done in ((9, 0), (10, 1000), (14, 2000), (14.5, 2500), (16, 3000), (20, 6000), (21, 10000)):
        now[0] = 100 + seconds
        lines.show(done, 10000)
    assert capsys.readouterr().err.splitlines() == [
        "compress: 10 % (1.00 kB of 10.00 kB)",
        "compress: 30 % (3.00 kB of 10.00 kB), 333 B/s, 21 s left",
        "compress: 100 % (10.00 kB of 10.00 kB), 818 B/s, 0 s left",
    ]
