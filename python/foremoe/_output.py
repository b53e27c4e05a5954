"""Output files: invalid paths are refused early, and files are written completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterable

from ._core import _expect_writable, _write_file
from ._errors import InputError


def write_file(path: str, data: bytes) -> None:
    """Replaces a file, or writes to a device or pipe. Raises InputError if that fails."""
    if os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path):
        try:
            with open(path, "wb") as stream:  # can be interrupted while a pipe has no reader
                stream.write(data)
        except OSError as error:
            raise InputError(f"{path}: cannot be written: {error.strerror}", file=path) from error
    else:
        _write_file(path, data)


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
