"""Destinations of the rows of one layer, from the plan or the router's choice.

Planned sizes are known before the layer runs. If the router may choose other experts than recorded, ranks exchange
counts. A recorded row (a token at one of its experts) goes to its planned replica, any other row to its expert's home.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from foremoe._engine.failures import Channel

ON_MISMATCH = ("refuse", "replay", "home")


DISPATCHES = ("row", "token")


@dataclass(frozen=True)
class SlotRows:
    """The rows that this rank computes, sorted by slot."""

    home_rows: int
    home_ends: Tensor  # int32 [homes]
    guest_ends: Tensor  # int32 [guest slots]


@dataclass(frozen=True)
class Dispatch(SlotRows):
    """Destinations of rows. Split sizes are on the host; index tensors are on the device."""

    send: list[int]
    recv: list[int]
    order: Tensor  # int64 [rows sent], entry of [tokens, top_k]
    to_slots: Tensor  # int64 [rows received]
    words: list[int] = field(default_factory=list)  # of all ranks; empty if not exchanged


def chosen_slots(
    planned: Tensor, recorded: Tensor, ids: Tensor, positions: Tensor, *, own: int, slots: int
) -> tuple[Tensor, Tensor]:
    """Returns rank · slots + slot of each row, int64 [tokens, top_k], and whether its expert was recorded, bool.

    Args:
        planned: rank · slots + slot of each recorded row; −1 in rows without a route.
        recorded: Recorded experts, int64 [tokens, top_k].
        ids: Chosen experts, int64 [tokens, top_k].
        positions: Positions of `ids`, rank · own + home slot, int64 [tokens, top_k].
        own: Homes of a rank.
        slots: Slots of a rank.
    """
    same = ids[:, :, None] == recorded[:, None, :]  # [token, chosen, recorded]
    as_recorded = same.any(2)
    home = positions // own * slots + positions % own
    return torch.where(as_recorded, planned.gather(1, same.byte().argmax(2)), home), as_recorded


def dispatch_to(slot: Tensor, *, slots: int, own: int, channel: Channel, word: Tensor | None = None) -> Dispatch:
    """Returns the destinations of rows whose counts ranks must exchange first. Collective; waits for the device.

    Args:
        slot: rank · slots + slot of each row, int64 [tokens, top_k]; −1: not sent.
        slots: Slots of a rank.
        own: Homes of a rank, the first of its slots.
        channel: Channel for rows.
        word: A number of this rank that all ranks receive, int64 []; given on all ranks or on none.
    """
    ranks = dist.get_world_size(channel.group)
    to, order = slot.reshape(-1).sort(stable=True)
    sent = to >= 0
    to, order = to[sent], order[sent]
    counts = torch.bincount(to, minlength=ranks * slots)
    of_target = counts.view(ranks, slots)
    if word is not None:
        of_target = torch.cat([of_target, word.expand(ranks, 1)], 1)
    found = torch.empty_like(of_target)
    dist.all_to_all_single(found, of_target, group=channel.group)
    of_source, words = found[:, :slots], found[:, slots:].flatten()
    received, of_slot = of_source.flatten(), of_source.sum(0)  # [source, slot], [slot]
    sizes = torch.cat(
        [of_target[:, :slots].sum(1), of_source.sum(1), of_slot[:own].sum(0, keepdim=True), words]
    ).tolist()
    send, recv, home_rows = sizes[:ranks], sizes[ranks : 2 * ranks], sizes[2 * ranks]
    slot_of_row = torch.arange(slots, device=slot.device).repeat(ranks).repeat_interleave(received)
    ends = of_slot.cumsum(0)
    return Dispatch(
        send=send,
        recv=recv,
        order=order,
        to_slots=slot_of_row.argsort(stable=True),
        home_rows=home_rows,
        home_ends=ends[:own].to(torch.int32),
        guest_ends=(ends[own:] - home_rows).to(torch.int32),
        words=sizes[2 * ranks + 1 :],
    )
