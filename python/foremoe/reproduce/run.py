"""An experiment carried out: every system on every input, each plan proved right before it is measured."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .. import _core
from .._core import Load
from .._errors import InputError
from ..files import read_trace
from ..planning import synthesize_load
from .columns import Measured, ratio
from .experiment import Aim, Experiment, Input, System
from .other_routes import OtherRoutes, executed_quotas, other_routes


@dataclass(frozen=True)
class Cell:
    """figures: [column], NaN where there is none. skipped: why there are no figures; empty where there are."""

    figures: tuple[float, ...] = ()
    skipped: str = ""


@dataclass(frozen=True)
class Result:
    """cells: [input][system]."""

    experiment: Experiment
    cells: tuple[tuple[Cell, ...], ...]

    def runs(self) -> Iterator[tuple[Input, System, Cell]]:
        """Every system on every input, input after input."""
        for on, cells in zip(self.experiment.inputs, self.cells, strict=True):
            for system, cell in zip(self.experiment.systems, cells, strict=True):
                yield on, system, cell

    def judged(self) -> list[JudgedAim]:
        return [_judge(self, aim) for aim in self.experiment.aims]


@dataclass(frozen=True)
class JudgedAim:
    """figures: how many the aim speaks of. worst: of them the one closest to missing it, or furthest from it; 0 where
    there are none, and then it is not met.
    """

    aim: Aim
    figures: int
    worst: float
    met: bool


def run_experiment(
    experiment: Experiment, *, threads: int = 0, progress: Callable[[str], object] = lambda what: None
) -> Result:
    """Carries an experiment out. threads: 0 for as many as processors.

    progress: told before each system is run on each input. An input whose file is not here is skipped, and so is a
    system that is not defined for an input. Raises InputError for what cannot be, also when a plan is wrong.
    """
    inputs = range(len(experiment.inputs))
    return Result(experiment, tuple(tuple(_cells_of(experiment, i, threads, progress)) for i in inputs))


def _cells_of(experiment: Experiment, number: int, threads: int, progress: Callable[[str], object]) -> Iterator[Cell]:
    on = experiment.inputs[number]
    if on.file and not os.path.exists(on.file):
        yield from [Cell(skipped=f"no file {on.file} here")] * len(experiment.systems)
        return
    with _naming(experiment.file, f"input[{number}]", f"'{on.label}'"):
        load, former = _load_of(on, threads)
        others = _other_routes(on, load)
    first: Measured | None = None
    for i, system in enumerate(experiment.systems):
        progress(f"{experiment.name}: {system.label} on {on.label}")
        with _naming(experiment.file, f"system[{i}]", f"'{system.label}' on '{on.label}'"):
            options = {**system.options, **(on.cost or {})}
            own = dict(system.own)
            executed = load if others is None else others.executed
            planned = others.recorded if others is not None and system.foresight else executed
            evaluation = _core._evaluate(planned, system.policy, options, own, previous_load=former, threads=threads)
            if evaluation.skipped:
                yield Cell(skipped=evaluation.skipped)
                continue
            if others is not None and system.foresight:
                quotas = executed_quotas(evaluation.plan, others, seed=on.load.get("seed", 1))
                evaluation = _core._evaluate_quotas(evaluation.plan, quotas, executed, options, threads)
            measured = Measured(evaluation, executed, on.steps)
            if not measured.figures["ok"]:
                raise InputError(f"the plan is wrong: {measured.figures['violations'][0]['message']}")
        if i == 0:
            first = measured
        yield Cell(tuple(c.of(measured, first) for c in experiment.columns))


@contextlib.contextmanager
def _naming(file: str, place: str, label: str) -> Iterator[None]:
    """What goes wrong inside is a fault of that table of the experiment's file."""
    try:
        yield
    except InputError as error:
        field = f"{place}.{error.field}" if error.field and not error.file else place
        raise InputError(f"{file}: {place} {label}: {error}", file=file, field=field, index=error.index) from error


def _load_of(on: Input, threads: int) -> tuple[Load, Load | None]:
    """The load, and that of the step before where systems know it."""
    if on.file:
        # Not by collect(), which remarks on batching anew: the experiment asks for it.
        return _core._collect(read_trace(on.file), dict(on.load), threads), None
    if not on.former_step:
        return synthesize_load(**on.load), None
    micro_steps = on.load["micro_steps"]
    both = synthesize_load(**{**on.load, "micro_steps": 2 * micro_steps})
    former, load = (
        Load.from_array(half, top_k=both.top_k, ranks_per_node=both.ranks_per_node, name=both.name)
        for half in (both.array[:micro_steps], both.array[micro_steps:])
    )
    return load, former


def _other_routes(on: Input, load: Load) -> OtherRoutes | None:
    if not on.has_other_routes:
        return None
    wrong, missing = ((percent or 0) / 100 for percent in (on.wrong_percent, on.missing_percent))
    return other_routes(load, wrong=wrong, missing=missing, seed=on.load.get("seed", 1))


def _judge(result: Result, aim: Aim) -> JudgedAim:
    experiment = result.experiment
    column = experiment.columns.index(aim.column)
    systems = [system.label for system in experiment.systems]
    figures = []
    for on, cells in zip(experiment.inputs, result.cells, strict=True):
        for system, cell in zip(systems, cells, strict=True):
            if cell.skipped or aim.input not in ("", on.label) or aim.system not in ("", system):
                continue
            figure = cell.figures[column]
            if aim.relative_to:
                unit = cells[systems.index(aim.relative_to)]
                figure = math.nan if unit.skipped else ratio(figure, unit.figures[column])
            if not math.isnan(figure):
                figures.append(figure)
    worst = min(figures, key=lambda figure: _room(aim, figure), default=0.0)
    return JudgedAim(aim, len(figures), worst, met=bool(figures) and _room(aim, worst) >= 0)


def _room(aim: Aim, figure: float) -> float:
    """How far inside its bounds a figure is; negative outside."""
    above = math.inf if aim.at_least is None else figure - aim.at_least
    below = math.inf if aim.at_most is None else aim.at_most - figure
    return min(above, below)
