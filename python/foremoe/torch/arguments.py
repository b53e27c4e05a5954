"""Arguments of ExpertParallel other than its layers, equal on all ranks of its group."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

import torch.distributed as dist

import foremoe
from foremoe._engine import arguments
from foremoe._files import expect

from .dispatch import DISPATCHES


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExecutorArguments(arguments.PlanningArguments):
    """The arguments of ExpertParallel, with the group in place of None."""

    group: Any
    path: str
    dispatch: str
    host_timeout: float
    copy_group: Any
    replicate_group: Any = dataclasses.field(compare=False)  # differs between the ranks of a group

    def compared(self) -> dict[str, str]:
        groups = {"group": self.group, "copy_group": self.copy_group}
        return super().compared() | {name: _named(group) for name, group in groups.items()}

    def compared_between_replicas(self) -> dict[str, str]:
        return {name: value for name, value in self.compared().items() if name not in ("group", "copy_group")}

    def expect_executable(self) -> None:
        """Raises InputError for arguments of another type, or that cannot be executed; for groups without this rank;
        and for a copy_group of other ranks."""
        expect(numbers.Integral, depth=self.depth)
        if self.ranks_per_node is not None:
            expect(numbers.Integral, ranks_per_node=self.ranks_per_node)
        expect(numbers.Real, host_timeout=self.host_timeout)
        self.expect_known()
        if not self.host_timeout > 0:
            raise foremoe.InputError(f"host_timeout: {self.host_timeout}, must be above 0", field="host_timeout")
        if self.dispatch not in DISPATCHES:
            raise foremoe.InputError(f"dispatch: '{self.dispatch}', expected row or token", field="dispatch")
        ranks = ranks_of(self.group, "group")
        if self.copy_group is not None and ranks_of(self.copy_group, "copy_group") != ranks:
            raise foremoe.InputError(
                f"copy_group: {_named(self.copy_group)}; expected the ranks of group, {ranks}", field="copy_group"
            )
        if self.replicate_group is ... and len(ranks) < dist.get_world_size():
            raise foremoe.InputError(
                f"replicate_group: not given, but group has {len(ranks)} of the {dist.get_world_size()} processes; "
                "expected the group of the ranks that hold the same experts as this one, over which their gradients "
                "are averaged, or None where there are no such ranks, as under tensor or pipeline parallelism and "
                "beside ranks that generate, or where your code averages over replicas",
                field="replicate_group",
            )

    @property
    def replicas(self) -> list[int] | None:
        """Ranks that own the same experts, in the default group. None without replicas."""
        if self.replicate_group is None or self.replicate_group is ...:
            return None
        return ranks_of(self.replicate_group, "replicate_group")


def ranks_of(group: Any, name: str) -> list[int]:
    """Returns a group's ranks in the default group. Raises InputError unless this process is one of them."""
    is_group = isinstance(group, dist.ProcessGroup)
    if group is dist.GroupMember.NON_GROUP_MEMBER or (is_group and dist.get_rank(group) < 0):
        raise foremoe.InputError(f"{name}: this process is not one of its ranks", field=name)
    if not is_group:
        raise foremoe.InputError(f"{name}: is a {type(group).__name__}; expected a process group", field=name)
    return dist.get_process_group_ranks(group)


def _named(group: Any) -> str:
    """Returns a group's ranks and unique name, which differs between two groups of the same ranks."""
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        return repr(group)
    return f"{dist.get_process_group_ranks(group)} named {group.group_name}"
