"""The gain from more guest slots, and their cost in memory."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from .facts import MemoryPoint, Report
from .figures import BYTES, TEMPLATE, escape_all
from .numbers import bytes_text, counted, ratio_text, seconds_text, times_text
from .page import Plot, Section, Table, section_of

MARKS = (("s1", "circle"), ("s5", "square"), ("s2", "triangle-up"), ("s7", "diamond"))


def memory_section(report: Report) -> Section | None:
    """Speedup over memory, by residency and guest slots."""
    points = report.memory
    if not points:
        return None
    front = _pareto_front(points)
    names = dict.fromkeys(p.residency for p in points)
    marks = {name: MARKS[i % len(MARKS)] for i, name in enumerate(names)}
    said = [_words(points[i]) for i in sorted(front)]
    plot = Plot(
        "memory-plot",
        f"{report.after.policy}, by where guests stay; numbers at the marks are guest slots per rank and layer. The "
        "line is the front: nothing is quicker with as little memory.",
        f"Memory against speedup. {'. '.join(said)}.",
        _memory_figure(points, front, marks, f"times as fast as {report.before.policy}"),
        [(" ".join(mark), name) for name, mark in marks.items()],
    )
    head = ["residency", "guest slots", "step", "speedup", "memory", "guests", "ρ mean", "copies", "waits for copies"]
    table = Table("memory and speedup by residency and guest slots", [*head, "on the front"])
    for i, point in enumerate(points):
        p = point.result
        cells = [seconds_text(p.step_seconds), times_text(p.speedup), bytes_text(p.memory_bytes)]
        cells += [
            bytes_text(p.guest_bytes),
            ratio_text(p.mean_rho),
            f"{p.copies_per_layer_event:.2f}",
            seconds_text(p.exposed_copy_seconds),
        ]
        table.rows.append([point.residency, str(point.guest_slots), *cells, "yes" if i in front else "no"])
    return section_of("memory", "Memory against speedup", (plot, table))


def _pareto_front(points: Sequence[MemoryPoint]) -> list[int]:
    """Return the Pareto front by ascending memory: each point is faster than all that need no more memory."""
    order = sorted(range(len(points)), key=lambda i: (points[i].result.memory_bytes, -points[i].result.speedup))
    front: list[int] = []
    for i in order:
        if not front or points[i].result.speedup > points[front[-1]].result.speedup:
            front.append(i)
    return front


def _words(point: MemoryPoint) -> str:
    result = point.result
    slots = f"{point.residency}, {counted(point.guest_slots, 'guest slot')}"
    return (
        f"{slots}: {bytes_text(result.memory_bytes)}, {seconds_text(result.step_seconds)}, {times_text(result.speedup)}"
    )


def _memory_figure(
    points: Sequence[MemoryPoint], front: Sequence[int], marks: dict[str, tuple[str, str]], y_title: str
) -> go.Figure:
    """Return a mark for each point, labelled with its guest slots, and the front."""
    memory, gain = [p.result.memory_bytes for p in points], [p.result.speedup for p in points]
    x_range, y_range = _extent(memory), _extent(gain)
    figure = go.Figure(layout={"template": TEMPLATE, "height": 340})
    figure.update_xaxes(title_text="memory of the fullest rank", range=x_range, **BYTES)
    figure.update_yaxes(title_text=escape_all([y_title])[0], range=y_range)
    figure.add_scatter(
        mode="lines",
        x=[*(memory[i] for i in front), x_range[1]],
        y=[*(gain[i] for i in front), gain[front[-1]]],
        line={"shape": "hv", "dash": "3px,4px", "width": 1.6, "color": "var(--soft)"},
    )
    for residency, (colour, symbol) in marks.items():
        here = [i for i, p in enumerate(points) if p.residency == residency]
        figure.add_scatter(
            mode="markers+text",
            x=[memory[i] for i in here],
            y=[gain[i] for i in here],
            text=[str(points[i].guest_slots) for i in here],
            marker={"symbol": symbol, "size": 12, "color": f"var(--{colour})"},
            marker_line={"color": "var(--card)", "width": 1.2},
            hovertext=escape_all(_words(points[i]) for i in here),
            hoverinfo="text",
        )
    return figure


def _extent(values: Sequence[float]) -> list[float]:
    least, most = min(values), max(values)
    margin = 0.07 * (most - least) or 0.05 * abs(least) or 1e-6
    return [least - margin, most + margin]
