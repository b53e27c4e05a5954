"""The command `foremoe`: the program that the package carries."""

from __future__ import annotations

import os
import pathlib
import sys


def main() -> None:
    """Becomes the packaged program."""
    program = pathlib.Path(__file__).with_name("bin") / "foremoe"
    try:
        os.execv(program, ["foremoe", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"foremoe: {program}: {error.strerror}")


if __name__ == "__main__":
    main()
