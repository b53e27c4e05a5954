"""Shared code of the package's commands: errors as one line on stderr, and exit codes.

The program `foremoe` parses every command line. It starts Python for reports and for formats that Python decodes.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from ._errors import InputError

OK, FOUND_WRONG, BAD_INPUT, GAVE_UP = 0, 1, 2, 3  # exit codes
INTERRUPTED = 130
OUTPUT_FAILED = "standard output cannot be written"
REFRESH_SECONDS = 1.0  # of the line that shows progress


def reporting(name: str, spelling: Mapping[str, str], run: Callable[[], int]) -> int:
    """Runs a command; converts exceptions to one line on stderr and an exit code. spelling: Options by name."""
    if sys.stdout is None:  # closed by the parent process
        return fail(name, OUTPUT_FAILED, BAD_INPUT)
    try:
        code = run()
        sys.stdout.flush()
        return code
    except InputError as error:
        return fail(name, message_of(error, {"max_memory": "--max-memory", **spelling}), BAD_INPUT)
    except ImportError as error:
        return fail(name, str(error), BAD_INPUT)
    except MemoryError:
        return fail(name, "not enough memory for an input of this size", GAVE_UP)
    except KeyboardInterrupt:
        return INTERRUPTED
    except OSError as error:
        if error.filename is not None:
            raise
        _discard_output()
        return fail(name, OUTPUT_FAILED, BAD_INPUT)  # errors of files have a filename


def _discard_output() -> None:
    """Points standard output at the null device. Otherwise Python writes its buffer once more at exit, fails again,
    and turns the exit code into 120."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def fail(name: str, message: str, code: int) -> int:
    """Prints one line on stderr and returns the code."""
    if sys.stderr is not None:
        print(f"{name}: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code


def printable(text: str) -> str:
    """Escapes control characters, since names come from untrusted files."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


@contextlib.contextmanager
def activity(parts: int = 0) -> Iterator[Callable[[str], None]]:
    """Yields a function that announces the current activity. On a terminal, stderr shows it after a second.

    Args:
        parts: Number of announcements. The line also shows the time left, as if all activities took equally long. 0:
            unknown.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda what: None
        return
    told = [("", time.monotonic())]
    done = threading.Event()

    def show() -> None:
        while not done.wait(REFRESH_SECONDS):
            what, since = told[-1]
            now = time.monotonic()
            state = progress_text(len(told) - 2, parts, now - told[0][1]) or f"{now - since:.0f} s"
            print(f"\r{printable(what)} … {state}\x1b[K", end="", file=sys.stderr, flush=True)

    line = threading.Thread(target=show, daemon=True)
    line.start()
    try:
        yield lambda what: told.append((what, time.monotonic()))
    finally:
        done.set()
        line.join()
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def progress_text(done: int, parts: int, seconds: float) -> str:
    """Returns "3 of 12 done, about 40 s left"; an empty text as long as nothing is done or the number is unknown."""
    if done <= 0 or parts <= 0:
        return ""
    left = seconds * max(0, parts - done) / done
    duration = f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min" if left < 6000 else f"{left / 3600:.1f} h"
    return f"{done} of {parts} done, about {duration} left"


def message_of(error: InputError, spelling: Mapping[str, str]) -> str:
    """Returns the error's message with options in command-line spelling, such as --guest-slots."""
    text = str(error)
    plain = error.problem.replace("`", "")
    if text.endswith(plain):
        problem = re.sub(r"`([^`]*)`", lambda name: spelling.get(name[1], name[1]), error.problem)
        text = text[: len(text) - len(plain)] + problem
    if error.field in spelling and not error.file and text.startswith(error.field):
        text = spelling[error.field] + text[len(error.field) :]
    return text
