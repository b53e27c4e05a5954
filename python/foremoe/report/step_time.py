"""Where a step's time goes, and what each stage of our planner saves of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .facts import PhaseTime, PolicyResult, Report, speedup
from .numbers import ratio_text, seconds_text, times_text
from .page import Plot, Section, Table, section_of
from .plots import Bars, Row, bar_chart, bars_of, colours_of, rows_of, seconds_axis

# What has a colour of its own.
PARTS = (
    *("dense", "dispatch", "experts", "combine", "planning"),
    *("exposed copies", "arena refresh", "exposed gradients", "optimizer", "homes moved"),
)


def time_section(report: Report) -> Section | None:
    """Where a step's time goes."""
    phases = [phase.parts for p in report.planned for phase in (p.recompute, p.policy_update)]
    parts = list(dict.fromkeys(name for of_phase in phases for name, seconds in of_phase.items() if seconds > 0))
    if not parts:
        return None
    recompute = _phase(report, parts, "time-recompute", "recompute phase", "Recompute", lambda p: p.recompute)
    update = _phase(report, parts, "time-update", "policy update", "Policy update", lambda p: p.policy_update)
    return section_of("time", "Where the time goes", recompute, update, wide=True)


def _phase(
    report: Report,
    parts: Sequence[str],
    plot_id: str,
    name: str,
    title: str,
    phase_of: Callable[[PolicyResult], PhaseTime],
) -> tuple[Plot, Table]:
    before = phase_of(report.before)
    ideal = before.ideal_seconds
    times = [phase_of(p) for p in report.planned]
    gains = [f"{seconds_text(t.seconds)} · {times_text(speedup(before.seconds, t.seconds))}" for t in times]
    policies = rows_of(report, gains)
    rows = [Row("ideal", seconds_text(ideal)), *policies]
    colours = colours_of(parts, PARTS)
    here = [part for part in parts if any(time.parts.get(part, 0) > 0 for time in times)]
    bars = [
        bars_of(rows, part, f"--{colours[part]}", [0.0, *(t.parts.get(part, 0.0) for t in times)], seconds_text)
        for part in here
    ]
    nothing = [0.0] * len(times)
    bars.append(Bars("ideal", "--ideal", [ideal, *nothing], [f"ideal: {seconds_text(ideal)}"] * len(rows)))
    told = [f"{row.name}: {seconds_text(time.seconds)}." for row, time in zip(policies, times, strict=True)]
    plot = Plot(
        plot_id,
        f"{title}; dashed: every rank at the mean load, nothing copied",
        f"Seconds of the {name} by policy and part. Ideal: {seconds_text(ideal)}. {' '.join(told)}",
        *bar_chart(rows, bars, seconds_axis("critical path"), reference=ideal),
        rows=len(rows),
        legend=[*((colours[part], part) for part in here), ("ideal", "ideal")],
    )
    table = Table(f"seconds of the {name} by part", ["policy", *parts, "sum", "ideal"])
    for row, time in zip(policies, times, strict=True):
        seconds = [*(time.parts.get(part, 0.0) for part in parts), time.seconds, time.ideal_seconds]
        table.rows.append([row.name, *map(seconds_text, seconds)])
    return plot, table


def ablation_section(report: Report) -> Section | None:
    """What each stage of our planner adds."""
    if not report.ablation:
        return None
    last = len(report.ablation) - 1
    rows = [
        Row(stages, f"{times_text(p.speedup)} · ρ {ratio_text(p.mean_rho)}", i == last)
        for i, (stages, p) in enumerate(report.ablation.items())
    ]
    said = [f"{stages}: {times_text(p.speedup)}" for stages, p in report.ablation.items()]
    bars = [Bars("speedup", "--s2", [p.speedup for p in report.ablation.values()], said)]
    plot = Plot(
        "ablation-plot",
        "Speedup and mean ρ with some stages alone. B: base placement, once per step; per micro-step L: relocation of "
        "whole experts, P: replication, T: exact token assignment.",
        f"Speedup by stages of the planner. {'. '.join(said)}.",
        *bar_chart(rows, bars, {"title": f"times as fast as {report.before.policy}"}, reference=1.0),
        rows=len(rows),
    )
    table = Table("stages of the planner", ["stages", "speedup", "ρ mean", "copies", "waits for copies"])
    for stages, p in report.ablation.items():
        copies, waits = f"{p.copies_per_layer_event:.2f}", seconds_text(p.exposed_copy_seconds)
        table.rows.append([stages, times_text(p.speedup), ratio_text(p.mean_rho), copies, waits])
    return section_of("ablation", "What each stage of the planner adds", (plot, table))
