"""From arguments to an exit code; every failure is one line on stderr, with --json an object on stdout as well."""

from __future__ import annotations

import errno
import os
import signal
import sys
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path

import typer

from samebits.cli.app import app
from samebits.cli.failure import interruption, json_of, kind_of, line_of, open_streams
from samebits.errors import InputError, MismatchError, ResourceError, SamebitsError

DONE, FAILED, UNUSABLE, DEFECT = 0, 1, 2, 70  # the last as in sysexits.h
INTERRUPTED, PIPE_CLOSED = 130, 141  # 128 + the signal's number, as shells have it
_UsageError: type[Exception] = typer.BadParameter.__mro__[2]  # click's ClickException, wherever typer keeps click


def run(arguments: list[str]) -> int:
    """Run one command.

    Returns:
        0 done, 1 a comparison failed, 2 unusable input, 70 a defect of samebits; 130 interrupted, 141 a closed pipe.
    """
    open_streams()
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
        what = what.replace(": Value error, ", ": ", 1)  # which pydantic, in newer versions of typer, puts before it
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
        mend = "report the lines above and the output of `samebits doctor`"
        return _refuse(SamebitsError("a defect of samebits", mend=mend), arguments, type(error).__name__, DEFECT)
    except KeyboardInterrupt:
        return _refuse(interruption(arguments), arguments, kind_of(signal.SIGINT), INTERRUPTED)


def _refuse(error: SamebitsError, arguments: list[str], kind: str | None = None, code: int = UNUSABLE) -> int:
    """``kind``: as JSON, if not the error's class."""
    if "--json" in arguments:
        with suppress(OSError):  # what goes wrong may be that nothing can be written there
            sys.stdout.write(json_of(error, kind))
            sys.stdout.flush()
    return _fail(str(error), code)


def _fail(message: str, code: int) -> int:
    with suppress(OSError):  # a log on a disk that is full, say
        sys.stderr.write(line_of(message))
    return code


def _described(error: OSError) -> SamebitsError:
    reason, file = error.strerror or str(error), error.filename2 or error.filename  # to where a file was to be moved
    where = str(file) if file else None
    if error.errno in (errno.ENOSPC, errno.EDQUOT) and where and _is_temporary(where):
        return ResourceError(reason, where=where, mend="free some space, or set TMPDIR to a folder with more")
    if where is None and "temporary directory" in reason:
        return ResourceError(reason, mend="set TMPDIR to a folder that can be written")
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return ResourceError(reason, where=where, mend="free some space, or raise the limit")
    return InputError(reason, where=where, mend="check the path and its permissions" if where else None)


def _is_temporary(file: str) -> bool:
    return tempfile.tempdir is not None and Path(file).parent == Path(tempfile.tempdir)
