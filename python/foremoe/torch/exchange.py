"""Rows on their way to the ranks that compute them, and back; experts' guests on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from foremoe._engine.layers import ExpertLayer
from foremoe._engine.lent import KeptWeights
from foremoe._engine.sharded import local_weights
from foremoe._engine.together import Channel

from .dispatch import Dispatch


class AllToAll(torch.autograd.Function):
    """Rows to other ranks, by split sizes that both sides know; gradients come back the same way.

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
    """Sends rows to where they are computed, and adds up what comes back, by gates: [tokens, hidden].

    hidden: [tokens, hidden]. gates: [tokens, top_k]. compute: of this rank's slots, [rows received, hidden], those of a
    slot side by side. before, after: called in the backward pass, before its first exchange and after its last.
    """
    token = to.order // gates.shape[1]
    # The dispatch is the last of the layer's backward, the combine the first.
    received = AllToAll.apply(hidden[token], to.send, to.recv, channel, None, after)[to.to_slots]
    computed = compute(received)
    back = torch.empty_like(computed).index_copy(0, to.to_slots, computed)
    returned = AllToAll.apply(back, to.recv, to.send, channel, before, None)
    weighted = returned * gates.reshape(-1)[to.order, None].to(returned.dtype)
    # The rows of a token are summed in a fixed order, in float32 where they are narrower, as in transformers. On CUDA,
    # index_add() would add them in any order and round each sum.
    of_tokens = weighted.new_zeros(gates.numel(), hidden.shape[1]).index_copy(0, to.order, weighted)
    out: Tensor = of_tokens.view(*gates.shape, hidden.shape[1]).sum(1).to(hidden.dtype)
    return out


def computed_in_slots(rows: Tensor, to: Dispatch, layer: ExpertLayer, guests: Any) -> Tensor:
    """This rank's experts on their rows, then guests on theirs; so also in the backward pass, since copies of guests
    overlap with the experts at home.

    rows: [rows, hidden], as `to` orders them. guests: as GuestRows takes it. Returns [rows, hidden].
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
    """Guests' experts on their rows.

    The graph of the layer's own function is kept, but not the weights in it: a buffer may be lent to another expert
    between forward and backward, and then holds the guest again elsewhere. `guests` says where a turn finds them, and
    takes their gradients.

    `first` is called before anything else. Autograd runs the nodes that were made last first: what `first` computes
    comes before the guests in the backward pass too.
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
