"""Opens the session of an ExpertParallel: checks its layers and arguments, and creates its process groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import foremoe
from foremoe._engine.arguments import expect_layers, plan_empty_load
from foremoe._engine.calls import Calls
from foremoe._engine.choice import Choice, cluster_of, known_choice
from foremoe._engine.failures import Channel, Failures
from foremoe._engine.groups import can_make_gloo, expect_backend, make_groups
from foremoe._engine.homes import HomeTable
from foremoe._engine.layers import ExpertLayer
from foremoe._engine.lent import try_lending_layers
from foremoe._engine.ranks import Ranks
from foremoe._engine.session import Session
from foremoe._engine.sharded import is_dtensor
from foremoe._engine.shares import Shares
from foremoe._engine.together import facts_of, refused_together, versions

from .arguments import ExecutorArguments, ranks_of
from .descriptions import descriptions_of
from .routes import Counts
from .spread import expect_no_hooks


@dataclasses.dataclass(frozen=True)
class Opened:
    """Layers and arguments as checked, the latter with homes as plans take them, and ranks with channels."""

    layers: list[ExpertLayer]
    arguments: ExecutorArguments
    ranks: Ranks
    session: Session


def open_session(layers: Iterable[ExpertLayer], arguments: ExecutorArguments) -> Opened:
    """Checks layers and arguments, and creates the channels. Collective over all ranks; raises on all or on none."""
    with refused_together() as given:
        given.expect_equal(versions())
        own = ranks_of(arguments.group, "group")
        among = given.expect_same_group(own)
        given.expect_equal(arguments.compared(), among)
        arguments.expect_executable()
        replicas = arguments.replicas
        checked = list(layers)
        expect_layers(checked, arguments.group)
        expect_no_hooks(checked)
        facts = facts_of(checked)
        given.expect_equal(facts, among)
        weight = next(iter(checked[0].weights().values()))
        expect_backend(arguments.group, weight.device, "layers")
        num_experts, num_ranks = checked[0].num_experts, len(own)
        contiguous = HomeTable.contiguous(len(checked), num_experts, num_ranks)
        ranks = Ranks.of(arguments.group, contiguous, arguments.ranks_per_node, weight.device)
        nothing = load_of(np.zeros((1, len(checked), num_ranks, num_experts), np.int64), checked[0].top_k, ranks)
        table = HomeTable.of(arguments.homes, nothing)
        given.expect_equal({"homes": table.digest}, among)
        if replicas is not None:
            of_replica = arguments.compared_between_replicas() | facts | {"homes": table.digest}
            given.expect_equal(of_replica, f"replicas {replicas}")
        given.told = own, replicas
        if is_dtensor(weight) and not table.is_contiguous:
            raise foremoe.InputError(
                "homes: experts that came as DTensors are at contiguous homes; expected None", field="homes"
            )
        arguments = dataclasses.replace(arguments, homes=table.given())
        ranks = dataclasses.replace(ranks, table=table)
        plan = plan_empty_load(nothing, arguments, table, path=arguments.path)
        if plan.residency == "shared":
            try_lending_layers(checked)
        detected = cluster_of(weight.device)
        given.expect_equal({"detected cluster": str(detected)}, among)
        choice = known_choice(
            arguments, descriptions_of(checked), plan, nothing, cluster=detected, rank=ranks.rank,
            path=arguments.path, dispatch=arguments.dispatch, prefetch_depth=arguments.depth,
            bytes_per_parameter=weight.dtype.itemsize,
        )  # fmt: skip
        by_token = arguments.dispatch == "token" and ranks.num_nodes > 1
        if by_token:
            _expect_relays(ranks)
    grid = replicas_of(own, given.of_all)
    joined, session = _with_channels(ranks, arguments, grid, choice, by_token=by_token)
    return Opened(checked, arguments, joined, session)


def load_of(counts: Counts, top_k: int, ranks: Ranks) -> foremoe.Load:
    """Returns the load of counts, int64 [micro_steps, layers, ranks, experts]."""
    return foremoe.Load.from_array(counts, top_k=top_k, ranks_per_node=ranks.ranks_per_node, name="routes")


def _expect_relays(ranks: Ranks) -> None:
    """Raises InputError unless tokens can be dispatched between and within these ranks' nodes."""
    if ranks.num_ranks % ranks.ranks_per_node:
        raise foremoe.InputError(
            f"dispatch: token needs equally many ranks on all nodes; ranks_per_node {ranks.ranks_per_node} does not "
            f"divide {ranks.num_ranks} ranks",
            field="dispatch",
        )
    if not can_make_gloo(ranks.num_ranks, dist.get_world_size()):
        raise foremoe.InputError(
            f"dispatch: token needs a gloo group, and torch {torch.__version__} cannot make one of {ranks.num_ranks} "
            f"of {dist.get_world_size()} ranks after init_process_group(device_id=…); leave device_id out, or use "
            "torch 2.15",
            field="dispatch",
        )


def _with_channels(
    ranks: Ranks, arguments: ExecutorArguments, grid: list[list[int]], choice: Choice | None, *, by_token: bool
) -> tuple[Ranks, Session]:
    """Creates the groups. Returns ranks with channels, and the session. Collective over all ranks.

    Args:
        ranks: Ranks without channels.
        grid: See Ranks.
        by_token: Whether tokens are dispatched between and within nodes.
    """
    of_all = sorted(rank for group in grid for rank in group)
    copy_group = arguments.copy_group
    replicate_group = None if len(grid) == 1 else arguments.replicate_group
    wanted = _wanted_groups(ranks, arguments, replicate_group, of_all, by_token=by_token)
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
        replicas=replicas,
        everyone=everyone,
        grid=grid,
        agreement=channels.get("agreement"),
        plans=channels.get("plans"),
        across=channels.get("across"),
        within=channels.get("within"),
        relays=channels.get("relays"),
    )
    shares = Shares(joined.plans, arguments.planning(), choice, failures.expect_none)
    announced = Calls(calls[0], failures, calls[1])
    return joined, Session(shares, failures, list(channels.values()), calls=announced)


def _wanted_groups(
    ranks: Ranks, arguments: ExecutorArguments, replicate_group: Any, of_all: list[int], *, by_token: bool
) -> dict[str, tuple[Any, ...]]:
    """Returns the arguments of make_groups(), by the name of the channel. of_all: Ranks of all replicas."""
    backend = ranks.group._get_backend(ranks.device).name()  # get_backend() is "undefined" if the trainer named none
    # On gloo, rows use a separate group, which closes when a rank fails. On NCCL, this group would take memory and
    # could not be closed.
    wanted: dict[str, tuple[Any, ...]] = {"rows": (ranks.group, backend)} if backend == "gloo" else {}
    if arguments.copy_group is None:
        wanted["copies"] = ranks.group, backend
    if arguments.path != "peer":
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
    return wanted


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
