"""From arguments to an exit code; every failure is one line on stderr, with --json an object on stdout as well."""

from __future__ import annotations

import errno
import io
import os
import signal
import sys
import traceback
from contextlib import suppress
from typing import NoReturn

import typer

from samebits.cli.app import app
from samebits.errors import InputError, MismatchError, ResourceError, SamebitsError

DONE, FAILED, UNUSABLE, DEFECT = 0, 1, 2, 70  # the last as in sysexits.h
INTERRUPTED, PIPE_CLOSED, TERMINATED = 130, 141, 143  # 128 + the signal's number, as shells have it
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]  # click's ClickException, wherever typer keeps click


def run(arguments: list[str]) -> int:
    """Run one command.

    Returns:
        0 done, 1 a comparison failed, 2 unusable input, 70 a defect of samebits; 128 + signal if a signal ended it.
    """
    _open_streams()
    signal.signal(signal.SIGTERM, _terminate)
    command = typer.main.get_command(app)
    try:
        with command.make_context("samebits", arguments or ["--help"]) as context:  # main() would catch too much
            command.invoke(context)
        sys.stdout.flush()
        return DONE
    except typer.Exit as done:
        return done.exit_code
    except MismatchError as error:
        return _fail(str(error), FAILED)
    except SamebitsError as error:
        return _refuse(error, arguments)
    except _UsageError as error:
        what = error.format_message().rstrip(".")  # type: ignore[attr-defined]
        known = [name for name in arguments[:1] if name in getattr(command, "commands", ())]
        return _refuse(InputError(what, mend=f"see `{' '.join(['samebits', *known])} --help`"), arguments)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or flushing at exit fails again
        return PIPE_CLOSED
    except OSError as error:
        return _refuse(_described(error), arguments)
    except Exception as error:
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "out of memory" in str(error)):
            mend = "close other programs, use fewer --workers, or --device cpu"
            return _refuse(ResourceError("out of memory", mend=mend), arguments)
        traceback.print_exc()
        return _fail("a defect of samebits; report the lines above and the output of `samebits doctor`", DEFECT)
    except KeyboardInterrupt:
        return _stop("Interrupted", INTERRUPTED, arguments)
    except _Terminated:
        return _stop("Terminated", TERMINATED, arguments)


def _open_streams() -> None:
    """A stream that is closed loses what is written to it; an open one takes every character, whatever its encoding."""
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


class _Terminated(BaseException):
    """SIGTERM: unwinds like Ctrl-C, so that a job is left in a state to go on from."""


def _terminate(number: int, frame: object) -> NoReturn:
    raise _Terminated


def _stop(kind: str, code: int, arguments: list[str]) -> int:
    """By a signal."""
    resumable = arguments[:1] in (["compress"], ["decompress"])
    mend = "the same command goes on where it stopped" if resumable else None
    return _refuse(SamebitsError("interrupted", mend=mend), arguments, kind, code)


def _refuse(error: SamebitsError, arguments: list[str], kind: str | None = None, code: int = UNUSABLE) -> int:
    """``kind``: as JSON, if not the error's class."""
    if "--json" in arguments:
        from samebits.cli.console import print_json

        found = {"kind": kind or type(error).__name__, "what": error.what, "where": error.where, "mend": error.mend}
        with suppress(OSError):  # what goes wrong may be that nothing can be written there
            print_json({"error": found})
            sys.stdout.flush()
    return _fail(str(error), code)


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    sys.stderr.write(f"samebits: {line}\n")
    return code


def _described(error: OSError) -> SamebitsError:
    reason, where = error.strerror or str(error), str(error.filename) if error.filename else None
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ResourceError(reason, where=where, mend="free some space, or raise the limit")
    return InputError(reason, where=where, mend="check the path and its permissions" if where else None)
