"""foremoe reproduce: experiments of papers done again, our figures beside the published ones."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from typing import Any

from .._command_line import FOUND_WRONG, OK, THREADS, Command, Option, activity, fail, threads_of
from .._command_line import main as run_command
from .._errors import InputError
from .columns import COLUMNS
from .experiment_file import experiment_names, read_experiment
from .run import Result, run_experiment
from .text import to_json, to_markdown, to_text

EXAMPLES = """\
  foremoe reproduce --list
  foremoe reproduce ultraep-table
  foremoe reproduce all --json
  foremoe reproduce mine.toml --markdown     an experiment of your own: lab/experiments/README.md lists the keys
"""

MEANING = """\
Exact figures are counted in loads and plans, modelled ones come from a replay on a modelled cluster
(docs/users/simulation.md), and what is measured here is time on the machine that runs this.

Columns:
"""

EXIT_CODES = "0; 1 where an aim is not met; 2 for what cannot be. How much was skipped is told at the end"

OPTIONS = [
    Option("name", "Experiment of --list, all, or a TOML file of your own", "NAME", positional=True),
    Option("list", "List the experiments", main=True),
    Option("json", "Print figures and aims as JSON", main=True),
    Option("markdown", "Print it as Markdown, with the table", main=True),
    THREADS,
]


def command() -> Command:
    """The command with its options."""
    columns = [[column.name, f"{column.meaning} ({column.origin})"] for column in COLUMNS.values()]
    summary = "Do experiments of papers again, our figures beside the published ones"
    return Command("foremoe reproduce", summary, EXAMPLES, MEANING + _facts(columns), OPTIONS, _run, EXIT_CODES)


def main(arguments: Sequence[str]) -> int:
    """Runs the command with what stands behind its name on a command line; the exit code."""
    return run_command(command(), arguments)


def _run(given: dict[str, str]) -> int:
    as_json, markdown, threads = "json" in given, "markdown" in given, threads_of(given)
    if as_json and markdown:
        raise InputError("markdown: cannot be used beside --json", field="markdown")
    if "list" in given:
        print(_list(as_json), end="")
        return OK
    if "name" not in given:
        raise InputError("name: is missing; --list lists the experiments", field="name")
    wanted = given["name"]
    results, shortfalls, missed = [], [], False
    for name in experiment_names() if wanted == "all" else [wanted]:
        with activity() as progress:
            result = run_experiment(read_experiment(name), threads=threads, progress=progress)
        shortfalls += _shortfalls(result)
        missed = missed or not all(aim.met for aim in result.judged())
        if as_json:
            results.append(to_json(result))
        elif markdown:
            print(to_markdown(result), end="", flush=True)
        else:
            print(to_text(result, _terminal_columns()), end="", flush=True)
    if as_json:
        print(_json_text(results if wanted == "all" else results[0]), end="", flush=True)
    for shortfall in shortfalls:
        fail(command(), shortfall, FOUND_WRONG)
    return FOUND_WRONG if missed else OK


def _shortfalls(result: Result) -> list[str]:
    """How many aims are not met, and how often a system was skipped, in a sentence; none where all is well."""
    met = [aim.met for aim in result.judged()]
    ran = [not cell.skipped for _, _, cell in result.runs()]
    counts = {"aims not met": met, "systems skipped, over all inputs": ran}
    told = [f"{what}: {all_.count(False)} of {len(all_)}" for what, all_ in counts.items() if not all(all_)]
    return [f"{result.experiment.name}: {'; '.join(told)}"] if told else []


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
