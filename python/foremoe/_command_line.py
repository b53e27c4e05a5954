"""Command lines of the package's own commands, from the library's tables of options: each is declared once, in C++.

Values stay the texts that were typed: the library parses them, and refuses what cannot be in words of its own. What
goes wrong is one line on stderr, and an exit code.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from . import _core
from ._errors import InputError

OK, FOUND_WRONG, BAD_INPUT, GAVE_UP = 0, 1, 2, 3  # exit codes
INTERRUPTED = 130
OUTPUT_FAILED = "standard output cannot be written"
MOST_THREADS = 4096
WIDTH = 110
TEXT_COLUMN = 34


@dataclass(frozen=True)
class Option:
    """One option: `name` is guest_slots, on a command line --guest-slots; "" as `value` makes a flag."""

    name: str
    help: str
    value: str = ""
    letter: str = ""
    default: str = ""
    group: str = ""
    main: bool = False  # in the short help too
    required: bool = False
    positional: bool = False
    joins: bool = False  # may be given several times, which makes one list

    @property
    def spelling(self) -> str:
        return self.value if self.positional else "--" + self.name.replace("_", "-")


def options_of(table: str, **changed: dict[str, Any]) -> list[Option]:
    """Those of a table of the library; `changed` are fields by name of the option."""
    options = []
    for o in _core._option_tables()[table]:
        fields = {key: o[key] for key in ("name", "help", "value", "letter", "default", "group", "main")}
        option = Option(**fields, joins=o["type"] == "list")
        options.append(replace(option, **changed.get(option.name, {})))
    return options


THREADS = Option("threads", "Threads. The result does not depend on it", "N", default="as many as processors")


@dataclass(frozen=True)
class Command:
    """A command and what its help says."""

    name: str  # "foremoe report"
    summary: str
    examples: str
    meaning: str
    options: Sequence[Option]
    run: Callable[[dict[str, str]], int]  # of the options that were given, by name, as typed; the exit code
    exit_codes: str  # what they mean


def main(command: Command, arguments: Sequence[str]) -> int:
    """Runs the command with what stands behind its name on a command line; the exit code."""

    def run() -> int:
        try:
            given = parse(command, arguments)
        except SystemExit as end:  # after --help, or a wrong line
            return end.code if isinstance(end.code, int) else BAD_INPUT
        _expect_one_process()
        return command.run(given)

    return reporting(command.name, {option.name: option.spelling for option in command.options}, run)


def reporting(name: str, spelling: Mapping[str, str], run: Callable[[], int]) -> int:
    """Runs a command; turns what it raises into one line on stderr and an exit code. spelling: of options, by name."""
    if sys.stdout is None:  # closed by who started us
        return fail(name, OUTPUT_FAILED, BAD_INPUT)
    try:
        code = run()
        sys.stdout.flush()
        return code
    except InputError as error:
        return fail(name, message_of(error, spelling), BAD_INPUT)
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
        return fail(name, OUTPUT_FAILED, BAD_INPUT)  # an error of a file names the file


def _expect_one_process() -> None:
    """Refuses to do the same work, and to write the same files, in each process of mpirun or srun."""
    processes, variable = _core._launched_processes()
    if processes > 1:
        raise InputError(
            f"mpirun or srun has started {processes} processes ({variable}), and each would do all of the work; start "
            "one process, or unset that variable where this one runs alone"
        )


def _discard_output() -> None:
    """Points standard output at the null device. Otherwise Python writes its buffer once more at exit, fails again,
    and turns the exit code into 120."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def fail(name: str, message: str, code: int) -> int:
    """One line on stderr; returns the code."""
    if sys.stderr is not None:
        print(f"{name}: {printable(' '.join(message.split()))}", file=sys.stderr)
    return code


def printable(text: str) -> str:
    """The text with control characters as escapes: names come from files that strangers wrote."""
    return re.sub(r"[\x00-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


def threads_of(given: dict[str, str]) -> int:
    """The number that THREADS was given; 0 where it was not."""
    text = given.get("threads")
    if text is None:
        return 0
    if not re.fullmatch(r"[+-]?[0-9]{1,18}", text):
        raise InputError(f"threads: '{text}' is not a whole number", field="threads")
    if not 1 <= int(text) <= MOST_THREADS:
        raise InputError(f"threads: {text} is not in 1 … {MOST_THREADS}", field="threads")
    return int(text)


@contextlib.contextmanager
def activity() -> Iterator[Callable[[str], None]]:
    """Gives a function that is told what is being done. On a terminal a line on stderr says it, and for how long."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda what: None
        return
    told = [("", time.monotonic())]
    done = threading.Event()

    def show() -> None:
        while not done.wait(1):
            what, since = told[-1]
            print(f"\r{printable(what)} … {time.monotonic() - since:.0f} s\x1b[K", end="", file=sys.stderr, flush=True)

    line = threading.Thread(target=show, daemon=True)
    line.start()
    try:
        yield lambda what: told.append((what, time.monotonic()))
    finally:
        done.set()
        line.join()
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def parse(command: Command, arguments: Sequence[str]) -> dict[str, str]:
    """The options that were given, by name, as typed; a flag is "". Exits after --help. Raises InputError."""
    parser = _parser(command, everything="--help-all" in arguments)
    given = vars(parser.parse_args(arguments))
    for option in command.options:
        if option.required and option.name not in given:
            parser.error(f"{option.spelling} is required")
    return given


def message_of(error: InputError, spelling: Mapping[str, str]) -> str:
    """The error's text with options spelled as the user knows them: --guest-slots."""
    text = str(error)
    plain = error.problem.replace("`", "")
    if text.endswith(plain):
        problem = re.sub(r"`([^`]*)`", lambda name: spelling.get(name[1], name[1]), error.problem)
        text = text[: len(text) - len(plain)] + problem
    if error.field in spelling and not error.file and text.startswith(error.field):
        text = spelling[error.field] + text[len(error.field) :]
    return text


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message} (see {self.prog} --help)")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Writes help. argparse does too, but says nothing where it cannot."""
        (file or sys.stderr).write(message)


class _Store(argparse.Action):
    """Texts as typed; an option that makes no list is given once."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        value = "" if values == [] else values
        before = getattr(namespace, self.dest, None)
        if before is not None and not self.const.joins:
            parser.error(f"{self.const.spelling}: is given twice")
        if not _is_unicode(value):
            parser.error(f"{self.const.spelling}: is no UTF-8 text")
        if self.nargs != 0 and not value:
            parser.error(f"{self.const.spelling}: is empty")
        setattr(namespace, self.dest, value if before is None else f"{before},{value}")


def _is_unicode(text: str) -> bool:
    """Not so for arguments in other encodings, which Python has as halves of surrogates."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _parser(command: Command, everything: bool) -> _Parser:
    shown = [o for o in command.options if everything or o.main or o.required or o.positional]
    hidden = len(command.options) - len(shown)
    epilog = f"Examples:\n{command.examples}\nExit code: {command.exit_codes}\n"
    if everything:
        epilog += f"\n{command.meaning}"
    if hidden:
        epilog += f"\n{hidden} more options, and what words mean: {command.name} --help-all\n"
    words = " ".join(["[OPTIONS]", *(o.value for o in command.options if o.positional)])
    parser = _Parser(
        prog=command.name,
        usage=f"{command.name} {words}",
        description=command.summary,
        epilog=epilog.replace("%", "%%"),
        add_help=False,
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(
            prog, max_help_position=TEXT_COLUMN, width=WIDTH
        ),
    )
    groups = {"": parser.add_argument_group("Options")}
    groups[""].add_argument("-h", "--help", action="help", help="Print this help and exit")
    groups[""].add_argument("--help-all", action="help", help="Print all options and what words mean, and exit")
    for option in command.options:
        group = groups.get(option.group) or groups.setdefault(option.group, parser.add_argument_group(option.group))
        _add(parser if option.positional else group, option, visible=option in shown)
    return parser


def _add(group: argparse._ActionsContainer, option: Option, visible: bool) -> None:
    text = option.help + (f" (default {option.default})" if option.default else "")
    text += " (required)" if option.required and not option.positional else ""
    fields: dict[str, Any] = {"action": _Store, "const": option, "metavar": option.value or None}
    fields["help"] = text.replace("%", "%%") if visible else argparse.SUPPRESS
    if option.positional:
        group.add_argument(option.name, nargs="?", **fields)
        return
    if not option.value:
        fields["nargs"] = 0
    names = [f"-{option.letter}"] if option.letter else []
    group.add_argument(*names, option.spelling, dest=option.name, **fields)
