"""Report pages: the predicted gain from balancing on a cluster, with plots and tables in one HTML file.

    import foremoe
    from foremoe.report import write_report

    load = foremoe.read_load("step.load.safetensors")
    report = write_report(load, "page.html", cluster="h100", policies="vanilla,eplb,foremoe")
    print(report.after.speedup)

Needs plotly: pip install '.[report]', or 'plotly>=6'. `foremoe report` is the same as a command.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from numbers import Integral
from typing import Unpack

from .._core import Load
from .._files import expect
from .._output import expect_output, write_file
from ..options import ReportOptions, expect_options
from .facts import Report
from .gather import Request, gather_report
from .page import document, plotly_script
from .summary import footer, header

__all__ = ["Report", "to_html", "write_report"]


def write_report(
    load: Load,
    path: str | os.PathLike[str],
    *,
    cluster: str,
    guest_slots: int | Sequence[int] = (1, 2, 4),
    policies: str | Sequence[str] = "all",
    measured: bool = True,
    ep: int | None = None,
    **options: Unpack[ReportOptions],
) -> Report:
    """Plans a load with several policies, models the step on a cluster, and writes a page with the gain of each.

    Args:
        load: Load to plan.
        path: File of the page; an existing file is replaced.
        cluster: A name of foremoe.clusters(), or a file that `foremoe calibrate` wrote.
        guest_slots: Policies are compared at the first number. The plot of memory against speedup shows all numbers,
            and a point without guests.
        policies: Keys of foremoe.policies(); "all" for every system, without the variants.
        measured: False omits the planning time, which is measured on this machine. Equal inputs then give equal pages.
        ep: Ranks of an expert-parallel group: the load's ranks form groups of `ep` neighbours. The page shows the
            slowest group, and a table of all. None: one group.
        **options: foremoe.options.ReportOptions.

    Returns:
        The figures of the page. Plans that the checker rejects are omitted and listed in `.wrong`.

    Raises:
        InputError: for an invalid value, with the option's name in `.field`.
        ImportError: without plotly.
    """
    expect(Load, load=load)
    expect(Integral | None, ep=ep)
    expect_options(ReportOptions, "write_report", options)
    plotly_script()
    expect_output(os.fspath(path), [], "path")
    names = policies.split(",") if isinstance(policies, str) else policies
    slots = [guest_slots] if isinstance(guest_slots, int) else list(guest_slots)
    given = {"cluster": cluster, **options}
    report = gather_report(load if ep is None else load.groups(ep), Request(names, slots, given, measured=measured))
    write_file(os.fspath(path), to_html(report).encode())
    return report


def to_html(report: Report) -> str:
    """Return the page. Equal reports give equal pages."""
    from .sections import sections  # imports plotly, which importing foremoe.report does not need

    title = f"{report.model} on {report.cluster}: ForeMoE report"
    return document(title, header(report), sections(report), footer(report))
