"""Runs `foremoe` commands: the program parses the arguments, and this process runs the Python part."""

from __future__ import annotations

import importlib
import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

import foremoe
from foremoe.__main__ import COMMANDS

PROGRAM = pathlib.Path(foremoe.__file__).with_name("bin") / "foremoe"


def run(verb: str, *arguments: str) -> int:
    """Runs a command like the package's `foremoe`, with its Python part in this process. Returns the exit code."""
    echo = os.environ | {"FOREMOE_PYTHON": "/bin/echo"}  # prints "-m foremoe COMMAND REQUEST"
    command = [PROGRAM, verb, *map(os.fsencode, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=echo, check=False)
    words = done.stdout.rstrip("\n").split(" ", 3)
    if words[:2] == ["-m", "foremoe"]:
        code: int = importlib.import_module(COMMANDS[words[2]]).main([words[3]])
        return code
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    return done.returncode


def requested(verb: str, *arguments: str) -> Sequence[str]:
    """Returns the arguments with which the program starts Python."""
    echo = os.environ | {"FOREMOE_PYTHON": "/bin/echo"}
    return subprocess.run(
        [PROGRAM, verb, *arguments], capture_output=True, text=True, env=echo, check=True
    ).stdout.split(" ", 3)
