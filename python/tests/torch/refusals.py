"""Errors that calls raise, and the ranks that raise them. Shared by tests of rejected arguments."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import foremoe

ODD = 2  # the one of four ranks whose arguments differ
OTHERS = "ranks 0, 1, 3"


def refusal(call: Callable[[], Any]) -> str:
    """Returns type and message of the error that `call` raises, or "nothing"."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def input_error(call: Callable[[], Any], within: float = 60.0) -> str:
    """Returns the message of the InputError that `call` raises, or "nothing". Collective. Asserts that the message
    begins with the error's field and that `call` takes less than `within` seconds."""
    dist.barrier()
    since = time.monotonic()
    said = "nothing"
    try:
        call()
    except foremoe.InputError as error:
        said = str(error).removeprefix("rank 2 refused: ")
        assert said.startswith(error.field), (error.field, said)
        said = str(error)
    assert time.monotonic() < since + within
    return said
