"""Output files: invalid paths are refused early, and files are written completely or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable

from ._errors import InputError


def expect_output(path: str, inputs: Iterable[str], option: str = "out") -> None:
    """Raises InputError for a path that is also an input or cannot be written, and for "-", since a page is a file."""
    if not path:
        raise InputError(f"{option}: is an empty name", field=option)
    if path == "-":
        raise InputError(f"{option}: '-', expected the name of a file", field=option)
    for name in inputs:
        if name and os.path.exists(name) and os.path.exists(path) and os.path.samefile(name, path):
            raise InputError(f"{option}: is also an input", field=option)
    if not _is_stream(path):
        os.unlink(_beside(path))  # tests that the folder is writable


def write_file(path: str, data: bytes) -> None:
    """Replaces a file, or writes to a device or pipe. Raises InputError if that fails."""
    try:
        if _is_stream(path):
            with open(path, "wb") as stream:
                stream.write(data)
            return
        temporary = _beside(path)
        try:
            with open(temporary, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, os.path.realpath(path))
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise _not_written(path, error) from error


def _is_stream(path: str) -> bool:
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def _beside(path: str) -> str:
    """Create an empty file in the same folder."""
    folder, name = os.path.split(os.path.realpath(path))
    try:
        if os.path.isdir(path):
            raise IsADirectoryError(21, "Is a directory")
        temporary = os.path.join(folder, f".{name[:64]}.{secrets.token_hex(8)}")
        os.close(os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    except OSError as error:
        raise _not_written(path, error) from error
    return temporary


def _not_written(path: str, error: OSError) -> InputError:
    return InputError(f"{path}: cannot be written: {error.strerror}", file=path)
