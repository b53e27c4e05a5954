"""What an MoE layer must offer for its experts to be spread over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

Execute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden [tokens, hidden], ids [tokens, top_k], gates [tokens, top_k]) → [tokens, hidden]."""


class CopiedLayer(Protocol):
    """What copies need of a layer: an ExpertLayer, or one that computes its rows elsewhere."""

    def weights(self) -> dict[str, Any]:
        """This rank's experts by name: tensors [experts, …], or what stands for them."""


class ExpertLayer(Protocol):
    """The routed experts of one MoE layer. An adapter for a framework implements it; so can any module of yours.

    It may have an attribute `model`, the module to train. Then state_dict() of the model has DTensors of all
    experts from the beginning, and not from ExpertParallel.wrap() on. It may have `own_choice`, the router's own choice
    of its last forward, [tokens, top_k], or None. With it, routes of other rows are found.
    """

    name: str  # of the layer, for messages
    num_experts: int
    top_k: int
    hidden_size: int

    def weights(self) -> dict[str, torch.nn.Parameter]:
        """The experts' parameters by name, the expert first: [experts, …].

        DTensors that are sharded over the ranks, the first E/R experts on the first of them, stay as they are.
        """

    def set_weights(self, weights: dict[str, torch.nn.Parameter]) -> None:
        """Puts other parameters in their place, of as many experts as this rank owns."""

    def forward_rows(self, rows: Tensor, offsets: Tensor, weights: dict[str, Tensor]) -> Tensor:
        """Every expert on its rows. Differentiable, a row at a time, and the same function for any number of experts.

        rows: [rows, hidden], those of an expert side by side. offsets: int32 [experts], where the rows of each end.
        weights: by name, [experts, …]. Returns [rows, hidden].

        Under residency shared its autograd Functions keep weights by save_for_backward(), since other experts' lie
        there in the backward pass. ExpertParallel tries it on one row, and refuses others.
        """

    def execute_by(self, execute: Execute | None) -> None:
        """From now on the layer's forward calls this with its hidden states, routes and gates; None: its own code."""

    def replay(self, ids: Tensor | None) -> None:
        """From now on the router chooses these experts, int64 [tokens, top_k], and its own where an id is negative.

        None: its own everywhere.
        """


def grouped_linear(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """rows [rows, in] times weight [experts, in, out]: each expert on its rows, up to offsets, int32 [experts]."""
    if rows.dtype is torch.float64 or not hasattr(torch.nn.functional, "grouped_mm"):
        ends = offsets.tolist()
        parts = [rows[begin:end] @ w for begin, end, w in zip([0, *ends[:-1]], ends, weight, strict=True)]
        return torch.cat(parts)
    return _Contiguous.apply(torch.nn.functional.grouped_mm(rows, weight, offs=offsets))  # type: ignore[no-any-return]


class _Contiguous(torch.autograd.Function):
    """The identity. The backward of grouped_mm refuses gradients that are expanded."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()
