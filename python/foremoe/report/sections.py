"""The sections of the page, each a function of a report, and the tables of policies.

A section without data is None, and the page omits it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .balance import balance_section, experts_section, load_section, quantiles, shares_section
from .facts import PolicyResult, Report, Skipped, speedup
from .memory import memory_section
from .numbers import bytes_text, count_text, counted, percent_text, ratio_text, seconds_text, times_text
from .page import Section, Table, paragraph, table_html
from .step import ablation_section, time_section, timeline_section
from .traffic import traffic_section

CANNOT_TRAIN = (
    "experts may be anywhere. Such a plan serves recompute alone; it cannot train, since gradients and optimizer state "
    "have no home. Its step, and all that is of a step, is what it would be if it could."
)


def sections(report: Report) -> list[Section]:
    """Return the sections that have data, in the order of the page."""
    make: Sequence[Callable[[Report], Section | None]] = (
        policies_section,
        groups_section,
        load_section,
        experts_section,
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
    """Return two tables of the policies, each narrow enough for a window of 1,000 pixels."""
    slots = f"{counted(report.guest_slots, 'guest slot')} per rank and layer"
    balance, price = (Table(f"Policies: {what}, {slots}", []) for what in ("balance and time", "copies and memory"))
    optional = {"RL step": "rl_speedup", "largest micro-batch": "largest_micro_batch", "planning": "plan_us"}
    left_out = {h for h, name in optional.items() if all(getattr(p, name) is None for p in report.planned)}
    for p in report.policies:
        if isinstance(p, Skipped):
            balance.rows.append([p.policy, f"skipped: {p.reason}"])
            continue
        for table, all_cells in ((balance, _balance_cells(p)), (price, _price_cells(p))):
            cells = {head: cell for head, cell in all_cells.items() if head not in left_out}
            table.head = list(cells)
            if p is report.after:
                table.strong_row = len(table.rows)
            table.rows.append(list(cells.values()))
    about_time = "Modelled: speedup, RL step, step, of ideal and waits."
    if not all(p.can_train for p in report.planned):
        about_time += f" free*: {CANNOT_TRAIN}"
    about_price = (
        "Copies: per layer and pass of a micro-step, whole group. Memory: modelled, of the fullest rank, and its "
        "guests' part. Peak and largest micro-batch: in tokens."
    )
    if "planning" not in left_out:
        about_price += " Planning: CPU time of one layer of one micro-step, without what is done once per step; "
        about_price += "measured, so another run changes it."
    body = "".join(
        table_html(table) + paragraph(about, "note") for table, about in ((balance, about_time), (price, about_price))
    )
    return Section("policies", "Policies side by side", body, wide=True)


def groups_section(report: Report) -> Section | None:
    """Return a table of all expert-parallel groups; the page shows the slowest before planning."""
    if not report.groups:
        return None
    before, after = report.before.policy, report.after.policy
    head = ["ranks", f"ρ, {before}", after, f"step, {before}", after, "speedup"]
    table = Table(f"Expert-parallel groups with {before} and {after}", head)
    for group in report.groups:
        if group.before is report.before:
            table.strong_row = len(table.rows)
        ranks = f"{group.first_rank} to {group.first_rank + group.num_ranks - 1}"
        rho = [ratio_text(p.mean_rho) for p in (group.before, group.after)]
        steps = [seconds_text(p.step_seconds) for p in (group.before, group.after)]
        table.rows.append([ranks, *rho, *steps, times_text(group.after.speedup)])
    was, seconds = (max(getattr(g, name).step_seconds for g in report.groups) for name in ("before", "after"))
    about = (
        "The groups wait for each other at the end of the step, so the slowest determines it: "
        f"{seconds_text(seconds)} instead of {seconds_text(was)}, {times_text(speedup(was, seconds))} as fast, "
        "modelled. All else on this page is of the group in bold."
    )
    return Section("groups", "Expert-parallel groups", table_html(table) + paragraph(about, "note"), wide=True)


def _gain(seconds: float, factor: float) -> str:
    return f"{seconds_text(seconds)}, {times_text(factor)}"


def _balance_cells(p: PolicyResult) -> dict[str, str]:
    q = quantiles(p.rho) if p.rho.size else None
    return {
        "policy": p.policy,
        "residency": p.residency if p.can_train else f"{p.residency}*",
        "speedup": times_text(p.speedup),
        "RL step": "–" if p.rl_speedup is None else _gain(p.rl_step_seconds, p.rl_speedup),
        "step": seconds_text(p.step_seconds),
        "of ideal": percent_text(p.fraction_of_ideal),
        "ρ mean": ratio_text(q.mean) if q else "–",
        "ρ 99 %": ratio_text(q.p99) if q else "–",
        "ρ most": ratio_text(q.most) if q else "–",
        "waits for copies": seconds_text(p.exposed_copy_seconds),
    }


def _price_cells(p: PolicyResult) -> dict[str, str]:
    return {
        "policy": p.policy,
        "copies": f"{p.copies_per_layer_event:.2f}",
        "memory": bytes_text(p.memory_bytes),
        "guests": bytes_text(p.guest_bytes),
        "peak tokens": count_text(p.peak_tokens),
        "home moves": count_text(p.home_moves),
        "planning": f"{p.plan_us:.1f} µs" if p.plan_us is not None else "–",
        "largest micro-batch": count_text(p.largest_micro_batch) if p.largest_micro_batch is not None else "–",
    }
