"""Homes of experts: the rank that owns each expert of each layer, and where that rank stores it.

A rank stores its experts of a layer in ascending order. The position of an expert is rank · E/R + its index in this
order. All positions of one rank are adjacent, and with contiguous homes every expert is its own position.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

import foremoe
from foremoe.options import AnyHomes

from .together import digest_of


class HomeTable:
    """The homes of a model's experts.

    Attributes:
        home: int32 [layers, experts], rank that owns each expert.
        order: int64 [layers, experts], expert at each position.
        position: int64 [layers, experts], position of each expert.
        per_rank: Experts of each layer that a rank owns, E/R.
        is_contiguous: Whether rank r owns experts r · E/R to (r + 1) · E/R − 1 of every layer.
    """

    def __init__(self, home: npt.NDArray[np.int32], num_ranks: int) -> None:
        """home: int32 [layers, experts], E/R experts of each layer on each rank."""
        self.home = home
        self.per_rank: int = home.shape[1] // num_ranks
        self.order: npt.NDArray[np.int64] = home.argsort(1, kind="stable")
        self.position: npt.NDArray[np.int64] = self.order.argsort(1)
        self.is_contiguous = bool((self.position == np.arange(home.shape[1])).all())

    @classmethod
    def contiguous(cls, num_layers: int, num_experts: int, num_ranks: int) -> HomeTable:
        home = np.arange(num_experts, dtype=np.int32) * num_ranks // num_experts
        return cls(np.tile(home, (num_layers, 1)), num_ranks)

    @classmethod
    def of(cls, homes: AnyHomes, nothing: foremoe.Load) -> HomeTable:
        """Returns the homes given to an entrance. Raises InputError if they do not fit the load.

        nothing: Load without rows, with the layers, ranks and experts of the model.
        """
        plan = foremoe.plan(nothing, "vanilla", guest_slots=0, homes=homes, threads=1)
        return cls(plan.home.copy(), plan.num_ranks)

    @property
    def digest(self) -> str:
        """SHA-256 of the homes as plans record it, or "contiguous"."""
        return named_digest("" if self.is_contiguous else digest_of(self.home))

    def given(self) -> Any:
        """Returns the argument `homes` of foremoe.plan()."""
        return None if self.is_contiguous else self.home

    def owner(self, layer: int, expert: int) -> int:
        """Returns the rank that owns an expert."""
        return int(self.home[layer, expert])

    def index(self, layer: int, expert: int) -> int:
        """Returns the index of an expert among those of its rank."""
        return int(self.position[layer, expert]) % self.per_rank

    def of_rank(self, layer: int, rank: int) -> npt.NDArray[np.int64]:
        """Returns the experts of a rank in the order in which it stores them, int64 [E/R]."""
        return self.order[layer, rank * self.per_rank :][: self.per_rank]


@torch.no_grad()
def exchanged(part: Tensor, table: HomeTable, layer: int, group: Any, *, to_blocks: bool) -> Tensor:
    """Sends each expert from its home to the rank of its contiguous block, or back. Collective.

    part: This rank's experts [E/R, …], ascending. Returns those that it receives, ascending.
    """
    home, block = table.home[layer], np.arange(table.home.shape[1]) // table.per_rank  # rank of each expert
    source, target = (home, block) if to_blocks else (block, home)
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    sent, received = target[source == rank], source[target == rank]  # of experts in ascending order
    found = torch.empty_like(part, memory_format=torch.contiguous_format)
    dist.all_to_all_single(
        found,
        part[torch.from_numpy(sent.argsort(kind="stable")).to(part.device)],
        np.bincount(received, minlength=ranks).tolist(),
        np.bincount(sent, minlength=ranks).tolist(),
        group=group,
    )
    return found[torch.from_numpy(received.argsort(kind="stable").argsort()).to(part.device)]


def named_digest(digest: str) -> str:
    """Returns the homes_digest of a plan for messages."""
    return digest or "contiguous"
