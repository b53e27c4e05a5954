"""The page around sections: one HTML file that needs neither network nor anything beside it.

Names of files, models and policies are whatever somebody called them. escaped() is where they become part of the page,
and lose the power to be anything but text. The page's security policy permits its own scripts and style sheet, by their
hashes, and nothing else but style attributes, which Plotly sets; what draws is Plotly, embedded once, and page.js.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

# Control characters but tab and newline, those that turn the direction of writing, and halves of surrogates.
_NOT_SHOWN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]",
)


def escaped(text: str) -> str:
    """Text as it may stand between tags, inside quoted attributes, and in texts that Plotly draws."""
    return html.escape(_NOT_SHOWN.sub("\ufffd", text))


@dataclass
class Table:
    """Cells are text. The first column names the row; the last cell of a short row spans the rest."""

    caption: str
    head: list[str]
    rows: list[list[str]] = field(default_factory=list)
    strong_row: int | None = None  # that the reader came for


@dataclass(frozen=True)
class Plot:
    """A figure of Plotly's, with what stands around it.

    label: what it shows and its numbers, for who does not see it. layout.height is of the plot on a wide screen.
    rows: their number, where rows are named at the left; on a narrow screen names move above the bars. legend: colour
    (a name in style.css) and meaning.
    """

    id: str
    caption: str
    label: str
    data: list[dict[str, Any]]
    layout: dict[str, Any]
    rows: int = 0
    legend: Sequence[tuple[str, str]] = ()
    scale: bool = False  # the legend is a scale: its words stand between colours


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it; `wide`: over the whole width of a wide screen."""

    id: str
    heading: str
    body: str
    wide: bool = False
    plots: tuple[Plot, ...] = ()


def paragraph(text: str, css: str = "") -> str:
    return f'<p class="{css}">{escaped(text)}</p>\n' if css else f"<p>{escaped(text)}</p>\n"


def beside(*parts: str) -> str:
    """Side by side where there is room."""
    return '<div class="pair">\n' + "".join(f"<div>\n{part}</div>\n" for part in parts) + "</div>\n"


def table_html(table: Table) -> str:
    """In a box of its own that scrolls, so that the page need not."""
    name = escaped(table.caption)
    head = "".join(f'<th scope="col">{escaped(cell)}</th>' for cell in table.head)
    rows = [_row(row, len(table.head), index == table.strong_row) for index, row in enumerate(table.rows)]
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}">\n<table><caption>{name}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{''.join(rows)}</tbody></table>\n</div>\n"
    )


def folded(table: Table) -> str:
    """The same, to be unfolded: the numbers of a plot."""
    summary = f"<summary>Numbers: {escaped(table.caption)}</summary>"
    return f"<details>{summary}\n{table_html(table)}</details>\n"


def _row(cells: list[str], columns: int, strong: bool) -> str:
    out = ['<tr class="strong">' if strong else "<tr>"]
    for i, cell in enumerate(cells):
        spans = columns - i if i == len(cells) - 1 and len(cells) < columns else 1
        more = f' colspan="{spans}" class="words"' if spans > 1 else ""
        out.append(f"<td{more}>{escaped(cell)}</td>" if i else f'<th scope="row"{more}>{escaped(cell)}</th>')
    return "".join(out) + "</tr>\n"


def figure(plot: Plot, table: Table) -> str:
    """The place of a plot, which page.js fills, with caption, legend and numbers."""
    keys = "".join(f'<li><i class="{css}"></i><span>{escaped(words)}</span></li>' for css, words in plot.legend)
    legend = f'<ul class="{"scale" if plot.scale else "legend"}" aria-hidden="true">{keys}</ul>\n' if keys else ""
    place = f'<div class="plot" id="{plot.id}" role="img" aria-label="{escaped(plot.label)}"></div>'
    return f"<figure>\n<figcaption>{escaped(plot.caption)}</figcaption>\n{legend}{place}\n</figure>\n" + folded(table)


def section_of(id: str, heading: str, *sides: tuple[Plot, Table], about: str = "", wide: bool = False) -> Section:
    """Figures with their numbers, side by side where there are several."""
    drawn = [figure(*side) for side in sides]
    body = (paragraph(about) if about else "") + (drawn[0] if len(drawn) == 1 else beside(*drawn))
    return Section(id, heading, body, wide, tuple(plot for plot, _ in sides))


def document(title: str, header: str, sections: Sequence[Section], footer: str) -> str:
    """The whole page. Equal arguments, equal text."""
    style, script, plotly = _own_file("style.css"), _own_file("page.js"), plotly_script()
    policy = (
        f"default-src 'none'; script-src {_hash(plotly)} {_hash(script)}; style-src {_hash(style)}; "
        "style-src-attr 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    plots = (plot for section in sections for plot in section.plots)
    drawn = {plot.id: {"data": plot.data, "layout": plot.layout, "rows": plot.rows} for plot in plots}
    # Data, not a script: no browser runs it. Only "</script" could end it.
    figures = json.dumps(drawn, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>{escaped(title)}</title>
<style id="plotly.js-style-global" class="no-inline-styles">{style}</style>
</head>
<body>
{"".join(f'<template id="{one}"></template>' for one in _styles_of(plotly))}
<header>
{header}<noscript><p class="note">The plots need JavaScript. The tables have all their numbers.</p></noscript>
</header>
<main>
{"".join(map(_section_html, sections))}</main>
<footer>
{footer}</footer>
<script type="application/json" id="figures">{figures}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


def plotly_script() -> str:
    """Plotly's own script, in one file. Raises ImportError, which says how to get it, where there is no Plotly."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError("plotly is not installed: pip install 'plotly>=6'") from error
    script: str = get_plotlyjs()
    return script


def _styles_of(script: str) -> list[str]:
    """Ids of style sheets that Plotly would add for maps, and does not where there is an element of that id."""
    return sorted(set(re.findall(r'getElementById\("([0-9a-f]{64})"\)', script)))


def _section_html(section: Section) -> str:
    css = ' class="whole"' if section.wide else ""
    heading = f'<h2 id="{section.id}-h">{escaped(section.heading)}</h2>'
    return f'<section id="{section.id}" aria-labelledby="{section.id}-h"{css}>\n{heading}\n{section.body}</section>\n'


def _own_file(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
