"""FOREMOE_ATTACH, the variable of the environment with arguments of foremoe.megatron.attach() for all adapters."""

from __future__ import annotations

import contextlib
import os
from typing import Any

from ._errors import refuse

VARIABLE = "FOREMOE_ATTACH"
_WORDS = {"null": None, "true": True, "false": False}  # as in JSON


def given_arguments() -> dict[str, Any]:
    """Returns the arguments that the variable has; shadow mode if it is not set. Raises InputError for other syntax."""
    return arguments_from(os.environ.get(VARIABLE, ""))


def arguments_from(text: str) -> dict[str, Any]:
    """Parses arguments of attach() from "name=value,name=value". mode defaults to "shadow".

    Values are numbers, null (None), true and false; anything else is a string.

    Raises InputError for any other syntax.
    """
    found: dict[str, Any] = {"mode": "shadow"}
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not (name.isidentifier() and equals and value) or name == "model_chunks":
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
