"""The exchange of rows between ranks, and the computation of guests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from foremoe._engine.failures import Channel
from foremoe._engine.layers import ExpertLayer
from foremoe._engine.lent import KeptWeights
from foremoe._engine.sharded import local_weights

from .dispatch import Dispatch, SlotRows


class AllToAll(torch.autograd.Function):
    """Sends rows to other ranks by known split sizes. Gradients return the same way.

    `before` and `after` are called in the backward pass, around its exchange.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, send: list[int], recv: list[int], channel: Channel, before: Any, after: Any
    ) -> Tensor:
        ctx.of = send, recv, channel, before, after
        return _exchange(rows, send, recv, channel)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None, None]:
        send, recv, channel, before, after = ctx.of
        if before is not None:
            before()
        result = _exchange(grads[0], recv, send, channel)
        if after is not None:
            after()
        return result, None, None, None, None, None


def _exchange(rows: Tensor, send: list[int], recv: list[int], channel: Channel) -> Tensor:
    out = rows.new_empty(sum(recv), *rows.shape[1:])
    dist.all_to_all_single(out, rows.contiguous(), recv, send, group=channel.group)
    return out


def exchanged(
    hidden: Tensor,
    gates: Tensor,
    to: Dispatch,
    channel: Channel,
    compute: Callable[[Tensor], Tensor],
    *,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> Tensor:
    """Sends rows to their destinations, and sums the results by gates.

    Args:
        hidden: [tokens, hidden].
        gates: [tokens, top_k].
        to: Destinations.
        channel: Channel for rows.
        compute: Computes this rank's slots on [rows received, hidden], sorted by slot.
        before: Called in the backward pass before its first exchange.
        after: Called in the backward pass after its last exchange.

    Returns:
        [tokens, hidden].
    """
    token = to.order // gates.shape[1]
    # In the layer's backward pass, the combine's exchange is first and the dispatch's is last.
    received = AllToAll.apply(hidden[token], to.send, to.recv, channel, None, after)[to.to_slots]
    computed = compute(received)
    back = torch.empty_like(computed).index_copy(0, to.to_slots, computed)
    returned = AllToAll.apply(back, to.recv, to.send, channel, before, None)
    weighted = returned * gates.reshape(-1)[to.order, None].to(returned.dtype)
    # Sums the rows of a token in a fixed order, in float32 for narrower types, as transformers does. On CUDA,
    # index_add() would add them in an undefined order and round each sum.
    of_tokens = weighted.new_zeros(gates.numel(), hidden.shape[1]).index_copy(0, to.order, weighted)
    out: Tensor = of_tokens.view(*gates.shape, hidden.shape[1]).sum(1).to(hidden.dtype)
    return out


def computed_in_slots(rows: Tensor, to: SlotRows, layer: ExpertLayer, guests: Any) -> Tensor:
    """Computes this rank's experts, then its guests, also in the backward pass: copies of guests overlap with experts.

    rows: [rows, hidden], in the order of `to`. guests: See GuestRows. Returns [rows, hidden].
    """
    of_homes, of_guests = rows[: to.home_rows], rows[to.home_rows :]

    def at_homes() -> Tensor:
        return layer.forward_rows(of_homes, to.home_ends, local_weights(layer))

    if len(of_guests) == 0:
        return at_homes()
    if not torch.is_grad_enabled():
        computed = at_homes()
        guests.wait_for_guests()
        return torch.cat([computed, layer.forward_rows(of_guests, to.guest_ends, guests.weights())])
    first: list[Tensor] = []

    def compute_first() -> None:
        with torch.enable_grad():
            first.append(at_homes())

    by_guests = GuestRows.apply(of_guests, layer, to.guest_ends, guests, compute_first)
    return torch.cat([*first, by_guests])


class GuestRows(torch.autograd.Function):
    """Computes guests on their rows.

    The autograd graph of the layer's function stores no weights: until the backward, the buffer may get another expert,
    and the guest another buffer. `guests` returns the buffers of a turn and accepts gradients.

    `first` is called before anything else. Autograd runs nodes in reverse order of creation, so the computation of
    `first` also precedes the guests in the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, layer: ExpertLayer, offsets: Tensor, guests: Any, first: Callable[[], None]
    ) -> Tensor:
        first()
        guests.wait_for_guests()
        weights: dict[str, Tensor] = guests.weights()
        kept = KeptWeights(weights, guests)
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(kept.pack, kept.unpack):
            inner = rows.detach().requires_grad_(rows.requires_grad)
            leaves = {
                name: weight.detach().requires_grad_(name in guests.trained()) for name, weight in weights.items()
            }
            out = layer.forward_rows(inner, offsets, leaves)
        ctx.of = inner, leaves, out, guests
        return out.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        inner, leaves, out, guests = ctx.of
        guests.wait_for_guests()
        trained = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        inputs = [*([inner] if inner.requires_grad else []), *trained.values()]
        found = list(torch.autograd.grad(out, inputs, grads[0].contiguous()))
        of_rows = found.pop(0) if inner.requires_grad else None
        guests.add_gradients(dict(zip(trained, found, strict=True)))
        ctx.of = None
        return of_rows, None, None, None, None
