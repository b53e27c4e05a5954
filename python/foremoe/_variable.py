"""FOREMOE_ATTACH, the variable of the environment with arguments of foremoe.megatron.attach() for all adapters."""

from __future__ import annotations

import contextlib
import difflib
import numbers
import os
from collections.abc import Mapping
from typing import Any

from ._core import _check_evaluation, policies
from ._errors import InputError, refuse

VARIABLE = "FOREMOE_ATTACH"
MODES = ("active", "static", "shadow")
REFUSE, HOME = "refuse", "home"  # values of on_mismatch
RESIDENCIES = ("static", "resident", "shared")
_LEAST = {"guest_slots": 0, "depth": 1, "ranks_per_node": 1, "threads": 0}  # of arguments that are integers
_OF_ATTACH = ("mode", "policy", "depth", "ranks_per_node", "threads", "on_mismatch")  # evaluate() has the others
ARGUMENTS = (
    *_OF_ATTACH, "guest_slots", "residency", "cluster", "model", "prefer", "copy_price", "free_copies", "tolerance",
    "stages", "max_copies_per_rank", "max_copies_per_source", "min_tokens_per_guest", "seed",
)  # fmt: skip
"""Arguments of attach() that a text can give."""
_WORDS = {"null": None, "true": True, "false": False}  # as in JSON


def given_arguments() -> dict[str, Any]:
    """Returns the arguments that the variable has; shadow mode if it is not set.

    Raises InputError for other syntax, and for arguments that attach() would refuse for any model.
    """
    arguments = arguments_from(os.environ.get(VARIABLE, ""))
    expect_usable(arguments)
    return arguments


def expect_values(arguments: Mapping[str, Any]) -> None:
    """Raises InputError for a value that attach() refuses for any model. Options of the planner are not checked."""
    optional = ("ranks_per_node", "residency")  # may be None
    given = {name: value for name, value in arguments.items() if value is not None or name not in optional}
    for name, least in _LEAST.items():
        value = given.get(name, least)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
            refuse(name, f"{value!r}, expected an integer from {least} on")
    for name, known in (("mode", MODES), ("on_mismatch", (REFUSE, HOME)), ("residency", (*RESIDENCIES, "auto"))):
        if name in given and given[name] not in known:
            refuse(name, f"{given[name]!r}, expected {', '.join(known[:-1])} or {known[-1]}")
    residency = given.get("residency", "static")
    if given.get("mode") == "static" and residency != "static":
        refuse("residency", f"{residency!r}, but mode='static' stands for residency='static'; expected none")
    policy = given.get("policy", "foremoe")
    if policy not in policies():
        refuse("policy", f"{policy!r}, expected one of {', '.join(policies())}")


def expect_usable(arguments: Mapping[str, Any]) -> None:
    """Raises InputError for unknown names, and for values that attach() refuses for any model."""
    for name in arguments:
        if name not in ARGUMENTS:
            near = difflib.get_close_matches(name, ARGUMENTS, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; expected one of {', '.join(ARGUMENTS)}"
            refuse(VARIABLE, f"{name}: is no argument of attach(){hint}")
    try:
        expect_values(arguments)
        _check_evaluation(
            {name: value for name, value in arguments.items() if name not in _OF_ATTACH and value is not None}
        )
    except InputError as error:
        refuse(VARIABLE, str(error))


def arguments_from(text: str) -> dict[str, Any]:
    """Parses arguments of attach() from "name=value,name=value". mode defaults to "shadow".

    Values are numbers, null (None), true and false; anything else is a string.

    Raises InputError for any other syntax, and for a name that is given twice.
    """
    given: dict[str, str] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name.isidentifier() and equals and value):
            refuse(VARIABLE, f"has {item!r}; expected name=value, and commas between them")
        if name in given:
            refuse(VARIABLE, f"{name}: is given twice, with {given[name]!r} and {value!r}")
        given[name] = value
    return {"mode": "shadow"} | {name: _value(value) for name, value in given.items()}


def _value(text: str) -> int | float | str | None:
    if text in _WORDS:
        return _WORDS[text]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
