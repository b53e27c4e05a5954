"""Header and footer of the page: the most important numbers in a few sentences, and the options."""

from __future__ import annotations

from .facts import PolicyResult, Report, speedup
from .numbers import bytes_text, counted, percent_text, ratio_text, seconds_text, times_text
from .page import escaped, paragraph


def header(report: Report) -> str:
    """Return title, summary, tiles and remarks."""
    title = escaped(f"{report.model} on {report.cluster}")
    out = f'<p class="over">ForeMoE report</p>\n<h1>{title}</h1>\n' + paragraph(report.input, "input")
    if not report.before.rho.size:
        out += paragraph("No load: no rank has a token in any layer, so there is nothing to balance.", "summary")
    elif report.after is report.before:
        out += paragraph(_summary_of_one(report), "summary")
    else:
        out += paragraph(_summary(report), "summary") + _tiles(report)
    return out + "".join(paragraph(remark, "note") for remark in report.remarks)


def footer(report: Report) -> str:
    """Return the settings, and the definitions of terms."""
    settings = "".join(
        f"<div><dt>{escaped(name)}</dt><dd>{escaped(value)}</dd></div>\n" for name, value in report.settings.items()
    )
    about = (
        "Plans are real and proved right; times, memory and traffic are those of a model of the cluster, not measured "
        "on one. ρ is the busiest rank's tokens divided by the mean rank's: a layer's experts take ρ times as long as "
        "they could. A guest is a copy of an expert away from its home."
    )
    return f'<h2>What was asked</h2>\n<dl class="settings">\n{settings}</dl>\n' + paragraph(about)


def conclusion(report: Report) -> str:
    """Return the result in one line."""
    before, after = report.before, report.after
    what = f"{report.model} on {report.cluster}"
    if not after.rho.size:
        return f"{what}, no load"
    seconds, ideal = _served(report, after)
    of_ideal = f"{100 * speedup(ideal, seconds):.1f} % of ideal, modelled"
    if after is not before:
        was = _served(report, before)[0]
        gain = f"in {seconds_text(seconds)}, {speedup(was, seconds):.3f} times as fast as {before.policy}"
        alone = "" if after.can_train else "; in recompute alone, since its plan cannot train"
        return f"{what}, {after.policy} {gain}, {of_ideal}{alone}"
    alone = "" if len(report.policies) == 1 else "nothing could be planned but "
    return f"{what}, {alone}{before.policy} in {seconds_text(seconds)}, {of_ideal}"


def _served(report: Report, p: PolicyResult) -> tuple[float, float]:
    """Return p's seconds, as planned and ideal, of a training step, or of recompute if `report.after` cannot train.

    With expert-parallel groups, those of the slowest one, if the groups have results of the policy.
    """
    in_groups = [q for group in report.groups for q in (group.before, group.after) if q.policy == p.policy]
    p = max(in_groups, key=lambda q: q.step_seconds, default=p)
    if report.after.can_train:
        return p.step_seconds, p.ideal_step_seconds
    return p.recompute.seconds, p.recompute.ideal_seconds


def _ranks(report: Report) -> str:
    ranks = counted(report.num_ranks, "rank")
    return f"{counted(len(report.groups), 'group')} of {ranks}" if report.groups else ranks


def _exposed(p: PolicyResult) -> float:
    return p.exposed_copy_seconds if p.can_train else p.recompute.parts.get("exposed copies", 0)


def _summary_of_one(report: Report) -> str:
    """Return the summary if there is nothing to compare."""
    only = report.before
    text = (
        f"On {_ranks(report)} of {report.cluster}, {only.policy} takes "
        f"{seconds_text(only.step_seconds)} (modelled) for a training step of {report.model}, "
        f"{percent_text(only.fraction_of_ideal)} of what perfect balance would give."
    )
    if len(report.policies) == 1:
        return text
    return f"{text} Nothing but {only.policy} could be planned: the table says why."


def _summary(report: Report) -> str:
    before, after = report.before, report.after
    was, (seconds, ideal) = _served(report, before)[0], _served(report, after)
    served = "a training step" if after.can_train else "recompute"
    exposed = _exposed(after)
    waiting = f"{seconds_text(exposed)} of" if exposed > 0 else "no"
    text = (
        f"On {_ranks(report)} of {report.cluster}, {after.policy} takes "
        f"{seconds_text(seconds)} (modelled) for {served} of {report.model} where {before.policy} takes "
        f"{seconds_text(was)}: {times_text(speedup(was, seconds))} as fast, "
        f"{percent_text(speedup(ideal, seconds))} of what perfect balance without a single copy would give. "
        f"The busiest rank has {ratio_text(after.mean_rho)} times the mean load on average instead of "
        f"{ratio_text(before.mean_rho)}. "
        f"The price: {counted(report.guest_slots, 'guest slot')} per rank and layer, {bytes_text(after.guest_bytes)} "
        f"for guests on a rank, {after.copies_per_layer_event:.1f} copies per layer and pass of a micro-step in the "
        f"whole group, {waiting} waiting for copies."
    )
    if not after.can_train:
        text += " It cannot train: its plan has residency free, so gradients and optimizer state have no home."
    others = [p for p in report.planned if p is not before and p is not after and p.can_train >= after.can_train]
    if others:
        best = min(others, key=lambda p: _served(report, p)[0])
        took = _served(report, best)[0]
        gain = f"{seconds_text(took)}: {times_text(speedup(was, took))} as fast as {before.policy}"
        text += f" The fastest of the others here, {best.policy}, takes {gain}."
    return text


def _tiles(report: Report) -> str:
    before, after = report.before, report.after
    was, (seconds, ideal) = _served(report, before)[0], _served(report, after)
    memory = bytes_text(before.memory_bytes)
    what, of_what = ("a step", "a step") if after.can_train else ("recompute", "in recompute")
    with_rollout = after.rl_speedup if after.can_train else None
    rl_step = f"{seconds_text(after.rl_step_seconds)} with the rollout, modelled"
    tiles = [
        (
            f"Speedup of {what}",
            times_text(speedup(was, seconds)),
            f"{seconds_text(seconds)} instead of {seconds_text(was)}, modelled",
        ),
        *([("Speedup of an RL step", times_text(with_rollout), rl_step)] if with_rollout else []),
        ("Of the ideal", percent_text(speedup(ideal, seconds)), f"{seconds_text(ideal)} at perfect balance, modelled"),
        ("Mean imbalance ρ", ratio_text(after.mean_rho), f"instead of {ratio_text(before.mean_rho)}"),
        ("Waiting for copies", seconds_text(_exposed(after)), f"of {seconds_text(seconds)} {of_what}, modelled"),
        (
            "Memory for guests",
            bytes_text(after.guest_bytes),
            f"fullest rank {bytes_text(after.memory_bytes)}, was {memory}, modelled",
        ),
    ]
    out = ""
    for name, value, detail in (map(escaped, tile) for tile in tiles):
        out += f'<div class="tile"><dt>{name}</dt><dd>{value}<span>{detail}</span></dd></div>\n'
    return f'<dl class="tiles">\n{out}</dl>\n'
