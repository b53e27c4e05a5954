"""How evenly ranks are loaded: per rank and micro-step before and after, and the distribution of ρ by policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .facts import Report
from .heat_map import Cells, heat_map
from .numbers import count_text, percent_text, ratio_text
from .page import Plot, Section, Table, section_of
from .plots import Drawn, Json, Row, axis, bar_chart, bars_of, in_rows, rows_of, trace

RHO_BOUNDS = (1.1, 1.3, 1.5, 2.0)
RHO_CLASSES = ("below 1.1", "1.1 to 1.3", "1.3 to 1.5", "1.5 to 2", "2 and more")
LOAD_BOUNDS = (0.5, 0.8, 0.95, 1.05, 1.25, 1.5, 2, 3)  # of load ÷ mean
MOST_CELLS = 64  # along one axis


class Quantiles(NamedTuple):
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


def load_section(report: Report) -> Section | None:
    """Load per rank before and after, by micro-step."""
    if not report.loads.before.any():
        return None
    about = (
        f"Tokens of each rank ÷ mean of all ranks, in layer {report.loads.layer}, the one that {report.before.policy} "
        "balances worst on average. Orange and red are ranks that others wait for, blue ones wait."
    )
    before = _load_side(report, "load-before", report.before.policy, report.loads.before)
    after = _load_side(report, "load-after", report.after.policy, report.loads.after)
    return section_of("load", "Load per rank, before and after", before, after, about=about, wide=True)


def _load_side(report: Report, name: str, policy: str, tokens: npt.NDArray[np.int64]) -> tuple[Plot, Table]:
    """Tokens are [micro_steps, ranks]. Of several in one cell the most loaded counts, and is what the cell tells."""
    rows, columns = tokens.shape
    down, right = -(-rows // MOST_CELLS), -(-columns // MOST_CELLS)
    mean = tokens.mean(1, keepdims=True)
    relative = tokens / np.where(mean > 0, mean, 1)
    value = np.zeros((-(-rows // down), -(-columns // right)))
    hover = []
    for r in range(value.shape[0]):
        said = []
        for c in range(value.shape[1]):
            cell = relative[r * down : (r + 1) * down, c * right : (c + 1) * right]
            m, n = (int(i) for i in np.unravel_index(cell.argmax(), cell.shape))
            value[r, c] = cell[m, n]
            m, n = m + r * down, n + c * right
            count = count_text(int(tokens[m, n]))
            said.append(f"rank {n}, micro-step {m}: {count} tokens, {ratio_text(value[r, c])} × mean")
        hover.append(said)
    per_node = report.ranks_per_node // right
    cells = Cells(
        bins=np.searchsorted(LOAD_BOUNDS, value, "right"),
        num_bins=len(LOAD_BOUNDS) + 1,
        colours="h",
        hover=hover,
        titles=(_grouped(down, "micro-step"), _grouped(right, "rank")),
        steps=(down, right),
        separate=per_node if per_node > 1 and report.num_nodes > 1 else 0,
    )
    most = ratio_text(float(value.max()))
    what = "Columns are ranks, rows micro-steps; the largest load is"
    label = f"Load per rank and micro-step, {policy}. {what} {most} times the mean of its micro-step."
    caption = f"{policy}: at most {most} times the mean"
    legend = [(f"h{i}", f"{bound:g}") for i, bound in enumerate(LOAD_BOUNDS)] + [(f"h{len(LOAD_BOUNDS)}", "")]
    table = Table(f"load ÷ mean per micro-step and rank, {policy}", ["micro-step"])
    table.head += [str(c * right) for c in range(value.shape[1])]
    table.rows = [[str(r * down), *(f"{v:.2f}" for v in row)] for r, row in enumerate(value)]
    return Plot(name, caption, label, *heat_map(cells), legend=legend, scale=True), table


def _grouped(step: int, noun: str) -> str:
    return f"{noun}s, {step} in a cell: the most loaded" if step > 1 else noun


def balance_section(report: Report) -> Section | None:
    """How imbalance is distributed over layers and micro-steps, by policy."""
    if not report.before.rho.size:
        return None
    values = [quantiles(p.rho) for p in report.planned]
    rows = rows_of(report, [ratio_text(q.mean) for q in values])
    head = ["policy", "least", "25 %", "median", "75 %", "99 %", "most", "mean"]
    told = list(zip(rows, values, strict=True))
    table = Table("imbalance ρ over all layers and micro-steps", head, [[r.name, *map(ratio_text, q)] for r, q in told])
    said = [f"{row.name}: mean {ratio_text(q.mean)}, most {ratio_text(q.most)}." for row, q in told]
    plot = Plot(
        "rho",
        "ρ: busiest rank ÷ mean rank. Line: from the least to the most of all layers and micro-steps; box: the middle "
        "half; dot and number: the mean.",
        f"Imbalance ρ by policy. {' '.join(said)}",
        *_box_chart(rows, values, "ρ (1 is perfect; logarithmic axis)"),
        rows=len(rows),
    )
    return section_of("balance", "Imbalance, by policy", (plot, table))


def _box_chart(rows: Sequence[Row], values: Sequence[Quantiles], title: str) -> Drawn:
    """Boxes on a logarithmic axis that begins at 1: the middle half, whiskers to least and most, a dot at the mean."""
    places = list(range(len(rows)))
    data = []
    for strong, colour in ((False, "--s3"), (True, "--s2")):
        here = [i for i in places if rows[i].strong == strong]
        edges = ("lowerfence", "q1", "median", "q3", "upperfence")
        kinds = ("least", "p25", "median", "p75", "most")
        box = {edge: [getattr(values[i], kind) for i in here] for edge, kind in zip(edges, kinds, strict=True)}
        look: Json = {"width": 0.55, "whiskerwidth": 0.5, "fillcolor": colour, "line": {"color": "--ink", "width": 1.2}}
        if here:
            data.append(trace("box", orientation="h", y=here, **box, **look))
    dot = {"size": 7, "color": "--card", "line": {"color": "--ink", "width": 1.4}}
    data.append(trace("scatter", mode="markers", x=[q.mean for q in values], y=places, marker=dot))
    # What can be pointed at: all of the row.
    said = [_spoken(row.name, q) for row, q in zip(rows, values, strict=True)]
    extent = {"base": [q.least for q in values], "x": [max(q.most - q.least, 1e-3) for q in values]}
    data.append(trace("bar", said, orientation="h", y=places, **extent, width=0.9, marker={"color": "rgba(0,0,0,0)"}))
    most = np.log10(max(1.05, *(q.most for q in values)))
    xaxis = axis(title, type="log", range=[-0.01 * most, 1.03 * most])
    return in_rows(rows, xaxis, data, boxmode="overlay", barmode="overlay")


def _spoken(name: str, q: Quantiles) -> str:
    parts = {"least": q.least, "median": q.median, "mean": q.mean, "99 % up to": q.p99, "most": q.most}
    return f"{name}: " + ", ".join(f"{what} {ratio_text(value)}" for what, value in parts.items())


def shares_section(report: Report) -> Section | None:
    """The classes of ρ, by policy."""
    if not report.before.rho.size:
        return None
    rows = rows_of(report)
    in_class = [np.searchsorted(RHO_BOUNDS, p.rho, "right") for p in report.planned]
    shares = [np.bincount(classes, minlength=len(RHO_CLASSES)) / classes.size for classes in in_class]
    table = Table("share of layers and micro-steps by ρ", ["policy", *RHO_CLASSES])
    table.rows = [[row.name, *map(percent_text, part)] for row, part in zip(rows, shares, strict=True)]
    names = [f"ρ {RHO_CLASSES[0]}", *RHO_CLASSES[1:]]
    bars = [
        bars_of(rows, name, f"--q{i}", [float(part[i]) for part in shares], percent_text)
        for i, name in enumerate(names)
    ]
    ticks = {"tickformat": ".0%", "range": [0, 1], "tickvals": [0, 0.25, 0.5, 0.75, 1]}
    told = [f"{row.name}: {percent_text(part[0])} below 1.1." for row, part in zip(rows, shares, strict=True)]
    plot = Plot(
        "shares-plot",
        "Every layer of every micro-step falls in one of five classes of ρ.",
        f"Share of micro-steps by imbalance. {' '.join(told)}",
        *bar_chart(rows, bars, {"title": "share of all layers and micro-steps", **ticks}),
        rows=len(rows),
        legend=[(f"q{i}", name) for i, name in enumerate(names)],
    )
    return section_of("shares", "How often is it unbalanced?", (plot, table))
