"""Results as people and programs read them: tables, remarks, a section in Markdown, JSON."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

from .columns import ORIGINS, Column, fixed
from .experiment import Aim, Experiment, Published
from .finding import filled_finding
from .run import Cell, JudgedAim, Result
from .toml_table import plain

Rows = list[list[str]]

_NONE = "–"


def to_rows(result: Result) -> Rows:
    """The table, its head first. A row that was skipped has fewer cells."""
    return _wide_table(result) if result.experiment.across else _long_table(result)


def remarks(result: Result) -> list[str]:
    """What was published and has no place in the table, and whether aims are met."""
    told = [_tell_published(p) for p in result.experiment.published if p.note or not _stands_in_table(p)]
    return told + [_tell_judged(judged) for judged in result.judged()]


def to_text(result: Result, columns: int | None = None) -> str:
    """columns: of the terminal; None for lines as long as they need to be."""
    e = result.experiment
    told = "".join(f"{remark}\n" for remark in remarks(result))
    return f"{e.name}: {e.title}\n{e.source}\n\n{aligned(to_rows(result), columns)}\n{told}\n"


def to_markdown(result: Result) -> str:
    """A section as build/results.md has it (lab/write_results)."""
    e = result.experiment
    head, *rows = to_rows(result)
    table = [f"| {' | '.join(row)} |" + " |" * (len(head) - len(row)) for row in (head, *rows)]
    table.insert(1, f"|{'---|' * len(head)}")
    parts = [
        f"## {e.name}: {e.title}",
        f"*{e.source}{' (secondary)' if e.secondary else ''}.* {e.about}",
        f"**What we assumed.** {e.reading}",
        f"    foremoe reproduce {e.argument}",
        "\n".join(table),
        _unpublished(e) + _origins(e),
        "\n".join(f"- {remark}" for remark in remarks(result)),
        f"**What came out.** {filled_finding(result)}" if e.finding else "",
    ]
    return "".join(f"{part}\n\n" for part in parts if part)


def to_json(result: Result) -> dict[str, Any]:
    """The object that `foremoe reproduce --json` prints; figures that are none are None."""
    e = result.experiment
    rows: list[dict[str, Any]] = []
    for on, system, cell in result.runs():
        figures = _by_name(e, cell.figures)
        skipped = {"skipped": cell.skipped} if cell.skipped else {}
        spread = _by_name(e, cell.spread)
        drawn = {"draws": on.draws, "spread": spread} if spread else {}
        estimated = {"dispatch_estimated": on.is_estimated} if "token" in on.dispatches else {}
        rows.append({"input": on.label, "system": system.label, **estimated, **skipped, **figures, **drawn})
    return {
        "name": e.name,
        "title": e.title,
        "source": e.source,
        "secondary": e.secondary,
        "columns": {column.name: column.origin for column in e.columns},
        "rows": rows,
        "published": [
            {"input": p.input, "system": p.system, "column": p.column.name, "value": p.value} for p in e.published
        ],
        "aims": [{"aim": _tell_judged(j), "met": j.met, "worst": _finite(j.worst)} for j in result.judged()],
    }


def aligned(rows: Rows, columns: int | None = None) -> str:
    """Columns as wide as they need to be, the first to the left, all others to the right.

    The last cell of a row that has fewer than the head may run over the rest of the line. Columns that do not fit on
    the terminal follow in further blocks, each with the first column again.
    """
    num_columns = len(rows[0])
    widths = [0] * num_columns
    for row in rows:
        for c, cell in enumerate(row if len(row) == num_columns else row[:-1]):
            widths[c] = max(widths[c], len(cell))
    blocks, shown = [], [0]
    for c in range(1, num_columns):
        if len(shown) > 1 and columns is not None and sum(2 + widths[s] for s in [*shown, c]) > columns:
            blocks.append(shown)
            shown = [0]
        shown.append(c)
    return "\n".join(_block(rows, shown, widths) for shown in [*blocks, shown])


def _block(rows: Rows, shown: list[int], widths: list[int]) -> str:
    lines = []
    for row in rows:
        runs_over = len(row) - 1 if len(row) < len(widths) else None
        cells = [row[c] if c == runs_over else f"{row[c]:>{widths[c]}}" for c in shown[1:] if c < len(row)]
        lines.append("  ".join(["", f"{row[0]:<{widths[0]}}", *cells]) + "\n")
    return "".join(lines)


def _by_name(e: Experiment, figures: Sequence[float]) -> dict[str, Any]:
    """One for each column, or an object with one for each dispatch."""
    by_name: dict[str, Any] = {}
    for heading, figure in zip(e.headings, figures, strict=False):
        if heading.dispatch:
            by_name.setdefault(heading.column.name, {})[heading.dispatch] = _finite(figure)
        else:
            by_name[heading.column.name] = _finite(figure)
    return by_name


def _finite(figure: float) -> float | None:
    return figure if math.isfinite(figure) else None


def _shown(column: Column, figure: float) -> str:
    return fixed(figure, column.digits)


def _shown_figures(e: Experiment, cell: Cell) -> list[str]:
    """With how far the draws are apart, where there are several."""
    figures = [_shown(heading.column, figure) for heading, figure in zip(e.headings, cell.figures, strict=False)]
    spread = [f" ± {_shown(heading.column, s)}" for heading, s in zip(e.headings, cell.spread, strict=False)]
    return [figure + s for figure, s in zip(figures, spread or [""] * len(figures), strict=True)]


def _shown_published(p: Published) -> str:
    """As many digits as were published."""
    text = plain(p.value)
    return _shown(p.column, p.value) if isinstance(p.value, float) and len(text) > 12 else text


def _stands_in_table(p: Published) -> bool:
    return bool(p.input and p.system)


def _published_at(experiment: Experiment, *place: object) -> str | None:
    """What was published of (input, system, column)."""
    for p in experiment.published:
        if (p.input, p.system, p.column) == place:
            return _shown_published(p)
    return None


def _long_table(result: Result) -> Rows:
    """A row per input and system, a column per heading, then what was published of that column where anything was."""
    e = result.experiment
    last_of = {heading.column.name: heading for heading in e.headings}
    beside = {last_of[p.column.name] for p in e.published if _stands_in_table(p)}
    head = ["input", "system"]
    for heading in e.headings:
        head += [heading.title, "published"] if heading in beside else [heading.title]
    rows = [head]
    for on, system, cell in result.runs():
        row = [on.label, system.label]
        rows.append(row)
        if cell.skipped:
            row.append(f"skipped: {cell.skipped}")
            continue
        for heading, figure in zip(e.headings, _shown_figures(e, cell), strict=True):
            row.append(figure)
            if heading in beside:
                row.append(_published_at(e, on.label, system.label, heading.column) or _NONE)
    return rows


def _wide_table(result: Result) -> Rows:
    """A row per input, a column per system; several figures between slashes, what was published in brackets."""
    e = result.experiment
    rows = [[" / ".join(heading.title for heading in e.headings), *(system.label for system in e.systems)]]
    for on, cells in zip(e.inputs, result.cells, strict=True):
        row = [on.label]
        rows.append(row)
        for system, cell in zip(e.systems, cells, strict=True):
            figures = []
            for heading, figure in zip(e.headings, _shown_figures(e, cell), strict=False):
                published = _published_at(e, on.label, system.label, heading.column)
                figures.append(figure + (f" [{published}]" if published else ""))
            row.append("skipped" if cell.skipped else " / ".join(figures))
    return rows


def _of_whom(title: str, of: Published | Aim) -> str:
    names = ", ".join(filter(None, (of.system, of.input)))
    return f"{title} of {names}" if names else title


def _tell_published(p: Published) -> str:
    return f"Published: {_of_whom(p.column.title, p)} {_shown_published(p)}" + (f" ({p.note})" if p.note else "")


def _tell_judged(judged: JudgedAim) -> str:
    aim = judged.aim
    relative = f" ÷ that of {aim.relative_to}" if aim.relative_to else ""
    bounds = [f" ≥ {plain(aim.at_least)}"] if aim.at_least is not None else []
    bounds += [f" ≤ {plain(aim.at_most)}"] if aim.at_most is not None else []
    text = f"Aim: {_of_whom(judged.heading.title, aim)}{relative}{','.join(bounds)}"
    if judged.figures == 0:
        return f"{text}: nothing to judge by"
    worst = f"{judged.worst:.3f}" if aim.relative_to else _shown(aim.column, judged.worst)
    which = "it is" if judged.figures == 1 else "the worst is"
    return f"{text}: {'met' if judged.met else 'missed'}, {which} {worst}"


def _unpublished(experiment: Experiment) -> str:
    if not experiment.across and any(map(_stands_in_table, experiment.published)):
        return f"{_NONE} in a *published* column: not published to us. "
    return "" if experiment.published else "Figures: not published to us. "


def _origins(experiment: Experiment) -> str:
    """Which figures are exact, modelled, and measured here, and with which dispatch."""
    by = _by_dispatches(experiment)
    parts = []
    for origin, depends in itertools.product(ORIGINS, (False, True)):
        of = [c.title for c in experiment.columns if c.origin == origin and c.depends_on_dispatch == depends]
        if of:
            parts.append(f"{origin}{by if depends else ''}: {'; '.join(of)}.")
    text = " ".join(parts)
    return text[:1].upper() + text[1:]


def _by_dispatches(experiment: Experiment) -> str:
    """For example " by token (estimated) and by row". Empty where inputs differ, or nothing depends on it."""
    dispatches, *others = {on.dispatches for on in experiment.inputs}
    if others or not dispatches:
        return ""
    estimated = {on.is_estimated for on in experiment.inputs}
    token = {(True,): "token (estimated)", (False, True): "token (estimated, but for traces)"}
    named = {"token": token.get(tuple(sorted(estimated)), "token")}
    return " " + " and ".join(f"by {named.get(dispatch, dispatch)}" for dispatch in dispatches)
