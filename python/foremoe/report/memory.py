"""What more guest slots buy, and what they cost in memory."""

from __future__ import annotations

from collections.abc import Sequence

from .facts import MemoryPoint, Report
from .numbers import bytes_text, counted, ratio_text, seconds_text, times_text
from .page import Plot, Section, Table, section_of
from .plots import Drawn, axis, bytes_axis, layout, trace

SYMBOLS = ("circle", "square", "triangle-up", "diamond")
COLOURS = ("--s1", "--s5", "--s2", "--s7")


def memory_section(report: Report) -> Section | None:
    """Speedup over memory, by residency and guest slots."""
    points = report.memory
    if not points:
        return None
    front = _pareto_front(points)
    said = [_words(points[i]) for i in sorted(front)]
    names = list(dict.fromkeys(p.residency for p in points))
    plot = Plot(
        "memory-plot",
        f"{report.after.policy}, by where guests stay; numbers at the marks are guest slots per rank and layer. The "
        "line is the front: nothing is quicker with as little memory.",
        f"Memory against speedup. {'. '.join(said)}.",
        *_chart(points, front, f"times as fast as {report.before.policy}"),
        legend=[(f"p{i} {SYMBOLS[i % 4]}", name) for i, name in enumerate(names)],
    )
    head = ["residency", "guest slots", "speedup", "memory", "guests", "ρ mean", "copies", "waits for copies"]
    table = Table("memory and speedup by residency and guest slots", [*head, "on the front"])
    for i, point in enumerate(points):
        p = point.result
        cells = [times_text(p.speedup), bytes_text(p.memory_bytes), bytes_text(p.guest_bytes), ratio_text(p.mean_rho)]
        cells += [f"{p.copies_per_layer_event:.2f}", seconds_text(p.exposed_copy_seconds)]
        table.rows.append([point.residency, str(point.guest_slots), *cells, "yes" if i in front else "no"])
    return section_of("memory", "Memory against speedup", (plot, table))


def _pareto_front(points: Sequence[MemoryPoint]) -> list[int]:
    """Those that nothing beats with as little memory, by memory."""
    order = sorted(range(len(points)), key=lambda i: (points[i].result.memory_bytes, -points[i].result.speedup))
    front: list[int] = []
    for i in order:
        if not front or points[i].result.speedup > points[front[-1]].result.speedup:
            front.append(i)
    return front


def _words(point: MemoryPoint) -> str:
    result = point.result
    slots = f"{point.residency}, {counted(point.guest_slots, 'guest slot')}"
    return f"{slots}: {bytes_text(result.memory_bytes)}, {times_text(result.speedup)}"


def _chart(points: Sequence[MemoryPoint], front: Sequence[int], y_title: str) -> Drawn:
    """Speedup over memory: a mark for each point with its guest slots beside it, and the front."""
    memory, gain = [p.result.memory_bytes for p in points], [p.result.speedup for p in points]
    x_range, y_range = _extent(memory), _extent(gain)
    x = [*(memory[i] for i in front), x_range[1]]
    y = [*(gain[i] for i in front), gain[front[-1]]]
    steps = {"shape": "hv", "dash": "3px,4px", "width": 1.6, "color": "--soft"}
    data = [trace("scatter", mode="lines", x=x, y=y, line=steps)]
    for series, residency in enumerate(dict.fromkeys(p.residency for p in points)):
        here = [i for i, p in enumerate(points) if p.residency == residency]
        mark = {"symbol": SYMBOLS[series % 4], "size": 12, "color": COLOURS[series % 4]}
        marks = {
            "x": [memory[i] for i in here],
            "y": [gain[i] for i in here],
            "text": [str(points[i].guest_slots) for i in here],
            "textfont": {"color": "--text", "size": 12},
            "marker": {**mark, "line": {"color": "--card", "width": 1.2}},
        }
        data.append(trace("scatter", [_words(points[i]) for i in here], mode="markers+text", **marks))
    xaxis = axis(range=x_range, **bytes_axis("memory of the fullest rank"))
    return data, layout(340, xaxis, axis(y_title, range=y_range))


def _extent(values: Sequence[float]) -> list[float]:
    least, most = min(values), max(values)
    margin = 0.07 * (most - least) or 0.05 * abs(least) or 1e-6
    return [least - margin, most + margin]
