"""Process groups beside those of the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist


def group_like(group: Any, backend: str, device: torch.device | str) -> Any:
    """Another group of the same ranks. Collective over them alone."""
    ranks = dist.get_process_group_ranks(group)
    made: Any = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    _begin(made, device)
    return made


def _begin(group: Any, device: torch.device | str) -> None:
    """The first operation of a group must be one that all ranks take part in."""
    dist.all_reduce(torch.zeros(1, device=device), group=group)
