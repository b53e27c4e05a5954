"""The pictures of `--plot` of compare, simulate, fit and inspect, which need matplotlib."""

from __future__ import annotations

import html
import json
import os
import pathlib
import re
import resource
import shutil
import subprocess
import sys
from typing import Any

import commands
import numpy as np
import numpy.typing as npt
import pytest
from reports import MODEL, shared_load

import foremoe
from foremoe import _plot

ON = ("step.load.safetensors", "--cluster", "h100", "--model", MODEL, "--guest-slots", "1")
POLICIES = ("--policy", "vanilla,static,foremoe,finemoe-random")


@pytest.fixture(autouse=True)
def folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    monkeypatch.chdir(tmp_path)
    shared_load().save("step.load.safetensors")
    return tmp_path


def foremoe_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(pathlib.Path(foremoe.__file__).parents[1])}
    command = [sys.executable, "-m", "foremoe", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


def request_of(verb: str, *arguments: str) -> tuple[str, dict[str, Any]]:
    """Returns the printed table, and the request for the picture."""
    echo = os.environ | {"FOREMOE_PYTHON": "/bin/echo"}
    command = [commands.PROGRAM, verb, *arguments]
    said = subprocess.run(command, capture_output=True, text=True, env=echo, check=True).stdout
    checked, printed = said.split("\n", 1)  # the check whether matplotlib is installed
    assert checked.startswith("-c import importlib.util") and "'matplotlib'" in checked
    table, drawn = printed.split("-m foremoe _plot ")
    return table, json.loads(drawn.rsplit(" ", 1)[0])


def simulated(*policy: str) -> dict[str, dict[str, Any]]:
    command = [commands.PROGRAM, "simulate", *ON, *policy, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {one["policy"]: one for one in json.loads(done)}


def drawn_widths(axes: Any) -> list[dict[str, float]]:
    """Returns the widths of the bars of each row by part, as drawn. Expects them to be adjacent."""
    rows: list[dict[str, float]] = [{} for _ in axes.get_yticks()]
    ends = [0.0] * len(rows)
    for container in axes.containers:
        for row, bar in enumerate(container):
            rows[row][container.get_label()] = bar.get_width()
            if bar.get_width() > 0:
                assert bar.get_x() == pytest.approx(ends[row])
                ends[row] = bar.get_x() + bar.get_width()
    return rows


def test_the_bars_of_simulate_are_the_parts_of_both_phases() -> None:
    table, request = request_of("simulate", *ON, *POLICIES, "--plot", "out.svg")
    expected = simulated(*POLICIES)
    assert "finemoe-random  skipped" in table
    assert [panel["name"] for panel in request["panels"]] == ["recompute", "policy update"]
    assert [bar["policy"] for bar in request["bars"]] == ["vanilla", "static", "foremoe"]
    assert request["left_out"] == [f"finemoe-random: {expected['finemoe-random']['skipped']}"]
    figure = _plot.draw(request)
    for index, axes in enumerate(figure.axes):
        for row, (policy, widths) in enumerate(zip(["vanilla", "static", "foremoe"], drawn_widths(axes), strict=True)):
            phase = expected[policy]["phases"][index]
            for part, seconds in phase["parts"].items():
                assert widths[part.replace("_", " ")] == pytest.approx(seconds), (policy, part)
            assert sum(widths.values()) == pytest.approx(phase["seconds"])
            assert request["bars"][row]["note"] == "{step_seconds:.4g} s, {speedup_over_vanilla:.3f}×".format(
                **expected[policy]
            )


def test_the_bars_of_compare_are_the_whole_step_with_rho_beside() -> None:
    _, request = request_of("compare", *ON, *POLICIES, "--plot", "out.svg")
    expected = simulated(*POLICIES)
    (axes,) = _plot.draw(request).axes
    notes = [text.get_text() for text in axes.texts if re.fullmatch(r"[\d.]+", text.get_text())]
    for row, policy in enumerate(("vanilla", "static", "foremoe")):
        widths, one = drawn_widths(axes)[row], expected[policy]
        placement = widths.pop("placement, measured here")  # differs from run to run
        assert placement >= 0 and (placement == 0) == (one["placement"]["seconds"] == 0)
        assert sum(widths.values()) == pytest.approx(one["step_seconds"])
        assert notes[row] == f"{one['rho']['mean']:.3f}"


def test_the_picture_names_input_cluster_model_and_that_times_are_modelled() -> None:
    done = foremoe_command("simulate", *ON, "--policy", "foremoe", "--plot", "out.svg")
    assert (done.returncode, done.stderr) == (0, "")
    text = pathlib.Path("out.svg").read_text()
    for words in ("Modelled training step", "Qwen3-30B-A3B", "h100", "step.load.safetensors", "modelled seconds",
                  "1 guest slot per rank and layer", "policy update", "foremoe", "ideal", "experts"):  # fmt: skip
        assert words in text


def test_a_png_is_written_and_the_exit_code_is_that_of_the_command() -> None:
    done = foremoe_command("compare", *ON, "--policy", "vanilla", "--plot", "out.png")
    assert (done.returncode, done.stderr) == (0, "")
    assert pathlib.Path("out.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert "ρ mean" in done.stdout
    _, request = request_of("compare", *ON, "--policy", "vanilla", "--plot", "out.svg")
    assert _plot.main([json.dumps({**request, "exit_code": 1}), "out.svg"]) == 1


def test_the_picture_of_fit_shows_the_peaks_of_micro_steps_and_the_limit() -> None:
    _, request = request_of("fit", *ON, "--memory-budget", "300", "--plot", "out.svg")
    command = [commands.PROGRAM, "fit", *ON, "--memory-budget", "300", "--json"]
    expected = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    rows, memory = _plot.draw_peaks(request).axes
    assert request["series"][0]["name"] == "now: vanilla" and request["series"][1]["name"] == "planned: foremoe"
    for series, plan in enumerate(("now", "planned")):
        peaks = expected[plan]["micro_steps"]
        assert rows.patches[series].get_data().values.tolist() == [peak["rows"] for peak in peaks]
        assert memory.patches[series].get_data().values == pytest.approx([peak["bytes"] / 1e9 for peak in peaks])
    assert [set(line.get_ydata()) for line in memory.lines] == [{300.0}] and not rows.lines


def test_fit_draws_also_a_step_that_does_not_fit_and_exits_with_1() -> None:
    done = foremoe_command("fit", *ON, "--memory-budget", "1", "--plot", "out.png")
    assert (done.returncode, done.stderr) == (1, "")
    assert pathlib.Path("out.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_the_picture_of_layout_marks_what_exceeds_the_memory() -> None:
    on = ("step.load.safetensors", "--gpus", "4", "--cluster", "h100", "--model", MODEL, "--memory-budget", "150")
    _, request = request_of("layout", *on, "--plot", "out.svg")
    command = [commands.PROGRAM, "layout", *on, "--json"]
    layouts = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["layouts"]
    assert request["layouts"] == layouts
    panels = _plot.draw_layouts(request).axes
    stages = sorted({one["stages"] for one in layouts})
    assert len(panels) == len(stages) == 3
    for axes, number in zip(panels, stages, strict=True):
        shown = [one for one in layouts if one["stages"] == number]
        lines = {line.get_label(): line for line in axes.lines}
        assert list(lines["unplanned"].get_ydata()) == [one["unplanned"]["seconds"] for one in shown]
        hollow = lines["unplanned, exceeds the memory"]
        assert list(hollow.get_ydata()) == [
            one["unplanned"]["seconds"] for one in shown if one["unplanned"]["memory_bytes"] > 150e9
        ]
        assert hollow.get_markerfacecolor() == "white"


def expected_heat(counts: npt.NDArray[np.int64]) -> list[npt.NDArray[np.int64]]:
    """Returns the classes of both maps. counts: [micro_steps, layers, ranks, experts]."""
    bounds = [0.5, 0.8, 0.95, 1.05, 1.25, 1.5, 2, 3]
    maps = np.zeros((2, counts.shape[1], counts.shape[3]))
    for layer in range(counts.shape[1]):
        loads = [of for of in counts[:, layer].sum(1) if of.any()]
        if loads:
            ratios = np.stack([of / of.mean() for of in loads])
            most = [max(r for r in of if (of >= r).mean() >= 0.75) for of in ratios.T]
            maps[:, layer] = sum(loads) / np.mean(sum(loads)), most
    return [np.digitize(one, bounds) for one in maps]


def test_the_picture_of_inspect_shows_how_hot_experts_are_and_whether_they_stay_hot() -> None:
    counts = np.random.default_rng(3).poisson(np.linspace(0, 12, 16), (9, 3, 4, 16)).astype(np.int64)
    counts[2, 0] = counts[:, 1] = 0  # a micro-step and a layer without load
    counts[4:, 2, :, 5] = 900  # hot in five of nine micro-steps: not in three of four
    counts[2:, 2, :, 6] = 900  # hot in seven of nine
    foremoe.Load.from_array(counts, top_k=1, ranks_per_node=2).save("hot.load.safetensors")
    _, request = request_of("inspect", "hot.load.safetensors", "--plot", "out.svg")
    *maps, scale = _plot.draw_heat(request).axes
    expected = expected_heat(counts)
    for axes, classes in zip(maps, expected, strict=True):
        (image,) = axes.get_images()
        np.testing.assert_array_equal(image.get_array(), classes)
        assert image.get_extent() == [-0.5, 15.5, 2.5, -0.5]
    assert expected[0][2, 5] > 6 > 3 > expected[1][2, 5] and expected[1][2, 6] > 6
    assert [axes.get_title(loc="left") for axes in maps] == list(request["heat"])
    assert request["facts"][1].startswith("hottest: expert 6 of layer 2, ")
    assert [label.get_text() for label in scale.get_xticklabels()] == [
        "0.5",
        "0.8",
        "0.95",
        "1.05",
        "1.25",
        "1.5",
        "2",
        "3",
    ]
    assert len({tuple(colour) for colour in scale.get_images()[0].to_rgba([range(9)])[0]}) == 9


def test_a_cell_of_a_wide_picture_shows_the_hottest_of_its_experts() -> None:
    """The request of the largest models fits in a command line."""
    counts = np.ones((1, 120, 2, 1024), np.int64)
    counts[0, 7, :, 333] = 500
    foremoe.Load.from_array(counts, top_k=1, ranks_per_node=2).save("wide.load.safetensors")
    _, request = request_of("inspect", "wide.load.safetensors", "--plot", "out.svg")
    assert request["experts_in_cell"] == 3
    for rows in request["heat"].values():
        assert [len(row) for row in rows] == [342] * 120
        assert [row.find("8") for row in rows] == [333 // 3 if layer == 7 else -1 for layer in range(120)]
    assert _plot.draw_heat(request).axes[0].get_xlabel() == "expert, 3 in a cell: the hottest"


def test_inspect_draws_beside_json_and_refuses_what_it_cannot_draw() -> None:
    done = foremoe_command("inspect", ON[0], "--json", "--plot", "out.png")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["kind"] == "load"
    assert pathlib.Path("out.png").read_bytes().startswith(b"\x89PNG\r\n")
    foremoe.plan(shared_load(), guest_slots=1).save("plan.safetensors")
    zeros = np.zeros((1, 2, 4, 16), np.int64)
    foremoe.Load.from_array(zeros, top_k=1, ranks_per_node=2).save("none.load.safetensors")
    for name, plot, problem in (
        ("plan.safetensors", "new.png", "--plot: draws a trace or a load, and plan.safetensors has none"),
        ("none.load.safetensors", "new.png", "--plot: has nothing to show: the load has no tokens"),
        (ON[0], "new.pdf", "--plot: 'new.pdf', expected a name that ends in .png or .svg"),
        (ON[0], "none/new.png", "none/new.png: cannot be written"),
    ):
        done = foremoe_command("inspect", name, "--plot", plot)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert problem in done.stderr
        assert not pathlib.Path(plot).exists()


@pytest.mark.parametrize("verb", ["compare", "simulate", "fit", "inspect"])
def test_long_lines_wrap_at_spaces_and_names_are_no_formulas(verb: str) -> None:
    folder = pathlib.Path("with-$x^2$-and-a-long-name-" + 5 * "such-as-this-one-" + "$^")
    folder.mkdir()
    shutil.copy(ON[0], folder)
    done = foremoe_command(verb, str(folder / ON[0]), *(ON[1:] if verb != "inspect" else ()), "--plot", "out.svg")
    assert (done.returncode, done.stderr) == (0, "")
    texts = html.unescape(" ".join(re.findall("<text[^>]*>([^<]*)</text>", pathlib.Path("out.svg").read_text())))
    assert f"{folder / ON[0]}: 3 micro-steps × 2 layers, 128 experts on 4 ranks (" in texts
    assert "…" not in texts


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([*ON, "--plot", "out.pdf"], "--plot: 'out.pdf', expected a name that ends in .png or .svg"),
        ([*ON, "--plot", "none/out.png"], "none/out.png: cannot be written"),
        ([*ON, "--plot", ""], "--plot: is empty"),
        ([ON[0], "--plot", "out.png"], "--plot: needs --cluster"),
        ([*ON, "--policy", "finemoe-random", "--plot", "out.png"], "--plot: has nothing to show"),
    ],
)
def test_compare_rejects_what_it_cannot_draw(arguments: list[str], problem: str) -> None:
    done = foremoe_command("compare", *arguments)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith(f"foremoe compare: {problem}")
    assert not pathlib.Path("out.png").exists()


def test_missing_packages_are_named_before_planning() -> None:
    def refused(python: str | None) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "FOREMOE_PYTHON"}
        if python is not None:
            environment["FOREMOE_PYTHON"] = python
        done = subprocess.run([commands.PROGRAM, "simulate", *ON, "--plot", "out.svg"], capture_output=True, text=True,
                              env=environment, check=False)  # fmt: skip
        assert (done.returncode, done.stdout) == (2, "")
        return done.stderr

    assert "--plot: requires the Python package: pip install '.[plot]'" in refused(None)
    assert "--plot: requires matplotlib, which is not installed: pip install matplotlib" in refused("/bin/false")


@pytest.mark.parametrize("name", ["out.png", "out.svg"])
def test_a_picture_that_cannot_be_written_replaces_none(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pathlib.Path(name).write_text("another picture")
    _, request = request_of("fit", *ON, "--plot", name)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        assert _plot.main([json.dumps(request), name]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert capsys.readouterr().err.startswith(f"foremoe fit: {name}: cannot be written: File too large")
    assert pathlib.Path(name).read_text() == "another picture" and len(list(pathlib.Path().glob(".*"))) == 0
