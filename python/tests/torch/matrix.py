"""A tiny MoE layer for two ranks, shared by tests that need no model."""

from __future__ import annotations

from typing import Any

import torch

from foremoe.torch import grouped_linear

RANKS, EXPERTS, TOP_K, HIDDEN = 2, 4, 1, 8


class Layer(torch.nn.Module):
    """A user-defined MoE layer in which each expert is one matrix."""

    def __init__(self, experts: int = EXPERTS, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.name, self.num_experts, self.top_k, self.hidden_size = "own", experts, TOP_K, HIDDEN
        self.matrix = torch.nn.Parameter(torch.randn(experts, HIDDEN, HIDDEN))
        self.execute: Any = None

    def weights(self) -> dict[str, Any]:
        return {"matrix": self.matrix}

    def set_weights(self, weights: dict[str, Any]) -> None:
        self.matrix = weights["matrix"]

    def forward_rows(self, rows: Any, offsets: Any, weights: dict[str, Any]) -> Any:
        return grouped_linear(rows, weights["matrix"], offsets)

    def execute_by(self, execute: Any) -> None:
        self.execute = execute

    def replay(self, ids: Any) -> None:
        self.ids = ids


def routes_of(rank: int) -> list[Any]:
    return [torch.tensor([[[0]], [[0]], [[0]], [[3]]]) if rank == 0 else torch.tensor([[[0]], [[1]]])]
