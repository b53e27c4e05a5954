"""Formats results: a table with remarks, a section in Markdown, JSON."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

from .columns import ORIGINS, Column
from .experiment import DIGITS, REFERENCE, Aim, Experiment, Published, reference
from .run import Cell, JudgedAim, Result

Rows = list[list[str]]

_NONE = "–"


def to_text(result: Result) -> str:
    """Formats the table with columns of minimal width. The first column is left-aligned, all others right-aligned."""
    e, rows = result.experiment, to_rows(result)
    width = [max(len(row[c]) for row in rows if c < len(row) and len(row) == len(rows[0])) for c in range(len(rows[0]))]
    lines = []
    for row in rows:
        runs_over = len(row) - 1 if len(row) < len(width) else None  # why a system was skipped
        cells = [cell if c == runs_over else f"{cell:>{width[c]}}" for c, cell in enumerate(row) if c]
        lines.append("  ".join([f"  {row[0]:<{width[0]}}", *cells]))
    return "\n".join(
        [f"{e.name}: {e.title}", e.source, "", *lines, *([""] if remarks(result) else []), *remarks(result), ""]
    )


def to_markdown(result: Result) -> str:
    """Formats a section of build/results.md (lab/write_results)."""
    e = result.experiment
    parts = [
        f"## {e.name}: {e.title}",
        f"*{e.source}{' (secondary)' if e.secondary else ''}.* {e.about}",
        f"**What we assumed.** {e.assumed}",
        f"    lab/run {e.name}",
        table(to_rows(result)),
        _unpublished(e) + _origins(e),
        "\n".join(f"- {remark}" for remark in remarks(result)),
        f"**What came out.** {filled(result)}" if e.result else "",
    ]
    return "".join(f"{part}\n\n" for part in parts if part)


def table(rows: Rows) -> str:
    head = rows[0]
    lines = [f"| {' | '.join(row)} |" + " |" * (len(head) - len(row)) for row in rows]
    return "\n".join([lines[0], f"|{'---|' * len(head)}", *lines[1:]])


def to_json(result: Result) -> dict[str, Any]:
    """Missing figures are None. A column that depends on several dispatches is an object with a figure for each."""
    e = result.experiment
    rows: list[dict[str, Any]] = []
    for on, system, cell in result.runs():
        estimated = {"dispatch_estimated": on.estimated} if "token" in on.by_dispatch else {}
        skipped = {"skipped": cell.skipped} if cell.skipped else {}
        drawn = {"draws": on.draws, "spread": _by_name(e, cell.spread)} if cell.spread else {}
        figures = _by_name(e, cell.figures)
        rows.append({"input": on.label, "system": system.label, **estimated, **skipped, **figures, **drawn})
    return {
        "name": e.name,
        "title": e.title,
        "source": e.source,
        "secondary": e.secondary,
        "columns": {column.name: column.origin for column in e.columns},
        "rows": rows,
        "published": [
            {"input": p.input, "system": p.system, "column": p.column, "value": p.value} for p in e.published
        ],
        "aims": [{"aim": _tell_judged(j), "met": j.met, "worst": _finite(j.worst)} for j in result.judged()],
    }


def to_rows(result: Result, *, measured: bool = True) -> Rows:
    """The table's rows, head first. A skipped system's row has fewer cells. measured: False replaces figures that are
    measured here by the word "measured", because they differ from run to run.
    """
    return _wide_rows(result, measured) if result.experiment.across else _long_rows(result, measured)


def remarks(result: Result) -> list[str]:
    """Lists published figures that are not in the table, and whether aims are met."""
    skipped = {(on.label, system.label) for on, system, cell in result.runs() if cell.skipped}
    told = [
        _tell_published(result, p)
        for p in result.experiment.published
        if p.note or not _stands_in_table(p) or (p.input, p.system) in skipped
    ]
    return told + [_tell_judged(judged) for judged in result.judged()]


def filled(result: Result) -> str:
    """The experiment's result with its figures; – for figures of a skipped system."""
    headings = {heading.name: at for at, heading in enumerate(result.experiment.headings)}
    cells = {(on.label, system.label): cell for on, system, cell in result.runs()}

    def figure(match: re.Match[str]) -> str:
        on, system, name, *digits = reference(match)
        cell, at = cells[on, system], headings[name]
        if cell.skipped:
            return _NONE
        form = DIGITS.fullmatch(digits[0]) if digits else None
        decimals = int(form[1]) if form else result.experiment.headings[at].digits
        spread = f" ± {fixed(cell.spread[at], decimals)}" if form and form[2] else ""
        return fixed(cell.figures[at], decimals) + spread

    return REFERENCE.sub(figure, result.experiment.result)


def fixed(figure: float, decimals: int) -> str:
    """Formats a figure for tables: never −0, and – for NaN."""
    return _NONE if math.isnan(figure) else f"{round(figure, decimals) + 0.0:.{decimals}f}"


def _plain(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:.15g}"


def _by_name(e: Experiment, figures: Sequence[float]) -> dict[str, Any]:
    by_name: dict[str, Any] = {}
    for heading, figure in zip(e.headings, figures, strict=False):
        if heading.dispatch:
            by_name.setdefault(heading.name.split(" (")[0], {})[heading.dispatch] = _finite(figure)
        else:
            by_name[heading.name] = _finite(figure)
    return by_name


def _finite(figure: float) -> float | None:
    return figure if math.isfinite(figure) else None


def _figures(e: Experiment, cell: Cell, measured: bool) -> list[str]:
    """Formats the figures, with the standard deviation over draws if there are several."""
    shown = []
    for at, (heading, figure) in enumerate(zip(e.headings, cell.figures, strict=False)):
        spread = f" ± {fixed(cell.spread[at], heading.digits)}" if cell.spread else ""
        hidden = heading.origin == "measured here" and not measured
        shown.append("measured" if hidden else fixed(figure, heading.digits) + spread)
    return shown


def _stands_in_table(p: Published) -> bool:
    return bool(p.input and p.system)


def _published_at(e: Experiment, on: str, system: str, heading: Column) -> str | None:
    of = (p for p in e.published if (p.input, p.system) == (on, system) and heading.name.split(" (")[0] == p.column)
    return next((_plain(p.value) for p in of), None)


def _long_rows(result: Result, measured: bool) -> Rows:
    """A row per input and system. Each heading is a column, followed by its published figures, if any."""
    e = result.experiment
    last = {column.name: e.headings_of(column)[-1] for column in e.columns}
    beside = {last[p.column].name for p in e.published if _stands_in_table(p)}
    head = ["input", "system"]
    for heading in e.headings:
        head += [heading.title, "published"] if heading.name in beside else [heading.title]
    rows = [head]
    for on, system, cell in result.runs():
        rows.append(row := [on.label, system.label])
        if cell.skipped:
            row.append(f"skipped: {cell.skipped}")
            continue
        for heading, figure in zip(e.headings, _figures(e, cell, measured), strict=True):
            row.append(figure)
            if heading.name in beside:
                row.append(_published_at(e, on.label, system.label, heading) or _NONE)
    return rows


def _wide_rows(result: Result, measured: bool) -> Rows:
    """A row per input and a column per system. Slashes separate figures; published figures are in brackets."""
    e = result.experiment
    rows = [[" / ".join(heading.title for heading in e.headings), *(system.label for system in e.systems)]]
    for on, cells in zip(e.inputs, result.cells, strict=True):
        rows.append(row := [on.label])
        for system, cell in zip(e.systems, cells, strict=True):
            figures = []
            for heading, figure in zip(e.headings, _figures(e, cell, measured), strict=False):
                published = _published_at(e, on.label, system.label, heading)
                figures.append(figure + (f" [{published}]" if published else ""))
            row.append("skipped" if cell.skipped else " / ".join(figures))
    return rows


def _of_whom(title: str, of: Published | Aim) -> str:
    names = ", ".join(filter(None, (of.system, of.input)))
    return f"{title} of {names}" if names else title


def _tell_published(result: Result, p: Published) -> str:
    title = next(column.title for column in result.experiment.columns if column.name == p.column)
    return f"Published: {_of_whom(title, p)} {_plain(p.value)}" + (f" ({p.note})" if p.note else "")


def _tell_judged(judged: JudgedAim) -> str:
    aim = judged.aim
    relative = f" ÷ that of {aim.relative_to}" if aim.relative_to else ""
    bounds = [f" ≥ {_plain(aim.at_least)}"] if aim.at_least is not None else []
    bounds += [f" ≤ {_plain(aim.at_most)}"] if aim.at_most is not None else []
    text = f"Aim: {_of_whom(judged.heading.title, aim)}{relative}{','.join(bounds)}"
    if judged.figures == 0:
        return f"{text}: nothing to judge by"
    worst = fixed(judged.worst, 3 if aim.relative_to else judged.heading.digits)
    which = "it is" if judged.figures == 1 else "the worst is"
    without = f"; {judged.missing} without a figure" if judged.missing else ""
    return f"{text}: {'met' if judged.met else 'missed'}, {which} {worst}{without}"


def _unpublished(e: Experiment) -> str:
    if not e.across and any(map(_stands_in_table, e.published)):
        return f"{_NONE} in a *published* column: no published figure. "
    return "" if e.published else "No published figures. "


def _origins(e: Experiment) -> str:
    """States which figures are exact, modelled or measured here, and with which dispatch."""
    dispatches, *others = {on.dispatches for on in e.inputs}
    estimated = {on.estimated for on in e.inputs}
    token = {(True,): "token (estimated)", (False, True): "token (estimated, but for traces)"}
    named = {"token": token.get(tuple(sorted(estimated)), "token"), "row": "row"}
    by = "" if others else " " + " and ".join(f"by {named[dispatch]}" for dispatch in dispatches)
    parts = []
    for origin, depends in itertools.product(ORIGINS, (False, True)):
        of = [c.title for c in e.columns if c.origin == origin and c.by_dispatch == depends]
        if of:
            parts.append(f"{origin}{by if depends else ''}: {'; '.join(of)}.")
    text = " ".join(parts)
    return text[:1].upper() + text[1:]
