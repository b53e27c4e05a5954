"""Time of a step by part, time saved by each planner stage, and activities of ranks while one layer runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from .._plot import PARTS
from .facts import Report, Span, Window, speedup
from .figures import SECONDS, Row, colours_of, escape_all, legend_of, policy_rows, row_figure, stacked_bars
from .numbers import ratio_text, seconds_text, times_text
from .page import Plot, Section, Table, section_of

# Activities with a colour of their own.
SPANS = (*PARTS[:5], "waiting for copies", "copies from the host", "copies from peers")


def time_section(report: Report) -> Section | None:
    """Time of a step, by part."""
    phases = [phase.parts for p in report.planned for phase in (p.recompute, p.policy_update)]
    parts = list(dict.fromkeys(name for of_phase in phases for name, seconds in of_phase.items() if seconds > 0))
    if not parts:
        return None
    sides = (_phase(report, parts, name) for name in ("recompute", "update"))
    return section_of("time", "Where the time goes", *sides, wide=True)


def _phase(report: Report, parts: Sequence[str], phase: str) -> tuple[Plot, Table]:
    recompute = phase == "recompute"
    title, name = ("Recompute", "recompute phase") if recompute else ("Policy update", "policy update")
    times = [p.recompute if recompute else p.policy_update for p in report.planned]
    before = report.before.recompute if recompute else report.before.policy_update
    ideal = before.ideal_seconds
    gains = [f"{seconds_text(t.seconds)} · {times_text(speedup(before.seconds, t.seconds))}" for t in times]
    policies = policy_rows(report, gains)
    colours = colours_of(parts, PARTS)
    here = [part for part in parts if any(time.parts.get(part, 0) > 0 for time in times)]
    bars = {part: (colours[part], [0.0, *(t.parts.get(part, 0.0) for t in times)]) for part in here}
    bars["ideal"] = ("ideal", [ideal, *[0.0] * len(times)])
    figure = stacked_bars(
        [Row("ideal", seconds_text(ideal)), *policies], bars, seconds_text, "critical path", **SECONDS
    )
    figure.data[-1].hovertext = [f"ideal: {seconds_text(ideal)}"] * (len(times) + 1)
    _add_reference(figure, ideal)
    told = [f"{row.name}: {seconds_text(time.seconds)}." for row, time in zip(policies, times, strict=True)]
    plot = Plot(
        f"time-{phase}",
        f"{title}; dashed: every rank at the mean load, nothing copied",
        f"Seconds of the {name} by policy and part. Ideal: {seconds_text(ideal)}. {' '.join(told)}",
        figure,
        legend_of(bars),
    )
    table = Table(f"seconds of the {name} by part", ["policy", *parts, "sum", "ideal"])
    for row, time in zip(policies, times, strict=True):
        seconds = [*(time.parts.get(part, 0.0) for part in parts), time.seconds, time.ideal_seconds]
        table.rows.append([row.name, *map(seconds_text, seconds)])
    return plot, table


def _add_reference(figure: go.Figure, x: float) -> None:
    figure.add_vline(x, line={"color": "var(--ink)", "width": 1.2, "dash": "5px,4px"})


def ablation_section(report: Report) -> Section | None:
    """Return the section that shows the gain from each planner stage; None without an ablation."""
    if not report.ablation:
        return None
    last = len(report.ablation) - 1
    told = [f"{s}: {seconds_text(p.step_seconds)}, {times_text(p.speedup)}" for s, p in report.ablation.items()]
    rows = [
        Row(stages, f"{seconds_text(p.step_seconds)} · {times_text(p.speedup)} · ρ {ratio_text(p.mean_rho)}", i == last)
        for i, (stages, p) in enumerate(report.ablation.items())
    ]
    bars = {"": ("s2", [p.speedup for p in report.ablation.values()])}
    figure = stacked_bars(rows, bars, times_text, f"times as fast as {report.before.policy}")
    _add_reference(figure, 1)
    plot = Plot(
        "ablation-plot",
        "Speedup and mean ρ with some stages alone. B: base placement, once per step; per micro-step L: relocation of "
        "whole experts, P: replication, T: exact token assignment.",
        f"Speedup by stages of the planner. {'. '.join(told)}.",
        figure,
    )
    table = Table("stages of the planner", ["stages", "step", "speedup", "ρ mean", "copies", "waits for copies"])
    for stages, p in report.ablation.items():
        copies, waits = f"{p.copies_per_layer_event:.2f}", seconds_text(p.exposed_copy_seconds)
        table.rows.append(
            [stages, seconds_text(p.step_seconds), times_text(p.speedup), ratio_text(p.mean_rho), copies, waits]
        )
    return section_of("ablation", "What each stage of the planner adds", (plot, table))


def timeline_section(report: Report) -> Section | None:
    """Activities of some ranks while one layer runs, under both policies."""
    if not report.windows:
        return None
    kinds = dict.fromkeys(span.kind for window in report.windows for lane in window.lanes.values() for span in lane)
    colours = colours_of(list(kinds), SPANS)
    colours |= {"waiting": "idle"} if "waiting" in colours else {}
    end = max(window.seconds for window in report.windows)
    sides = [_timeline(f"timeline-{i}", window, colours, end) for i, window in enumerate(report.windows)]
    about = "The same layer of the same micro-step on one scale. Thin bars are copies that travel meanwhile."
    return section_of("timeline", "One layer, rank by rank", *sides, about=about, wide=True)


def _timeline(plot_id: str, window: Window, colours: Mapping[str, str], end: float) -> tuple[Plot, Table]:
    plot = Plot(
        plot_id,
        f"{window.policy}, {window.what}: {seconds_text(window.seconds)}",
        f"Timeline, {window.policy}. {window.what}: {seconds_text(window.seconds)}.",
        _lane_figure(window, colours, end),
        [(colour, kind) for kind, colour in colours.items()],
    )
    table = Table(f"what the ranks did, {window.policy}", ["rank", "what", "begins", "ends"])
    for rank, lane in window.lanes.items():
        for span in lane:
            table.rows.append([f"rank {rank}", span.name, seconds_text(span.begin), seconds_text(span.end)])
    return plot, table


def _lane_figure(window: Window, colours: Mapping[str, str], end: float) -> go.Figure:
    """Return a lane for each rank. Thin bars below a lane are copies in transit."""
    rows = [Row(f"rank {rank}") for rank in window.lanes]
    figure = row_figure(rows, "since the first of the ranks began", range=[0, end], **SECONDS)
    figure.update_layout(barmode="overlay", meta=None)
    spans = [(place, rank, span) for place, (rank, lane) in enumerate(window.lanes.items()) for span in lane]
    for kind, colour in colours.items():
        here = [one for one in spans if one[2].kind == kind]
        figure.add_bar(
            orientation="h",
            base=[span.begin for _, _, span in here],
            x=[span.end - span.begin for _, _, span in here],
            y=[place + (0.32 if span.beneath else -0.06) for place, _, span in here],
            width=[0.14 if span.beneath else 0.56 for _, _, span in here],
            marker={"color": f"var(--{colour})", "line_width": 0.6},
            hovertext=escape_all(_spoken(rank, span) for _, rank, span in here),
        )
    return figure


def _spoken(rank: int, span: Span) -> str:
    when = f"{seconds_text(span.begin)} to {seconds_text(span.end)}"
    return f"rank {rank}, {span.name}: {seconds_text(span.end - span.begin)} ({when})"
