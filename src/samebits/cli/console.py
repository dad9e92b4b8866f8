"""Reports on stdout, progress on stderr."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from samebits.cli.failure import visible
from samebits.progress import silent
from samebits.sizes import size

if TYPE_CHECKING:
    from samebits.progress import Progress

_PIPE_WIDTH = 160
_KEPT_WIDTH = 20  # up to which a column keeps its width on any terminal
_SECONDS_BETWEEN_LINES = 5.0
_UNDER_WAY = 0.05  # done, from which on speed is measured


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on stdout."""
    sys.stdout.write(json.dumps(value, indent=2, default=str) + "\n")


def print_lines(*lines: str) -> None:
    sys.stdout.write("".join(f"{visible(line)}\n" for line in lines))


def note(line: str) -> None:
    """A remark on stderr; no reason to end, where it cannot be written."""
    with suppress(OSError):
        sys.stderr.write(f"{visible(line)}\n")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table on stdout: the first column is text, the others are figures, which a narrow terminal does not cut."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=visible(title), title_justify="left")
    rows = [[visible(cell) for cell in row] for row in rows]
    widths = [min(_KEPT_WIDTH, max(map(len, cells))) for cells in zip(columns, *rows, strict=True)]
    for number, (column, width) in enumerate(zip(columns, widths, strict=True)):
        table.add_column(column, justify="right" if number else "left", overflow="fold", min_width=width)
    for row in rows:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, markup=False, emoji=False, highlight=False)
    console.width = max(console.width, sum(widths) + 3 * len(widths) + 1)  # with what is between columns
    console.print(table)


@contextmanager
def progress_bar(label: str, *, is_shown: bool = True) -> Iterator[Progress]:
    """Progress with speed and time left: a bar on a terminal that can redraw it, now and then a line elsewhere."""
    if not is_shown:
        yield silent
        return
    if not sys.stderr.isatty():
        yield Lines(label).show
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with compilation_noted():
        if not console.is_interactive:  # a dumb one, on which nothing is drawn
            yield Lines(label).show
            return
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(label, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def compilation_noted() -> Iterator[None]:
    """Say on a terminal, once, if meanwhile this process compiles the CPU codec instead of finding it compiled."""
    from numba.core.event import Event, Listener, install_listener

    class FirstCompilation(Listener):  # type: ignore[misc]
        is_noted = not sys.stderr.isatty()

        def on_start(self, event: Event) -> None:
            if not self.is_noted:
                self.is_noted = True
                note("note: compiling the CPU codec, which takes up to half a minute the first time")

        def on_end(self, event: Event) -> None:
            pass

    with install_listener("numba:compile", FirstCompilation()):
        yield


class Lines:
    """Progress where there is no terminal: a line every few seconds, and none for short work.

    The speed is that since some of it was done; what lies before, in a first run the codec's compilation, is not going
    to be repeated, and small tensors that need none of it are done before.
    """

    def __init__(self, label: str) -> None:
        self.label = label
        self.last = time.monotonic()
        self.first: tuple[float, int] | None = None  # when it was under way, and how much was done

    def show(self, done: int, total: int) -> None:
        now = time.monotonic()
        if not done:
            return
        if self.first is None and done >= _UNDER_WAY * total:
            self.first = now, done
        start, before = self.first or (now, done)
        if now - self.last < _SECONDS_BETWEEN_LINES:
            return
        self.last = now
        line = f"{self.label}: {100 * done // total} % ({size(done)} of {size(total)})"
        if done > before and now > start:
            speed = (done - before) / (now - start)
            line += f", {size(speed)}/s, {(total - done) / speed:.0f} s left"
        note(line)
