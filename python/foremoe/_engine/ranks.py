"""The ranks that share the experts of a model, and the channels between them."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from .failures import Channel
from .homes import HomeTable


@dataclasses.dataclass(frozen=True)
class Ranks:
    """An expert-parallel group.

    Attributes:
        table: Homes of all experts.
        ranks_per_node: Ranks that share a fast interconnect and, for the host path, memory.
        rows: Channel for rows and all other exchanges inside a phase, so that they end if a rank fails.
        copies: Channel for copies of experts. A second group lets copies overlap with exchanges of rows.
        replicas: Channel between the ranks that own the same experts; None if no other rank owns them.
        everyone: Channel between all ranks of all replicas.
        grid: Ranks in the default group, [replica][rank].
        agreement: Gloo channel on which ranks agree about copies by the host path; None if no copy takes that path.
        plans: Gloo channel for planning in shares; None if each rank plans alone.
        across: Channel between the ranks at this position of all nodes, for dispatch by token; None without it.
        within: Channel between the ranks of this node, for dispatch by token; None without it.
        relays: Gloo channel for the destinations of tokens; None without dispatch by token.
    """

    group: Any
    rank: int
    num_ranks: int
    table: HomeTable
    ranks_per_node: int
    device: torch.device
    rows: Channel = dataclasses.field(default_factory=lambda: Channel(None))
    copies: Channel = dataclasses.field(default_factory=lambda: Channel(None))
    replicas: Channel | None = None
    everyone: Channel = dataclasses.field(default_factory=lambda: Channel(None))
    grid: list[list[int]] = dataclasses.field(default_factory=list)
    agreement: Channel | None = None
    plans: Channel | None = None
    across: Channel | None = None
    within: Channel | None = None
    relays: Channel | None = None

    @classmethod
    def of(cls, group: Any, table: HomeTable, ranks_per_node: int | None, device: torch.device) -> Ranks:
        """Returns the ranks of a group without channels. ranks_per_node: None: 8, or all if fewer."""
        rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)
        node = min(8, num_ranks) if ranks_per_node is None else ranks_per_node
        return cls(group, rank, num_ranks, table, node, device)

    @property
    def homes(self) -> int:
        """Experts of each layer that a rank owns, E/R."""
        return self.table.per_rank

    @property
    def num_trainers(self) -> int:
        """Number of ranks of all replicas."""
        return self.num_ranks * max(1, len(self.grid))

    @property
    def trainers(self) -> Any:
        """Group of all ranks of all replicas. Unlike `everyone` it survives a failure."""
        if self.replicas is None:
            return self.group
        return dist.group.WORLD if self.num_trainers == dist.get_world_size() else self.everyone.group

    @property
    def node(self) -> int:
        return self.rank // self.ranks_per_node

    @property
    def num_nodes(self) -> int:
        return -(-self.num_ranks // self.ranks_per_node)
