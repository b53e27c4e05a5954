"""Load per rank and micro-step before and after planning, and the distribution of ρ by policy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import plotly.graph_objects as go

from .. import _core
from .facts import Report
from .figures import CLEAR, Row, escape_all, heat_map, legend_of, policy_rows, row_figure, stacked_bars
from .numbers import count_text, percent_text, ratio_text
from .page import Plot, Section, Table, section_of

RHO_BOUNDS = (1.1, 1.3, 1.5, 2.0)
RHO_CLASSES = ("below 1.1", "1.1 to 1.3", "1.3 to 1.5", "1.5 to 2", "2 and more")
LOAD_BOUNDS = _core._heat_bounds()  # of load ÷ mean
MOST_CELLS = 64  # along one axis
MOST_CELLS_OF_EXPERTS = 128


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
    """Return quantiles of a non-empty array, with linear interpolation, and its mean."""
    return Quantiles(*map(float, (*np.quantile(values, (0, 0.25, 0.5, 0.75, 0.99, 1)), values.mean())))


def load_section(report: Report) -> Section | None:
    """Load per rank before and after, by micro-step."""
    if not report.loads.before.any():
        return None
    about = (
        f"Tokens of each rank ÷ mean of all ranks, in layer {report.loads.layer}, the one that {report.before.policy} "
        "balances worst on average. Ranks below 1 wait for ranks above 1."
    )
    sides = []
    for name, policy, tokens in (
        ("load-before", report.before.policy, report.loads.before),
        ("load-after", report.after.policy, report.loads.after),
    ):
        relative = tokens / np.maximum(tokens.mean(1, keepdims=True), np.finfo(float).tiny)
        plot, table = _load_map(name, policy, ("micro-step", "rank"), relative, MOST_CELLS, tokens)
        _separate_nodes(plot.figure, report, tokens.shape[1])
        sides.append((plot, table))
    return section_of("load", "Load per rank, before and after", *sides, about=about, wide=True)


def experts_section(report: Report) -> Section | None:
    """Load per expert and layer."""
    heat = report.experts
    if not heat.step.any():
        return None
    about = (
        "Tokens of each expert ÷ mean of all experts of its layer. No plan changes these loads. Experts well above 1 "
        "in the first map are hot. Experts well above 1 in both maps stay hot."
    )
    nouns, most = ("layer", "expert"), MOST_CELLS_OF_EXPERTS
    step = _load_map("experts-step", "whole step", nouns, heat.step, most)
    steady = _load_map("experts-steady", "in three of four micro-steps", nouns, heat.steady, most)
    return section_of("experts", "Load per expert and layer", step, steady, about=about, wide=True)


def _load_map(
    name: str,
    subject: str,
    nouns: tuple[str, str],
    relative: npt.NDArray[np.float64],
    most_columns: int,
    tokens: npt.NDArray[np.int64] | None = None,
) -> tuple[Plot, Table]:
    """Draw load ÷ mean of its row. A cell that covers several entries shows the largest.

    Args:
        nouns: Nouns of a row and a column.
        relative: Load ÷ mean, [rows, columns].
        most_columns: Largest number of cells in a row.
        tokens: The loads, which hover texts then show too.
    """
    down = -(-relative.shape[0] // MOST_CELLS)
    right = -(-relative.shape[1] // most_columns)
    value = np.zeros((-(-relative.shape[0] // down), -(-relative.shape[1] // right)))
    hover = [[""] * value.shape[1] for _ in value]
    for r, c in np.ndindex(value.shape):
        cell = relative[r * down : (r + 1) * down, c * right : (c + 1) * right]
        m, n = (int(i) for i in np.unravel_index(cell.argmax(), cell.shape))
        value[r, c] = cell[m, n]
        m, n = m + r * down, n + c * right
        ratio = ratio_text(float(value[r, c]))
        words = ratio if tokens is None else f"{count_text(int(tokens[m, n]))} tokens, {ratio} × mean"
        hover[r][c] = f"{nouns[1]} {n}, {nouns[0]} {m}: {words}"
    colours = [f"h{i}" for i in range(len(LOAD_BOUNDS) + 1)]
    titles = _grouped(down, nouns[0]), _grouped(right, nouns[1])
    figure = heat_map(np.searchsorted(LOAD_BOUNDS, value, "right"), colours, hover, titles, (down, right))
    most = ratio_text(float(value.max()))
    what = f"Columns are {nouns[1]}s, rows {nouns[0]}s; the largest load is"
    label = f"Load per {nouns[1]} and {nouns[0]}, {subject}. {what} {most} times the mean of its {nouns[0]}."
    caption = f"{subject}: at most {most} times the mean"
    legend = list(zip(colours, [*(f"{bound:g}" for bound in LOAD_BOUNDS), ""], strict=True))
    table = Table(f"load ÷ mean per {nouns[0]} and {nouns[1]}, {subject}", [nouns[0]])
    table.head += [str(c * right) for c in range(value.shape[1])]
    table.rows = [[str(r * down), *(f"{v:.2f}" for v in row)] for r, row in enumerate(value)]
    return Plot(name, caption, label, figure, legend, scale=True), table


def _separate_nodes(figure: go.Figure, report: Report, num_ranks: int) -> None:
    """Draw lines between the nodes of a map whose columns are ranks."""
    right = -(-num_ranks // MOST_CELLS)
    per_node = report.ranks_per_node // right
    if per_node > 1 and report.num_nodes > 1:
        for column in range(per_node, -(-num_ranks // right), per_node):
            width = 4 if figure.data[0].xgap else 2
            figure.add_vline(right * (column - 0.5), line={"color": "var(--card)", "width": width})


def _grouped(step: int, noun: str) -> str:
    return f"{noun}s, {step} in a cell: the most loaded" if step > 1 else noun


def balance_section(report: Report) -> Section | None:
    """Distribution of imbalance over layers and micro-steps, by policy."""
    if not report.before.rho.size:
        return None
    values = [quantiles(p.rho) for p in report.planned]
    rows = policy_rows(report, [ratio_text(q.mean) for q in values])
    head = ["policy", "least", "25 %", "median", "75 %", "99 %", "most", "mean"]
    told = list(zip(rows, values, strict=True))
    table = Table("imbalance ρ over all layers and micro-steps", head, [[r.name, *map(ratio_text, q)] for r, q in told])
    said = [f"{row.name}: mean {ratio_text(q.mean)}, most {ratio_text(q.most)}." for row, q in told]
    plot = Plot(
        "rho",
        "ρ: busiest rank ÷ mean rank. Line: from the least to the most of all layers and micro-steps; box: the middle "
        "half; dot and number: the mean.",
        f"Imbalance ρ by policy. {' '.join(said)}",
        _box_figure(rows, values),
    )
    return section_of("balance", "Imbalance, by policy", (plot, table))


def _box_figure(rows: Sequence[Row], values: Sequence[Quantiles]) -> go.Figure:
    """Return boxes on a logarithmic axis that begins at 1: middle half, whiskers to extremes, dot at the mean."""
    most = np.log10(max(1.05, *(q.most for q in values)))
    title = "ρ (1 is perfect; logarithmic axis)"
    figure = row_figure(rows, title, type="log", range=[-0.01 * most, 1.03 * most])
    figure.update_layout(barmode="overlay", boxmode="overlay")
    for i, (row, q) in enumerate(zip(rows, values, strict=True)):
        box = {"lowerfence": [q.least], "q1": [q.p25], "median": [q.median], "q3": [q.p75], "upperfence": [q.most]}
        figure.add_box(orientation="h", y=[i], **box, width=0.55, fillcolor=f"var(--{'s2' if row.strong else 's3'})")
    places = list(range(len(rows)))
    dot = {"size": 7, "color": "var(--card)", "line": {"color": "var(--ink)", "width": 1.4}}
    figure.add_scatter(mode="markers", x=[q.mean for q in values], y=places, marker=dot)
    figure.add_bar(  # an invisible bar over the whole row shows the hover text
        orientation="h",
        base=[q.least for q in values],
        x=[max(q.most - q.least, 1e-3) for q in values],
        y=places,
        width=0.9,
        marker={"color": CLEAR, "line_width": 0},
        hovertext=escape_all(_spoken(row.name, q) for row, q in zip(rows, values, strict=True)),
    )
    return figure


def _spoken(name: str, q: Quantiles) -> str:
    parts = {"least": q.least, "median": q.median, "mean": q.mean, "99 % up to": q.p99, "most": q.most}
    return f"{name}: " + ", ".join(f"{what} {ratio_text(value)}" for what, value in parts.items())


def shares_section(report: Report) -> Section | None:
    """The classes of ρ, by policy."""
    if not report.before.rho.size:
        return None
    rows = policy_rows(report)
    in_class = [np.searchsorted(RHO_BOUNDS, p.rho, "right") for p in report.planned]
    shares = [(np.bincount(classes, minlength=len(RHO_CLASSES)) / classes.size).tolist() for classes in in_class]
    table = Table("share of layers and micro-steps by ρ", ["policy", *RHO_CLASSES])
    table.rows = [[row.name, *map(percent_text, part)] for row, part in zip(rows, shares, strict=True)]
    names = [f"ρ {RHO_CLASSES[0]}", *RHO_CLASSES[1:]]
    parts = {name: (f"q{i}", [share[i] for share in shares]) for i, name in enumerate(names)}
    ticks = {"tickformat": ".0%", "range": [0, 1], "tickvals": [0, 0.25, 0.5, 0.75, 1]}
    told = [f"{row.name}: {percent_text(part[0])} below 1.1." for row, part in zip(rows, shares, strict=True)]
    plot = Plot(
        "shares-plot",
        "Every layer of every micro-step falls in one of five classes of ρ.",
        f"Share of micro-steps by imbalance. {' '.join(told)}",
        stacked_bars(rows, parts, percent_text, "share of all layers and micro-steps", **ticks),
        legend_of(parts),
    )
    return section_of("shares", "How often is it unbalanced?", (plot, table))
