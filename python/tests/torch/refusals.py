"""What calls raise, and on which ranks: what tests of refusals share."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import foremoe

ODD = 2  # of four ranks, the one that is given something else
OTHERS = "ranks 0, 1, 3"


def refusal(call: Callable[[], Any]) -> str:
    """The type and the words of the error that it raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def input_error(call: Callable[[], Any], within: float = 60.0) -> str:
    """The words of the InputError that it raises within so many seconds, which begin with its field. All ranks begin
    it together."""
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
