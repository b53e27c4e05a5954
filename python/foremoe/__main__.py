"""The command `foremoe`: reproduce and report are the package's, all else is the program that the package carries."""

from __future__ import annotations

import importlib
import logging
import os
import pathlib
import signal
import sys
from collections.abc import Sequence

from ._errors import InputError

_NEEDS = {"plotly": "report"}  # module → extra of the package


def main() -> None:
    """Runs one of the package's commands, or becomes the packaged program."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a reader that has read enough ends us, here and in the program
    if sys.argv[1:2] in (["report"], ["reproduce"]):
        sys.exit(_run(sys.argv[1], sys.argv[2:]))
    program = pathlib.Path(__file__).with_name("bin") / "foremoe"
    try:
        os.execv(program, ["foremoe", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"foremoe: {program}: {error.strerror}")


def _run(command: str, argv: Sequence[str]) -> int:
    """The exit code. What goes wrong is one line on stderr."""
    logging.basicConfig(format="foremoe: %(message)s")
    try:
        code: int = importlib.import_module(f"foremoe.{command}.command").main(argv)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except ModuleNotFoundError as error:
        if error.name not in _NEEDS:
            raise
        problem, code = f"needs {error.name}: pip install 'foremoe[{_NEEDS[error.name]}]'", 2
    except InputError as error:
        problem, code = str(error), 2
    except MemoryError:
        problem, code = "not enough memory for an input of this size", 3
    except OSError as error:
        if error.filename is not None:
            raise
        problem, code = "standard output cannot be written", 2  # an error of a file names the file
    print(f"foremoe {command}: {' '.join(problem.split())}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
