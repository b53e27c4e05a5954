"""Figures as Plotly's JSON: what all have in common, and bars in rows.

Colours are names in style.css ("--s1"), which page.js looks up, so that a figure follows the scheme. Whatever Plotly
would read as markup is escaped here; hover texts are no templates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .facts import Report
from .page import escaped

Json = dict[str, Any]
Drawn = tuple[list[Json], Json]  # data and layout

FONT = 'system-ui, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif'
ROW = 30  # px
MOST_CHARACTERS = 28  # of a row's name


@dataclass(frozen=True)
class Row:
    """A row of a bar chart: its name, what stands at its right end, and whether it is what the reader came for."""

    name: str
    text: str = ""
    strong: bool = False


@dataclass(frozen=True)
class Bars:
    """Bars of the rows, stacked: seconds, bytes or whatever the axis says, by row, and what each says."""

    name: str
    colour: str
    values: Sequence[float]
    hover: Sequence[str]


def rows_of(report: Report, texts: Sequence[str] = ()) -> list[Row]:
    """One for each policy with a plan."""
    told = texts or [""] * len(report.planned)
    return [Row(p.policy, text, p is report.after) for p, text in zip(report.planned, told, strict=True)]


def bars_of(rows: Sequence[Row], name: str, colour: str, values: Sequence[float], text: Callable[[Any], str]) -> Bars:
    """Bars that say what they are, and their value as text() has it."""
    return Bars(name, colour, values, [f"{row.name}, {name}: {text(v)}" for row, v in zip(rows, values, strict=True)])


def colours_of(names: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """s0 … s9 by name: those that are known have one of their own, others take what is left."""
    return {name: f"s{known.index(name) if name in known else i % 10}" for i, name in enumerate(names)}


def trace(kind: str, hover: Sequence[str] = (), **more: Any) -> Json:
    """What is drawn, and what it says when pointed at; nothing without `hover`."""
    told: Json = {"hovertext": list(map(escaped, hover)), "hoverinfo": "text"} if hover else {"hoverinfo": "skip"}
    return {"type": kind, **more, **told}


def line(**more: Any) -> Json:
    return {"type": "line", **more}


def axis(title: str = "", **more: Any) -> Json:
    font = {"color": "--soft", "size": 12}
    common = {"fixedrange": True, "gridcolor": "--grid", "zeroline": False, "linecolor": "--line", "tickfont": font}
    words = {"text": escaped(title), "font": font, "standoff": 10}
    return {**common, "title": words, "automargin": True, **more}


def seconds_axis(title: str) -> Json:
    return {"title": title, "tickformat": "~s", "ticksuffix": "s"}


def bytes_axis(title: str) -> Json:
    return {"title": title, "tickformat": "~s", "ticksuffix": "B"}


def layout(height: int, xaxis: Json, yaxis: Json, **more: Any) -> Json:
    label = {"bgcolor": "--text", "bordercolor": "--text", "align": "left", "font": {"color": "--card", "size": 13}}
    return {
        "height": height,
        "margin": {"l": 24, "r": 24, "t": 6, "b": 46},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": FONT, "size": 12, "color": "--text"},
        "showlegend": False,
        "dragmode": False,
        "hovermode": "closest",
        "hoverlabel": label,
        "xaxis": xaxis,
        "yaxis": yaxis,
        **more,
    }


def in_rows(rows: Sequence[Row], xaxis: Json, data: list[Json], **more: Any) -> Drawn:
    """Rows from top to bottom with names at the left and texts at the right, which hang on an axis of their own."""
    places = list(range(len(rows)))

    def names(texts: Sequence[str], **side: Any) -> Json:
        words = [f"<b>{escaped(t)}</b>" if row.strong else escaped(t) for t, row in zip(texts, rows, strict=True)]
        font = {"color": "--text", "size": 12}
        span = [len(rows) - 0.5, -0.5]
        return axis(range=span, tickvals=places, ticktext=words, tickfont=font, showgrid=False, **side)

    short = [r.name if len(r.name) <= MOST_CHARACTERS else r.name[: MOST_CHARACTERS - 1] + "…" for r in rows]
    whole = layout(len(rows) * ROW + 52, xaxis, names(short), **more)
    if any(row.text for row in rows):
        whole["yaxis2"] = names([row.text for row in rows], overlaying="y", side="right")
        # An axis is there when something is drawn on it.
        data = [*data, trace("scatter", x=[0] * len(rows), y=places, yaxis="y2", opacity=0)]
    return data, whole


def bar_chart(rows: Sequence[Row], bars: Sequence[Bars], xaxis: Json, reference: float | None = None) -> Drawn:
    """Stacked horizontal bars; a dashed line at `reference`."""
    places, edge = list(range(len(rows))), {"color": "--card", "width": 0.8}
    data = [
        trace("bar", b.hover, orientation="h", name=escaped(b.name), x=list(b.values), y=places, width=0.62)
        | {"marker": {"color": b.colour, "line": edge}}
        for b in bars
    ]
    more: Json = {"barmode": "stack"}
    if reference is not None:
        dashed = {"color": "--ink", "width": 1.2, "dash": "5px,4px"}
        more["shapes"] = [line(x0=reference, x1=reference, y0=0, y1=1, yref="paper", line=dashed)]
    return in_rows(rows, axis(rangemode="tozero", **xaxis), data, **more)
