"""`foremoe report`: what balancing would gain on a cluster, as a page for people."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from .. import _core
from .._command_line import (
    FOUND_WRONG,
    OK,
    THREADS,
    Command,
    Option,
    activity,
    fail,
    options_of,
    printable,
    threads_of,
)
from .._command_line import main as run_command
from .._core import policies
from . import to_html
from .gather import Request, gather_report
from .output import expect_output, write_text
from .page import plotly_script
from .summary import conclusion

DEFAULT_SLOTS = "1,2,4"

EXAMPLES = """\
  foremoe report step.load.safetensors --cluster h100 --model qwen3-30b-a3b --out page.html
  foremoe report step.trace.safetensors --cluster h20 --model qwen3-30b-a3b --policy vanilla,foremoe --out page.html
  foremoe report step.load.safetensors --cluster h100 --model qwen3-30b-a3b --guest-slots 2,1,4 --out page.html
"""

MEANING = """\
The page is one HTML file that needs neither network nor anything beside it. It shows, with the numbers beneath every
plot: load per rank before and after, the distribution of ρ by policy, phase times by part beside the ideal, what each
stage of our planner adds, memory against speedup over guest slots and residencies, traffic between nodes, and what
ranks do while one layer runs. Before is vanilla; after is foremoe or, where it was not asked for, the fastest; of one
that cannot train (residency free), recompute alone is told. Every plan is proved right; what is not is left out and
named.
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
WITHOUT_MEASURED = Option(
    "without_measured",
    "Leave out what is measured, which is planning time: equal input then makes an equal page",
)


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
    own = [ALIGN, THREADS, OUT, POLICY, WITHOUT_MEASURED]
    options = [INPUT, *options_of("input"), *own, *planning, *cost, *options_of("simulation")]
    width = max(map(len, policies()))
    listed = "".join(f"  {name:{width}}  {summary}\n" for name, summary in policies().items())
    return Command(
        "foremoe report",
        "Show what each policy would gain on a cluster, as a page with plots and tables",
        EXAMPLES,
        f"{MEANING}\nPolicies:\n{listed}",
        options,
        _run,
        "0; 1 where a plan is not right; 2 for what cannot be",
    )


def main(arguments: Sequence[str]) -> int:
    """Runs the command with what stands behind its name on a command line; the exit code."""
    return run_command(command(), arguments)


def _run(given: dict[str, str]) -> int:
    """Makes the page."""
    plotly_script()
    files = [given.get(name, "") for name in ("input", "homes", "previous", "previous_load", "cluster", "model")]
    expect_output(given["out"], files)
    threads = threads_of(given)
    input_names = {option.name for option in options_of("input")}
    reading: dict[str, Any] = {name: text for name, text in given.items() if name in input_names}
    own = {"input", "out", "policy", "guest_slots", "threads", "without_measured"}
    flags = {
        option.name for table in ("planning", "cost", "simulation") for option in options_of(table) if not option.value
    }
    planning = {name: name in flags or text for name, text in given.items() if name not in input_names | own}
    slots = [part for part in given.get("guest_slots", DEFAULT_SLOTS).split(",") if part]
    names = [part for part in given.get("policy", "all").split(",") if part]
    measured = "without_measured" not in given
    request = Request(names, slots, {**planning, "threads": threads}, measured=measured)
    reading.setdefault("ranks_per_node", _core._ranks_per_node(given["cluster"]))
    with activity() as progress:
        progress(f"reading {given['input']}")
        load = _core._read_input(given["input"], reading, threads)
    for remark in load.remarks:
        print(f"foremoe: {printable(remark)}", file=sys.stderr)
    with activity() as progress:
        report = gather_report(load, request, progress)
    write_text(given["out"], to_html(report))
    print(printable(f"{given['out']}: {conclusion(report)}"))
    for wrong in report.wrong:
        fail(command().name, wrong, FOUND_WRONG)
    return FOUND_WRONG if report.wrong else OK
