"""Ctrl-C and SIGTERM, wherever they find a command: its exit code, one line, no traceback, nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from samebits.format.folder import JOB
from tests.cli.conftest import Command
from tests.jobs.checkpoints import files_of

CODES = {signal.SIGINT: (130, "Interrupted"), signal.SIGTERM: (143, "Terminated")}
AT_AN_IMPORT = """
import signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            signal.raise_signal({number})

sys.meta_path.insert(0, Finder())
from samebits.cli import main
main()
"""
AT_WORK = """
import signal
from concurrent.futures import ProcessPoolExecutor
from samebits.cli import main
from samebits.jobs import job

class Swallowed:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)

def work(task):
    Swallowed()
    return original(task)

def advance(self, nbytes):
    if nbytes:
        {act}
    original(self, nbytes)

def shutdown(self, *arguments, **options):
    {act}
    original(self, *arguments, **options)

if __name__ == "__main__":
    original = {place}
    {place} = {function}
    main()
"""
AT_A_FILE_THAT_BECAME_SHORTER = """
import os, pathlib, sys, threading
from samebits.cli.failure import sayer
from samebits.digest import digest
from samebits.format.mapping import map_file
from samebits.jobs.signals import end_by_signals

path = pathlib.Path(sys.argv[1])
path.write_bytes(bytes(1 << 20))
end_by_signals(sayer(sys.argv[2:]))
data = map_file(path, 0, 1 << 20)
os.truncate(path, 0)
{read}
print("not reached")
"""
OF_A_COMMAND_THAT_IS_DONE = """
import atexit, signal, sys
{first}
atexit.register(signal.raise_signal, {number})
sys.argv = ["samebits", "--version"]
from samebits.cli import main
main()
"""
SWALLOWED, RAISED = "Swallowed()", "signal.raise_signal(signal.SIGTERM)"


def started(*command: object) -> tuple[int, str, str]:
    """Exit code, stdout and stderr, which are complete once workers have ended, too.

    Ctrl-C is not ignored, as it would be if the tests were started in the background.
    """
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    texts = [sys.executable, *map(str, command)]
    done = subprocess.run(texts, capture_output=True, text=True, timeout=300, preexec_fn=heed)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("number", CODES)
@pytest.mark.parametrize(
    ("module", "command"),
    [("typer", "inspect"), ("typer", "estimate"), ("torch._refs", "inspect"), ("numba.core", "estimate")],
)
def test_during_imports(source: Path, module: str, command: str, number: signal.Signals) -> None:
    script = AT_AN_IMPORT.format(module=module, number=int(number))
    code, kind = CODES[number]
    if command == "inspect":
        assert started("-c", script, "inspect", source) == (code, "", "samebits: interrupted\n")
        return
    found = started("-c", script, "estimate", source, "--json")
    error = {"kind": kind, "what": "interrupted", "where": None, "mend": None}
    assert (found[0], json.loads(found[1]), found[2]) == (code, {"error": error}, "samebits: interrupted\n")


@pytest.mark.parametrize(
    ("place", "function", "act", "workers"),
    [
        ("job.work", "work", SWALLOWED, 1),
        ("job.Job._advance", "advance", RAISED, 2),
        ("job.Job._advance", "advance", SWALLOWED, 2),
        ("ProcessPoolExecutor.shutdown", "shutdown", RAISED, 2),
    ],
)
def test_at_work(
    samebits: Command, source: Path, packed: Path, tmp_path: Path, place: str, function: str, act: str, workers: int
) -> None:
    """What other code swallows does not let the command go on; given again, it does."""
    script, destination = tmp_path / "script.py", tmp_path / "interrupted"
    script.write_text(AT_WORK.format(place=place, function=function, act=act))
    code, out, err = started(script, "compress", source, destination, "--workers", workers)
    *progress, line = err.splitlines()
    assert (code, out, line) == (143, "", "samebits: interrupted; the same command goes on where it stopped")
    assert all(text.startswith("compress: ") for text in progress)
    assert os.listdir(destination) == [JOB]
    assert samebits("compress", source, destination).code == 0
    assert files_of(destination) == files_of(packed)


def test_a_signal_that_is_ignored_stays_so(source: Path) -> None:
    """As nohup and the & of a shell start a command."""
    script = AT_AN_IMPORT.format(module="typer", number=int(signal.SIGINT))
    code, out, err = started("-c", f"import signal\nsignal.signal(2, signal.SIG_IGN)\n{script}", "inspect", source)
    assert (code, "tensors packed" in out, err) == (0, True, "")


@pytest.mark.parametrize("number", CODES)
def test_behind_a_command_that_is_done(number: signal.Signals) -> None:
    """It ends the process as it ends any other; one that is ignored still is."""
    ended = started("-c", OF_A_COMMAND_THAT_IS_DONE.format(first="", number=int(number)))
    ignore = f"signal.signal({int(number)}, signal.SIG_IGN)"
    went_on = started("-c", OF_A_COMMAND_THAT_IS_DONE.format(first=ignore, number=int(number)))
    assert (ended[0], ended[2]) == (-number, "")
    assert went_on == (0, ended[1], "")


SAYING = """
import signal, threading
from samebits.jobs.signals import end_by_signals, held, unwinding

def say(number):
    print("said", int(number), flush=True)
    {then}

end_by_signals(say)
{act}
"""


@pytest.mark.parametrize(
    ("act", "then"),
    [
        ("with unwinding():\n    pass\nsignal.raise_signal(15)", "pass"),
        ("signal.raise_signal(15)", "signal.raise_signal(2)"),
        ("with held():\n    signal.raise_signal(15)\n    signal.raise_signal(2)", "pass"),
    ],
    ids=["behind what was to be tidied up", "while that is said", "while signals wait"],
)
def test_the_first_signal_ends_a_process_and_that_is_said_once(act: str, then: str) -> None:
    assert started("-c", SAYING.format(act=act, then=then)) == (143, "said 15\n", "")


def test_workers_of_a_thread_end_whatever_signals_do() -> None:
    """Only the main thread may ask them to wait."""
    act = """
def work():
    with held():
        print("held", flush=True)

thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
    assert started("-c", SAYING.format(act=act, then="pass")) == (0, "held\n", "")


def test_what_others_raise_where_nobody_catches_it_is_shown() -> None:
    act = """
class Other:
    def __del__(self):
        raise ValueError("of another")

Other()
"""
    code, out, err = started("-c", SAYING.format(act=act, then="pass"))
    assert (code, out, err.endswith("ValueError: of another\n")) == (0, "", True)


def test_as_a_module(source: Path) -> None:
    code, out, err = started("-m", "samebits", "inspect", source)
    assert (code, "tensors packed" in out, err) == (0, True, "")


@pytest.mark.parametrize("read", ["digest(data)", "data.sum()", "threading.Thread(target=data.sum).start()"])
def test_a_mapped_file_became_shorter(tmp_path: Path, read: str) -> None:
    script = AT_A_FILE_THAT_BECAME_SHORTER.format(read=f"{read}; threading.Event().wait(60)")
    code, out, err = started("-c", script, tmp_path / "file", "compress", "--json")
    assert code == 128 + signal.SIGBUS
    assert json.loads(out)["error"]["kind"] == "ResourceError"
    assert err.startswith("samebits: a file that was being read became shorter")
    assert err.count("\n") == 1
