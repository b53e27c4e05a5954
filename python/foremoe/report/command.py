"""`foremoe report`: a page that shows the gain of balancing on a cluster. The program parses the command line."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from .. import _core
from .._command_line import FOUND_WRONG, OK, activity, fail, printable, reporting
from .._output import expect_output, write_file
from . import to_html
from .gather import Request, gather_report
from .page import plotly_script
from .summary import conclusion

NAME = "foremoe report"
OWN = ("out", "policy", "guest_slots", "threads", "align", "without_measured")


def main(arguments: Sequence[str]) -> int:
    """Write the page and return the exit code. The argument is a JSON object: options by name, as typed."""
    tables = _core._option_tables()
    reading = [o["name"] for table in ("input", "groups") for o in tables[table]]
    names = [*OWN, *reading, *(o["name"] for table in ("planning", "cost", "simulation") for o in tables[table])]
    spelling = {name: f"--{name.replace('_', '-')}" for name in names}
    return reporting(NAME, spelling, lambda: _run(json.loads(arguments[0]), reading))


def _run(given: dict[str, Any], input_names: Sequence[str]) -> int:
    plotly_script()
    files = [given.get(name, "") for name in ("input", "homes", "previous", "previous_load", "cluster", "model")]
    expect_output(given["out"], files)
    reading = {name: text for name, text in given.items() if name in input_names}
    own = {"input", "out", "policy", "guest_slots", "threads", "without_measured"}
    planning = {name: text for name, text in given.items() if name not in own.union(input_names)}
    slots, names = (
        [part.strip() for part in given.get(name, default).split(",") if part.strip()]
        for name, default in (("guest_slots", "1,2,4"), ("policy", "all"))
    )
    threads = int(given.get("threads", 0))
    request = Request(names, slots, {**planning, "threads": threads}, measured="without_measured" not in given)
    reading.setdefault("ranks_per_node", _core._ranks_per_node(given["cluster"]))
    with activity() as progress:
        progress(f"reading {given['input']}")
        loads = _core._read_input(given["input"], reading, threads)
    for remark in loads[0].remarks:
        print(f"foremoe: {printable(remark)}", file=sys.stderr)
    with activity(request.num_evaluations + 2 * (len(loads) - 1)) as progress:
        report = gather_report(loads, request, progress=progress)
    write_file(given["out"], to_html(report).encode())
    print(printable(f"{given['out']}: {conclusion(report)}"))
    for wrong in report.wrong:
        fail(NAME, wrong, FOUND_WRONG)
    return FOUND_WRONG if report.wrong else OK
