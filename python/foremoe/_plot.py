"""The pictures of `--plot`: modelled seconds of each policy by part (compare, simulate), peaks of ranks (fit), seconds
of layouts (layout), and loads of experts (inspect).

The program passes the data as JSON, for compare and simulate:

    {"command": "simulate", "title": "…", "facts": ["…"], "panels": [{"name": "step", "ideal": 1.5}], "note": "mean ρ",
     "bars": [{"policy": "vanilla", "note": "1.439", "parts": [{"dense": 0.5, "experts": 1.2}]}],
     "left_out": ["eplb: …"], "exit_code": 0}

A policy has one entry of "parts" per panel, in seconds. "note" is the heading of a column of texts, one per policy.
"ideal" is drawn as a line: every rank at the mean load, no copies. For fit, where "rows" and "gigabytes" are those of
the busiest rank by micro-step:

    {"command": "fit", "title": "…", "facts": ["…"], "limit": 80.0, "exit_code": 0,
     "series": [{"name": "now: vanilla", "rows": [4096], "gigabytes": [71.5]}]}

For layout, where "layouts" has the entries of `foremoe layout --json`:

    {"command": "layout", "title": "…", "facts": ["…"], "exit_code": 0,
     "layouts": [{"ep": 8, "stages": 1, "unplanned": {"seconds": 9.1, "fits": True}, "planned": None}]}

For inspect, with a map per entry of "heat" and a text per layer, whose digits count the bounds of load ÷ mean that the
hottest expert of a cell reaches:

    {"command": "inspect", "title": "…", "facts": ["…"], "bounds": [0.5, 0.8], "experts_in_cell": 1, "exit_code": 0,
     "heat": {"whole step": ["0112", "2010"]}}
"""

from __future__ import annotations

import importlib.resources
import io
import json
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ._command_line import reporting
from ._output import write_file

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def _colours(letter: str) -> tuple[str, ...]:
    """Returns the numbered colours that style.css gives this letter, in the report's light scheme."""
    style = importlib.resources.files(__package__).joinpath("report", "style.css").read_text(encoding="utf-8")
    return tuple(re.findall(rf"--{letter}\d+: (#\w+);", style.partition("@media")[0]))


PARTS = (  # in the order of drawing
    *("dense", "dispatch", "experts", "combine", "planning"),
    *("exposed copies", "arena refresh", "exposed gradients", "optimizer", "homes moved", "data parallel"),
)
COLOURS = dict(zip(PARTS, _colours("s"), strict=True)) | {"placement, measured here": "#e8d36a"}
SERIES = (COLOURS["dense"], COLOURS["dispatch"])
HEAT = _colours("h")  # of load ÷ mean
WIDTH = 9.0  # inches, as all sizes
BAR = 0.34
NOTE = 1.1  # the column of notes
DPI = 160
MOST_CHARACTERS = 140  # of a line of text
IN_A_ROW = 8  # entries of the legend
PANELS_IN_A_ROW = 3  # of layouts
VISIBLE = 0.002  # share of the longest bar from which a part is in the legend


def main(arguments: Sequence[str]) -> int:
    """Draws the picture that the program requests: the data as JSON, and the path of a .png or .svg file."""
    text, path = arguments
    request = json.loads(text)
    return reporting(f"foremoe {request['command']}", {"plot": "--plot"}, lambda: _draw(request, path))


def _draw(request: Mapping[str, Any], path: str) -> int:
    by_key = {"series": draw_peaks, "heat": draw_heat, "layouts": draw_layouts}
    draw_any = next((by_key[key] for key in by_key if key in request), draw)
    figure = draw_any(request)
    picture, form = io.BytesIO(), path.rpartition(".")[2]
    figure.savefig(picture, format=form, dpi=DPI, metadata={"Date": None} if form == "svg" else None)
    write_file(path, picture.getvalue())
    return int(request["exit_code"])


def _figure(height: float) -> Figure:
    import matplotlib
    from matplotlib.figure import Figure

    # parse_math: names of files and models may contain dollar signs
    matplotlib.rcParams.update(
        {"svg.fonttype": "none", "svg.hashsalt": "foremoe", "font.size": 9, "text.parse_math": False}
    )
    return Figure(figsize=(WIDTH, height))


def _write_head(figure: Figure, title: str, texts: Sequence[str], height: float) -> None:
    figure.text(0.1 / WIDTH, 1 - 0.1 / height, title, va="top", fontsize=11, fontweight="bold")
    for line, text in enumerate(texts):
        figure.text(0.1 / WIDTH, 1 - (0.34 + 0.19 * line) / height, text, va="top", fontsize=8, color="#545d69")


def _plain(axes: Axes) -> None:
    axes.yaxis.grid(color="#e7eaee")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend(figure: Figure, axes: Axes, top: float, height: float) -> None:
    handles, names = axes.get_legend_handles_labels()
    figure.legend(
        handles, names, loc="upper left", ncols=len(names), frameon=False, fontsize=8, handlelength=1.4,
        bbox_to_anchor=(0.02 / WIDTH, 1 - top / height), borderpad=0.2,
    )  # fmt: skip


def draw_peaks(request: Mapping[str, Any]) -> Figure:
    """Draws a panel of rows and one of memory over micro-steps, one line per entry of "series", and the limit."""
    from matplotlib.ticker import MaxNLocator

    texts = _wrapped(request["facts"])
    top = 0.9 + 0.19 * len(texts)
    height = top + 2.3
    figure = _figure(height)
    for index, (of, label) in enumerate(
        (("rows", "rows of the busiest rank"), ("gigabytes", "GB of the busiest rank, modelled"))
    ):
        left, width = 0.75 + index * WIDTH / 2, WIDTH / 2 - 0.95
        axes = figure.add_axes((left / WIDTH, 0.5 / height, width / WIDTH, (height - top - 0.5) / height))
        for series, colour in zip(request["series"], SERIES, strict=True):
            steps = [step - 0.5 for step in range(len(series[of]) + 1)]
            axes.stairs(series[of], steps, color=colour, linewidth=1.5, baseline=None, label=series["name"])
        if of == "gigabytes":
            axes.axhline(request["limit"], color="#1b1f24", linewidth=1, linestyle="--", label="limit")
        axes.set_ylim(bottom=0)
        axes.set_xlabel("micro-step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.set_title(label, fontsize=9, loc="left")
        _plain(axes)
    _write_head(figure, request["title"], texts, height)
    _legend(figure, axes, top - 0.6, height)
    return figure


def draw_layouts(request: Mapping[str, Any]) -> Figure:
    """Draws seconds over EP sizes, a panel per number of stages. Layouts beyond the memory have hollow markers."""
    layouts: Sequence[Mapping[str, Any]] = request["layouts"]
    stages = sorted({layout["stages"] for layout in layouts})
    sizes = sorted({layout["ep"] for layout in layouts})
    texts = _wrapped(request["facts"])
    columns = min(len(stages), PANELS_IN_A_ROW)
    rows = -(-len(stages) // columns)
    top, of_row = 0.65 + 0.19 * len(texts), 2.4
    height = top + of_row * rows
    figure = _figure(height)
    most = max(step["seconds"] for layout in layouts for step in (layout["unplanned"], layout["planned"]) if step)
    for index, number in enumerate(stages):
        row, column = divmod(index, columns)
        left, below = column * WIDTH / columns + 0.5, of_row * (rows - 1 - row) + 0.5
        width = WIDTH / columns - 0.65
        axes = figure.add_axes((left / WIDTH, below / height, width / WIDTH, (of_row - 0.8) / height))
        for name, colour in zip(("unplanned", "planned"), SERIES, strict=True):
            shown = [layout for layout in layouts if layout["stages"] == number and layout[name]]
            _draw_series(axes, [(sizes.index(layout["ep"]), layout[name]) for layout in shown], name, colour)
        axes.set_xlim(-0.5, len(sizes) - 0.5)
        axes.set_ylim(0, 1.08 * most)
        axes.set_xticks(range(len(sizes)), [str(size) for size in sizes])
        axes.set_xlabel("EP size")
        axes.set_title(f"{number} stage{'s' if number > 1 else ''}: modelled seconds", fontsize=9, loc="left")
        _plain(axes)
    _write_head(figure, request["title"], texts, height)
    _legend(figure, axes, top - 0.3, height)
    return figure


def _draw_series(axes: Any, steps: Sequence[tuple[int, Mapping[str, Any]]], name: str, colour: str) -> None:
    """Draws seconds of steps, each at its place, with hollow markers beyond the memory."""
    axes.plot([at for at, _ in steps], [step["seconds"] for _, step in steps], color=colour, linewidth=1.5, label=name)
    for fits, face in ((True, colour), (False, "white")):
        marked = [(at, step["seconds"]) for at, step in steps if step["fits"] == fits]
        axes.plot(
            [at for at, _ in marked], [seconds for _, seconds in marked], "o", markersize=5, color=colour,
            markerfacecolor=face, label="_" if fits else f"{name}, exceeds the memory",
        )  # fmt: skip


def draw_heat(request: Mapping[str, Any]) -> Figure:
    """Draws a map of layers × experts per entry of "heat", one below the other, and the scale of their colours."""
    from matplotlib.colors import ListedColormap

    maps: Mapping[str, Sequence[str]] = request["heat"]
    in_cell, bounds = request["experts_in_cell"], request["bounds"]
    layers = len(next(iter(maps.values())))
    texts = _wrapped(request["facts"])
    inside = min(max(0.8, 0.06 * layers), 4.0)
    of_map, top = inside + 0.8, 0.95 + 0.19 * len(texts)
    height = top + of_map * len(maps)
    figure = _figure(height)
    colours: dict[str, Any] = {"cmap": ListedColormap(HEAT), "vmin": -0.5, "vmax": len(HEAT) - 0.5, "aspect": "auto"}
    left, width = 0.65, WIDTH - 0.85
    for index, (name, rows) in enumerate(maps.items()):
        below = of_map * (len(maps) - 1 - index) + 0.5
        axes = figure.add_axes((left / WIDTH, below / height, width / WIDTH, inside / height))
        digits = [[int(digit) for digit in row] for row in rows]
        edges = (-0.5, in_cell * len(digits[0]) - 0.5, layers - 0.5, -0.5)
        axes.imshow(digits, extent=edges, interpolation="nearest", **colours)
        axes.set_title(name, fontsize=9, loc="left")
        axes.set_xlabel("expert" if in_cell == 1 else f"expert, {in_cell} in a cell: the hottest")
        axes.set_ylabel("layer")
        axes.locator_params(integer=True, min_n_ticks=1)
    scale = figure.add_axes((left / WIDTH, 1 - (top - 0.3) / height, 3.6 / WIDTH, 0.13 / height))
    scale.imshow([range(len(HEAT))], **colours)
    scale.set_xticks([i + 0.5 for i in range(len(bounds))], [f"{bound:g}" for bound in bounds], fontsize=8)
    scale.set_yticks([])
    scale.tick_params(length=0)
    _write_head(figure, request["title"], texts, height)
    return figure


def draw(request: Mapping[str, Any]) -> Figure:
    """Draws one panel of stacked horizontal bars per entry of "panels", side by side. Needs matplotlib."""
    bars, panels = request["bars"], request["panels"]
    most = max((sum(parts.values()) for bar in bars for parts in bar["parts"]), default=0.0)
    used = [p for p in COLOURS if any(parts.get(p, 0.0) > VISIBLE * most for bar in bars for parts in bar["parts"])]
    below = _wrapped(f"Left out: {text}" for text in request["left_out"])[::-1]  # from the bottom upwards
    texts = _wrapped(request["facts"])
    rows = -(-(len(used) + 1) // IN_A_ROW)  # of the legend
    top, bottom = 0.58 + 0.19 * (len(texts) + rows), 0.55 + 0.19 * len(below)
    height = top + BAR * (len(bars) + 0.6) + bottom
    figure = _figure(height)
    names = 0.1 + 0.082 * max(len(bar["policy"]) for bar in bars)
    room = (WIDTH - names - NOTE) / len(panels)
    legend: dict[str, Any] = {}
    for index, panel in enumerate(panels):
        left, width = names + index * room, room - 0.2
        axes = figure.add_axes((left / WIDTH, bottom / height, width / WIDTH, (height - top - bottom) / height))
        drawn, ideal = _draw_panel(axes, bars, index, panel, width)
        legend |= {part: of for part, of in drawn.items() if part in used}
    if bars:
        across = axes.get_yaxis_transform()  # of the last panel
        for row, note in enumerate([request["note"], *(bar["note"] for bar in bars)]):
            axes.text(1 + 0.8 * NOTE / width, row - 1, note, ha="right", va="center", fontsize=8, transform=across)
    _write_head(figure, request["title"], texts, height)
    for line, text in enumerate(below):
        figure.text(0.1 / WIDTH, (0.08 + 0.19 * line) / height, text, fontsize=8, color="#545d69")
    entries = [*legend.items(), ("ideal: mean load, no copies", ideal)]
    for row in range(rows):
        at = 1 - (top - 0.24 - 0.19 * (rows - 1 - row)) / height
        _write_legend(figure, dict(entries[row * IN_A_ROW : (row + 1) * IN_A_ROW]), at)
    return figure


def _draw_panel(
    axes: Any, bars: Sequence[Mapping[str, Any]], index: int, panel: Mapping[str, Any], width: float
) -> tuple[dict[str, Any], Any]:
    """Draws the bars of one panel, `width` inches wide. Returns the legend's handles: by part, and of the ideal."""
    totals = [sum(bar["parts"][index].values()) for bar in bars]
    longest = max([*totals, panel["ideal"]]) or 1.0
    drawn = {}
    for part, colour in COLOURS.items():
        starts = [_before(bar["parts"][index], part) for bar in bars]
        widths = [bar["parts"][index].get(part, 0.0) for bar in bars]
        drawn[part] = axes.barh(range(len(bars)), widths, 0.7, starts, color=colour, label=part)
    ideal = axes.axvline(panel["ideal"], color="#1b1f24", linewidth=1, linestyle="--", label="ideal")
    for row, total in enumerate(totals):
        axes.text(total + 0.012 * longest, row, f"{_digits(total)} s", va="center", fontsize=8)
    axes.set_xlim(0, longest / (1 - 0.5 / width))
    axes.set_ylim(len(bars) - 0.5, -0.6)
    axes.set_yticks(range(len(bars)), [bar["policy"] for bar in bars] if index == 0 else [""] * len(bars))
    axes.tick_params(length=0)
    axes.set_xlabel(f"{panel['name']}, modelled seconds")
    axes.xaxis.grid(color="#e7eaee")
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    return drawn, ideal


def _write_legend(figure: Figure, shown: Mapping[str, Any], at: float) -> None:
    """Writes one row of the legend. shown: By name. at: Its upper end, as a share of the figure's height."""
    figure.legend(
        list(shown.values()), list(shown), loc="upper left", ncols=len(shown), frameon=False, fontsize=8,
        bbox_to_anchor=(0.02 / WIDTH, at), handlelength=1.1, columnspacing=1.1, handletextpad=0.4, borderpad=0.2,
    )  # fmt: skip


def _before(parts: Mapping[str, float], part: str) -> float:
    """Returns the seconds of all parts that are drawn before `part`."""
    order = list(COLOURS)
    return sum(parts.get(name, 0.0) for name in order[: order.index(part)])


def _digits(seconds: float) -> str:
    return f"{seconds:.0f}" if seconds >= 1000 else f"{seconds:#.3g}"


def _wrapped(texts: Iterable[str]) -> list[str]:
    """Returns the lines of the texts. A line breaks at a space, and inside a word that is longer than a line."""
    return [line for text in texts for line in textwrap.wrap(text, MOST_CHARACTERS, break_on_hyphens=False)]
