"""The page's header and footer: the numbers that matter in two or three sentences, and what was asked."""

from __future__ import annotations

from .facts import Report
from .numbers import bytes_text, counted, percent_text, ratio_text, seconds_text, times_text
from .page import escaped, paragraph


def header(report: Report) -> str:
    """Title, summary, tiles and remarks."""
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
    """Settings, and what the page's words mean."""
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
    """One line: what came out."""
    before, after = report.before, report.after
    what = f"{report.model} on {report.cluster}"
    if not after.rho.size:
        return f"{what}, no load"
    of_ideal = f"{100 * after.fraction_of_ideal:.1f} % of ideal"
    if after is not before:
        return f"{what}, {after.policy} {after.speedup:.3f} times as fast as {before.policy}, {of_ideal}"
    alone = "" if len(report.policies) == 1 else "nothing could be planned but "
    return f"{what}, {alone}{before.policy}, {of_ideal}"


def _summary_of_one(report: Report) -> str:
    """Where there is nothing to compare."""
    only = report.before
    text = (
        f"On {counted(report.num_ranks, 'rank')} of {report.cluster}, {only.policy} takes "
        f"{seconds_text(only.step_seconds)} for a training step of {report.model}, "
        f"{percent_text(only.fraction_of_ideal)} of what perfect balance would give."
    )
    if len(report.policies) == 1:
        return text
    return f"{text} Nothing but {only.policy} could be planned: the table says why."


def _summary(report: Report) -> str:
    before, after = report.before, report.after
    waiting = f"{seconds_text(after.exposed_copy_seconds)} of" if after.exposed_copy_seconds > 0 else "no"
    text = (
        f"On {counted(report.num_ranks, 'rank')} of {report.cluster}, {after.policy} takes "
        f"{seconds_text(after.step_seconds)} for a training step of {report.model} where {before.policy} takes "
        f"{seconds_text(before.step_seconds)}: {times_text(after.speedup)} as fast, "
        f"{percent_text(after.fraction_of_ideal)} of what perfect balance without a single copy would give. "
        f"The busiest rank has {ratio_text(after.mean_rho)} times the mean load on average instead of "
        f"{ratio_text(before.mean_rho)}. "
        f"The price: {counted(report.guest_slots, 'guest slot')} per rank and layer, {bytes_text(after.guest_bytes)} "
        f"for guests on a rank, {after.copies_per_layer_event:.1f} copies per layer and pass of a micro-step in the "
        f"whole group, {waiting} waiting for copies."
    )
    others = [p for p in report.planned if p is not before and p is not after]
    if others:
        best = max(others, key=lambda p: p.speedup)
        text += (
            f" The fastest of the others here, {best.policy}, is {times_text(best.speedup)} as fast as {before.policy}."
        )
    return text


def _tiles(report: Report) -> str:
    before, after = report.before, report.after
    was = bytes_text(before.memory_bytes)
    tiles = [
        (
            "Speedup of a step",
            times_text(after.speedup),
            f"{seconds_text(after.step_seconds)} instead of {seconds_text(before.step_seconds)}",
        ),
        *([("Speedup of an RL step", times_text(after.rl_speedup), "with the rollout")] if after.rl_speedup else []),
        (
            "Of the ideal",
            percent_text(after.fraction_of_ideal),
            f"{seconds_text(after.ideal_step_seconds)} at perfect balance",
        ),
        ("Mean imbalance ρ", ratio_text(after.mean_rho), f"instead of {ratio_text(before.mean_rho)}"),
        (
            "Waiting for copies",
            seconds_text(after.exposed_copy_seconds),
            f"of {seconds_text(after.step_seconds)} a step",
        ),
        (
            "Memory for guests",
            bytes_text(after.guest_bytes),
            f"fullest rank {bytes_text(after.memory_bytes)}, was {was}",
        ),
    ]
    return '<dl class="tiles">\n' + "".join(map(_tile, tiles)) + "</dl>\n"


def _tile(tile: tuple[str, str, str]) -> str:
    what, value, detail = map(escaped, tile)
    return f'<div class="tile"><dt>{what}</dt><dd>{value}<span>{detail}</span></dd></div>\n'
