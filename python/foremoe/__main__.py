"""The command `foremoe`: report is the package's, all else is the program that the package carries."""

from __future__ import annotations

import importlib
import logging
import os
import pathlib
import signal
import sys


def main() -> None:
    """Runs one of the package's commands, or becomes the packaged program."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that has read enough ends us, here and in the program
    if sys.argv[1:2] == ["report"]:
        logging.basicConfig(format="foremoe: %(message)s")
        sys.exit(importlib.import_module("foremoe.report.command").main(sys.argv[2:]))
    program = pathlib.Path(__file__).with_name("bin") / "foremoe"
    try:
        os.execv(program, ["foremoe", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"foremoe: {program}: {error.strerror}")


if __name__ == "__main__":
    main()
