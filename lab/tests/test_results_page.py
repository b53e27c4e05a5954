"""Tests that lab/write_results finds all differences between lab/results.md and a new run."""

from __future__ import annotations

import dataclasses
import importlib.machinery
import importlib.util
import pathlib
from typing import Any

import pytest

from kit.experiment import Experiment
from kit.inputs import ROOT
from kit.run import Cell, Result, run_experiment
from small import hot_rank


def load_program(name: str) -> Any:
    loader = importlib.machinery.SourceFileLoader(name, str(ROOT / "lab" / name))
    spec = importlib.util.spec_from_loader(name, loader)
    assert spec
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> Any:
    """lab/write_results with two experiments and temporary pages."""
    program = load_program("write_results")
    experiments = {name: dataclasses.replace(hot_rank(result="It is so."), name=name) for name in ("one", "two")}
    monkeypatch.setattr(program, "experiment_names", lambda: list(experiments))
    monkeypatch.setattr(program, "experiment_named", experiments.__getitem__)
    monkeypatch.setattr(program, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(program, "WHOLE", tmp_path / "whole.md")
    return program


def with_figure(result: Result, figure: float) -> Result:
    """Replaces the first system's figure in the first column."""
    none, ours = result.cells[0]
    return Result(result.experiment, [[Cell((figure, *none.figures[1:])), ours]])


def test_the_page_has_headlines_and_changes_are_reported_with_their_line(
    results: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results.write(["one", "two"])
    page = results.PAGE.read_text(encoding="utf-8")
    assert "| [two](#two-a-title) | A title | 2 of 3 met |" in page
    assert "\n\n`lab/run one` prints its table (digest " in page and "| w2 |" not in page
    assert "| w2 | none | 2.5000 |" in results.WHOLE.read_text(encoding="utf-8")
    assert not results.compare(["one", "two"])
    assert "2 experiments, 0 differences" in capsys.readouterr().out

    def other_figures(experiment: Experiment) -> Result:
        result = run_experiment(experiment)
        return with_figure(result, 2.4) if experiment.name == "two" else result

    monkeypatch.setattr(results, "run_experiment", other_figures)
    assert results.compare(["one", "two"])
    found, *_, count = capsys.readouterr().out.splitlines()
    at = page[: page.index("## two")].count("\n") + 1
    assert int(found.split(":")[1]) > at and "digest" in found
    assert count.startswith("2 experiments, ")
    results.rewrite(["two"])
    assert not results.compare(["one", "two"])
    assert results.PAGE.read_text(encoding="utf-8").count("\n## ") == 2


def test_only_measured_figures_may_differ(results: Any) -> None:
    exact = run_experiment(hot_rank())
    columns = [dataclasses.replace(exact.experiment.columns[0], origin="measured here"), *exact.experiment.columns[1:]]
    experiment = dataclasses.replace(exact.experiment, columns=columns, aims=[], published=[])
    measured = Result(experiment, exact.cells)
    assert results.headlines(measured) == results.headlines(with_figure(measured, 9.0))
    assert results.headlines(exact) != results.headlines(with_figure(exact, 9.0))


def test_a_page_that_lacks_an_experiment_is_reported(results: Any, capsys: pytest.CaptureFixture[str]) -> None:
    results.write(["one"])
    assert results.check() and "two is missing" in capsys.readouterr().out


def test_run_lists_experiments_and_columns(capsys: pytest.CaptureFixture[str]) -> None:
    program = load_program("run")
    import sys

    for arguments, words in (([], "foremoe-figure-8 "), (["feplb-dyn"], "FEPLB, dyn 4"), (["--columns"], "ρ mean")):
        sys.argv[1:] = arguments
        assert program.main() == 0
        assert words in capsys.readouterr().out
