"""Process groups beside those of the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d


def group_like(group: Any, backend: str, device: torch.device | str) -> Any:
    """Another group of the same ranks. Collective over them alone.

    Raises RuntimeError, on all of them, where ranks would wait for each other forever.
    """
    ranks = dist.get_process_group_ranks(group)
    _expect_same_name(ranks, group)
    made: Any = dist.new_group(ranks, backend=backend, use_local_synchronization=True)
    dist.all_reduce(torch.zeros(1, device=device), group=made)  # the first operation must be one of all ranks
    return made


def _expect_same_name(ranks: list[int], group: Any) -> None:
    """torch names a group that its own ranks alone make by these, and by how many groups the process made before. Where
    that differs, the ranks of a group wait for each other under different names."""
    name_of: Any = getattr(distributed_c10d, "_hash_ranks_to_str", None)
    if name_of is None:
        return
    names: list[Any] = [None] * len(ranks)
    dist.all_gather_object(names, name_of(ranks), group=group)
    others = [rank for rank, name in zip(ranks, names, strict=True) if name != names[0]]
    if others:
        raise RuntimeError(
            f"ranks {others} have made other process groups before than rank {ranks[0]}, so that torch would wait "
            "forever for another group of them; expected ranks of a group to make as many groups each, such as by "
            "dist.new_group() on all ranks"
        )
