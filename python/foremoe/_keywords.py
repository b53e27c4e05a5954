"""Keywords that are options: given as `**options`, shown one by one, refused by name where there is none.

    @takes(CompareOptions)
    def compare(load: Load, **options: Unpack[CompareOptions]) -> list[dict[str, Any]]: ...

The signature and the help of such a function have every option, with its default.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import textwrap
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any, ParamSpec, TypeVar, get_type_hints

from . import _core
from ._core import Load, Plan
from .files import expect

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger("foremoe")

_REFUSAL = "Raises InputError, with the name of the keyword in `.field`, for an invalid value."

# Options that the C++ tables do not have, and what they must be; homes are checked by the library.
_BESIDE: dict[str, Any] = {
    "policy_options": Mapping | None,
    "homes": object,
    "previous": Plan | None,
    "previous_load": Load | None,
    "threads": Integral,
}


def takes(of: type) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Shows the options of a TypedDict in a function's signature and help, and refuses others with a TypeError."""
    hints = get_type_hints(of, include_extras=True)
    keywords = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=hint.__metadata__[0], annotation=hint.__origin__
        )
        for name, hint in hints.items()
    ]

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        signature = inspect.signature(function)
        own = {k: v for k, v in signature.parameters.items() if v.kind is not inspect.Parameter.VAR_KEYWORD}
        shown = [keyword for keyword in keywords if keyword.name not in own]
        whole = signature.replace(parameters=[*own.values(), *shown])

        @functools.wraps(function)
        def named(*args: P.args, **kwargs: P.kwargs) -> T:
            for name in kwargs:
                if name not in whole.parameters:
                    near = difflib.get_close_matches(name, whole.parameters, 1, 0)
                    raise TypeError(f"{function.__name__}() has no option '{name}'. Did you mean '{near[0]}'?")
            return function(*args, **kwargs)

        texts = [f"{keyword.name}: {hints[keyword.name].__metadata__[1]}" for keyword in shown]
        lines = [textwrap.fill(text, 116, subsequent_indent="    ") for text in texts]
        named.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), *lines, "", _REFUSAL])
        named.__signature__ = whole  # type: ignore[attr-defined]
        return named

    return decorate


def split(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of the C++ tables, and arguments beside them. Raises InputError that names one of a wrong class."""
    beside = {name: given[name] for name in _BESIDE if name in given}
    for name, value in beside.items():
        expect(_BESIDE[name], **{name: value})
    beside["policy_options"] = dict(beside.get("policy_options") or {})
    rest = {name: value for name, value in given.items() if name not in _BESIDE}
    if isinstance(rest.get("model"), Mapping):
        rest["model"] = dict(rest["model"])
    return rest, beside


def names_of(policies: str | Sequence[str]) -> list[str]:
    """Of policies in a list, or with commas between. Raises InputError that names the argument, and the index."""
    expect(str | Sequence, policies=policies)
    names = policies.split(",") if isinstance(policies, str) else list(policies)
    for i, name in enumerate(names):
        expect(str, **{f"policies[{i}]": name})
    return names


def remark(remarks: Sequence[str]) -> None:
    """Warns with each sentence."""
    for sentence in remarks:
        _log.warning(sentence.replace("`", ""))


def given(function: Callable[..., object], options: Mapping[str, object]) -> set[str]:
    """The names of those that differ from the function's defaults."""
    parameters = inspect.signature(function).parameters
    return {name for name, value in options.items() if value != parameters[name].default}


def remark_on_unused(
    function: Callable[..., object],
    load: Load,
    policies: Sequence[str],
    options: Mapping[str, Any],
    beside: Mapping[str, Any],
    **keywords: object,
) -> None:
    """Warns of each option, and keyword beside them, that was given to the function and has no effect."""
    names = given(function, {**options, **keywords})
    former = (beside.get("previous"), beside.get("previous_load"))
    remark(_core._unused_options(load, policies, dict(options), names, *former))
