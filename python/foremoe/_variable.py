"""FOREMOE_ATTACH, the variable of the environment with arguments of foremoe.megatron.attach() for all adapters."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Mapping
from typing import Any

from ._core import _check_evaluation
from ._errors import InputError, refuse

VARIABLE = "FOREMOE_ATTACH"
MODES = ("active", "static", "shadow")
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


def expect_usable(arguments: Mapping[str, Any]) -> None:
    """Raises InputError for an unknown name, mode, cluster or model, and for an invalid option of the planner."""
    for name in arguments:
        if name not in ARGUMENTS:
            near = difflib.get_close_matches(name, ARGUMENTS, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; expected one of {', '.join(ARGUMENTS)}"
            refuse(VARIABLE, f"{name}: is no argument of attach(){hint}")
    if arguments.get("mode", "shadow") not in MODES:
        refuse(VARIABLE, f"mode: {arguments['mode']!r}; expected {' or '.join(MODES)}")
    try:
        _check_evaluation(
            {name: value for name, value in arguments.items() if name not in _OF_ATTACH and value is not None}
        )
    except InputError as error:
        refuse(VARIABLE, str(error))


def arguments_from(text: str) -> dict[str, Any]:
    """Parses arguments of attach() from "name=value,name=value". mode defaults to "shadow".

    Values are numbers, null (None), true and false; anything else is a string.

    Raises InputError for any other syntax.
    """
    found: dict[str, Any] = {"mode": "shadow"}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name.isidentifier() and equals and value):
            refuse(VARIABLE, f"has {item!r}; expected name=value, and commas between them")
        found[name] = _value(value)
    return found


def _value(text: str) -> int | float | str | None:
    if text in _WORDS:
        return _WORDS[text]
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            return kind(text)
    return text
