"""Point-to-point operations that are started together."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def start_point_to_point(operations: list[Any]) -> list[Any]:
    """Starts point-to-point operations together; returns what to wait for, of each."""
    if not operations:
        return []
    works = dist.batch_isend_irecv(operations)
    return works if len(works) == len(operations) else [works[0]] * len(operations)  # one for all of them
