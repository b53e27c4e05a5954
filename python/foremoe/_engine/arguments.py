"""Argument checks that all executors share: executable options, and layers.

The planner checks the values of its options (plan_empty_load).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import foremoe
from foremoe import _core
from foremoe._variable import RESIDENCIES

from .homes import HomeTable, named_digest
from .layers import ExpertLayer
from .sharded import expect_own_experts, is_dtensor

PHASES = ("recompute", "policy_update")
PRICED = "prefer", "copy_price"  # options that fix how to plan
# Options of foremoe.plan() that do not move homes, except in_flight, which the executor sets.
OPTIONS = {
    "prefer", "copy_price", "free_copies", "tolerance", "stages", "max_copies_per_rank", "max_copies_per_source",
    "min_tokens_per_guest", "seed",
}  # fmt: skip

# Parameters of spread experts, by id. Spreading them again, by any layers, would mistake one rank's experts for all
# experts.
_SPREAD: weakref.WeakValueDictionary[int, torch.nn.Parameter] = weakref.WeakValueDictionary()


def mark_spread(experts: list[torch.nn.Parameter]) -> None:
    _SPREAD.update({id(weight): weight for weight in experts})


def unmark_spread(experts: list[torch.nn.Parameter]) -> None:
    for weight in experts:
        _SPREAD.pop(id(weight), None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanningArguments:
    """Arguments of foremoe.plan(), and other arguments that every executor needs."""

    guest_slots: int
    residency: str | None
    policy: str
    depth: int
    ranks_per_node: int | None
    threads: int = dataclasses.field(compare=False)
    options: dict[str, Any]
    homes: Any = dataclasses.field(default=None, compare=False)  # see foremoe.plan(); compared by their digest
    cluster: str | None = None
    model: str | Mapping[str, Any] | None = None

    @property
    def is_fixed(self) -> bool:
        """Whether the arguments say how to plan, so that nothing is left to choose."""
        is_given = self.residency not in (None, "auto") or any(self.options.get(of) is not None for of in PRICED)
        return is_given or self.policy != "foremoe"

    def compared(self) -> dict[str, str]:
        """Returns the arguments that must be equal on all ranks, by name, as text."""
        fields = [of.name for of in dataclasses.fields(self) if of.compare and of.name != "options"]
        given = {name: getattr(self, name) for name in fields} | self.options
        return {name: repr(value) for name, value in given.items()}

    def planning(self) -> dict[str, Any]:
        """Returns the arguments of foremoe.start_plan()."""
        names = "policy", "guest_slots", "threads", "homes"
        residency = "resident" if self.residency in (None, "auto") else self.residency
        return {name: getattr(self, name) for name in names} | {"residency": residency} | self.options

    def expect_known(self) -> None:
        """Raises InputError for a residency that cannot be executed, and for unknown options."""
        for name in sorted(set(self.options) - OPTIONS):
            raise foremoe.InputError(f"{name}: is not one of {', '.join(sorted(OPTIONS))}", field=name)
        if self.residency not in (None, "auto", *RESIDENCIES):
            raise foremoe.InputError(
                f"residency: '{self.residency}', expected one of {', '.join(RESIDENCIES)}, auto", field="residency"
            )
        if self.residency == "auto" and self.is_fixed:
            raise foremoe.InputError(
                "residency: auto chooses prefer and prices of policy foremoe; expected none of them", field="residency"
            )


def expect_phase(phase: str) -> None:
    """Raises InputError for an unknown phase."""
    if phase not in PHASES:
        raise foremoe.InputError(f"phase: '{phase}', expected {' or '.join(PHASES)}", field="phase")


def plan_empty_load(
    nothing: foremoe.Load,
    arguments: PlanningArguments,
    table: HomeTable,
    *,
    path: str = "peer",
    in_flight: int = 1,
    executes: bool = True,
) -> foremoe.Plan:
    """Plans an empty load. Raises the planner's errors for these arguments and, if `executes`, an executor's.

    nothing: Load without rows, with the same layers, ranks and experts. table: Homes of the model's experts.
    """
    plan = foremoe.start_plan(nothing, in_flight=in_flight, **arguments.planning()).finish()
    if executes:
        expect_executable(plan, table, in_flight)
        foremoe.RankTurns(plan, nothing, rank=0, path=path, depth=arguments.depth)
    return plan


def expect_warm_start(arguments: PlanningArguments) -> None:
    """Raises InputError if planning with these arguments would ignore the plan of an earlier phase."""
    options = {name: of for name, of in arguments.planning().items() if name not in ("policy", "threads", "homes")}
    if why := _core._why_cold(arguments.policy, options):
        raise foremoe.InputError(f"previous: the former plan has no effect: {why}", field="previous")


def expect_same_homes(plan: foremoe.Plan, table: HomeTable, name: str = "plan") -> None:
    """Raises InputError if the plan was made from other homes. name: Argument that has the plan."""
    found = named_digest(plan.homes_digest)
    if plan.home.shape == table.home.shape and found != table.digest:
        raise foremoe.InputError(
            f"{name}: was made from other homes: their digest is {found}, that of these ranks {table.digest}",
            field=name,
        )


def expect_executable(plan: foremoe.Plan, table: HomeTable, in_flight: int = 1) -> None:
    """Raises InputError unless the plan has these homes and in_flight micro-steps are in flight."""
    expect_same_homes(plan, table)
    if plan.residency == "free" or plan.in_flight != in_flight or not np.array_equal(plan.home, table.home):
        raise foremoe.InputError(
            f"policy: {plan.policy} made a plan of residency {plan.residency}, {plan.in_flight} in flight, whose "
            "homes may have moved: it cannot be executed here",
            field="policy",
        )


def expect_layers(layers: list[ExpertLayer], group: Any) -> None:
    """Raises InputError unless all layers are alike and the group's ranks can share their experts."""
    if dist.get_rank(group) < 0:
        raise foremoe.InputError("group: this process is not one of its ranks", field="group")
    if not layers:
        raise foremoe.InputError("layers: there is no MoE layer", field="layers")
    first = layers[0]
    shapes = _shapes(first)
    seen: set[int] = set()
    for i, layer in enumerate(layers):

        def refuse(what: str, i: int = i) -> None:
            raise foremoe.InputError(f"layers[{i}]: {what}", field="layers", index=f"[{i}]")

        if any(_SPREAD.get(id(weight)) is weight for weight in layer.weights().values()):
            refuse("another ExpertParallel has spread its experts; call detach() of that one before")
        own = {id(weight) for weight in layer.weights().values()}
        if own & seen:
            refuse("shares a parameter of its experts with a layer before it; expected experts of its own")
        seen |= own
        if _shapes(layer) != shapes or layer.top_k != first.top_k:
            refuse("is of another shape or type than layer 0")
        expect_own_experts(layer, group)
    for name, (shape, *_) in shapes.items():
        if shape[0] != first.num_experts:
            raise foremoe.InputError(
                f"layers: {name} has {shape[0]} experts, but the layer {first.num_experts}", field="layers"
            )
    num_ranks = dist.get_world_size(group)
    if first.num_experts % num_ranks:
        raise foremoe.InputError(f"group: {num_ranks} ranks must divide {first.num_experts} experts", field="group")


def _shapes(layer: ExpertLayer) -> dict[str, Any]:
    """Returns shape, type and sharding of the experts' parameters, by name."""
    return {name: (tuple(w.shape), w.dtype, is_dtensor(w)) for name, w in layer.weights().items()}
