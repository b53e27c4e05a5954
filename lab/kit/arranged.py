"""Training systems of FineMoE's comparison: several expert-parallel groups, replicas with separate weights, and padded
rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from foremoe import Evaluation, InputError, Load

from .inputs import Case, like
from .measured import Measured
from .systems import System

DEFINED = {
    *("rho_mean", "rho_max", "speedup", "update_speedup", "step_ms", "update_ms", "recompute_ms", "forward_ms"),
    *("dispatch_ms", "planning_ms", "experts_ms", "combine_ms", "migration_ms", "migration_of_50", "migration_pays"),
}  # columns; all others need a single plan


class Arranged(System):
    """groups: number of expert-parallel groups of consecutive ranks; each has all experts and is planned separately.
    in_place: replicas retain their weights and optimizer state, see InPlace. padded: in each layer and micro-step,
    every source pads its rows for each expert to the largest (source, expert) cell of the group. Needs dispatch by row,
    since padding is not tokens.
    """

    def __init__(
        self,
        label: str,
        policy: str = "",
        *,
        groups: int = 1,
        in_place: bool = False,
        padded: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(label, policy, columns=DEFINED, **options)
        self.groups, self.in_place, self.padded = groups, in_place, padded

    def measure(self, case: Case) -> dict[str, Measured]:
        if self.groups > 1 and not case.on.estimated and "token" in case.on.by_dispatch:
            raise InputError(f"{self.label}: by token on a trace, but groups are counted without their tokens")
        formers = [None] * self.groups if case.former is None else _split(case.former, self.groups)
        parts = zip(_split(case.load, self.groups), formers, strict=True)
        groups = [self._measure_group(case.of(load, former)) for load, former in parts]
        if self.groups == 1 and not self.padded:
            return groups[0]
        return {d: Groups.of([group[d] for group in groups], case.load.ranks_per_node) for d in groups[0]}

    def _measure_group(self, case: Case) -> dict[str, Measured]:
        if self.padded:
            by_row = case.of(_padded(case.load), case.former)
            made = self.planned(by_row, by_row.load, "row")
            real = self.planned(case, case.load, "row")
            return {"row": Padded(made, case.load, case.on, made, real)}
        measured = super().measure(case)
        return {d: InPlace(**vars_of(m)) for d, m in measured.items()} if self.in_place else measured


@dataclass(frozen=True, eq=False)
class Groups(Measured):
    """One system in several expert-parallel groups, each planned separately. Figures are those of the slowest group,
    except ρ, which is over all ranks.

    Each group has a copy of every expert, so the policy update ends with an all-reduce of expert gradients. The part of
    the all-reduce that the last backward does not hide is charged.

    groups: all groups, in rank order. ranks_per_node: of the whole load; groups in several nodes reduce over the
    network.
    """

    groups: tuple[Measured, ...]
    slowest: Measured
    ranks_per_node: int

    @staticmethod
    def of(groups: Sequence[Measured], ranks_per_node: int) -> Groups:
        modelled = groups[0].evaluation.cost is not None
        slowest = max(groups, key=lambda group: float(group.seconds)) if modelled else groups[0]
        return Groups(**vars_of(slowest), groups=tuple(groups), slowest=slowest, ranks_per_node=ranks_per_node)

    @cached_property
    def figures(self) -> dict[str, Any]:
        figures = {**self.slowest.figures, "rho": self._rho()}
        if self.evaluation.cost is None:
            return figures
        count = len(self.groups)
        experts = self.load.num_experts / self.load.num_ranks
        link = "network" if self.load.num_ranks * count > self.ranks_per_node else "peers"
        return _with_all_reduce(figures, self.cost, count, experts, link)

    def _rho(self) -> dict[str, float]:
        largest = np.max([group.evaluation.plan.max_load for group in self.groups], axis=0)
        total = np.sum([group.load.array.sum((2, 3)) for group in self.groups], axis=0)  # [micro_steps, layers]
        ranks = sum(group.load.num_ranks for group in self.groups)
        rho = (largest[total > 0] * ranks / total[total > 0]) if (total > 0).any() else np.ones(1)
        return {"mean": float(rho.mean()), "p99": float(np.percentile(rho, 99)), "max": float(rho.max())}


@dataclass(frozen=True, eq=False)
class InPlace(Measured):
    """One system in which each replica retains its weights and optimizer state, so a step fetches no weights and sends
    no gradients home. The policy update ends with an all-reduce of the replicas' gradients, as in Groups. Moving
    replicas between steps is not charged.
    """

    @cached_property
    def figures(self) -> dict[str, Any]:
        figures = self.evaluation.figures
        if self.evaluation.cost is None:
            return figures
        placed = self.evaluation.plan.slot_expert[0] >= 0  # [layers, ranks, slots]
        replicas = float(placed.sum()) / (self.load.num_layers * self.load.num_experts)
        slots = float(placed.sum()) / (self.load.num_layers * self.load.num_ranks)
        link = "network" if self.load.num_ranks > self.load.ranks_per_node else "peers"
        nothing = {"arena_refresh": 0.0, "exposed_copies": 0.0, "exposed_gradients": 0.0}
        return _with_all_reduce(_with_parts(figures, [nothing, nothing]), self.cost, replicas, slots, link)


@dataclass(frozen=True, eq=False)
class Padded(Measured):
    """One system with padded rows. `evaluation` has the padded rows, and `load` the rows before padding. Only experts
    compute padding, so the time of dense layers is that of `unpadded`.
    """

    unpadded: Evaluation

    @cached_property
    def figures(self) -> dict[str, Any]:
        figures = self.evaluation.figures
        if self.evaluation.cost is None:
            return figures
        return _with_parts(figures, [{"dense": real["parts"]["dense"]} for real in self.unpadded.figures["phases"]])


def vars_of(measured: Measured) -> dict[str, Any]:
    """The fields that all subclasses of Measured share."""
    return {name: getattr(measured, name) for name in ("evaluation", "load", "on", "planned")}


def _padded(load: Load) -> Load:
    """Raises each cell [micro_step, layer, rank, expert] to the largest of its layer and micro-step."""
    return like(load, np.broadcast_to(load.array.max((2, 3), keepdims=True), load.array.shape))


def _split(load: Load, count: int) -> list[Load]:
    """Splits a load into `count` expert-parallel groups, each with all experts and its ranks' tokens."""
    if load.num_ranks % count or load.num_experts % (load.num_ranks // count):
        raise InputError(f"{count} groups do not divide {load.num_ranks} ranks and {load.num_experts} experts")
    return [load] if count == 1 else [like(load, part) for part in np.split(load.array, count, axis=2)]


def _with_all_reduce(
    figures: Mapping[str, Any], cost: Mapping[str, Any], copies: float, experts: float, link: str
) -> dict[str, Any]:
    """Adds the exposed part of a ring all-reduce over the copies of each expert to the policy update. A layer's ring
    starts when the layer's last backward ends, and overlaps with the backward of earlier layers. experts: number per
    rank in one layer.
    """
    size, speed = cost["expert_gradient_bytes"] * experts, cost[link]
    ring = 2 * (copies - 1) * (size / copies / speed["bytes_per_second"] + speed["latency_seconds"])
    recompute, update = figures["phases"]
    forward, both = (  # excludes an earlier all-reduce, which is not in `parts` and hides nothing
        sum(phase["parts"].values()) - phase["parts"]["arena_refresh"] - phase["parts"]["optimizer"]
        for phase in (recompute, update)
    )
    layers: int = cost["moe_layers"]
    backward = (both - forward) / (figures["micro_steps"] * layers)
    exposed = max(ring, layers * ring - (layers - 1) * backward)
    return _with_phases(figures, [recompute, {**update, "seconds": update["seconds"] + exposed}])


def _with_parts(figures: Mapping[str, Any], parts: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Replaces the seconds of some parts of each phase."""
    phases = []
    for phase, other in zip(figures["phases"], parts, strict=True):
        of_phase = {**phase["parts"], **other}
        phases.append({**phase, "parts": of_phase, "seconds": sum(of_phase.values())})
    return _with_phases(figures, phases)


def _with_phases(figures: Mapping[str, Any], phases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Replaces the phases and adjusts the step time by the difference."""
    step = figures["step_seconds"] + sum(
        after["seconds"] - before["seconds"] for before, after in zip(figures["phases"], phases, strict=True)
    )
    return {**figures, "phases": phases, "step_seconds": step}
