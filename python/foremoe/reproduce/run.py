"""An experiment carried out: every system on every input, each plan proved right before it is measured."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from .. import _core
from .._core import Load, Plan
from .._errors import InputError
from ..files import read_trace
from ..loads import synthesize_load, synthesize_trace
from .arranged import MeasuredGroups, MeasuredInPlace, MeasuredOnOtherRoutes, MeasuredPadded
from .columns import Heading, ratio
from .experiment import Aim, Experiment, Input, System
from .forecast import forecast_load
from .measured import Measured
from .other_routes import OtherRoutes, executed_quotas, other_routes

ByDispatch = dict[str, Measured]  # in the order of the input's dispatches; key "" where nothing depends on it


@dataclass(frozen=True)
class Cell:
    """figures: [heading], NaN where there is none. skipped: why there are no figures; empty where there are.

    spread: [heading], standard deviation of the figures of an input's draws, of which `figures` are the means; empty
    where there is one draw.
    """

    figures: tuple[float, ...] = ()
    skipped: str = ""
    spread: tuple[float, ...] = ()


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
        """Each aim, with each dispatch that its column has."""
        columns = [heading.column for heading in self.experiment.headings]
        return [
            _judge(self, aim, at)
            for aim in self.experiment.aims
            for at, column in enumerate(columns)
            if column == aim.column
        ]


@dataclass(frozen=True)
class JudgedAim:
    """heading: the aim's column, with one dispatch. figures: how many the aim speaks of. worst: of them the one closest
    to missing it, or furthest from it; 0 where there are none, and then it is not met.
    """

    aim: Aim
    heading: Heading
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

    def cells(number: int, on: Input) -> tuple[Cell, ...]:
        draws = [tuple(_cells_of(experiment, number, draw, threads, progress)) for draw in _draws_of(on)]
        return tuple(map(_mean_cell, zip(*draws, strict=True)))

    return Result(experiment, tuple(cells(number, on) for number, on in enumerate(experiment.inputs)))


def _draws_of(on: Input) -> Iterator[Input]:
    first = on.load.get("seed", 1)
    for seed in range(first, first + on.draws):
        yield on if on.draws == 1 else replace(on, load={**on.load, "seed": seed})


def _mean_cell(draws: tuple[Cell, ...]) -> Cell:
    if len(draws) == 1:
        return draws[0]
    if skipped := next((cell for cell in draws if cell.skipped), None):
        return skipped
    figures = np.array([cell.figures for cell in draws])
    return Cell(tuple(map(float, figures.mean(0))), spread=tuple(map(float, figures.std(0, ddof=1))))


def _cells_of(
    experiment: Experiment, number: int, on: Input, threads: int, progress: Callable[[str], object]
) -> Iterator[Cell]:
    if on.file and not os.path.exists(on.file):
        yield from [Cell(skipped=f"no file {on.file} here")] * len(experiment.systems)
        return
    with _naming(experiment.file, f"input[{number}]", f"'{on.label}'"):
        load, former = _load_of(on, threads)
        others = _other_routes(on, load)
        executed = load if others is None else others.executed
        loads = _step_by_step(executed, on.steps) if on.plan_each_step else [executed]
    first: list[ByDispatch] | None = None
    for i, system in enumerate(experiment.systems):
        seed = f", seed {on.load['seed']}" if on.draws > 1 else ""
        progress(f"{experiment.name}: {system.label} on {on.label}{seed}")
        with _naming(experiment.file, f"system[{i}]", f"'{system.label}' on '{on.label}'"):
            measured: list[ByDispatch] = []
            before: Plan | None = None
            for load_of_step in loads:
                one = _measure(system, _Step(on, load_of_step, former, others, before, threads))
                if isinstance(one, Cell):
                    break
                measured.append(one)
                if system.warm:
                    before = next(iter(one.values())).evaluation.plan
            if isinstance(one, Cell):
                yield one
                continue
        if i == 0:
            first = measured
        yield Cell(tuple(_figure(heading, on, measured, first) for heading in experiment.headings))


def _figure(heading: Heading, on: Input, measured: list[ByDispatch], first: list[ByDispatch] | None) -> float:
    """Over the steps. A heading without a dispatch has the figure of the first."""
    figures = []
    for step, one in enumerate(measured):
        dispatch = heading.dispatch or next(iter(one))
        beside = first[step].get(dispatch) if first else None
        figures.append(heading.column.of(one[dispatch], beside) if dispatch in one else math.nan)
    return heading.column.over_steps(figures, on.over_steps)


@dataclass(frozen=True)
class _Step:
    """One step of an input, or what one expert-parallel group has of it."""

    on: Input
    load: Load  # that is executed
    former: Load | None  # of the step before
    others: OtherRoutes | None  # where routes are not those recorded
    before: Plan | None  # of the step before, for a warm start
    threads: int


def _measure(system: System, step: _Step) -> ByDispatch | Cell:
    """A cell where the system is not defined for the input."""
    on, load = step.on, step.load
    if step.others is not None and (system.padded or system.in_place):
        raise InputError(
            "cannot be where routes are not those recorded", field="padded" if system.padded else "in_place"
        )
    if system.ep_groups > 1 and "token" in on.dispatches and not on.is_estimated:
        raise InputError("cannot be by token on a trace: groups are counted without their tokens", field="ep_groups")
    groups: list[ByDispatch] = []
    for part, former in zip(_split(load, system), _split(step.former, system), strict=True):
        assert part is not None
        group = _measure_group(system, replace(step, load=part, former=former))
        if isinstance(group, Cell):
            return group
        groups.append(group)
    if system.ep_groups == 1 and not system.padded:
        return groups[0]
    return {d: MeasuredGroups.of([group[d] for group in groups], load.ranks_per_node) for d in groups[0]}


def _measure_group(system: System, step: _Step) -> ByDispatch | Cell:
    """Of one expert-parallel group: planned once, with the first dispatch, and modelled with each."""
    on, load, former, others, threads = step.on, step.load, step.former, step.others, step.threads
    dispatches = on.dispatches or ("",)
    if system.padded and not (dispatches := tuple(d for d in dispatches if d != "token")):
        raise InputError("needs dispatch row on its inputs: padding is no tokens", field="padded")
    own = dict(system.own)
    foreseen = others if system.foresight else None
    evaluate = partial(_core._evaluate, policy=system.policy, policy_options=own, previous_load=former, threads=threads)
    planned = _padded(load) if system.padded else load if foreseen is None else foreseen.recorded
    if system.forecast:
        planned = forecast_load(system.forecast, load, former)
    base = {**on.planned, **system.options, **(on.cost or {})}
    options = {dispatch: {**base, "dispatch": dispatch} if dispatch else base for dispatch in dispatches}
    before = _former_plan(system, options[dispatches[0]], former, threads) if on.former_plan else step.before
    made = evaluate(planned, options=options[dispatches[0]], previous=before)
    if made.skipped:
        return Cell(skipped=made.skipped)
    recompute_plan = made.recompute_plan if made.plan.in_flight > 1 else None
    plan = _core._split_anew(made.plan, load) if system.forecast else made.plan
    quotas = None if foreseen is None else executed_quotas(made.plan, foreseen, seed=on.load.get("seed", 1))
    by_dispatch: ByDispatch = {}
    for dispatch in dispatches:
        again = (options[dispatch], own)
        if quotas is not None:
            evaluation = _core._evaluate_quotas(made.plan, quotas, load, *again, previous_load=former, threads=threads)
        elif dispatch == dispatches[0] and not system.forecast:
            evaluation = made
        else:
            executed = load if system.forecast else planned
            evaluation = _core._evaluate_plan(
                plan, executed, *again, recompute_plan=recompute_plan, previous_load=former, threads=threads
            )
        if not evaluation.figures["ok"]:
            raise InputError(f"the plan is wrong: {evaluation.figures['violations'][0]['message']}")
        measured = (evaluation, load, on.steps, made)
        if others is not None or system.forecast:
            by_dispatch[dispatch] = MeasuredOnOtherRoutes(*measured)
        elif system.padded:
            by_dispatch[dispatch] = MeasuredPadded(*measured, evaluate(load, options=options[dispatch]))
        else:
            by_dispatch[dispatch] = (MeasuredInPlace if system.in_place else Measured)(*measured)
    return by_dispatch


def _former_plan(system: System, options: dict[str, Any], former: Load | None, threads: int) -> Plan | None:
    """Of the step before. None where the system is not defined for the input."""
    assert former is not None
    evaluation = _core._evaluate(former, system.policy, options, dict(system.own), threads=threads)
    return None if evaluation.skipped else evaluation.plan


def _padded(load: Load) -> Load:
    """Each cell [micro_step, layer, rank, expert] as large as the largest of its layer and micro-step."""
    largest = load.array.max((2, 3), keepdims=True)
    array = np.ascontiguousarray(np.broadcast_to(largest, load.array.shape))
    return Load.from_array(array, top_k=load.top_k, ranks_per_node=load.ranks_per_node, name=load.name)


def _split(load: Load | None, system: System) -> list[Load | None]:
    """The loads of the system's expert-parallel groups: each has the tokens of its own ranks and all experts."""
    count = system.ep_groups
    if load is None or count == 1:
        return [load] * count
    ranks = load.num_ranks // count
    if ranks * count != load.num_ranks or load.num_experts % ranks != 0:
        raise InputError(
            f"{count} groups do not divide {load.num_ranks} ranks into groups that divide {load.num_experts} experts",
            field="ep_groups",
        )
    return [
        Load.from_array(
            np.ascontiguousarray(load.array[:, :, ranks * i : ranks * (i + 1)]),
            top_k=load.top_k,
            ranks_per_node=min(load.ranks_per_node, ranks),
            name=load.name,
        )
        for i in range(count)
    ]


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
    if on.trace:
        return _core._collect(synthesize_trace(**on.load), {}, threads), None
    if on.drift:
        return _drifting(on), None
    if not on.former_step:
        return synthesize_load(**on.load), None
    micro_steps = on.load["micro_steps"]
    both = synthesize_load(**{**on.load, "micro_steps": 2 * micro_steps})
    former, load = (
        Load.from_array(half, top_k=both.top_k, ranks_per_node=both.ranks_per_node, name=both.name)
        for half in (both.array[:micro_steps], both.array[micro_steps:])
    )
    return load, former


def _drifting(on: Input) -> Load:
    """Of two loads that differ in popularity, the first gives way to the second from step to step."""
    first, second = (synthesize_load(**{**on.load, "seed": on.load.get("seed", 1) + more}) for more in (0, 1_000_000))
    part = np.repeat(np.linspace(0, on.drift, on.steps), first.num_micro_steps // on.steps)[:, None, None, None]
    counts = np.rint((1 - part) * first.array + part * second.array).astype(np.int64)
    return Load.from_array(counts, top_k=first.top_k, ranks_per_node=first.ranks_per_node, name=first.name)


def _other_routes(on: Input, load: Load) -> OtherRoutes | None:
    if not on.has_other_routes:
        return None
    wrong, missing = ((percent or 0) / 100 for percent in (on.wrong_percent, on.missing_percent))
    return other_routes(load, wrong=wrong, missing=missing, seed=on.load.get("seed", 1))


def _step_by_step(load: Load, steps: int) -> list[Load]:
    parts = load.array.reshape(steps, -1, *load.array.shape[1:])
    return [
        Load.from_array(part, top_k=load.top_k, ranks_per_node=load.ranks_per_node, name=load.name) for part in parts
    ]


def _judge(result: Result, aim: Aim, at: int) -> JudgedAim:
    """By the figures of one heading."""
    experiment = result.experiment
    systems = [system.label for system in experiment.systems]
    figures = []
    for on, cells in zip(experiment.inputs, result.cells, strict=True):
        for system, cell in zip(systems, cells, strict=True):
            if cell.skipped or aim.input not in ("", on.label) or aim.system not in ("", system):
                continue
            figure = cell.figures[at]
            if aim.relative_to:
                unit = cells[systems.index(aim.relative_to)]
                figure = math.nan if unit.skipped else ratio(figure, unit.figures[at])
            if not math.isnan(figure):
                figures.append(figure)
    worst = min(figures, key=lambda figure: _room(aim, figure), default=0.0)
    return JudgedAim(aim, experiment.headings[at], len(figures), worst, met=bool(figures) and _room(aim, worst) >= 0)


def _room(aim: Aim, figure: float) -> float:
    """How far inside its bounds a figure is; negative outside."""
    above = math.inf if aim.at_least is None else figure - aim.at_least
    below = math.inf if aim.at_most is None else aim.at_most - figure
    return min(above, below)
