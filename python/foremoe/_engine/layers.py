"""The protocol of MoE layers whose experts are spread over ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

Execute = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(hidden [tokens, hidden], ids [tokens, top_k], gates [tokens, top_k]) → [tokens, hidden]."""


class CopiedLayer(Protocol):
    """The part of the protocol that copies need. Layers that compute rows elsewhere implement only this."""

    def weights(self) -> dict[str, Any]:
        """Returns this rank's experts by name: tensors [experts, …], or objects that represent them."""


class ExpertLayer(Protocol):
    """The routed experts of one MoE layer. Implemented by adapters for frameworks. Your own modules can implement it.

    A layer may have an attribute `model`, the module to train. Then state_dict() of the model has DTensors of all
    experts from the beginning, not only after ExpertParallel.wrap(). A layer may also have `own_choice`, the router's
    own choice of its last forward, [tokens, top_k], or None. ForeMoE uses it to detect routes of other rows.
    """

    name: str  # of the layer, for messages
    num_experts: int
    top_k: int
    hidden_size: int

    def weights(self) -> dict[str, torch.nn.Parameter]:
        """Returns the experts' parameters by name, [experts, …].

        DTensors that are already sharded over the ranks, with the first E/R experts on rank 0, stay as they are.
        """

    def set_weights(self, weights: dict[str, torch.nn.Parameter]) -> None:
        """Replaces the parameters by those of the experts that this rank owns."""

    def forward_rows(self, rows: Tensor, offsets: Tensor, weights: dict[str, Tensor]) -> Tensor:
        """Applies each expert to its rows.

        The function must be differentiable, treat rows independently, and be the same for any number of experts. With
        residency 'shared', its autograd Functions must save weights with save_for_backward(), because the weights'
        buffers contain other experts before the backward pass. ExpertParallel tests this with one row, and refuses
        layers that fail.

        Args:
            rows: [rows, hidden], sorted by expert.
            offsets: int32 [experts], end of each expert's rows.
            weights: By name, [experts, …].

        Returns:
            [rows, hidden].
        """

    def execute_by(self, execute: Execute | None) -> None:
        """Makes forward call this function with hidden states, routes and gates. None restores the layer's own code."""

    def replay(self, ids: Tensor | None) -> None:
        """Makes the router choose these experts, int64 [tokens, top_k]. Negative ids leave the choice to the router.

        None restores the router's own choice for all tokens.
        """


def grouped_linear(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiplies rows [rows, in] by weight [experts, in, out]. offsets: int32 [experts], end of each expert's rows."""
    if rows.dtype is torch.float64 or not hasattr(torch.nn.functional, "grouped_mm"):
        ends = offsets.tolist()
        parts = [rows[begin:end] @ w for begin, end, w in zip([0, *ends[:-1]], ends, weight, strict=True)]
        return torch.cat(parts)
    return _Contiguous.apply(torch.nn.functional.grouped_mm(rows, weight, offs=offsets))  # type: ignore[no-any-return]


class _Contiguous(torch.autograd.Function):
    """The identity, with contiguous gradients. The backward of grouped_mm refuses expanded gradients."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()
