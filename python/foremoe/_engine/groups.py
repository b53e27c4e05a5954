"""Additional process groups. All ranks of the default group create them together, as torch requires.

If init_process_group(device_id=…) created the NCCL communicator of the default group, a new group splits this
communicator. All ranks of the default group must take part, including those outside the new group. Ranks also name a
new group by the number of groups that they have created before.
"""

from __future__ import annotations

import functools
import time
import uuid
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

import foremoe

from .background import at_end
from .together import refused_together, versions

_SPARES_NCCL = (2, 15)  # the first torch in which a new gloo group does not split the default NCCL communicator


_Wanted = tuple[tuple[int, ...], str, int]
"""Ranks, backend, and a number that distinguishes groups of the same ranks and backend."""


def make_groups(wanted: Sequence[tuple[Any, ...]], device: torch.device | str = "cpu") -> tuple[list[Any], str]:
    """Creates a group of the same ranks for each (group, backend). Collective over the default group.

    Also returns a name, the same on all ranks, that no other call returns, even after the default group was initialized
    again with the same store. A new group has the timeout of the given group; the longest if ranks differ.

    Args:
        wanted: Equal on all ranks of a group, in the same order; other ranks may want other groups or none. A list of
            ranks stands for a group that does not exist yet, and has the timeout of the default group or, if the entry
            is (ranks, backend, other), of the other group.
        device: Device of groups with other backends than gloo.

    Raises:
        RuntimeError: on all ranks, before any group is created, if ranks would wait for each other forever.
    """
    _end_after_gloo()
    own: dict[_Wanted, timedelta | None] = {}
    for group, backend, *like in wanted:
        ranks = tuple(group if isinstance(group, list) else dist.get_process_group_ranks(group))
        number = sum(of[:2] == (ranks, backend) for of in own)
        waits_like = like[0] if like else dist.group.WORLD if isinstance(group, list) else group
        own[ranks, backend, number] = _timeout_of(waits_like, torch.device(device))
    of_all: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_all, (own, distributed_c10d.get_pg_count(), uuid.uuid4().hex))
    made: dict[Any, Any] = {of: None for of_rank, *_ in of_all for of in of_rank}  # in the same order on all ranks
    _expect_alike([num_made for _, num_made, _ in of_all])
    _expect_makeable(made, [set(of_rank) for of_rank, *_ in of_all])
    for of in made:
        timeouts = [of_rank[of] for of_rank, *_ in of_all if of_rank.get(of) is not None]
        made[of] = dist.new_group(list(of[0]), timeout=max(timeouts, default=None), backend=of[1])
    for of in own:  # the first operation of a group must be one that all of its ranks take part in
        dist.all_reduce(torch.zeros(1, device="cpu" if of[1] == "gloo" else device), group=made[of])
    return [made[of] for of in own], of_all[0][2]


def _timeout_of(group: Any, device: torch.device) -> timedelta | None:
    """Returns the timeout of a group; None if its backend has none. gloo and NCCL have one."""
    timeout: timedelta | None = getattr(group._get_backend(device).options, "_timeout", None)
    return timeout


def expect_backend(group: Any, device: torch.device, field: str) -> None:
    """Raises InputError unless the group's backend works on the device of the experts. field: argument with them."""
    try:
        group._get_backend(device)
    except RuntimeError as error:
        raise foremoe.InputError(
            f"{field}: experts are on {device}, where the group's backend, {dist.get_backend(group)}, does not work; "
            "move the model to another device before",
            field=field,
        ) from error


@functools.cache
def _end_after_gloo() -> None:
    """Delays the end of this process until gloo's threads have released the tensors that they sent.

    The threads take the interpreter's lock to release tensors. Taking this lock while the interpreter ends aborts a
    process that has finished its work (pytorch/pytorch#179291), unless its groups were destroyed before. Groups of a
    model that is spread, or wrapped in DistributedDataParallel, are not destroyed, because the model refers to them.
    """
    at_end(time.sleep, 0.2)  # sleeps without the lock; the threads need it for microseconds


def stand_by() -> None:
    """Takes part in the creation of an ExpertParallel, on a rank in no expert-parallel group. Collective."""
    with refused_together() as given:
        given.expect_equal(versions())
    make_groups([])


def _expect_alike(num_made: list[int]) -> None:
    """Raises RuntimeError unless all ranks have created equally many groups: torch names groups by this number."""
    others = [rank for rank, of in enumerate(num_made) if of != num_made[0]]
    if others:
        raise RuntimeError(
            f"ranks {others} have made fewer or more process groups than rank 0, so torch would wait forever for the "
            "next one; expected the same number on all ranks, as if all ranks call dist.new_group()"
        )


def can_make_gloo(num_ranks: int, of: int) -> bool:
    """Returns whether make_groups() can create a gloo group of num_ranks out of `of` ranks."""
    splits = tuple(map(int, torch.__version__.split(".")[:2])) < _SPARES_NCCL
    is_bound = getattr(dist.group.WORLD, "bound_device_id", None) is not None
    return not (splits and is_bound and num_ranks < of)


def _expect_makeable(groups: Iterable[Any], of_all: list[set[Any]]) -> None:
    """Raises RuntimeError if torch would wait forever. groups: (ranks, backend, …). of_all: the groups of each rank."""
    for group in groups:
        ranks, backend = group[:2]
        missing = [rank for rank in ranks if group not in of_all[rank]]
        if missing:
            raise RuntimeError(
                f"ranks {missing} do not make the {backend} group of ranks {list(ranks)} that others make; expected "
                "the same arguments on all ranks of a group"
            )
        if backend == "gloo" and not can_make_gloo(len(ranks), len(of_all)):
            raise RuntimeError(
                f"torch {torch.__version__} would wait forever for a gloo group, since the default group was made by "
                "init_process_group(device_id=…); leave device_id out, or use torch 2.15"
            )
