"""What the functions that scripts/python_keywords writes share: arguments, and remarks on what has no effect."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from . import _core
from ._core import Load, Plan
from .files import expect

Homes = npt.NDArray[np.int32] | Plan | None

_log = logging.getLogger("foremoe")


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
    """The names of those that are not as the function has them by default."""
    defaults: dict[str, object] = getattr(function, "__kwdefaults__", None) or {}
    return {name for name, value in options.items() if value != defaults.get(name)}


def remark_on_unused(
    function: Callable[..., object],
    load: Load,
    policies: Sequence[str],
    options: Mapping[str, object],
    previous: Plan | None = None,
    **keywords: object,
) -> None:
    """Warns of each option, and keyword beside them, that was given to the function and has no effect."""
    names = given(function, {**options, **keywords})
    remark(_core._unused_options(load, policies, dict(options), names, previous))
