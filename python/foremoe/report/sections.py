"""The parts of the page, each from a report to a section with plots and their numbers in tables. One that has nothing
to show is None and is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from . import plots
from .facts import LinkBytes, PhaseTime, PolicyResult, Report, Skipped, Window, speedup
from .numbers import bytes_text, count_text, counted, percent_text, ratio_text, seconds_text, times_text
from .page import Plot, Section, Table, beside, figure, paragraph, table_html
from .plots import Bars, Cells, Row, quantiles

RHO_BOUNDS = (1.1, 1.3, 1.5, 2.0)
RHO_CLASSES = ("below 1.1", "1.1 to 1.3", "1.3 to 1.5", "1.5 to 2", "2 and more")
LOAD_BOUNDS = (0.5, 0.8, 0.95, 1.05, 1.25, 1.5, 2, 3)  # of load ÷ mean
MOST_CELLS = 64  # along one axis
MOST_NODES = 64  # of a matrix that one can read
NETWORK = "network"
CANNOT_TRAIN = (
    "experts may be anywhere. Such a plan serves recompute alone; it cannot train, since gradients and optimizer state "
    "have no home. Its step, and all that is of a step, is what it would be if it could."
)
# What has a colour of its own, s0 … s9; other parts take what is left.
PARTS = (
    *("dense", "dispatch", "experts", "combine", "planning"),
    *("exposed copies", "arena refresh", "exposed gradients", "optimizer", "homes moved"),
)
KINDS = (*PARTS[:5], "waiting for copies", "copies from the host", "copies from peers")


def sections(report: Report) -> list[Section]:
    """Those that there is data for, in the order of the page."""
    make: Sequence[Callable[[Report], Section | None]] = (
        policies_section,
        load_section,
        balance_section,
        shares_section,
        time_section,
        ablation_section,
        memory_section,
        traffic_section,
        timeline_section,
    )
    return [section for section in (one(report) for one in make) if section]


def policies_section(report: Report) -> Section:
    """The table of policies."""
    rollout = any(p.rl_speedup is not None for p in report.planned)
    budget = any(p.largest_micro_batch is not None for p in report.planned)
    table = Table(f"Policies, {counted(report.guest_slots, 'guest slot')} per rank and layer", [])
    for p in report.policies:
        if isinstance(p, Skipped):
            table.rows.append([p.policy, f"skipped: {p.reason}"])
            continue
        q = quantiles(p.rho) if p.rho.size else None
        cells = {
            "policy": p.policy,
            "residency": p.residency if p.can_train else f"{p.residency}*",
            "speedup": times_text(p.speedup),
            "RL step": times_text(p.rl_speedup) if p.rl_speedup is not None else "–",
            "step": seconds_text(p.step_seconds),
            "of ideal": percent_text(p.fraction_of_ideal),
            "ρ mean": ratio_text(q.mean) if q else "–",
            "ρ 99 %": ratio_text(q.p99) if q else "–",
            "ρ most": ratio_text(q.most) if q else "–",
            "waits for copies": seconds_text(p.exposed_copy_seconds),
            "copies": f"{p.copies_per_layer_event:.2f}",
            "memory": bytes_text(p.memory_bytes),
            "guests": bytes_text(p.guest_bytes),
            "peak tokens": count_text(p.peak_tokens),
            "home moves": count_text(p.home_moves),
            "planning": f"{p.plan_us:.1f} µs",  # measured: the only figure that another run changes
            "largest micro-batch": count_text(p.largest_micro_batch) if p.largest_micro_batch is not None else "–",
        }
        left_out = {"RL step": rollout, "largest micro-batch": budget}
        shown = {head: cell for head, cell in cells.items() if left_out.get(head, True)}
        table.head = list(shown)
        if p is report.after:
            table.strong_row = len(table.rows)
        table.rows.append(list(shown.values()))
    note = (
        "Copies: per layer and pass of a micro-step, whole group. Memory: of the fullest rank, of which guests. Peak "
        "and largest micro-batch: in tokens. Planning: CPU time of one layer of one micro-step."
    )
    if not all(p.can_train for p in report.planned):
        note += f" free*: {CANNOT_TRAIN}"
    return Section("policies", "Policies side by side", table_html(table) + paragraph(note, "note"), wide=True)


def load_section(report: Report) -> Section | None:
    """Load per rank before and after, by micro-step."""
    if not report.loads.before.any():
        return None
    about = (
        f"Tokens of each rank ÷ mean of all ranks, in layer {report.loads.layer}, the one that {report.before.policy} "
        "balances worst on average. Orange and red are ranks that others wait for, blue ones wait."
    )
    sides = [
        _load_side(report, "load-before", report.before.policy, report.loads.before),
        _load_side(report, "load-after", report.after.policy, report.loads.after),
    ]
    body = paragraph(about) + beside(*(figure(*side) for side in sides))
    return Section("load", "Load per rank, before and after", body, wide=True, plots=tuple(plot for plot, _ in sides))


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
    return Plot(name, caption, label, *plots.heat_map(cells), legend=legend, scale=True), table


def _grouped(step: int, noun: str) -> str:
    return f"{noun}s, {step} in a cell: the most loaded" if step > 1 else noun


def balance_section(report: Report) -> Section | None:
    """How imbalance is distributed over layers and micro-steps, by policy."""
    shown = [p for p in report.planned if p.rho.size]
    if not shown:
        return None
    values = [quantiles(p.rho) for p in shown]
    rows = [Row(p.policy, ratio_text(q.mean), p is report.after) for p, q in zip(shown, values, strict=True)]
    table = Table(
        "imbalance ρ over all layers and micro-steps",
        ["policy", "least", "25 %", "median", "75 %", "99 %", "most", "mean"],
    )
    for p, q in zip(shown, values, strict=True):
        table.rows.append([p.policy, *map(ratio_text, (q.least, q.p25, q.median, q.p75, q.p99, q.most, q.mean))])
    said = [
        f"{p.policy}: mean {ratio_text(q.mean)}, most {ratio_text(q.most)}." for p, q in zip(shown, values, strict=True)
    ]
    plot = Plot(
        "rho",
        "ρ: busiest rank ÷ mean rank. Line: from the least to the most of all layers and micro-steps; box: the middle "
        "half; dot and number: the mean.",
        f"Imbalance ρ by policy. {' '.join(said)}",
        *plots.box_chart(rows, values, "ρ (1 is perfect; logarithmic axis)"),
        rows=len(rows),
    )
    return Section("balance", "Imbalance, by policy", figure(plot, table), plots=(plot,))


def shares_section(report: Report) -> Section | None:
    """The classes of ρ, by policy."""
    shown = [p for p in report.planned if p.rho.size]
    if not shown:
        return None
    shares = [
        np.bincount(np.searchsorted(RHO_BOUNDS, p.rho, "right"), minlength=len(RHO_CLASSES)) / p.rho.size for p in shown
    ]
    table = Table("share of layers and micro-steps by ρ", ["policy", *RHO_CLASSES])
    table.rows = [[p.policy, *map(percent_text, part)] for p, part in zip(shown, shares, strict=True)]
    names = [f"ρ {RHO_CLASSES[0]}", *RHO_CLASSES[1:]]
    bars = []
    for i, name in enumerate(names):
        part = [float(of_policy[i]) for of_policy in shares]
        said = [f"{p.policy}, {name}: {percent_text(v)}" for p, v in zip(shown, part, strict=True)]
        bars.append(Bars(name, f"--q{i}", part, said))
    axis = {
        "title": "share of all layers and micro-steps",
        "tickformat": ".0%",
        "range": [0, 1],
        "tickvals": [0, 0.25, 0.5, 0.75, 1],
    }
    told = [f"{p.policy}: {percent_text(part[0])} below 1.1." for p, part in zip(shown, shares, strict=True)]
    plot = Plot(
        "shares-plot",
        "Every layer of every micro-step falls in one of five classes of ρ.",
        f"Share of micro-steps by imbalance. {' '.join(told)}",
        *plots.bar_chart([Row(p.policy, strong=p is report.after) for p in shown], bars, axis),
        rows=len(shown),
        legend=[(f"q{i}", name) for i, name in enumerate(names)],
    )
    return Section("shares", "How often is it unbalanced?", figure(plot, table), plots=(plot,))


def _colours(names: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    return {name: f"s{known.index(name) if name in known else i % 10}" for i, name in enumerate(names)}


def time_section(report: Report) -> Section | None:
    """Where a step's time goes."""
    phases = [phase.parts for p in report.planned for phase in (p.recompute, p.policy_update)]
    parts = list(dict.fromkeys(name for of_phase in phases for name, seconds in of_phase.items() if seconds > 0))
    if not parts:
        return None
    sides = [
        _phase(report, parts, "time-recompute", ("recompute stage", "Recompute"), lambda p: p.recompute),
        _phase(report, parts, "time-update", ("policy update", "Policy update"), lambda p: p.policy_update),
    ]
    body = beside(*(figure(*side) for side in sides))
    return Section("time", "Where the time goes", body, wide=True, plots=tuple(plot for plot, _ in sides))


def _phase(
    report: Report,
    parts: Sequence[str],
    plot_id: str,
    names: tuple[str, str],
    phase_of: Callable[[PolicyResult], PhaseTime],
) -> tuple[Plot, Table]:
    before = phase_of(report.before)
    ideal = before.ideal_seconds
    times = [(p, phase_of(p)) for p in report.planned]
    rows = [Row("ideal", seconds_text(ideal))]
    for p, time in times:
        gain = times_text(speedup(before.seconds, time.seconds))
        rows.append(Row(p.policy, f"{seconds_text(time.seconds)} · {gain}", p is report.after))
    colours = _colours(parts, PARTS)
    here = [part for part in parts if any(time.parts.get(part, 0) > 0 for _, time in times)]
    bars = []
    for part in here:
        values = [0.0, *(time.parts.get(part, 0.0) for _, time in times)]
        said = [f"{row.name}, {part}: {seconds_text(v)}" for row, v in zip(rows, values, strict=True)]
        bars.append(Bars(part, f"--{colours[part]}", values, said))
    nothing = [0.0] * len(times)
    bars.append(Bars("ideal", "--ideal", [ideal, *nothing], [f"ideal: {seconds_text(ideal)}"] * len(rows)))
    told = [f"{p.policy}: {seconds_text(time.seconds)}." for p, time in times]
    plot = Plot(
        plot_id,
        f"{names[1]}; dashed: every rank at the mean load, nothing copied",
        f"Seconds of the {names[0]} by policy and part. Ideal: {seconds_text(ideal)}. {' '.join(told)}",
        *plots.bar_chart(rows, bars, plots.seconds_axis("critical path"), reference=ideal),
        rows=len(rows),
        legend=[*((colours[part], part) for part in here), ("ideal", "ideal")],
    )
    table = Table(f"seconds of the {names[0]} by part", ["policy", *parts, "sum", "ideal"])
    for p, time in times:
        seconds = [*(time.parts.get(part, 0.0) for part in parts), time.seconds, time.ideal_seconds]
        table.rows.append([p.policy, *map(seconds_text, seconds)])
    return plot, table


def ablation_section(report: Report) -> Section | None:
    """What each stage of our planner adds."""
    if not report.ablation:
        return None
    last = len(report.ablation) - 1
    rows = [
        Row(stages, f"{times_text(p.speedup)} · ρ {ratio_text(p.mean_rho)}", i == last)
        for i, (stages, p) in enumerate(report.ablation.items())
    ]
    said = [f"{stages}: {times_text(p.speedup)}" for stages, p in report.ablation.items()]
    bars = [Bars("speedup", "--s2", [p.speedup for p in report.ablation.values()], said)]
    axis = {"title": f"times as fast as {report.before.policy}"}
    plot = Plot(
        "ablation-plot",
        "Speedup and mean ρ with some stages alone. B: base placement, once per step; per micro-step L: relocation of "
        "whole experts, P: replication, T: exact token assignment.",
        f"Speedup by stages of the planner. {'. '.join(said)}.",
        *plots.bar_chart(rows, bars, axis, reference=1.0),
        rows=len(rows),
    )
    table = Table("stages of the planner", ["stages", "speedup", "ρ mean", "copies", "waits for copies"])
    for stages, p in report.ablation.items():
        copies = f"{p.copies_per_layer_event:.2f}"
        waits = seconds_text(p.exposed_copy_seconds)
        table.rows.append([stages, times_text(p.speedup), ratio_text(p.mean_rho), copies, waits])
    return Section("ablation", "What each stage of the planner adds", figure(plot, table), plots=(plot,))


def memory_section(report: Report) -> Section | None:
    """What more guest slots buy, and what they cost."""
    points = report.memory
    if not points:
        return None
    front = plots.pareto_front(points)
    said = [plots.memory_words(points[i]) for i in sorted(front)]
    names = list(dict.fromkeys(p.residency for p in points))
    plot = Plot(
        "memory-plot",
        f"{report.after.policy}, by where guests stay; numbers at the marks are guest slots per rank and layer. The "
        "line is the front: nothing is quicker with as little memory.",
        f"Memory against speedup. {'. '.join(said)}.",
        *plots.memory_chart(points, f"times as fast as {report.before.policy}"),
        legend=[(f"p{i} {plots.SYMBOLS[i % 4]}", name) for i, name in enumerate(names)],
    )
    head = ["residency", "guest slots", "speedup", "memory", "guests", "ρ mean", "copies", "waits for copies"]
    table = Table("memory and speedup by residency and guest slots", [*head, "on the front"])
    for i, point in enumerate(points):
        p = point.result
        cells = [times_text(p.speedup), bytes_text(p.memory_bytes), bytes_text(p.guest_bytes), ratio_text(p.mean_rho)]
        cells += [
            f"{p.copies_per_layer_event:.2f}",
            seconds_text(p.exposed_copy_seconds),
            "yes" if i in front else "no",
        ]
        table.rows.append([point.residency, str(point.guest_slots), *cells])
    return Section("memory", "Memory against speedup", figure(plot, table), plots=(plot,))


def traffic_section(report: Report) -> Section | None:
    """What crosses between nodes, or inside the node where there is but one."""
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
    rows = [
        Row(p.policy, bytes_text(b.all_bytes), p is report.after) for p, b in zip(report.planned, over, strict=True)
    ]
    parts = {
        "tokens": ("s1", [b.rows for b in over]),
        "copies": ("s5", [b.copies for b in over]),
        "gradients of guests": ("s7", [b.gradients for b in over]),
    }
    bars = [
        Bars(name, f"--{css}", part, [f"{r.name}, {name}: {bytes_text(v)}" for r, v in zip(rows, part, strict=True)])
        for name, (css, part) in parts.items()
    ]
    plot = Plot(
        "traffic-bars",
        "Between nodes, in a whole step: all ranks together."
        if link == NETWORK
        else "There is one node: what its ranks send to each other in a whole step.",
        f"Bytes over links to {link}, by policy. {' '.join(f'{row.name}: {row.text}.' for row in rows)}",
        *plots.bar_chart(rows, bars, plots.bytes_axis("in a step, all ranks")),
        rows=len(rows),
        legend=[(css, name) for name, (css, _) in parts.items()],
    )
    table = Table(
        "bytes by link, all ranks, whole step",
        ["policy", "link", "tokens", "copies", "gradients", "busiest link's use"],
    )
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
    hover = [[f"node {i} to node {j}: {bytes_text(int(count[i, j]))}" for j in nodes] for i in nodes]
    cells = Cells(
        bins=np.searchsorted(bounds, count, "right"),
        num_bins=len(bounds) + 1,
        colours="f",
        hover=hover,
        titles=("from node", "to node"),
        square=True,
    )
    total = bytes_text(int(count.sum()))
    words = ["0", *map(bytes_text, bounds[1:]), ""]
    plot = Plot(
        plot_id,
        f"{policy}: {total} in all",
        f"Bytes from node to node, {policy}. {total} in all.",
        *plots.heat_map(cells),
        legend=[(f"f{i}", word) for i, word in enumerate(words)],
        scale=True,
    )
    table = Table(f"bytes from node to node, {policy}", ["from", *(f"to {node}" for node in nodes)])
    table.rows = [[f"node {i}", *(bytes_text(int(count[i, j])) for j in nodes)] for i in nodes]
    return plot, table


def timeline_section(report: Report) -> Section | None:
    """What some ranks did while one layer ran."""
    if not report.windows:
        return None
    spans = [span for window in report.windows for lane in window.lanes.values() for span in lane]
    colours = _colours(list(dict.fromkeys(span.kind for span in spans)), KINDS)
    colours |= {"waiting": "idle"} if "waiting" in colours else {}
    end = max(window.seconds for window in report.windows)
    sides = [_window(f"timeline-{i}", window, colours, end) for i, window in enumerate(report.windows)]
    about = "The same layer of the same micro-step on one scale. Thin bars are copies that travel meanwhile."
    body = paragraph(about) + beside(*(figure(*side) for side in sides))
    return Section("timeline", "One layer, rank by rank", body, wide=True, plots=tuple(plot for plot, _ in sides))


def _window(plot_id: str, window: Window, colours: dict[str, str], end: float) -> tuple[Plot, Table]:
    plot = Plot(
        plot_id,
        f"{window.policy}, {window.what}: {seconds_text(window.seconds)}",
        f"Timeline, {window.policy}. {window.what}: {seconds_text(window.seconds)}.",
        *plots.lane_chart(window, {kind: f"--{css}" for kind, css in colours.items()}, end),
        legend=[(css, kind) for kind, css in colours.items()],
    )
    table = Table(f"what the ranks did, {window.policy}", ["rank", "what", "begins", "ends"])
    for rank, lane in window.lanes.items():
        for span in lane:
            table.rows.append([f"rank {rank}", span.name, seconds_text(span.begin), seconds_text(span.end)])
    return plot, table
