"""Experiments compare figures for each input and system with published figures. Each is a module of lab/experiments.

The module's docstring has the title, then paragraphs: the source; what the source did; "We assume: …"; "Result: …". In
the result, {input | system | column} is replaced by a figure of the table. {… | 2} gives two decimals, and {… | 2 ±}
adds the standard deviation over the input's draws. Module variables have the names of Experiment's fields.
"""

from __future__ import annotations

import importlib
import pathlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType

from foremoe import InputError

from .columns import COLUMNS, OVER_STEPS, Column
from .inputs import Input
from .systems import System

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "experiments"
REFERENCE = re.compile(r"\{([^{}]*)\}")
DIGITS = re.compile(r"(\d+)( ±)?")
PAPERS = ("real", "foremoe", "review", "feplb", "ultraep", "finemoe")  # in this order on pages; others follow


@dataclass(frozen=True)
class Published:
    """A published figure, shown beside ours if input and system are given, otherwise below the table."""

    column: str
    value: float | str
    input: str = ""
    system: str = ""
    note: str = ""

    @staticmethod
    def table(column: str, values: Mapping[str, Mapping[str, float | str]]) -> list[Published]:
        """values: [input][system]."""
        return [Published(column, v, on, system) for on, of in values.items() for system, v in of.items()]


@dataclass(frozen=True)
class Aim:
    """Bounds on all figures of a column that input and system select (empty: all), with every dispatch.
    relative_to: a system; figures are divided by that system's figure on the same input.
    """

    column: str
    input: str = ""
    system: str = ""
    relative_to: str = ""
    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True)
class Experiment:
    """systems: others are compared with the first. secondary: the source is a text about the paper, not the paper.
    across: the table has a row per input and a column per system.
    """

    name: str
    title: str
    source: str
    about: str
    assumed: str
    result: str
    inputs: Sequence[Input]
    systems: Sequence[System]
    columns: Sequence[Column]
    published: Sequence[Published] = field(default_factory=list)
    aims: Sequence[Aim] = field(default_factory=list)
    secondary: bool = False
    across: bool = False

    def __post_init__(self) -> None:
        """Raises InputError for unknown and for duplicate labels, columns and statistics."""
        labels, systems = [on.label for on in self.inputs], [system.label for system in self.systems]
        known = {"input": labels, "system": systems, "column": [c.name for c in self.columns]}
        for what, names in known.items():
            self._expect_once(what, names)
        for system in self.systems:
            for column in known["column"]:
                if system.columns is not None and column not in system.columns:
                    raise InputError(f"{self.name}: column '{column}' is not defined for {system.label}")
        known |= {"relative_to": systems, "versus": systems, "over_steps": list(OVER_STEPS)}
        for of in (*self.published, *self.aims, *self.inputs, *self.columns):
            self._expect({key: value for key, value in vars(of).items() if value}, known)
        self._expect_once("published", [f"{p.column} of {p.system} on {p.input} {p.note}" for p in self.published])
        for aim in self.aims:
            if aim.at_least is None and aim.at_most is None:
                raise InputError(f"{self.name}: an aim of {aim.column} has neither at_least nor at_most")
        self._expect_references(known | {"column": [c.name for c in self.headings]})

    def _expect_references(self, known: dict[str, list[str]]) -> None:
        """Checks that references in the result name exact or modelled cells of the table."""
        for match in REFERENCE.finditer(self.result):
            cell = reference(match)
            if len(cell) not in (3, 4) or not all(map(DIGITS.fullmatch, cell[3:])):
                raise InputError(f"{self.name}: '{match[0]}', expected {{input | system | column | digits ±}}")
            self._expect(dict(zip(("input", "system", "column"), cell, strict=False)), known)
            if next(c for c in self.headings if c.name == cell[2]).origin == "measured here":
                raise InputError(f"{self.name}: '{match[0]}' is measured, and differs from run to run")
            if cell[-1].endswith("±") and next(on for on in self.inputs if on.label == cell[0]).draws == 1:
                raise InputError(f"{self.name}: '{match[0]}': '{cell[0]}' has one draw")

    def _expect(self, of: dict[str, object], known: dict[str, list[str]]) -> None:
        for key, value in of.items():
            if key in known and value not in known[key]:
                raise InputError(f"{self.name}: no {key} '{value}'; there are {', '.join(known[key])}")

    def _expect_once(self, what: str, names: list[str]) -> None:
        if len(set(names)) < len(names):
            raise InputError(f"{self.name}: {what} '{max(names, key=names.count)}' twice")

    @property
    def headings(self) -> list[Column]:
        """The headings of the table: its columns, once per dispatch where inputs have several."""
        return [heading for column in self.columns for heading in self.headings_of(column)]

    def headings_of(self, column: Column) -> list[Column]:
        several = tuple(dict.fromkeys(dispatch for on in self.inputs for dispatch in on.by_dispatch))
        return [column.with_dispatch(d) for d in several] if len(several) > 1 and column.by_dispatch else [column]


def reference(match: re.Match[str]) -> list[str]:
    return [part.strip() for part in match[1].split("|")]


def experiment_names() -> list[str]:
    """The names of all experiments in lab/experiments, in the order of pages."""

    def rank(name: str) -> tuple[int, str, list[int]]:
        paper, *words = name.split("-")
        numbers = [int(word) if word.isdigit() else 0 for word in words]  # figure-4 before figure-10
        return PAPERS.index(paper) if paper in PAPERS else len(PAPERS), re.sub(r"\d+", "", name), numbers

    return sorted((path.stem.replace("_", "-") for path in FOLDER.glob("*.py")), key=rank)


def experiment_named(name: str) -> Experiment:
    if name not in (names := experiment_names()):
        raise InputError(f"no experiment '{name}'; there are {', '.join(names)}")
    return experiment_of(importlib.import_module(f"experiments.{name.replace('-', '_')}"), name)


def experiment_of(module: ModuleType, name: str) -> Experiment:
    """The experiment that a module describes. Raises InputError for unknown paragraphs and names."""
    title, source, about, *told = (" ".join(part.split()) for part in (module.__doc__ or "").strip().split("\n\n"))
    said = {heading: text for heading, _, text in (part.partition(": ") for part in told)}
    if unknown := sorted(said.keys() - {"We assume", "Result"}):
        raise InputError(f"{name}: a paragraph begins with '{unknown[0][:40]}', expected We assume: or Result:")
    given = {}
    for key, value in vars(module).items():
        if key in Experiment.__dataclass_fields__:
            given[key] = value
        elif key.islower() and not key.startswith("_") and type(value) in (list, tuple, bool):
            raise InputError(f"{name}: '{key}' is not a field of an experiment")
    for column in module.columns:
        if isinstance(column, str) and column not in COLUMNS:
            raise InputError(f"{name}: no column '{column}'; there are {', '.join(COLUMNS)}")
    given["columns"] = [COLUMNS[c] if isinstance(c, str) else c for c in module.columns]
    assumed, result = said.get("We assume", ""), said.get("Result", "")
    return Experiment(name, title.rstrip("."), source.rstrip("."), about, assumed, result, **given)
