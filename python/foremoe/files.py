"""Files of traces, loads and plans; checks and figures of plans."""

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
    """Reads a foremoe.trace/1 file, whose routes stay in the mapped file.

    Raises InputError with file, field and index for a file that is none.
    """
    expect(str | os.PathLike, path=path)
    return _core._read_trace(path)


def read_load(path: Path) -> Load:
    """Reads a foremoe.load/1 file. Raises InputError with file, field and index for a file that is none."""
    expect(str | os.PathLike, path=path)
    return _core._read_load(path)


def read_plan(path: Path) -> Plan:
    """Reads a foremoe.plan/1 file. Raises InputError with file, field and index for a file that is none.

    Whether the plan is right for a load is for check() to say.
    """
    expect(str | os.PathLike, path=path)
    return _core._read_plan(path)


@dataclass(frozen=True)
class Violation:
    """One thing that is wrong with a plan, and where it is as far as it has a place."""

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
    """Raises InputError for an argument that is no instance of this class, or of these: Plan | None."""
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
    """Checks a plan against the load that it claims to serve, by code that shares nothing with any planner.

    trace: the trace that the load was collected from, where token routes are to be checked too. homes: before planning,
    as plan() was given them; None for contiguous ones. Returns the first hundred violations; none when the plan is
    right. Never raises for a bad plan, save for a part of one.
    """
    _expect_plan(plan, load, trace, align)
    report = _core._check(plan, load, trace, align, homes)
    for reason in report["not_checked"]:
        logging.getLogger("foremoe").warning("not checked: %s", reason)
    return [Violation(**violation) for violation in report["violations"]]


def figures(
    plan: Plan, load: Load, trace: Trace | None = None, align: int = 128, *, homes: Any = None
) -> dict[str, Any]:
    """What the plan is worth: the keys of `foremoe plan --json` less timing.

    trace: the trace that the load was collected from, for rows between nodes. align: tokens; rho_padded rounds each
    replica up to a multiple of it. homes: before planning, None for contiguous ones, an int32 array [layers, experts],
    or a plan. Raises InputError for a plan that is not right for this load.
    """
    _expect_plan(plan, load, trace, align)
    result: dict[str, Any] = _core._figures(plan, load, trace, align, homes)
    return result
