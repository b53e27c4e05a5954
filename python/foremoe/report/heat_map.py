"""Numbers of a matrix as colours of cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .page import escaped
from .plots import Drawn, axis, layout, line

MOST_TICKS = 10  # that fit on a narrow screen
MOST_GAPS = 32  # cells of a row or column with a gap between them


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
    xaxis = axis(cells.titles[1], tickvals=_whole(columns, right), range=_edges(columns, right), showgrid=False)
    yaxis = axis(cells.titles[0], tickvals=_whole(rows, down), range=_edges(rows, down)[::-1], showgrid=False)
    if cells.square:
        xaxis |= {"constrain": "domain"}
        yaxis |= {"constrain": "domain", "scaleanchor": "x"}
        return data, layout(min(264, 60 * rows) + 56, xaxis, yaxis)
    border = {"color": "--card", "width": 4 if columns <= MOST_GAPS else 2}
    after = [right * (c - 0.5) for c in range(cells.separate, columns, cells.separate)] if cells.separate else []
    shapes = [line(x0=x, x1=x, y0=0, y1=1, yref="paper", line=border) for x in after]
    return data, layout(round(min(max(260, 4 * rows), 24 * rows)) + 56, xaxis, yaxis, shapes=shapes)


def _whole(count: int, step: int) -> list[int]:
    """Some of 0, step, 2·step …, evenly."""
    every = 1
    while count > MOST_TICKS * every:
        every *= 2
    return [step * i for i in range(0, count, every)]


def _edges(count: int, step: int) -> list[float]:
    return [-0.5 * step, (count - 0.5) * step]
