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


def timed_refusal(call: Callable[[], Any]) -> dict[str, Any]:
    """The words and the field of the InputError that it raises, and after how many seconds. All ranks begin it
    together."""
    dist.barrier()
    since = time.monotonic()
    said = field = ""
    try:
        call()
    except foremoe.InputError as error:
        said, field = str(error), error.field
    return {"said": said or "nothing", "field": field, "seconds": time.monotonic() - since}
