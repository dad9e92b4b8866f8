"""From arguments to an exit code; every failure is one line on stderr."""

from __future__ import annotations

import os
import signal
import sys
from typing import NoReturn

import typer

from samebits.cli.app import app
from samebits.errors import MismatchError, SamebitsError

DONE, FAILED, UNUSABLE = 0, 1, 2
INTERRUPTED, PIPE_CLOSED, TERMINATED = 130, 141, 143  # 128 + the signal's number, as shells have it
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]  # click's ClickException, wherever typer keeps click


def run(arguments: list[str]) -> int:
    """Run one command.

    Returns:
        0 done, 1 a comparison failed, 2 unusable input; 128 + signal if a signal ended it.
    """
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
        return _fail(str(error), UNUSABLE)
    except _UsageError as error:
        what = error.format_message().rstrip(".")  # type: ignore[attr-defined]
        known = [name for name in arguments[:1] if name in getattr(command, "commands", ())]
        return _fail(f"{what}; see `{' '.join(['samebits', *known])} --help`", UNUSABLE)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or flushing at exit fails again
        return PIPE_CLOSED
    except OSError as error:
        return _fail(_describe(error), UNUSABLE)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "out of memory" not in str(error):
            raise
        return _fail("out of memory; close other programs, use fewer --workers, or --device cpu", UNUSABLE)
    except KeyboardInterrupt:
        return _fail(_interrupted(arguments), INTERRUPTED)
    except _Terminated:
        return _fail(_interrupted(arguments), TERMINATED)


class _Terminated(BaseException):
    """SIGTERM: unwinds like Ctrl-C, so that a job is left in a state to go on from."""


def _terminate(number: int, frame: object) -> NoReturn:
    raise _Terminated


def _interrupted(arguments: list[str]) -> str:
    resumable = arguments[:1] in (["compress"], ["decompress"])
    return "interrupted; the same command goes on where it stopped" if resumable else "interrupted"


def _fail(message: str, code: int) -> int:
    line = " ".join(message.split())
    sys.stderr.write(f"samebits: {line}\n")
    return code


def _describe(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}; check the path and its permissions" if error.filename else reason
