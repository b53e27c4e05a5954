"""Plotly figures of the page: their template, bars by row, and heat maps.

Colours are variables of style.css, such as "var(--s1)"; page.js replaces them with the values of the current scheme.
Plotly reads tags such as <b> in texts, so the functions here escape names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from .facts import Report
from .page import escaped

CLEAR = "rgba(0,0,0,0)"
ROW = 30  # px
MOST_CHARACTERS = 28  # of a row's name
MOST_TICKS = 10  # of a heat map on a narrow screen
MOST_GAPS = 32  # a heat map with more cells in a row has no gaps between them

SECONDS = {"tickformat": "~s", "ticksuffix": "s"}
BYTES = {"tickformat": "~s", "ticksuffix": "B"}

_SMALL = {"size": 12, "color": "var(--soft)"}
_AXIS = {
    "automargin": True,
    "fixedrange": True,
    "gridcolor": "var(--grid)",
    "linecolor": "var(--line)",
    "showline": True,
    "zeroline": False,
    "tickfont": _SMALL,
    "title": {"font": _SMALL, "standoff": 10},
}
TEMPLATE = go.layout.Template(
    layout={
        "margin": {"l": 24, "r": 24, "t": 6, "b": 46},
        "paper_bgcolor": CLEAR,
        "plot_bgcolor": CLEAR,
        "font": {
            "family": 'system-ui, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif',
            "size": 12,
            "color": "var(--text)",
        },
        "showlegend": False,
        "dragmode": False,
        "hovermode": "closest",
        "hoverlabel": {
            "bgcolor": "var(--text)",
            "bordercolor": "var(--text)",
            "align": "left",
            "font": {"color": "var(--card)", "size": 13},
        },
        "xaxis": _AXIS,
        "yaxis": _AXIS,
    },
    data={
        "bar": [{"hoverinfo": "text", "marker": {"line": {"color": "var(--card)", "width": 0.8}}}],
        "box": [{"hoverinfo": "skip", "whiskerwidth": 0.5, "line": {"color": "var(--ink)", "width": 1.2}}],
        "heatmap": [{"hoverinfo": "text", "showscale": False}],
        "scatter": [{"hoverinfo": "skip"}],
    },
)


class Row(NamedTuple):
    """A row of a figure: its name at the left, a text at the right, and whether both are bold."""

    name: str
    text: str = ""
    strong: bool = False


def policy_rows(report: Report, texts: Sequence[str] = ()) -> list[Row]:
    """Return a row for each policy with a plan."""
    texts = texts or [""] * len(report.planned)
    return [Row(p.policy, text, p is report.after) for p, text in zip(report.planned, texts, strict=True)]


def escape_all(texts: Iterable[str]) -> list[str]:
    return list(map(escaped, texts))


def row_figure(rows: Sequence[Row], x_title: str, **xaxis: Any) -> go.Figure:
    """Return a figure without data whose y axis has `rows` from top to bottom, at 0, 1, ….

    On a narrow screen page.js moves the names above the bars if `layout.meta` is set.
    """

    def bold(texts: Iterable[str]) -> list[str]:
        return [f"<b>{escaped(t)}</b>" if row.strong else escaped(t) for t, row in zip(texts, rows, strict=True)]

    places = list(range(len(rows)))
    names = [r.name if len(r.name) <= MOST_CHARACTERS else r.name[: MOST_CHARACTERS - 1] + "…" for r in rows]
    side = {"range": [len(rows) - 0.5, -0.5], "tickvals": places, "tickfont_color": "var(--text)", "showgrid": False}
    figure = go.Figure(layout={"template": TEMPLATE, "height": len(rows) * ROW + 52, "meta": "rows"})
    figure.update_xaxes(title_text=escaped(x_title), **xaxis)
    figure.update_yaxes(ticktext=bold(names), **side)
    if any(row.text for row in rows):
        figure.update_layout(
            yaxis2={**side, "ticktext": bold(r.text for r in rows), "overlaying": "y", "side": "right"}
        )
        figure.add_scatter(x=[0] * len(rows), y=places, yaxis="y2", opacity=0)  # Plotly hides axes without a trace
    return figure


def stacked_bars(
    rows: Sequence[Row],
    parts: Mapping[str, tuple[str, Sequence[float]]],
    text: Callable[[Any], str],
    x_title: str,
    **xaxis: Any,
) -> go.Figure:
    """Return horizontal bars, stacked.

    Args:
        rows: Rows of the figure.
        parts: Colour and values of each part, by name. Values are by row. Hover texts omit the name "".
        text: Formats a value for the hover text.
        x_title: Title of the x axis.
        **xaxis: Further attributes of the x axis.
    """
    figure = row_figure(rows, x_title, rangemode="tozero", **xaxis)
    figure.update_layout(barmode="stack")
    for name, (colour, values) in parts.items():
        names = [f"{row.name}, {name}" if name else row.name for row in rows]
        figure.add_bar(
            orientation="h",
            x=list(values),
            y=list(range(len(rows))),
            width=0.62,
            marker_color=f"var(--{colour})",
            hovertext=escape_all(f"{n}: {text(v)}" for n, v in zip(names, values, strict=True)),
        )
    return figure


def legend_of(parts: Mapping[str, tuple[str, Sequence[float]]]) -> list[tuple[str, str]]:
    return [(colour, name) for name, (colour, _) in parts.items()]


def colours_of(names: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """Return a colour, s0 … s10, for each name: by its position in `known` if it is there, else in `names`."""
    return {name: f"s{known.index(name) if name in known else i % 10}" for i, name in enumerate(names)}


def heat_map(
    bins: npt.NDArray[np.int64],
    colours: Sequence[str],
    hover: Sequence[Sequence[str]],
    titles: tuple[str, str],
    steps: tuple[int, int] = (1, 1),
) -> go.Figure:
    """Return a heat map.

    Args:
        bins: Indices of `colours`, [rows, columns].
        colours: Colour of each bin.
        hover: Hover text of each cell, [rows, columns].
        titles: Titles of rows and columns.
        steps: Number of micro-steps, ranks or nodes in one row, and in one column.
    """
    num_bins = len(colours)
    height = min(max(260, 4 * len(bins)), max(72, 24 * len(bins)))  # the title of the rows needs 72 px
    figure = go.Figure(layout={"template": TEMPLATE, "height": 56 + height})
    figure.add_heatmap(
        z=bins.tolist(),
        dy=steps[0],
        dx=steps[1],
        zmin=-0.5,
        zmax=num_bins - 0.5,
        colorscale=[[(i + edge) / num_bins, f"var(--{colour})"] for i, colour in enumerate(colours) for edge in (0, 1)],
        ygap=int(bins.shape[0] <= MOST_GAPS),
        xgap=int(bins.shape[1] <= MOST_GAPS),
        hovertext=list(map(escape_all, hover)),
    )
    for update, count, title, step in zip(
        (figure.update_yaxes, figure.update_xaxes), bins.shape, titles, steps, strict=True
    ):
        every = 2 ** max(0, math.ceil(math.log2(count / MOST_TICKS)))
        update(title_text=escaped(title), range=[-0.5 * step, (count - 0.5) * step], dtick=every * step, showgrid=False)
    figure.update_yaxes(range=figure.layout.yaxis.range[::-1])
    return figure
