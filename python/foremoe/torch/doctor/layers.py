"""Layers and routes for checks: MoE layers only, with replayed routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

import foremoe
from foremoe._engine.layers import Execute, grouped_linear

from ..parallel import ExpertParallel

TOKEN: dict[str, Any] = {"dispatch": "token", "ranks_per_node": 1}
"""Options of Net.spread() for dispatch by token between ranks that are nodes of their own."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a model and its step."""

    layers: int = 3
    experts: int = 24
    top_k: int = 2
    hidden: int = 32
    intermediate: int = 32
    tokens: int = 48  # per rank and micro-step
    micro_steps: int = 3
    dtype: str = "float32"
    routing: str = "zipf"  # zipf: popular experts differ in every micro-step; grpo: as in training


class Experts(torch.nn.Module):
    """One MoE layer of gated experts; an ExpertLayer."""

    def __init__(self, name: str, sizes: Sizes) -> None:
        super().__init__()
        self.name, self.num_experts, self.top_k, self.hidden_size = name, sizes.experts, sizes.top_k, sizes.hidden
        dtype = getattr(torch, sizes.dtype)

        def parameter(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter((0.1 * torch.randn(*shape)).to(dtype))

        self.gate_up = parameter(sizes.experts, sizes.hidden, 2 * sizes.intermediate)
        self.down = parameter(sizes.experts, sizes.intermediate, sizes.hidden)
        self.router = torch.nn.Linear(sizes.hidden, sizes.experts, bias=False, dtype=dtype)
        self._ids: Tensor | None = None
        self._execute: Execute | None = None

    def weights(self) -> dict[str, torch.nn.Parameter]:
        return {"gate_up": self.gate_up, "down": self.down}

    def set_weights(self, weights: dict[str, torch.nn.Parameter]) -> None:
        self.gate_up, self.down = weights["gate_up"], weights["down"]

    def forward_rows(self, rows: Tensor, offsets: Tensor, weights: dict[str, Tensor]) -> Tensor:
        gate, up = grouped_linear(rows, weights["gate_up"], offsets).chunk(2, -1)
        return grouped_linear(torch.nn.functional.silu(gate) * up, weights["down"], offsets)

    def execute_by(self, execute: Execute | None) -> None:
        self._execute = execute

    def replay(self, ids: Tensor | None) -> None:
        self._ids = ids

    def forward(self, hidden: Tensor) -> Tensor:
        assert self._ids is not None and self._execute is not None
        gates = torch.softmax(self.router(hidden), -1).gather(-1, self._ids)
        return hidden + self._execute(hidden, self._ids, gates)


class Net(torch.nn.Module):
    """A sequence of MoE layers, with equal weights on all ranks."""

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.sizes = sizes
        self.moe = [Experts(f"layer {i}", sizes) for i in range(sizes.layers)]
        self.layers = torch.nn.ModuleList(self.moe)
        self.to(device)

    def forward(self, hidden: Tensor) -> Tensor:
        for layer in self.moe:
            hidden = layer(hidden)
        return hidden

    def spread(self, guest_slots: int = 2, **options: Any) -> ExpertParallel:
        """Spreads the experts over all ranks, and averages the other gradients at every drain."""
        ep = ExpertParallel(self.moe, guest_slots=guest_slots, **options)
        ep.wrap(self)
        return ep


def draw_routes(sizes: Sizes, rank: int, ranks: int) -> list[Tensor]:
    """Returns the routes of each micro-step of a rank, int32 [rows, layers, top_k], from a model of routing."""
    trace = foremoe.synthesize_trace(
        layers=sizes.layers, experts=sizes.experts, top_k=sizes.top_k, micro_steps=sizes.micro_steps, ranks=ranks,
        tokens_per_rank=sizes.tokens, routing=sizes.routing, skew=1.5, permute_probability=1.0,
    )  # fmt: skip
    assert trace.micro_step is not None and trace.rank is not None
    routes = []
    for m in range(sizes.micro_steps):
        mine = np.flatnonzero((trace.micro_step == m) & (trace.rank == rank))
        parts = [trace.routed_experts[trace.cu_seqlens[i] : trace.cu_seqlens[i + 1]] for i in mine]
        routes.append(torch.from_numpy(np.concatenate(parts).astype(np.int32)))
    return routes


def draw_inputs(sizes: Sizes, rank: int) -> list[Tensor]:
    """Returns the rows of each micro-step, float64 [rows, hidden]; every type represents their values exactly."""
    own = torch.Generator().manual_seed(200 + rank)
    shape = (sizes.tokens, sizes.hidden)
    return [torch.randn(shape, generator=own).bfloat16().double() for _ in range(sizes.micro_steps)]
