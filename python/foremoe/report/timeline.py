"""What some ranks did while one layer ran, a lane for each rank."""

from __future__ import annotations

from collections.abc import Mapping

from .facts import Report, Span, Window
from .numbers import seconds_text
from .page import Plot, Section, Table, section_of
from .plots import Drawn, Row, axis, colours_of, in_rows, seconds_axis, trace
from .step_time import PARTS

KINDS = (*PARTS[:5], "waiting for copies", "copies from the host", "copies from peers")  # with a colour of their own


def timeline_section(report: Report) -> Section | None:
    """The same layer with both policies."""
    if not report.windows:
        return None
    spans = [span for window in report.windows for lane in window.lanes.values() for span in lane]
    colours = colours_of(list(dict.fromkeys(span.kind for span in spans)), KINDS)
    colours |= {"waiting": "idle"} if "waiting" in colours else {}
    end = max(window.seconds for window in report.windows)
    sides = [_window(f"timeline-{i}", window, colours, end) for i, window in enumerate(report.windows)]
    about = "The same layer of the same micro-step on one scale. Thin bars are copies that travel meanwhile."
    return section_of("timeline", "One layer, rank by rank", *sides, about=about, wide=True)


def _window(plot_id: str, window: Window, colours: Mapping[str, str], end: float) -> tuple[Plot, Table]:
    plot = Plot(
        plot_id,
        f"{window.policy}, {window.what}: {seconds_text(window.seconds)}",
        f"Timeline, {window.policy}. {window.what}: {seconds_text(window.seconds)}.",
        *_lane_chart(window, colours, end),
        legend=[(css, kind) for kind, css in colours.items()],
    )
    table = Table(f"what the ranks did, {window.policy}", ["rank", "what", "begins", "ends"])
    for rank, lane in window.lanes.items():
        for span in lane:
            table.rows.append([f"rank {rank}", span.name, seconds_text(span.begin), seconds_text(span.end)])
    return plot, table


def _lane_chart(window: Window, colours: Mapping[str, str], end: float) -> Drawn:
    """What happened when; thin bars beneath are what travelled meanwhile."""
    by_kind: dict[str, list[tuple[int, int, Span]]] = {kind: [] for kind in colours}
    for place, (rank, spans) in enumerate(window.lanes.items()):
        for span in spans:
            by_kind[span.kind].append((place, rank, span))
    data = []
    for kind, lanes in by_kind.items():
        bars = {
            "x": [span.end - span.begin for _, _, span in lanes],
            "y": [place + (0.32 if span.beneath else -0.06) for place, _, span in lanes],
            "base": [span.begin for _, _, span in lanes],
            "width": [0.14 if span.beneath else 0.56 for _, _, span in lanes],
            "marker": {"color": f"--{colours[kind]}", "line": {"color": "--card", "width": 0.6}},
        }
        if lanes:
            hover = [_spoken(rank, span) for _, rank, span in lanes]
            data.append(trace("bar", hover, orientation="h", name=kind, **bars))
    xaxis = axis(range=[0, end], **seconds_axis("since the first of the ranks began"))
    return in_rows([Row(f"rank {rank}") for rank in window.lanes], xaxis, data, barmode="overlay")


def _spoken(rank: int, span: Span) -> str:
    when = f"{seconds_text(span.begin)} to {seconds_text(span.end)}"
    return f"rank {rank}, {span.name}: {seconds_text(span.end - span.begin)} ({when})"
