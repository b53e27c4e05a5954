"""Figures within a finding, which therefore follow the table.

`{EP 8 | FEPLB | straggler_less}` in an experiment's `finding` becomes the figure of that input, system and column as
the table shows it; `{EP 8 | FEPLB | straggler_less | 0}` has no decimals, and `{… | 2 ±}` the standard deviation of the
input's draws beside it. A column with several dispatches is named
with one of them: `{64 ranks | foremoe | speedup (token)}`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence

from .columns import Heading, fixed
from .experiment import Input
from .run import Result
from .toml_table import Table

_REFERENCE = re.compile(r"\{([^{}]*)\}")
_FORM = "{input | system | column}, or with | and a number of decimals, ± behind it where the input has draws"
_DIGITS = re.compile(r"(\d+)( ±)?")


def expect_known_cells(
    root: Table, finding: str, headings: Sequence[Heading], inputs: Mapping[str, Input], systems: Collection[str]
) -> None:
    """Raises InputError unless every {…} is a cell of the table, exact or modelled."""
    columns = {heading.name: heading.column for heading in headings}
    for match in _REFERENCE.finditer(finding):
        parts = _parts(match)
        if len(parts) not in (3, 4) or not all(map(_DIGITS.fullmatch, parts[3:])):
            root.fail("finding", f"'{match[0]}', expected {_FORM}")
        for what, name, known in zip(("input", "system", "column"), parts[:3], (inputs, systems, columns), strict=True):
            if name not in known:
                root.fail("finding", f"'{match[0]}': no {what} '{name}'; there are {', '.join(known)}")
        if parts[-1].endswith("±") and inputs[parts[0]].draws == 1:
            root.fail("finding", f"'{match[0]}': '{parts[0]}' has one draw")
        if columns[parts[2]].origin == "measured here":
            root.fail("finding", f"'{match[0]}': {parts[2]} is measured, and differs from run to run")
    if set("{}") & set(_REFERENCE.sub("", finding)):
        root.fail("finding", f"a brace without its pair, expected {_FORM}")


def filled_finding(result: Result) -> str:
    """The experiment's finding with its figures; – for those of a system that was skipped."""
    experiment = result.experiment
    headings = [heading.name for heading in experiment.headings]
    cells = {(on.label, system.label): cell for on, system, cell in result.runs()}

    def figure(match: re.Match[str]) -> str:
        on, system, name, *digits = _parts(match)
        cell, at = cells[on, system], headings.index(name)
        if cell.skipped:
            return "–"
        form = _DIGITS.fullmatch(digits[0]) if digits else None
        decimals = int(form[1]) if form else experiment.headings[at].column.digits
        spread = f" ± {fixed(cell.spread[at], decimals)}" if form and form[2] else ""
        return fixed(cell.figures[at], decimals) + spread

    return _REFERENCE.sub(figure, experiment.finding)


def _parts(match: re.Match[str]) -> list[str]:
    return [part.strip() for part in match[1].split("|")]
