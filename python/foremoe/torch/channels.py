"""The process groups over which the ranks of an ExpertParallel send rows and copies, and agree."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from foremoe._engine.calls import Calls
from foremoe._engine.failures import Channel, Failures
from foremoe._engine.groups import groups_made, make_groups
from foremoe._engine.ranks import Ranks


def with_channels(ranks: Ranks, copy_group: Any, *, agree: bool) -> tuple[Ranks, list[Channel]]:
    """The ranks with channels of their own, and those of these that end with the ExpertParallel. Collective over the
    default group.

    copy_group: the user's, for copies; None: one is made. agree: whether ranks agree about copies by the host path.
    """
    backend = dist.get_backend(ranks.group)
    # On gloo rows have a group of their own, which ends when a rank fails. On NCCL one would take memory, and would not
    # end.
    wanted = {"rows": backend} if backend == "gloo" else {}
    if copy_group is None:
        wanted["copies"] = backend
    if agree:
        wanted["agreement"] = "gloo"
    made = make_groups([(ranks.group, of) for of in wanted.values()], ranks.device)
    channels = {name: Channel(group, is_own=True) for name, group in zip(wanted, made, strict=True)}
    if copy_group is not None:
        # The first operation of a group must be one that all ranks take part in.
        dist.all_reduce(torch.zeros(1, device=ranks.device), group=copy_group)
    of_default = dist.get_process_group_ranks(ranks.group)
    failures = Failures(f"{groups_made()}/{of_default}", of_default, dist.get_rank(), list(channels.values()))
    copies = channels.get("copies", Channel(copy_group))
    joined = dataclasses.replace(
        ranks,
        rows=channels.get("rows", Channel(ranks.group)),
        copies=copies,
        calls=Calls(copies, failures, ranks.device),
        agreement=channels.get("agreement"),
        failures=failures,
    )
    return joined, list(channels.values())
