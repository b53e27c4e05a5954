"""foremoe reproduce: experiments of papers done again, our figures beside the published ones."""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

from .._errors import InputError
from .columns import COLUMNS
from .experiment_file import experiment_names, read_experiment
from .run import run_experiment
from .text import to_json, to_markdown, to_text

_MEANING = """\
examples:
  foremoe reproduce --list
  foremoe reproduce ultraep-table
  foremoe reproduce all --json
  foremoe reproduce mine.toml --markdown     an experiment of your own: docs/formats.md lists the keys

Exact figures are counted in loads and plans, modelled ones come from a replay on a modelled cluster
(docs/simulation.md), and what is measured here is time on the machine that runs this.

columns:
"""

_MOST_THREADS = 4096


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


def main(argv: Sequence[str]) -> int:
    """Runs the command on what follows its name; returns the exit code. Raises InputError."""
    arguments = _parser().parse_args(argv)
    if arguments.json and arguments.markdown:
        raise InputError("--markdown: cannot be used beside --json", field="markdown")
    if arguments.list:
        print(_list(arguments.json), end="")
        return 0
    if not arguments.name:
        raise InputError("NAME: is missing; --list lists the experiments", field="name")
    results = []
    for name in experiment_names() if arguments.name == "all" else [arguments.name]:
        with _activity() as progress:
            result = run_experiment(read_experiment(name), threads=arguments.threads, progress=progress)
        if arguments.json:
            results.append(to_json(result))
        elif arguments.markdown:
            print(to_markdown(result), end="", flush=True)
        else:
            print(to_text(result, _terminal_columns()), end="", flush=True)
    if arguments.json:
        print(_json_text(results if arguments.name == "all" else results[0]), end="")
    return 0


def _parser() -> argparse.ArgumentParser:
    columns = [[column.name, f"{column.meaning} ({column.origin})"] for column in COLUMNS.values()]
    parser = _Parser(
        prog="foremoe reproduce",
        description="Do experiments of papers again, our figures beside the published ones",
        epilog=_MEANING + _facts(columns),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    add = parser.add_argument
    add("name", metavar="NAME", nargs="?", help="experiment of --list, all, or a TOML file of your own")
    add("-h", "--help", "--help-all", action="help", help="print this help and exit")
    add("--list", action="store_true", help="list the experiments")
    add("--json", action="store_true", help="print figures and aims as JSON")
    add("--markdown", action="store_true", help="print a section as docs/results.md has it")
    add(
        "--threads", metavar="N", type=_threads, default=0, help="threads to plan with (default: as many as processors)"
    )
    return parser


def _threads(text: str) -> int:
    if not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number")
    if not 1 <= int(text) <= _MOST_THREADS:
        raise argparse.ArgumentTypeError(f"{text} is not in 1 … {_MOST_THREADS}")
    return int(text)


def _list(as_json: bool) -> str:
    experiments = [read_experiment(name) for name in experiment_names()]
    if as_json:
        return _json_text([{"name": e.name, "title": e.title, "source": e.source} for e in experiments])
    return _facts([[e.name, f"{e.title} ({e.source})"] for e in experiments])


def _json_text(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _facts(facts: list[list[str]]) -> str:
    width = max(len(name) for name, _ in facts)
    return "".join(f"  {name:<{width}}  {fact}\n" for name, fact in facts)


def _terminal_columns() -> int | None:
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


@contextlib.contextmanager
def _activity() -> Iterator[Callable[[str], None]]:
    """Gives a function that is told what is being done. On a terminal a line on stderr says it, and for how long."""
    if not sys.stderr.isatty():
        yield lambda what: None
        return
    told = [("", time.monotonic())]
    done = threading.Event()

    def show() -> None:
        while not done.wait(1):
            what, since = told[-1]
            print(f"\r{what} … {time.monotonic() - since:.0f} s\x1b[K", end="", file=sys.stderr, flush=True)

    line = threading.Thread(target=show, daemon=True)
    line.start()
    try:
        yield lambda what: told.append((what, time.monotonic()))
    finally:
        done.set()
        line.join()
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
