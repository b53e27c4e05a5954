"""Pages for people: what balancing would gain on a cluster, with plots and tables in one HTML file.

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
from typing import Unpack

from .._core import Load
from .._keywords import takes
from ..files import expect
from ..options import ReportOptions
from .facts import Report
from .gather import Request, gather_report
from .output import expect_output, write_text
from .page import document, plotly_script
from .sections import sections
from .summary import footer, header

__all__ = ["Report", "to_html", "write_report"]


@takes(ReportOptions)
def write_report(
    load: Load,
    path: str | os.PathLike[str],
    *,
    cluster: str,
    guest_slots: int | Sequence[int] = (1, 2, 4),
    policies: str | Sequence[str] = "all",
    measured: bool = True,
    **options: Unpack[ReportOptions],
) -> Report:
    """Plans a load with several policies, models the step on a cluster, and writes a page that shows what each gains.

    path: of the page; a file there is replaced. cluster: as foremoe.simulate() takes it. guest_slots: policies
    are compared at the first number; memory is weighed against speedup at all of them and without any. policies: keys
    of foremoe.policies(), or "all". measured: False leaves out the planning time, which is measured here, so that equal
    input makes an equal page.

    Returns what the page shows. Plans that are not right are left out, and told in `.wrong`. Raises InputError for what
    cannot be, and ImportError without plotly.
    """
    expect(Load, load=load)
    plotly_script()
    expect_output(os.fspath(path), [], "path")
    names = policies.split(",") if isinstance(policies, str) else policies
    slots = [guest_slots] if isinstance(guest_slots, int) else list(guest_slots)
    given = {"cluster": cluster, **options}
    report = gather_report(load, Request(names, slots, given, measured=measured))
    write_text(os.fspath(path), to_html(report))
    return report


def to_html(report: Report) -> str:
    """The page. Equal reports make equal pages."""
    title = f"{report.model} on {report.cluster}: ForeMoE report"
    return document(title, header(report), sections(report), footer(report))
