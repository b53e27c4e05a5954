"""Exceptions of foremoe."""

from __future__ import annotations

from typing import NoReturn


class InputError(ValueError):
    """Invalid input. `str()` returns the whole message. The attributes locate the error; they are empty if unknown.

    Attributes:
        file: Path as the caller gave it.
        field: Tensor or key in that file, or argument of the caller.
        index: Position in the field, such as "[3, 0, 17]".
        problem: Description of the error, with names of other arguments in backquotes.
    """

    def __init__(self, message: str, file: str = "", field: str = "", index: str = "") -> None:
        super().__init__(message)
        self.file = file
        self.field = field
        self.index = index
        self.problem = message


def refuse(field: str, problem: str, index: str = "", *, file: str = "") -> NoReturn:
    """Raises InputError. file: Source that contains the field; "" if the field is an argument."""
    words = [file, f"{field}{index}", problem.replace("`", "")]
    error = InputError(": ".join(word for word in words if word), file=file, field=field, index=index)
    error.problem = problem
    raise error


class PolicySkipped(Exception):
    """The policy is not defined for this input, for the given reason."""

    def __init__(self, policy: str, reason: str) -> None:
        super().__init__(f"policy {policy} cannot plan it: {reason}")
        self.policy = policy
        self.reason = reason

    def __reduce__(self) -> tuple[type[PolicySkipped], tuple[str, str]]:
        return type(self), (self.policy, self.reason)
