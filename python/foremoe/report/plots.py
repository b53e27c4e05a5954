"""The page's figures, as Plotly's JSON. Colours are names in style.css ("--s1"), which page.js looks up, so that a
figure follows the scheme. Whatever Plotly would read as markup was escaped before; hover texts are no templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from .facts import MemoryPoint, Window
from .numbers import bytes_text, counted, ratio_text, seconds_text, times_text
from .page import escaped

Json = dict[str, Any]
Drawn = tuple[list[Json], Json]  # data and layout

FONT = 'system-ui, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif'
ROW = 30  # px
MOST_TICKS = 10  # that fit on a narrow screen
MOST_GAPS = 32  # cells of a row or column with a gap between them
MOST_CHARACTERS = 28  # of a row's name
SYMBOLS = ("circle", "square", "triangle-up", "diamond")


@dataclass(frozen=True)
class Row:
    """A row of a bar chart: its name, what stands at its right end, and whether it is what the reader came for."""

    name: str
    text: str = ""
    strong: bool = False


@dataclass(frozen=True)
class Bars:
    """Bars of the rows, stacked: seconds, bytes or whatever `axis` says, by row."""

    name: str
    colour: str
    values: Sequence[float]
    hover: Sequence[str]


@dataclass(frozen=True)
class Quantiles:
    """A distribution."""

    least: float
    p25: float
    median: float
    p75: float
    p99: float
    most: float
    mean: float


def quantiles(values: npt.NDArray[np.float64]) -> Quantiles:
    """Of values, at least one; between two of them linear."""
    return Quantiles(*map(float, (*np.quantile(values, (0, 0.25, 0.5, 0.75, 0.99, 1)), values.mean())))


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _axis(title: str = "", **more: Any) -> Json:
    font = {"color": "--soft", "size": 12}
    return {
        "fixedrange": True,
        "gridcolor": "--grid",
        "zeroline": False,
        "linecolor": "--line",
        "tickfont": font,
        "title": {"text": escaped(title), "font": font, "standoff": 10},
        "automargin": True,
        **more,
    }


def _layout(height: int, xaxis: Json, yaxis: Json, **more: Any) -> Json:
    return {
        "height": height,
        "margin": {"l": 24, "r": 24, "t": 6, "b": 46},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 12, "color": "--text"},
        "showlegend": False,
        "dragmode": False,
        "hovermode": "closest",
        "hoverlabel": {
            "bgcolor": "--text",
            "bordercolor": "--text",
            "align": "left",
            "font": {"color": "--card", "size": 13},
        },
        "xaxis": xaxis,
        "yaxis": yaxis,
        **more,
    }


def _rows(rows: Sequence[Row], xaxis: Json, data: list[Json], **more: Any) -> Drawn:
    """Rows from top to bottom with names at the left and texts at the right, which hang on an axis of their own."""
    places = list(range(len(rows)))

    def names(texts: Sequence[str], **side: Any) -> Json:
        words = [f"<b>{escaped(t)}</b>" if row.strong else escaped(t) for t, row in zip(texts, rows, strict=True)]
        font = {"color": "--text", "size": 12}
        span = [len(rows) - 0.5, -0.5]
        return _axis(range=span, tickvals=places, ticktext=words, tickfont=font, showgrid=False, **side)

    layout = _layout(len(rows) * ROW + 52, xaxis, names([shortened(r.name) for r in rows]), **more)
    if any(row.text for row in rows):
        layout["yaxis2"] = names([row.text for row in rows], overlaying="y", side="right")
        # An axis is there when something is drawn on it.
        x = [0] * len(rows)
        data = [*data, {"type": "scatter", "x": x, "y": places, "yaxis": "y2", "opacity": 0, "hoverinfo": "skip"}]
    return data, layout


def bar_chart(rows: Sequence[Row], bars: Sequence[Bars], axis: Json, reference: float | None = None) -> Drawn:
    """Stacked horizontal bars; a dashed line at `reference`."""
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": escaped(b.name),
            "x": list(b.values),
            "y": list(range(len(rows))),
            "width": 0.62,
            "marker": {"color": b.colour, "line": {"color": "--card", "width": 0.8}},
            "hovertext": [escaped(text) for text in b.hover],
            "hoverinfo": "text",
        }
        for b in bars
    ]
    more: Json = {"barmode": "stack"}
    if reference is not None:
        more["shapes"] = [_line(x0=reference, x1=reference, y0=0, y1=1, yref="paper", line=_dashed())]
    return _rows(rows, _axis(rangemode="tozero", **axis), data, **more)


def _dashed() -> Json:
    return {"color": "--ink", "width": 1.2, "dash": "5px,4px"}


def _line(**more: Any) -> Json:
    return {"type": "line", **more}


def seconds_axis(title: str) -> Json:
    return {"title": title, "tickformat": "~s", "ticksuffix": "s"}


def bytes_axis(title: str) -> Json:
    return {"title": title, "tickformat": "~s", "ticksuffix": "B"}


def box_chart(rows: Sequence[Row], values: Sequence[Quantiles], title: str) -> Drawn:
    """Boxes on a logarithmic axis that begins at 1: the middle half, whiskers to least and most, a dot at the mean."""
    data: list[Json] = []
    for strong, colour in ((False, "--s3"), (True, "--s2")):
        here = [i for i, row in enumerate(rows) if row.strong == strong]
        chosen = [values[i] for i in here]
        if not here:
            continue
        data.append(
            {
                "type": "box",
                "orientation": "h",
                "y": here,
                "lowerfence": [q.least for q in chosen],
                "q1": [q.p25 for q in chosen],
                "median": [q.median for q in chosen],
                "q3": [q.p75 for q in chosen],
                "upperfence": [q.most for q in chosen],
                "width": 0.55,
                "whiskerwidth": 0.5,
                "fillcolor": colour,
                "line": {"color": "--ink", "width": 1.2},
                "hoverinfo": "skip",
            }
        )
    places = list(range(len(rows)))
    data.append(
        {
            "type": "scatter",
            "mode": "markers",
            "x": [q.mean for q in values],
            "y": places,
            "marker": {"size": 7, "color": "--card", "line": {"color": "--ink", "width": 1.4}},
            "hoverinfo": "skip",
        }
    )
    data.append(  # what can be pointed at: all of the row
        {
            "type": "bar",
            "orientation": "h",
            "y": places,
            "base": [q.least for q in values],
            "x": [max(q.most - q.least, 1e-3) for q in values],
            "width": 0.9,
            "marker": {"color": "rgba(0,0,0,0)"},
            "hovertext": [_spoken(row.name, q) for row, q in zip(rows, values, strict=True)],
            "hoverinfo": "text",
        }
    )
    most = max(1.05, *(q.most for q in values))
    axis = _axis(title, type="log", range=[-0.01 * np.log10(most), 1.03 * np.log10(most)])
    return _rows(rows, axis, data, boxmode="overlay", barmode="overlay")


def _spoken(name: str, q: Quantiles) -> str:
    parts = {"least": q.least, "median": q.median, "mean": q.mean, "99 % up to": q.p99, "most": q.most}
    return escaped(f"{name}: " + ", ".join(f"{what} {ratio_text(value)}" for what, value in parts.items()))


def pareto_front(points: Sequence[MemoryPoint]) -> list[int]:
    """Those that nothing beats with as little memory, by memory."""
    order = sorted(range(len(points)), key=lambda i: (points[i].result.memory_bytes, -points[i].result.speedup))
    front: list[int] = []
    for i in order:
        if not front or points[i].result.speedup > points[front[-1]].result.speedup:
            front.append(i)
    return front


def memory_words(point: MemoryPoint) -> str:
    result = point.result
    slots = f"{point.residency}, {counted(point.guest_slots, 'guest slot')}"
    return f"{slots}: {bytes_text(result.memory_bytes)}, {times_text(result.speedup)}"


def memory_chart(points: Sequence[MemoryPoint], y_title: str) -> Drawn:
    """Speedup over memory: a mark for each point with its guest slots beside it, and the front."""
    data: list[Json] = []
    memory, gain = [p.result.memory_bytes for p in points], [p.result.speedup for p in points]
    x_range, y_range = _extent(memory), _extent(gain)
    front = pareto_front(points)
    data.append(
        {
            "type": "scatter",
            "mode": "lines",
            "x": [memory[i] for i in front] + [x_range[1]],
            "y": [gain[i] for i in front] + [gain[front[-1]]],
            "line": {"shape": "hv", "dash": "3px,4px", "width": 1.6, "color": "--soft"},
            "hoverinfo": "skip",
        }
    )
    for series, residency in enumerate(dict.fromkeys(p.residency for p in points)):
        here = [p for p in points if p.residency == residency]
        data.append(
            {
                "type": "scatter",
                "mode": "markers+text",
                "x": [p.result.memory_bytes for p in here],
                "y": [p.result.speedup for p in here],
                "text": [str(p.guest_slots) for p in here],
                "textfont": {"color": "--text", "size": 12},
                "marker": {
                    "symbol": SYMBOLS[series % len(SYMBOLS)],
                    "size": 12,
                    "color": ("--s1", "--s5", "--s2", "--s7")[series % 4],
                    "line": {"color": "--card", "width": 1.2},
                },
                "hovertext": [escaped(memory_words(p)) for p in here],
                "hoverinfo": "text",
            }
        )
    return data, _layout(
        340, _axis(range=x_range, **bytes_axis("memory of the fullest rank")), _axis(y_title, range=y_range)
    )


def _extent(values: Sequence[float]) -> list[float]:
    least, most = min(values), max(values)
    margin = 0.07 * (most - least) or 0.05 * abs(least) or 1e-6
    return [least - margin, most + margin]


@dataclass(frozen=True)
class Cells:
    """A heat map: colours `{colours}{bin}`, [rows, columns], with what each cell says when pointed at.

    steps: what a row and a column stand for: numbers at the axes count in it.
    """

    bins: npt.NDArray[np.int64]
    num_bins: int
    colours: str
    hover: Sequence[Sequence[str]]
    titles: tuple[str, str]  # of rows and columns
    steps: tuple[int, int] = (1, 1)
    separate: int = 0  # a line after every so many columns; 0: none
    square: bool = False


def heat_map(cells: Cells) -> Drawn:
    rows, columns = cells.bins.shape
    down, right = cells.steps
    data = [
        {
            "type": "heatmap",
            "x": [right * c for c in range(columns)],
            "y": [down * r for r in range(rows)],
            "z": cells.bins.tolist(),
            "zmin": -0.5,
            "zmax": cells.num_bins - 0.5,
            "colorscale": [
                [(i + edge) / cells.num_bins, f"--{cells.colours}{i}"] for i in range(cells.num_bins) for edge in (0, 1)
            ],
            "showscale": False,
            "xgap": int(columns <= MOST_GAPS),
            "ygap": int(rows <= MOST_GAPS),
            "hovertext": [list(map(escaped, row)) for row in cells.hover],
            "hoverinfo": "text",
        }
    ]
    xaxis = _axis(cells.titles[1], tickvals=_whole(columns, right), range=_edges(columns, right), showgrid=False)
    yaxis = _axis(cells.titles[0], tickvals=_whole(rows, down), range=_edges(rows, down)[::-1], showgrid=False)
    if cells.square:
        xaxis |= {"constrain": "domain"}
        yaxis |= {"constrain": "domain", "scaleanchor": "x"}
        return data, _layout(min(264, 60 * rows) + 56, xaxis, yaxis)
    line = 4 if columns <= MOST_GAPS else 2
    borders = range(cells.separate, columns, cells.separate) if cells.separate else ()
    shapes = [
        _line(
            x0=right * (c - 0.5),
            x1=right * (c - 0.5),
            y0=0,
            y1=1,
            yref="paper",
            line={"color": "--card", "width": line},
        )
        for c in borders
    ]
    return data, _layout(round(min(max(260, 4 * rows), 24 * rows)) + 56, xaxis, yaxis, shapes=shapes)


def _whole(count: int, step: int) -> list[int]:
    """Some of 0, step, 2·step …, evenly."""
    every = 1
    while count > MOST_TICKS * every:
        every *= 2
    return [step * i for i in range(0, count, every)]


def _edges(count: int, step: int) -> list[float]:
    return [-0.5 * step, (count - 0.5) * step]


def lane_chart(window: Window, colours: Mapping[str, str], end: float) -> Drawn:
    """What happened when, a lane for each rank; thin bars beneath are what travelled meanwhile."""
    bars: dict[str, _LaneBars] = {kind: _LaneBars() for kind in colours}
    for place, (rank, spans) in enumerate(window.lanes.items()):
        for span in spans:
            b = bars[span.kind]
            b.y.append(place + (0.32 if span.beneath else -0.06))
            b.width.append(0.14 if span.beneath else 0.56)
            b.base.append(span.begin)
            b.x.append(span.end - span.begin)
            when = f"{seconds_text(span.begin)} to {seconds_text(span.end)}"
            b.hover.append(escaped(f"rank {rank}, {span.name}: {seconds_text(span.end - span.begin)} ({when})"))
    data = [
        {
            "type": "bar",
            "orientation": "h",
            "name": escaped(kind),
            "x": b.x,
            "y": b.y,
            "base": b.base,
            "width": b.width,
            "marker": {"color": colours[kind], "line": {"color": "--card", "width": 0.6}},
            "hovertext": b.hover,
            "hoverinfo": "text",
        }
        for kind, b in bars.items()
        if b.x
    ]
    axis = _axis(range=[0, end], **seconds_axis("since the first of the ranks began"))
    return _rows([Row(f"rank {rank}") for rank in window.lanes], axis, data, barmode="overlay")


@dataclass
class _LaneBars:
    x: list[float] = field(default_factory=list)
    y: list[float] = field(default_factory=list)
    base: list[float] = field(default_factory=list)
    width: list[float] = field(default_factory=list)
    hover: list[str] = field(default_factory=list)
