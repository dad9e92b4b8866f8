"""What a command that fails leaves: one line on stderr, with --json an object on stdout as well."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable
from contextlib import suppress
from signal import SIGINT, SIGTERM

from samebits.errors import ResourceError, SamebitsError

_CONTROLS = re.compile(r"[\x00-\x08\n-\x1f\x7f-\x9f]")  # but for the tab
_CLEAN_LINE = "\r\x1b[2K\x1b[?25h"  # without the bar of progress, and with a cursor again


def open_streams() -> None:
    """A stream that is closed loses what is written to it; an open one takes every character, whatever its encoding."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def visible(text: str) -> str:
    """Without control characters, which names in files may have, and which could do anything to a terminal."""
    return _CONTROLS.sub(lambda found: repr(found[0])[1:-1], text)


def line_of(message: str) -> str:
    return f"samebits: {visible(' '.join(message.split()))}\n"


def json_of(error: SamebitsError, kind: str | None = None) -> str:
    """``kind``: if not the error's class."""
    found = {"kind": kind or type(error).__name__, "what": error.what, "where": error.where, "mend": error.mend}
    return json.dumps({"error": found}, indent=2) + "\n"


def interruption(arguments: list[str]) -> SamebitsError:
    """Of a command that a signal ends."""
    resumable = arguments[:1] in (["compress"], ["decompress"])
    return SamebitsError("interrupted", mend="the same command goes on where it stopped" if resumable else None)


def _unreadable() -> SamebitsError:
    """Of a command that reads memory which is a file's, and is not there any more."""
    mend = "run the same command again when nothing writes to the files"
    return ResourceError("a file that was being read became shorter, or its disk fails", mend=mend)


def sayer(arguments: list[str]) -> Callable[[int], None]:
    """Says which signal ended a command, past the streams, which the signal may have found at work."""
    out, err = sys.stdout.fileno(), sys.stderr.fileno()
    is_terminal = sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb"

    def say(number: int) -> None:
        ends_by_itself = number not in (SIGINT, SIGTERM)
        error = _unreadable() if ends_by_itself else interruption(arguments)
        if "--json" in arguments:
            _write(out, json_of(error, None if ends_by_itself else kind_of(number)))
        _write(err, (_CLEAN_LINE if is_terminal else "") + line_of(str(error)))

    return say


def kind_of(number: int) -> str:
    return "Terminated" if number == SIGTERM else "Interrupted"


def _write(descriptor: int, text: str) -> None:
    with suppress(OSError):  # what it leads to may be closed or full
        os.write(descriptor, text.encode())
