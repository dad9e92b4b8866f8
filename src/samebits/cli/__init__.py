"""The command line: parse, call, exit code. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the ``samebits`` command."""
    from samebits.cli.run import run

    sys.exit(run(sys.argv[1:]))
