"""Experiments of papers, to be done again: inputs × systems → figures, beside what was published.

What is computed follows from the columns that an experiment asks for. The first system is the one that others are
compared with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .columns import Column, Heading
from .toml_table import Options


@dataclass(frozen=True)
class Input:
    """file: a trace, from the working directory; empty: the load is drawn. load: keywords of collect() or
    synthesize_load(). trace: every token's route is drawn, so that rows by token are counted and not estimated.
    former_step: systems know the load of a step before this one: same popularity, other tokens.
    former_plan: they planned it too, and begin with the placement that they had in the end.
    steps: how many steps of equal length the micro-steps are. plan_each_step: each is planned by itself, as no copy
    outlives the optimizer's step. over_steps: which statistic of the steps' figures, see Column.over_steps. drift:
    share of the last step's tokens that follow another popularity; it grows from 0 in equal parts. wrong_percent,
    missing_percent: of the load's rows, that go elsewhere than recorded, and that are not recorded; None: routes are
    as recorded.
    cost: keywords of evaluate(): cluster, model, …; None: nothing is modelled. dispatches: ways in which rows travel.
    Each system plans once and its step is modelled with each of them; empty where nothing depends on it.
    planned: guest_slots of systems that do not set their own.
    draws: how often the load is drawn, with one seed after another; figures are means over the draws.
    """

    label: str
    file: str
    load: Options
    trace: bool
    former_step: bool
    former_plan: bool
    steps: int
    plan_each_step: bool
    over_steps: str
    drift: float
    wrong_percent: float | None
    missing_percent: float | None
    cost: Options | None
    dispatches: tuple[str, ...]
    planned: Options
    draws: int = 1

    @property
    def has_other_routes(self) -> bool:
        return self.wrong_percent is not None or self.missing_percent is not None

    @property
    def is_estimated(self) -> bool:
        """Whether rows by token are expected: counts do not record which experts each token chose together."""
        return "token" in self.dispatches and (not (self.file or self.trace) or self.has_other_routes)


@dataclass(frozen=True)
class System:
    """foresight: it plans what was recorded, not what is executed. forecast: by which loads it places in place of
    those that come, see forecast.py; empty: by these. options: keywords of evaluate(). own: options that
    this policy alone has. ep_groups: how many expert-parallel groups of consecutive ranks the input's ranks are; each
    has all experts and is planned on its own. padded: each source sends each expert as many rows as the largest such
    cell of the group has, in that layer and micro-step. warm: of steps that are planned one by one, each begins with
    this system's plan of the step before. in_place: replicas keep their weights and optimizer state, see
    MeasuredInPlace.
    """

    label: str
    policy: str
    foresight: bool
    forecast: str
    options: Options
    own: Mapping[str, float | str]
    ep_groups: int = 1
    padded: bool = False
    warm: bool = False
    in_place: bool = False


@dataclass(frozen=True)
class Published:
    """With input and system it stands beside our figure, else it is told below the table."""

    input: str
    system: str
    column: Column
    value: float | str
    note: str


@dataclass(frozen=True)
class Aim:
    """Every figure of a column that input and system select (empty: all) is to be within the bounds, with any dispatch.

    relative_to: a system, whose figure on the same input is the unit.
    """

    input: str
    system: str
    column: Column
    relative_to: str
    at_least: float | None
    at_most: float | None


@dataclass(frozen=True)
class Experiment:
    """name: the file's, without folder and ending. argument: what `foremoe reproduce` finds it by. secondary: the
    source tells of the paper, it is not the paper. about: what they did. reading: what we assumed. finding: what came
    out; {input | system | heading} stands for a figure of the table. across: the table has a row per input and a column
    per system. headings: of the figures of the table: its columns, for each dispatch where an input has several.
    """

    name: str
    file: str
    argument: str
    title: str
    source: str
    secondary: bool
    about: str
    reading: str
    finding: str
    across: bool
    columns: tuple[Column, ...]
    headings: tuple[Heading, ...]
    inputs: tuple[Input, ...]
    systems: tuple[System, ...]
    published: tuple[Published, ...]
    aims: tuple[Aim, ...]
