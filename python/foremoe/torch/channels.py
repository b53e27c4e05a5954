"""The process groups of an ExpertParallel for rows, copies, plans and agreement."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import foremoe
from foremoe._engine.calls import Calls
from foremoe._engine.failures import Channel, Failures
from foremoe._engine.groups import can_make_gloo, make_groups
from foremoe._engine.ranks import Ranks


def with_channels(
    ranks: Ranks, copy_group: Any, replicate_group: Any, grid: list[list[int]], *, agree: bool, by_token: bool
) -> tuple[Ranks, list[Channel]]:
    """Returns ranks with channels, and the channels that the ExpertParallel closes. Collective over all ranks.

    Args:
        ranks: Ranks without channels.
        copy_group: The user's group for copies. None: creates one.
        replicate_group: The user's group, or None.
        grid: See Ranks.
        agree: Whether ranks agree about copies by the host path.
        by_token: Whether tokens are dispatched between and within nodes.
    """
    backend = ranks.group._get_backend(ranks.device).name()  # get_backend() is "undefined" if the trainer named none
    # On gloo, rows use a separate group, which closes when a rank fails. On NCCL, this group would take memory and
    # could not be closed.
    of_all = sorted(rank for group in grid for rank in group)
    wanted: dict[str, tuple[Any, ...]] = {"rows": (ranks.group, backend)} if backend == "gloo" else {}
    if copy_group is None:
        wanted["copies"] = ranks.group, backend
    if agree:
        wanted["agreement"] = ranks.group, "gloo"
    if ranks.num_ranks > 1 and can_make_gloo(ranks.num_ranks, dist.get_world_size()):
        wanted["plans"] = ranks.group, "gloo"
        if backend != "gloo":
            wanted["calls"] = ranks.group, "gloo"
    if by_token:
        of_group, node = dist.get_process_group_ranks(ranks.group), ranks.ranks_per_node
        wanted["across"] = of_group[ranks.rank % node :: node], backend, ranks.group
        wanted["within"] = of_group[ranks.node * node :][:node], backend, ranks.group
        wanted["relays"] = ranks.group, "gloo"
    if replicate_group is not None and backend == "gloo":
        wanted["replicas"] = replicate_group, backend
    if replicate_group is not None and (backend == "gloo" or len(of_all) < dist.get_world_size()):
        wanted["everyone"] = of_all, backend
    made, name = make_groups(list(wanted.values()), ranks.device)
    channels = {name: Channel(group, is_own=True) for name, group in zip(wanted, made, strict=True)}
    if copy_group is not None:
        # All ranks must participate in the first operation of a group.
        dist.all_reduce(torch.zeros(1, device=ranks.device), group=copy_group)
    copies = channels.get("copies", Channel(copy_group))
    rows = channels.get("rows", Channel(ranks.group))
    replicas = None if replicate_group is None else channels.get("replicas", Channel(replicate_group))
    everyone = rows if replicate_group is None else channels.get("everyone", Channel(dist.group.WORLD))
    every = dict.fromkeys(of for of in (rows, copies, replicas, everyone, *channels.values()) if of is not None)
    failures = Failures(f"{name}/{of_all}", of_all, dist.get_rank(), list(every), ranks.device)
    calls = (channels["calls"], torch.device("cpu")) if "calls" in channels else (copies, ranks.device)
    joined = dataclasses.replace(
        ranks,
        rows=rows,
        copies=copies,
        calls=Calls(calls[0], failures, calls[1]),
        replicas=replicas,
        everyone=everyone,
        grid=grid,
        agreement=channels.get("agreement"),
        plans=channels.get("plans"),
        across=channels.get("across"),
        within=channels.get("within"),
        relays=channels.get("relays"),
        failures=failures,
    )
    return joined, list(channels.values())


def replicas_of(group: list[int], of_all: Sequence[Any]) -> list[list[int]]:
    """Returns the ranks of all replicas of this group, [replica][rank].

    of_all: For each rank of the default group, the ranks of its group and of its replicate group, or None. Raises
    InputError if these do not form a grid.
    """
    for rank, said in enumerate(of_all):
        own, replicas = said or ([rank], None)
        if replicas is None:
            continue
        groups = [of_all[other][0] if of_all[other] else [other] for other in replicas]
        expected = sorted(of_all[other][0] for other in of_all[own[0]][1] or [] if of_all[other])
        if (
            sorted(groups) != expected
            or len({len(of) for of in groups}) > 1
            or any(of.index(other) != own.index(rank) for of, other in zip(groups, replicas, strict=True))
            or any(of_all[other][1] != replicas for other in replicas if of_all[other])
        ):
            raise foremoe.InputError(
                f"replicate_group: ranks {replicas} of rank {rank}, whose group is {own}, are those of groups "
                f"{groups}; expected one rank of each replica of the group, at the same place in it",
                field="replicate_group",
            )
    replicas = of_all[group[0]][1]
    return [group] if replicas is None else sorted(of_all[rank][0] for rank in replicas)
