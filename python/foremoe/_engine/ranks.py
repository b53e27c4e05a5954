"""The ranks that share the experts of a model, as one of them sees them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist


@dataclasses.dataclass(frozen=True)
class Ranks:
    """An expert-parallel group.

    homes: experts of each layer that a rank owns, E/R.
    ranks_per_node: ranks that share a fast interconnect and, for the host path, memory.
    copy_group: a second group of the same ranks, so that copies overlap with exchanges of rows.
    cpu_group: another one, of gloo; None where no copy takes the host path.
    """

    group: Any
    rank: int
    num_ranks: int
    homes: int
    ranks_per_node: int
    device: torch.device
    copy_group: Any = None
    cpu_group: Any = None

    @classmethod
    def of(cls, group: Any, num_experts: int, ranks_per_node: int | None, device: torch.device) -> Ranks:
        """ranks_per_node: None: 8, or all if fewer."""
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        node = min(8, num_ranks) if ranks_per_node is None else ranks_per_node
        return cls(group, rank, num_ranks, num_experts // num_ranks, node, device)

    @property
    def node(self) -> int:
        return self.rank // self.ranks_per_node

    @property
    def num_nodes(self) -> int:
        return -(-self.num_ranks // self.ranks_per_node)
