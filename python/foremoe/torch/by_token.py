"""The exchange of one layer's rows by token.

A token crosses once to each node that serves it, to the rank at its source's position there, the relay. The relay
forwards it once to each rank of its node that serves it, and that rank copies it to its slots. Gates travel with the
token. Results return the same way. The serving rank weights them and sums those of a token in the order of its entries,
the relay sums over the ranks of its node and the source over nodes, both ascending; narrow types are summed in float32.

The sum is the transpose of the copies, so each is the other's gradient. Sizes and orders come from relays.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from foremoe._engine.failures import Channel
from foremoe._engine.ranks import Ranks

from .dispatch import SlotRows
from .exchange import AllToAll

_ALIGNMENT = 16  # bytes


@dataclass(frozen=True)
class Fan:
    """Copies of rows: each row has any number of copies."""

    row: Tensor  # int32 [copies], the row that each copy copies
    order: Tensor  # int32 [copies], copies by row
    first: Tensor  # int32 [rows + 1], where the copies of each row begin in `order`

    def copied(self, rows: Tensor) -> Tensor:
        """Returns the copies, [copies, width]."""
        return rows.index_select(0, self.row)

    def summed(self, copies: Tensor) -> Tensor:
        """Returns the sums of each row's copies in a fixed order, [rows, width]."""
        # Unlike index_add() on CUDA, it adds one after the other, and rounds once.
        return torch.nn.functional.embedding_bag(
            self.order, copies.contiguous(), self.first, mode="sum", include_last_offset=True
        )


@dataclass(frozen=True)
class Hop:
    """An exchange of copies within a group of ranks. Split sizes are on the host."""

    fan: Fan
    send: list[int]
    recv: list[int]

    def there(self, rows: Tensor, channel: Channel, after: Any = None) -> Tensor:
        """Sends copies of the rows. Returns those received."""
        return AllToAll.apply(_Copied.apply(rows, self.fan), self.send, self.recv, channel, None, after)  # type: ignore[no-any-return]

    def back(self, received: Tensor, channel: Channel, before: Any = None) -> Tensor:
        """Returns rows to where there() received them from. Returns the sum of each row's copies."""
        return _Summed.apply(AllToAll.apply(received, self.recv, self.send, channel, before, None), self.fan)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class TokenDispatch(SlotRows):
    """Destinations of tokens. Index tensors are on the device."""

    to_relays: Hop
    to_ranks: Hop
    to_slots: Fan
    entries: Tensor  # int64 [rows computed], entry of [tokens received, top_k]


def exchanged_by_token(
    hidden: Tensor,
    gates: Tensor,
    to: TokenDispatch,
    ranks: Ranks,
    compute: Callable[[Tensor], Tensor],
    *,
    dtype: torch.dtype,
    before: Callable[[], None] | None = None,
    after: Callable[[], None] | None = None,
) -> Tensor:
    """Sends tokens to their destinations, and sums the results by gates. The other arguments are those of exchanged().

    dtype: Type of the weights, in which experts compute and gates weight their results.
    """
    assert ranks.across is not None and ranks.within is not None
    # Gates are as exact as by row. Rows have multiples of 16 bytes, as vectorised copies need.
    wide = torch.promote_types(hidden.dtype, dtype)
    padding = -(hidden.shape[1] + gates.shape[1]) % (_ALIGNMENT // wide.itemsize)
    columns = torch.nn.functional.pad(gates.to(wide), (0, padding))
    tokens = torch.cat([hidden.to(wide), columns], 1)
    received = to.to_ranks.there(to.to_relays.there(tokens, ranks.across, after), ranks.within)
    rows, gates_of_rows = _ToSlots.apply(received, to, *gates.shape[1:], hidden.shape[1])
    computed = compute(rows.to(hidden.dtype))
    weighted = computed * gates_of_rows[:, None].to(computed.dtype)
    returned = to.to_ranks.back(_Summed.apply(weighted, to.to_slots), ranks.within)
    return to.to_relays.back(returned, ranks.across, before).to(hidden.dtype)


class _Copied(torch.autograd.Function):
    """Fan.copied(), whose gradient is Fan.summed()."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, fan: Fan) -> Tensor:
        ctx.fan = fan
        return fan.copied(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.fan.summed(grads[0]), None


class _Summed(torch.autograd.Function):
    """Fan.summed(), whose gradient is Fan.copied()."""

    @staticmethod
    def forward(ctx: Any, copies: Tensor, fan: Fan) -> Tensor:
        ctx.fan = fan
        return fan.summed(copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return ctx.fan.copied(grads[0]), None


class _ToSlots(torch.autograd.Function):
    """Copies received tokens, [tokens, hidden + top_k + padding], to rows [rows, hidden] and gates [rows]."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, to: TokenDispatch, top_k: int, hidden: int) -> tuple[Tensor, Tensor]:
        padding = received.shape[1] - hidden - top_k
        ctx.of = to, top_k, padding
        of_tokens, gates, _ = received.split([hidden, top_k, padding], 1)  # type: ignore[no-untyped-call]
        return to.to_slots.copied(of_tokens), gates.reshape(-1)[to.entries]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        to, top_k, padding = ctx.of
        of_rows, of_gates = grads
        of_tokens = to.to_slots.summed(of_rows)
        of_entries = of_gates.new_zeros(len(of_tokens) * top_k).index_copy(0, to.entries, of_gates).view(-1, top_k)
        return torch.cat([of_tokens, torch.nn.functional.pad(of_entries, (0, padding))], 1), None, None, None
