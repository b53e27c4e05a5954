"""Output files: invalid paths are refused early, and files are written completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ._core import _expect_writable, _write_file
from ._errors import InputError

write_file = _write_file


def expect_output(path: str, inputs: Iterable[str], option: str = "out") -> None:
    """Raises InputError for a path that is also an input or cannot be written, and for "-", since a page is a file."""
    if not path:
        raise InputError(f"{option}: is an empty name", field=option)
    if path == "-":
        raise InputError(f"{option}: '-', expected the name of a file", field=option)
    for name in inputs:
        if name and os.path.exists(name) and os.path.exists(path) and os.path.samefile(name, path):
            raise InputError(f"{option}: is also an input", field=option)
    _expect_writable(path)
