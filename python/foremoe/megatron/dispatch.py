"""Megatron-LM's dispatchers with slots instead of experts.

A planned dispatcher subclasses Megatron's and has homes + G slots per rank. The dispatcher maps each row to its slot
(dispatch_preprocess), supplies all sizes of the all-to-all (preprocess), and computes the rows of guest slots in
addition to rows of homes (dispatch_postprocess, combine_preprocess). Router and layer still count experts, so auxiliary
losses, expert bias and statistics are unchanged. The flex dispatcher was tested with stand-ins for the kernels of
DeepEP, HybridEP and NCCL-EP on CPU, never on a GPU.

The first node of the layer's backward pass fetches guests, and the last sends their gradients home. Both must happen
inside backward, because DistributedDataParallel with overlap_grad_reduce reduces a bucket once its gradients are ready,
and silently loses gradients added later. The last node is the identity on the layer's input, with the home weights as
further inputs, so autograd delivers their gradients, and runs DistributedDataParallel's hooks, only after this node.

Imports megatron-core, so attach() imports this module only when it is called.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.transformer.moe.token_dispatcher import (
    MoEAllGatherTokenDispatcher,
    MoEAlltoAllTokenDispatcher,
    MoEFlexTokenDispatcher,
)
from torch import Tensor
from torch.autograd.function import once_differentiable

from foremoe._variable import HOME

from .experts import MoE
from .step import MicroBatchRows, Step


class _BackwardBegins(torch.autograd.Function):
    """The identity on the layer's output. Its backward begins the layer's backward turn."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, rows: MicroBatchRows) -> Tensor:
        ctx.rows = rows
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.rows.turn.begin_backward()
        ctx.rows.turn.wait_for_guests()
        return grads[0], None


class _GradientsHome(torch.autograd.Function):
    """The identity on the layer's input, with the home weights as further inputs. Its backward ends the turn."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, rows: MicroBatchRows, *own: Tensor) -> Tensor:
        ctx.rows = rows
        return hidden.view_as(hidden)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, *ctx.rows.backward_ends()


class _Planned:
    """Base of the planned dispatchers. Precedes Megatron's class in the method resolution order."""

    step: Step  # set while a step runs
    moe: MoE
    index: int  # of the layer

    def forget(self) -> None:
        """Drops references to the step, including those that an error inside a layer may have left."""
        for name in ("step", "_rows", "_of_guests"):
            self.__dict__.pop(name, None)

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
        rows = self._rows = self.step.rows_of(self.index)
        if torch.is_grad_enabled():
            if rows.turn.backward >= 0 and not hidden_states.requires_grad:
                hidden_states = hidden_states.detach().requires_grad_()  # frozen layers have a backward turn too
            hidden_states = _GradientsHome.apply(hidden_states, rows, *self.moe.parameters())
        routing_map, probs = rows.to_slots(routing_map, probs)
        return super().dispatch_preprocess(hidden_states, routing_map, probs)  # type: ignore[misc]

    def dispatch_postprocess(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        hidden, tokens, probs = super().dispatch_postprocess(*args)  # type: ignore[misc]
        rows = self._rows
        rows.arrived(tokens)
        at_home = rows.home_rows
        rows.computed(hidden.shape[0])
        self._of_guests = hidden[at_home:], probs[at_home:]
        return hidden[:at_home], rows.tokens[: rows.homes], probs[:at_home]

    def combine_preprocess(self, hidden_states: Tensor) -> Any:
        hidden, probs = self._of_guests
        self._rows.turn.wait_for_guests()
        if hidden.shape[0]:
            hidden_states = torch.cat([hidden_states, self._rows.run_guests(hidden, probs)])
        del self._of_guests
        return super().combine_preprocess(hidden_states)  # type: ignore[misc]

    def combine_postprocess(self, *args: Any) -> Tensor:
        output: Tensor = super().combine_postprocess(*args)  # type: ignore[misc]
        rows = self._rows
        del self._rows
        rows.turn.end_forward()
        return _BackwardBegins.apply(output, rows) if torch.is_grad_enabled() else output


class _PlannedAllGather(_Planned, MoEAllGatherTokenDispatcher):
    """Gathers all rows, so it needs no sizes. Megatron's code still copies each expert's row count to the host."""


class _PlannedAllToAll(_Planned, MoEAlltoAllTokenDispatcher):
    """Takes all sizes from the plan: exchanges no counts and does not wait for the device.

    Under on_mismatch="home", Megatron's code exchanges counts and waits.
    """

    def preprocess(self, routing_map: Tensor) -> Tensor:
        if self.step.on_mismatch == HOME:
            tokens: Tensor = super().preprocess(routing_map)
            return tokens
        rows = self._rows
        self.num_out_tokens = sum(rows.send)
        self.input_splits = rows.send
        self.output_splits = rows.recv
        self.num_global_tokens_per_local_expert = rows.received
        if self.config.moe_permute_fusion and rows.received.device != routing_map.device:  # never run
            self.num_global_tokens_per_local_expert = rows.received.pin_memory().to(
                routing_map.device, non_blocking=True
            )
        return rows.tokens

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
        if self.step.on_mismatch == HOME:
            return super()._maybe_dtoh_and_synchronize(point, tokens_per_expert)
        return tokens_per_expert  # already on the host


class _Flex(MoEFlexTokenDispatcher):
    """Megatron's flex dispatcher, corrected to keep chosen slots whose probability is exactly 0.

    DeepEP's and NCCL-EP's managers rebuild the routing map from the largest probabilities, and so may send a row to a
    slot that was not chosen. In Megatron-LM, this loses a gradient. Here, sizes would differ from the plan.
    """

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> Any:
        hidden_states, _ = super().dispatch_preprocess(hidden_states, routing_map, probs)
        manager = self._comm_manager
        if hasattr(manager, "token_indices"):
            manager.token_probs, manager.token_indices = chosen_slots(routing_map, probs, self.config.moe_router_topk)
        return hidden_states, manager.token_probs


def chosen_slots(routing_map: Tensor, probs: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Maps bool [tokens, slots], [tokens, slots] to probabilities [tokens, top_k] and slots, int64 [tokens, top_k].

    Sorts slots by descending probability. If a token has fewer slots, appends −1, which DeepEP skips.
    """
    slots = probs.detach().masked_fill(~routing_map, -torch.inf).topk(top_k, dim=-1).indices
    return probs.gather(1, slots), slots.masked_fill(~routing_map.gather(1, slots), -1)


class _PlannedFlex(_Planned, _Flex):
    """The kernels exchange sizes and wait for the device, as they do without a plan."""

    def dispatch_postprocess(self, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
        hidden, tokens, probs = super().dispatch_postprocess(*args)
        arrived, planned = hidden.shape[0] + self._of_guests[0].shape[0], int(self._rows.tokens.sum())
        if arrived != planned:
            raise RuntimeError(f"{self.moe.name}: {arrived} rows arrived, {planned} were planned")
        return hidden, tokens, probs


_DISPATCHERS: dict[str, Any] = {"allgather": _PlannedAllGather, "alltoall": _PlannedAllToAll, "flex": _PlannedFlex}


def planned_dispatcher(moe: MoE, index: int, guest_slots: int, groups: Any) -> Any:
    """Creates a dispatcher of the layer's type for its home slots and this many guest slots on every rank."""
    layer = moe.layer
    slots = layer.num_local_experts + guest_slots
    config = copy.copy(layer.config)  # not deepcopy: it may hold groups
    config.num_moe_experts = slots * groups.ep.size()
    rank = groups.ep.rank()
    made = _DISPATCHERS[config.moe_token_dispatcher_type](
        slots, list(range(rank * slots, (rank + 1) * slots)), config=config, pg_collection=groups
    )
    if layer.token_dispatcher.shared_experts is not None:  # moe_shared_expert_overlap: the dispatcher runs them
        made.set_shared_experts(layer.token_dispatcher.shared_experts)
    made.moe, made.index = moe, index
    return made
