"""The command `foremoe`: the program that the package carries, and the parts of it that are in Python."""

from __future__ import annotations

import importlib
import logging
import os
import pathlib
import signal
import sys

COMMANDS = {"_report": "foremoe.report.command", "_import": "foremoe.importing"}
"""What the program runs by this Python, when it has parsed a command line."""


def main() -> None:
    """Runs one of the package's commands, or becomes the packaged program."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that has read enough ends us, here and in the program
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        logging.basicConfig(format="foremoe: %(message)s")
        sys.exit(importlib.import_module(COMMANDS[sys.argv[1]]).main(sys.argv[2:]))
    os.environ["FOREMOE_PYTHON"] = sys.executable  # by which the program runs what this package has
    program = pathlib.Path(__file__).with_name("bin") / "foremoe"
    try:
        os.execv(program, ["foremoe", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"foremoe: {program}: {error.strerror}")


if __name__ == "__main__":
    main()
