"""Running commands in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer

from samebits.cli import console
from samebits.cli.run import run
from tests.jobs.checkpoints import write_folder


@dataclass(frozen=True)
class Outcome:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        assert self.code in (0, 1), self.err
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value

    @property
    def error(self) -> str:
        """The one line of stderr that a failure leaves."""
        assert self.out == "" or self.code == 1, self.out
        assert self.err.count("\n") == 1, self.err
        assert self.err.startswith("samebits: ")
        return self.err


Command = Callable[..., Outcome]

made_command = cache(typer.main.get_command)


@pytest.fixture
def samebits(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    """``samebits(*arguments)`` runs the command line, without lines of progress, however slow the machine is.

    typer makes its parser once, which else takes longer than most commands.
    """
    monkeypatch.setattr(console, "_SECONDS_BETWEEN_LINES", float("inf"))
    monkeypatch.setattr(typer.main, "get_command", made_command)

    def call(*arguments: object) -> Outcome:
        capsys.readouterr()
        code = run([str(argument) for argument in arguments])
        return Outcome(code, *capsys.readouterr())

    return call


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "source")


@pytest.fixture
def packed(samebits: Command, source: Path) -> Path:
    assert samebits("compress", source, source.parent / "packed").code == 0
    return source.parent / "packed"
