"""The page that contains the sections: one HTML file that needs neither a network nor other files.

Names of files, models and policies come from users. escaped() turns them into plain text wherever they enter the page.
The content-security policy permits the page's own scripts and style sheet, by their hashes, and style attributes, which
Plotly sets. Plotly's script, embedded once, and page.js draw the figures.
"""

from __future__ import annotations

import base64
import hashlib
import html
import importlib.resources
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import plotly.graph_objects as go

# Control characters except tab and newline, characters that change the writing direction, and lone surrogates.
_NOT_SHOWN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str) -> str:
    """Return text that is safe between tags, inside quoted attributes, and in texts that Plotly draws."""
    return html.escape(_NOT_SHOWN.sub("\ufffd", text))


@dataclass
class Table:
    """A table of texts. The first column names the row; the last cell of a short row spans the rest."""

    caption: str
    head: list[str]
    rows: list[list[str]] = field(default_factory=list)
    strong_row: int | None = None  # row of the policy that the page presents


@dataclass(frozen=True)
class Plot:
    """A Plotly figure with its caption and legend."""

    id: str
    caption: str
    label: str  # accessible description, with the most important numbers
    figure: go.Figure
    legend: Sequence[tuple[str, str]] = ()  # CSS classes of the mark, such as a colour of style.css, and its meaning
    scale: bool = False  # the legend is a colour scale, with labels between colours


@dataclass(frozen=True)
class Section:
    """A heading and the HTML below it."""

    id: str
    heading: str
    body: str
    wide: bool = False  # spans the whole width of a wide screen
    plots: Sequence[Plot] = ()


def paragraph(text: str, css: str = "") -> str:
    return f'<p class="{css}">{escaped(text)}</p>\n' if css else f"<p>{escaped(text)}</p>\n"


def beside(*parts: str) -> str:
    """Place parts side by side where there is room."""
    return '<div class="pair">\n' + "".join(f"<div>\n{part}</div>\n" for part in parts) + "</div>\n"


def table_html(table: Table) -> str:
    """Return a table in a box that scrolls, so that the page itself does not scroll."""
    name = escaped(table.caption)
    head = "".join(f'<th scope="col">{escaped(cell)}</th>' for cell in table.head)
    rows = ""
    for index, cells in enumerate(table.rows):
        spans = len(table.head) - len(cells) + 1
        more = ["" for _ in cells[1:]] + [f' colspan="{spans}" class="words"' if spans > 1 else ""]
        rows += '<tr class="strong">' if index == table.strong_row else "<tr>"
        rows += f'<th scope="row"{more[0]}>{escaped(cells[0])}</th>'
        rows += "".join(f"<td{m}>{escaped(cell)}</td>" for m, cell in zip(more[1:], cells[1:], strict=True)) + "</tr>\n"
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name}">\n<table><caption>{name}</caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody></table>\n</div>\n"
    )


def figure_html(plot: Plot, table: Table) -> str:
    """Return an element that page.js fills with the plot, its caption, legend and a folded table of its numbers."""
    keys = "".join(f'<li><i class="{css}"></i><span>{escaped(words)}</span></li>' for css, words in plot.legend)
    legend = f'<ul class="{"scale" if plot.scale else "legend"}" aria-hidden="true">{keys}</ul>\n' if keys else ""
    place = f'<div class="plot" id="{plot.id}" role="img" aria-label="{escaped(plot.label)}"></div>'
    return (
        f"<figure>\n<figcaption>{escaped(plot.caption)}</figcaption>\n{legend}{place}\n</figure>\n"
        f"<details><summary>Numbers: {escaped(table.caption)}</summary>\n{table_html(table)}</details>\n"
    )


def section_of(id: str, heading: str, *sides: tuple[Plot, Table], about: str = "", wide: bool = False) -> Section:
    """Return a section of plots with their numbers, side by side if there are several."""
    drawn = [figure_html(*side) for side in sides]
    body = (paragraph(about) if about else "") + (drawn[0] if len(drawn) == 1 else beside(*drawn))
    return Section(id, heading, body, wide, [plot for plot, _ in sides])


def document(title: str, header: str, sections: Sequence[Section], footer: str) -> str:
    """Return the whole page. Equal arguments give equal text."""
    style, script, plotly = _own_file("style.css"), _own_file("page.js"), plotly_script()
    policy = (
        f"default-src 'none'; script-src {_hash(plotly)} {_hash(script)}; style-src {_hash(style)}; "
        "style-src-attr 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"
    )
    # A browser does not run JSON. to_json() escapes "<", so that no text can end the script element.
    plots = [plot for section in sections for plot in section.plots]
    figures = ",".join(f'"{plot.id}":{plot.figure.to_json(engine="json")}' for plot in plots)
    # Plotly adds style sheets for maps unless elements with the sheets' ids exist.
    maps = sorted(set(re.findall(r'getElementById\("([0-9a-f]{64})"\)', plotly)))
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
{"".join(f'<template id="{one}"></template>' for one in maps)}
<header>
{header}<noscript><p class="note">The plots need JavaScript. The tables have all their numbers.</p></noscript>
</header>
<main>
{"".join(map(_section_html, sections))}</main>
<footer>
{footer}</footer>
<script type="application/json" id="figures">{{{figures}}}</script>
<script>{plotly}</script>
<script>{script}</script>
</body>
</html>
"""


def plotly_script() -> str:
    """Return Plotly's script in one file. Raises ImportError, with the command to install Plotly, if it is missing."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError("plotly is not installed: pip install 'plotly>=6'") from error
    script: str = get_plotlyjs()
    return script


def _section_html(section: Section) -> str:
    css = ' class="whole"' if section.wide else ""
    heading = f'<h2 id="{section.id}-h">{escaped(section.heading)}</h2>'
    return f'<section id="{section.id}" aria-labelledby="{section.id}-h"{css}>\n{heading}\n{section.body}</section>\n'


def _own_file(name: str) -> str:
    return importlib.resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
