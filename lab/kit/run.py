"""Runs an experiment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from foremoe import InputError

from .columns import Column, ratio
from .experiment import Aim, Experiment
from .inputs import Case, Input
from .measured import Measured
from .systems import Skipped, System


@dataclass(frozen=True)
class Cell:
    """figures: one per heading, the mean over the input's draws; NaN if missing. spread: standard deviations of the
    figures; empty with one draw. skipped: the reason for missing figures.
    """

    figures: tuple[float, ...] = ()
    spread: tuple[float, ...] = ()
    skipped: str = ""


@dataclass(frozen=True)
class JudgedAim:
    """heading: the aim's column, with one dispatch. figures: number of figures that the aim bounds. worst: the figure
    closest to a bound or furthest outside. missing: number of selected cells without a figure. An aim is not met if
    figures are missing or there are none (worst is 0).
    """

    aim: Aim
    heading: Column
    figures: int
    worst: float
    missing: int

    @property
    def met(self) -> bool:
        return self.figures > 0 and self.missing == 0 and _room(self.aim, self.worst) >= 0


@dataclass(frozen=True)
class Result:
    """cells: [input][system]."""

    experiment: Experiment
    cells: list[list[Cell]]

    def runs(self) -> Iterator[tuple[Input, System, Cell]]:
        """Yields every system on every input, grouped by input."""
        for on, cells in zip(self.experiment.inputs, self.cells, strict=True):
            for system, cell in zip(self.experiment.systems, cells, strict=True):
                yield on, system, cell

    def judged(self) -> list[JudgedAim]:
        """Judges each aim with each dispatch of its column."""
        e = self.experiment
        column = {column.name: column for column in e.columns}
        return [self._judge(aim, heading) for aim in e.aims for heading in e.headings_of(column[aim.column])]

    def _judge(self, aim: Aim, heading: Column) -> JudgedAim:
        at, cells = self.experiment.headings.index(heading), {(on.label, s.label): cell for on, s, cell in self.runs()}
        figures = []
        for (on, system), cell in cells.items():
            unit = cells.get((on, aim.relative_to), Cell((1.0,) * (at + 1)))
            if aim.input in ("", on) and aim.system in ("", system):
                known = not cell.skipped and not unit.skipped
                figures.append(ratio(cell.figures[at], unit.figures[at]) if known else math.nan)
        there = [figure for figure in figures if not math.isnan(figure)]
        worst = min(there, key=lambda figure: _room(aim, figure), default=0.0)
        return JudgedAim(aim, heading, len(there), worst, missing=len(figures) - len(there))


def run_experiment(
    experiment: Experiment, *, threads: int = 0, progress: Callable[[str], object] = lambda what: None
) -> Result:
    """threads: 0 for the number of processors. progress: called before each system runs on each input. Skips systems
    that are not defined for an input. Raises InputError for invalid options and for wrong plans.
    """

    def cells(on: Input) -> list[Cell]:
        draws = [_cells_of(experiment, on, on.seed + draw, threads, progress) for draw in range(on.draws)]
        return [_mean(of_system) for of_system in zip(*draws, strict=True)]

    return Result(experiment, [cells(on) for on in experiment.inputs])


def _mean(draws: tuple[Cell, ...]) -> Cell:
    if len(draws) == 1:
        return draws[0]
    if skipped := next((cell for cell in draws if cell.skipped), None):
        return skipped
    figures = np.array([cell.figures for cell in draws])
    return Cell(tuple(map(float, figures.mean(0))), tuple(map(float, figures.std(0, ddof=1))))


def _cells_of(e: Experiment, on: Input, seed: int, threads: int, progress: Callable[[str], object]) -> list[Cell]:
    """Returns the cells of all systems on one draw."""
    cases = list(on.cases(seed, threads))
    measured: dict[str, list[dict[str, Measured]]] = {}  # by system, then by step
    skipped: dict[str, str] = {}
    for system in e.systems:
        progress(f"{e.name}: {system.label} on {on.label}, seed {seed}")
        try:
            measured[system.label] = list(_steps_of(system, cases))
        except Skipped as why:
            skipped[system.label] = str(why)
        except InputError as error:
            raise InputError(f"{e.name}: {system.label} on {on.label}: {error}") from error
    return [
        Cell(skipped=skipped[system.label])
        if system.label in skipped
        else Cell(tuple(_figure(heading, on, system.label, measured, e) for heading in e.headings))
        for system in e.systems
    ]


def _steps_of(system: System, cases: list[Case]) -> Iterator[dict[str, Measured]]:
    before = None
    for case in cases:
        of = system.measure(replace(case, before=before))
        before = next(iter(of.values())).evaluation.plan
        yield of


def _figure(
    heading: Column, on: Input, system: str, measured: dict[str, list[dict[str, Measured]]], e: Experiment
) -> float:
    """Combines a figure over steps. Without a dispatch in the heading, uses the first one."""
    beside = None if heading.versus is None else heading.versus or e.systems[0].label
    figures = []
    for step, of in enumerate(measured[system]):
        dispatch = heading.dispatch or next(iter(of))
        among = [of] if beside is None else [of, measured.get(beside, [{}] * (step + 1))[step]]
        known = all(dispatch in by_dispatch for by_dispatch in among)
        figures.append(float(heading.value(*(m[dispatch] for m in among))) if known else math.nan)
    return heading.over_steps(figures, on.over_steps)


def _room(aim: Aim, figure: float) -> float:
    """The distance of a figure to the nearest bound; negative outside the bounds."""
    above = math.inf if aim.at_least is None else figure - aim.at_least
    below = math.inf if aim.at_most is None else aim.at_most - figure
    return min(above, below)
