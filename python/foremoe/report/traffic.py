"""Bytes between nodes, or inside the node if there is only one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .facts import LinkBytes, Report
from .figures import BYTES, heat_map, legend_of, policy_rows, stacked_bars
from .numbers import bytes_text, percent_text
from .page import Plot, Section, Table, beside, figure_html

MOST_NODES = 64  # of a readable matrix


def traffic_section(report: Report) -> Section | None:
    """Bytes by policy and kind, and from node to node."""
    if not any(p.links for p in report.planned):
        return None
    many_nodes = report.num_nodes > 1
    sides = [_link_bars(report, "network" if many_nodes else "peers")]
    if all(count.ndim == 2 and 1 < len(count) <= MOST_NODES for count in report.traffic.values()):
        bounds = _byte_bounds(max(int(count.max()) for count in report.traffic.values()))
        sides += [_node_matrix(f"nodes-{i}", *side, bounds) for i, side in enumerate(report.traffic.items())]
    bars, *matrices = (figure_html(*side) for side in sides)
    body = beside(bars, beside(*matrices)) if matrices else bars
    heading = "Traffic between nodes" if many_nodes else "Traffic inside the node"
    return Section("traffic", heading, body, wide=many_nodes, plots=[plot for plot, _ in sides])


def _link_bars(report: Report, link: str) -> tuple[Plot, Table]:
    over = [next((one for one in p.links if one.link == link), LinkBytes(link)) for p in report.planned]
    rows = policy_rows(report, [bytes_text(b.all_bytes) for b in over])
    parts = {
        "tokens": ("s1", [b.rows for b in over]),
        "copies": ("s5", [b.copies for b in over]),
        "gradients of guests": ("s7", [b.gradients for b in over]),
    }
    plot = Plot(
        "traffic-bars",
        "Between nodes, in a whole step: all ranks together."
        if link == "network"
        else "There is one node: what its ranks send to each other in a whole step.",
        f"Bytes over links to {link}, by policy. {' '.join(f'{row.name}: {row.text}.' for row in rows)}",
        stacked_bars(rows, parts, bytes_text, "in a step, all ranks", **BYTES),
        legend_of(parts),
    )
    head = ["policy", "link", "tokens", "copies", "gradients", "busiest link's use"]
    table = Table("bytes by link, all ranks, whole step", head)
    for p in report.planned:
        for b in p.links:
            counts = map(bytes_text, (b.rows, b.copies, b.gradients))
            table.rows.append([p.policy, b.link, *counts, percent_text(b.busiest_use)])
    return plot, table


def _byte_bounds(most: int) -> list[float]:
    """Return five bounds: 1, then 20, 40, 60 and 80 % of a round number ≥ `most`, at least 2."""
    power = 10.0 ** math.floor(math.log10(max(most, 1) / 5))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= most / 5 * (1 - 1e-9))
    top = math.ceil(most / step - 1e-9) * step if most else 1
    return [1, *(max(2.0, share * top) for share in (0.2, 0.4, 0.6, 0.8))]


def _node_matrix(
    plot_id: str, policy: str, count: npt.NDArray[np.int64], bounds: Sequence[float]
) -> tuple[Plot, Table]:
    nodes = range(len(count))
    words = [[bytes_text(int(count[i, j])) for j in nodes] for i in nodes]
    hover = [[f"node {i} to node {j}: {words[i][j]}" for j in nodes] for i in nodes]
    colours = [f"f{i}" for i in range(len(bounds) + 1)]
    figure = heat_map(np.searchsorted(bounds, count, "right"), colours, hover, ("from node", "to node"))
    figure.update_layout(height=56 + min(264, 60 * len(count)), yaxis_scaleanchor="x")
    figure.update_xaxes(constrain="domain")
    figure.update_yaxes(constrain="domain")
    total = bytes_text(int(count.sum()))
    plot = Plot(
        plot_id,
        f"{policy}: {total} in all",
        f"Bytes from node to node, {policy}. {total} in all.",
        figure,
        list(zip(colours, ["0", *map(bytes_text, bounds[1:]), ""], strict=True)),
        scale=True,
    )
    table = Table(f"bytes from node to node, {policy}", ["from", *(f"to {node}" for node in nodes)])
    table.rows = [[f"node {i}", *words[i]] for i in nodes]
    return plot, table
