"""The ranks that share the experts of a model, as one of them sees them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from .calls import Calls
from .together import Channel, Failures


@dataclasses.dataclass(frozen=True)
class Ranks:
    """An expert-parallel group.

    homes: experts of each layer that a rank owns, E/R.
    ranks_per_node: ranks that share a fast interconnect and, for the host path, memory.
    rows, copies: over which rows and copies travel; two groups, so that copies overlap with exchanges of rows. All else
        that ranks exchange inside a phase goes over the first, so that it ends if a rank fails.
    replicas: between the ranks that hold the same experts; None where no other rank holds them.
    everyone: between all ranks of all replicas; `grid` lists them, [replica][rank] in the default group.
    agreement: of gloo, over which ranks agree about copies by the host path; None where no copy takes it.
    plans: of gloo, over which ranks plan in shares; None where each plans alone.
    failures: what the ranks say of their failures; None where they have another way. calls: likewise of collective
    calls.
    """

    group: Any
    rank: int
    num_ranks: int
    homes: int
    ranks_per_node: int
    device: torch.device
    rows: Channel = dataclasses.field(default_factory=lambda: Channel(None))
    copies: Channel = dataclasses.field(default_factory=lambda: Channel(None))
    replicas: Channel | None = None
    everyone: Channel = dataclasses.field(default_factory=lambda: Channel(None))
    grid: list[list[int]] = dataclasses.field(default_factory=list)
    agreement: Channel | None = None
    plans: Channel | None = None
    failures: Failures | None = None
    calls: Calls | None = None

    @classmethod
    def of(cls, group: Any, num_experts: int, ranks_per_node: int | None, device: torch.device) -> Ranks:
        """ranks_per_node: None: 8, or all if fewer."""
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        node = min(8, num_ranks) if ranks_per_node is None else ranks_per_node
        return cls(group, rank, num_ranks, num_experts // num_ranks, node, device)

    def expect_call(self, name: str) -> None:
        """Raises RuntimeError, on all ranks, where others make another collective call."""
        if self.calls is not None:
            self.calls.expect(name)

    @property
    def num_trainers(self) -> int:
        """Ranks of all replicas."""
        return self.num_ranks * max(1, len(self.grid))

    @property
    def trainers(self) -> Any:
        """The group of all ranks of all replicas, for what may keep it: `everyone` ends when a rank fails."""
        if self.replicas is None:
            return self.group
        return dist.group.WORLD if self.num_trainers == dist.get_world_size() else self.everyone.group

    @property
    def node(self) -> int:
        return self.rank // self.ranks_per_node

    @property
    def num_nodes(self) -> int:
        return -(-self.num_ranks // self.ranks_per_node)
