"""What crosses between nodes, or inside the node where there is but one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .facts import LinkBytes, Report
from .heat_map import Cells, heat_map
from .numbers import bytes_text, percent_text
from .page import Plot, Section, Table, beside, figure
from .plots import bar_chart, bars_of, bytes_axis, rows_of

MOST_NODES = 64  # of a matrix that one can read
NETWORK = "network"


def traffic_section(report: Report) -> Section | None:
    """Bytes by policy and kind, and from node to node."""
    if not any(p.links for p in report.planned):
        return None
    many_nodes = report.num_nodes > 1
    bars, table = _link_bars(report, NETWORK if many_nodes else "peers")
    body, drawn = figure(bars, table), [bars]
    matrices = report.traffic.items()
    if all(bytes_.ndim == 2 and 1 < len(bytes_) <= MOST_NODES for _, bytes_ in matrices):
        bounds = _byte_bounds(max(int(bytes_.max()) for _, bytes_ in matrices))
        sides = [_node_matrix(f"nodes-{i}", policy, bytes_, bounds) for i, (policy, bytes_) in enumerate(matrices)]
        drawn += [plot for plot, _ in sides]
        body = beside(body, beside(*(figure(*side) for side in sides)))
    heading = "Traffic between nodes" if many_nodes else "Traffic inside the node"
    return Section("traffic", heading, body, wide=many_nodes, plots=tuple(drawn))


def _link_bars(report: Report, link: str) -> tuple[Plot, Table]:
    over = [next((one for one in p.links if one.link == link), LinkBytes(link)) for p in report.planned]
    rows = rows_of(report, [bytes_text(b.all_bytes) for b in over])
    parts = {
        "tokens": ("s1", [b.rows for b in over]),
        "copies": ("s5", [b.copies for b in over]),
        "gradients of guests": ("s7", [b.gradients for b in over]),
    }
    bars = [bars_of(rows, name, f"--{css}", part, bytes_text) for name, (css, part) in parts.items()]
    plot = Plot(
        "traffic-bars",
        "Between nodes, in a whole step: all ranks together."
        if link == NETWORK
        else "There is one node: what its ranks send to each other in a whole step.",
        f"Bytes over links to {link}, by policy. {' '.join(f'{row.name}: {row.text}.' for row in rows)}",
        *bar_chart(rows, bars, bytes_axis("in a step, all ranks")),
        rows=len(rows),
        legend=[(css, name) for name, (css, _) in parts.items()],
    )
    head = ["policy", "link", "tokens", "copies", "gradients", "busiest link's use"]
    table = Table("bytes by link, all ranks, whole step", head)
    for p in report.planned:
        for b in p.links:
            counts = map(bytes_text, (b.rows, b.copies, b.gradients))
            table.rows.append([p.policy, b.link, *counts, percent_text(b.busiest_use)])
    return plot, table


def _byte_bounds(most: int) -> list[float]:
    """Nothing, and five equal steps up to a round number that is not below the most."""
    power = 10.0 ** math.floor(math.log10(max(most, 1) / 5))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= most / 5 * (1 - 1e-9))
    top = math.ceil(most / step - 1e-9) * step if most else 1
    return [1, *(max(2.0, share * top) for share in (0.2, 0.4, 0.6, 0.8))]


def _node_matrix(
    plot_id: str, policy: str, count: npt.NDArray[np.int64], bounds: Sequence[float]
) -> tuple[Plot, Table]:
    nodes = range(len(count))
    words = [[bytes_text(int(count[i, j])) for j in nodes] for i in nodes]
    cells = Cells(
        bins=np.searchsorted(bounds, count, "right"),
        num_bins=len(bounds) + 1,
        colours="f",
        hover=[[f"node {i} to node {j}: {words[i][j]}" for j in nodes] for i in nodes],
        titles=("from node", "to node"),
        square=True,
    )
    total = bytes_text(int(count.sum()))
    plot = Plot(
        plot_id,
        f"{policy}: {total} in all",
        f"Bytes from node to node, {policy}. {total} in all.",
        *heat_map(cells),
        legend=[(f"f{i}", word) for i, word in enumerate(["0", *map(bytes_text, bounds[1:]), ""])],
        scale=True,
    )
    table = Table(f"bytes from node to node, {policy}", ["from", *(f"to {node}" for node in nodes)])
    table.rows = [[f"node {i}", *words[i]] for i in nodes]
    return plot, table
