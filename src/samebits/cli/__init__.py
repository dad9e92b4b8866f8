"""The command line: parse, call, exit code. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the ``samebits`` command."""
    from samebits.cli.failure import open_streams, sayer
    from samebits.jobs.signals import end_by_default, end_by_signals

    arguments = sys.argv[1:]
    open_streams()
    end_by_signals(sayer(arguments))

    from samebits.cli.run import run

    code = run(arguments)
    end_by_default()
    sys.exit(code)
