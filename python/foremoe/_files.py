"""Reads traces, loads and plans from files; checks and measures plans."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from types import UnionType
from typing import Any

from . import _core
from ._core import Load, Plan, Trace
from ._errors import InputError

Path = str | os.PathLike[str]


def read_trace(path: Path) -> Trace:
    """Reads a foremoe.trace file. Its routes stay in the mapped file.

    Raises InputError, with file, field and index, if the file is not a trace.
    """
    expect(str | os.PathLike, path=path)
    return _core._read_trace(path)


def read_load(path: Path) -> Load:
    """Reads a foremoe.load file. Raises InputError, with file, field and index, if the file is not a load."""
    expect(str | os.PathLike, path=path)
    return _core._read_load(path)


def read_plan(path: Path) -> Plan:
    """Reads a foremoe.plan/1 file. Raises InputError, with file, field and index, if the file is not a plan.

    check() verifies whether the plan fits a load.
    """
    expect(str | os.PathLike, path=path)
    return _core._read_plan(path)


@dataclass(frozen=True)
class Violation:
    """A rule that a plan violates, with the position if known."""

    kind: str
    message: str
    event: int | None = None
    layer: int | None = None
    rank: int | None = None
    slot: int | None = None
    expert: int | None = None


_NAMES = {
    type(None): "None",
    Integral: "an integer",
    Real: "a number",
    os.PathLike: "a path",
    Sequence: "a sequence",
    Mapping: "a mapping",
    Callable: "a function",
}


def expect(kind: Any, **arguments: object) -> None:
    """Raises InputError for an argument that is not an instance of `kind`, a class or a union such as Plan | None."""
    for name, value in arguments.items():
        if isinstance(value, kind):
            continue
        kinds = kind.__args__ if isinstance(kind, UnionType) else (kind,)
        names = [_NAMES.get(k) or ("a " if k.__module__ == "builtins" else "a foremoe.") + k.__name__ for k in kinds]
        what = f"is a {type(value).__name__}; expected {' or '.join(names)}"
        raise InputError(f"{name}: {what}", field=name)


def _expect_plan(plan: Plan, load: Load, trace: Trace | None, align: int) -> None:
    expect(Plan, plan=plan)
    expect(Load, load=load)
    expect(Trace | None, trace=trace)
    expect(Integral, align=align)


def check(
    plan: Plan, load: Load, trace: Trace | None = None, align: int = 128, *, homes: Any = None
) -> list[Violation]:
    """Checks a plan against its load, with code that shares nothing with the planners.

    Args:
        plan: All layers of a plan.
        load: Load that the plan serves.
        trace: Trace that the load was collected from, to check also token routes.
        align: rho_padded rounds each replica's tokens up to a multiple of it.
        homes: Homes before planning, as given to plan(). None: contiguous.

    Returns:
        The first hundred violations; an empty list if the plan is valid.

    Raises:
        InputError: if `plan` does not have all layers. An invalid plan does not raise.
    """
    _expect_plan(plan, load, trace, align)
    report = _core._check(plan, load, trace, align, homes)
    for reason in report["not_checked"]:
        logging.getLogger("foremoe").warning("not checked: %s", reason)
    return [Violation(**violation) for violation in report["violations"]]


def figures(
    plan: Plan, load: Load, trace: Trace | None = None, align: int = 128, *, homes: Any = None
) -> dict[str, Any]:
    """Measures a plan: the keys of `foremoe plan --json` without timing.

    Args:
        plan: All layers of a plan.
        load: Load that the plan serves.
        trace: Trace that the load was collected from, for rows between nodes.
        align: rho_padded rounds each replica's tokens up to a multiple of it.
        homes: Homes before planning: None for contiguous ones, int32 [layers, experts], or those of a plan.

    Raises:
        InputError: if the plan does not fit this load.
    """
    _expect_plan(plan, load, trace, align)
    result: dict[str, Any] = _core._figures(plan, load, trace, align, homes)
    return result
