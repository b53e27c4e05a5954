"""The command `foremoe`: runs the packaged program, or its parts that are written in Python."""

from __future__ import annotations

import importlib
import logging
import os
import pathlib
import signal
import sys

COMMANDS = {
    "_report": "foremoe.report.command",
    "_import": "foremoe._importing",
    "_check_routes": "foremoe._route_checks",
    "_plot": "foremoe._plot",
}
"""Commands that the program runs in this Python after it has parsed the command line."""


def main() -> None:
    """Runs one of the commands in Python, or replaces this process by the packaged program."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # end quietly when a pipe closes, here and in the program
    if sys.argv[1:2] and sys.argv[1] in COMMANDS:
        logging.basicConfig(format="foremoe: %(message)s")
        sys.exit(importlib.import_module(COMMANDS[sys.argv[1]]).main(sys.argv[2:]))
    os.environ["FOREMOE_PYTHON"] = sys.executable  # the program runs COMMANDS with it
    program = pathlib.Path(__file__).with_name("bin") / "foremoe"
    try:
        os.execv(program, ["foremoe", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"foremoe: {program}: {error.strerror}")


if __name__ == "__main__":
    main()
