"""`foremoe report`: what balancing would gain on a cluster, as a page for people."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from .. import _core
from .._core import policies
from .._errors import InputError
from . import to_html
from .facts import Report
from .gather import Request, gather_report
from .options import Command, Option, message_of, options_of, parse
from .output import expect_output, write_text
from .page import plotly_script
from .summary import conclusion

OK, FOUND_WRONG, BAD_INPUT, GAVE_UP = 0, 1, 2, 3
INTERRUPTED = 130
DEFAULT_SLOTS = "1,2,4"

EXAMPLES = """\
  foremoe report step.load.safetensors --cluster h100 --model qwen3-30b-a3b --out page.html
  foremoe report step.trace.safetensors --cluster h20 --guest-slots 2,1,4 --policy vanilla,eplb,foremoe --out page.html
  foremoe report step.load.safetensors --cluster h100 --rollout-seconds 120 --memory-budget 80 --out page.html
"""

MEANING = """\
The page is one HTML file that needs neither network nor anything beside it. It shows, with the numbers beneath every
plot: load per rank before and after, the distribution of ρ by policy, stage times by part beside the ideal, what each
stage of our planner adds, memory against speedup over guest slots and residencies, traffic between nodes, and what
ranks do while one layer runs. Before is vanilla; after is foremoe or, where it was not asked for, the fastest. Every
plan is proved right; what is not is left out and named, and the exit code is 1.
Times, memory and traffic are those of a model of the cluster (foremoe simulate --help), not measured on one.
"""

INPUT = Option(
    "input", "Trace or load file (made by import, collect or synth)", "INPUT", required=True, positional=True
)
OUT = Option("out", "Where the page goes; a file there is replaced", "FILE.html", letter="o", main=True, required=True)
POLICY = Option(
    "policy",
    "Policies that plan: all, or names from below separated by commas",
    "A,B,…",
    default="all",
    main=True,
    joins=True,
)
ALIGN = Option(
    "align",
    "For rho_padded: a grouped matrix product rounds each replica's tokens up to a multiple of this",
    "TOKENS",
    default="128",
)
THREADS = Option("threads", "Threads. The result does not depend on it", "N", default="as many as processors")
MOST_THREADS = 4096


def command() -> Command:
    """The command with its options."""
    slots = {
        "value": "G,G,…",
        "help": "Copies that a rank has room for in one layer. Policies are compared at the first number; memory is "
        "weighed against speedup at all of them and without any",
        "default": DEFAULT_SLOTS,
        "joins": True,
    }
    residency = next(option for option in options_of("planner") if option.name == "residency")
    planning = options_of("planning", guest_slots=slots, residency={"help": residency.help})
    cost = options_of("cost", cluster={"required": True}, model={"default": "the one that fits the input"})
    options = [INPUT, *options_of("input"), ALIGN, THREADS, OUT, POLICY, *planning, *cost, *options_of("simulation")]
    width = max(map(len, policies()))
    listed = "".join(f"  {name:{width}}  {summary}\n" for name, summary in policies().items())
    return Command(
        "foremoe report",
        "Show what each policy would gain on a cluster, as a page with plots and tables",
        EXAMPLES,
        f"{MEANING}\nPolicies:\n{listed}",
        options,
    )


def main(arguments: Sequence[str]) -> int:
    """Runs the command with what stands behind its name on a command line; the exit code."""
    this = command()
    try:
        return run(this, parse(this, arguments))
    except SystemExit as end:  # after --help, or a wrong line
        return end.code if isinstance(end.code, int) else BAD_INPUT
    except InputError as error:
        return _fail(message_of(error, this.options), BAD_INPUT)
    except ImportError as error:
        return _fail(str(error), BAD_INPUT)
    except MemoryError:
        return _fail("not enough memory for an input of this size", GAVE_UP)
    except KeyboardInterrupt:
        return INTERRUPTED


def run(this: Command, given: dict[str, str]) -> int:
    """Makes the page of the options that were given, as texts."""
    plotly_script()
    files = [given.get(name, "") for name in ("input", "homes", "previous", "previous_load", "cluster", "model")]
    expect_output(given["out"], files)
    threads = _threads(given["threads"]) if "threads" in given else 0
    input_names = {option.name for option in options_of("input")}
    reading: dict[str, Any] = {name: text for name, text in given.items() if name in input_names}
    own = {"input", "out", "policy", "guest_slots", "threads"}
    flags = {option.name for option in this.options if not option.value}
    planning = {name: name in flags or text for name, text in given.items() if name not in input_names | own}
    slots = [part for part in given.get("guest_slots", DEFAULT_SLOTS).split(",") if part]
    names = [part for part in given.get("policy", "all").split(",") if part]
    progress = _Progress()
    request = Request(names, slots, {**planning, "threads": threads}, progress)
    request.check()
    reading.setdefault("ranks_per_node", _core._ranks_per_node(given["cluster"]))
    try:
        progress(f"reading {given['input']}")
        load = _core._read_input(given["input"], reading, threads)
        progress.end()
        for remark in load.remarks + _core._unused_options(load, {**planning, "guest_slots": slots[0]}, set(given)):
            print(f"foremoe: {remark}", file=sys.stderr)
        report = gather_report(load, request)
    finally:
        progress.end()
    write_text(given["out"], to_html(report))
    return _conclude(given["out"], report)


def _conclude(path: str, report: Report) -> int:
    print(f"{path}: {conclusion(report)}")
    for wrong in report.wrong:
        _fail(wrong, FOUND_WRONG)
    return FOUND_WRONG if report.wrong else OK


def _threads(text: str) -> int:
    if not text.isascii() or not text.lstrip("+").isdigit():
        raise InputError(f"threads: '{text}' is not a whole number", field="threads")
    if not 1 <= int(text) <= MOST_THREADS:
        raise InputError(f"threads: {text} is not in 1 … {MOST_THREADS}", field="threads")
    return int(text)


def _fail(message: str, code: int) -> int:
    print(f"foremoe report: {message}", file=sys.stderr)
    return code


class _Progress:
    """A line on a terminal's stderr that says what goes on; nothing elsewhere."""

    def __init__(self) -> None:
        self.shows = sys.stderr.isatty()

    def __call__(self, what: str) -> None:
        if self.shows:
            print(f"\r{what} …\x1b[K", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self.shows:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
