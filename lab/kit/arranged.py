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
from .measured import Measured, turns_of
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
        real = _split(case.load, self.groups)
        loads = _split(_padded(case.load, self.groups), self.groups) if self.padded else real
        formers = [None] * self.groups if case.former is None else _split(case.former, self.groups)
        parts = zip(loads, real, formers, strict=True)
        groups = [self._measure_group(case.of(load, former), of_real) for load, of_real, former in parts]
        if self.groups == 1 and not self.padded:
            return groups[0]
        return {d: Groups.of([group[d] for group in groups]) for d in groups[0]}

    def _measure_group(self, case: Case, real: Load) -> dict[str, Measured]:
        """case: with padded rows, if any. real: the load without them."""
        if self.padded:
            made = self.planned(case, case.load, "row")
            return {"row": Padded(made, real, case.on, made, self.planned(case.of(real, case.former), real, "row"))}
        measured = super().measure(case)
        return {d: InPlace(**vars_of(m)) for d, m in measured.items()} if self.in_place else measured


@dataclass(frozen=True, eq=False)
class Groups(Measured):
    """One system in several expert-parallel groups, each planned separately. Figures are those of the slowest group,
    except ρ, which is over all ranks.

    groups: all groups, in rank order.
    """

    groups: tuple[Measured, ...]
    slowest: Measured

    @staticmethod
    def of(groups: Sequence[Measured]) -> Groups:
        modelled = groups[0].evaluation.cost is not None
        slowest = max(groups, key=lambda group: float(group.seconds)) if modelled else groups[0]
        return Groups(**vars_of(slowest), groups=tuple(groups), slowest=slowest)

    @cached_property
    def figures(self) -> dict[str, Any]:
        return {**self.slowest.figures, "rho": self._rho()}

    def _rho(self) -> dict[str, float]:
        largest = np.max([group.evaluation.plan.max_load for group in self.groups], axis=0)
        total = np.sum([group.load.array.sum((2, 3)) for group in self.groups], axis=0)  # [micro_steps, layers]
        ranks = sum(group.load.num_ranks for group in self.groups)
        rho = (largest[total > 0] * ranks / total[total > 0]) if (total > 0).any() else np.ones(1)
        return {"mean": float(rho.mean()), "p99": float(np.percentile(rho, 99)), "max": float(rho.max())}


@dataclass(frozen=True, eq=False)
class InPlace(Measured):
    """One system in which each replica retains its weights and optimizer state, so a step fetches no weights and sends
    no gradients home. The policy update ends with a ring all-reduce of the replicas' gradients. A layer's ring starts
    when the layer's last backward ends, and overlaps with the backward of earlier layers. Moving replicas between steps
    is not charged.
    """

    @cached_property
    def figures(self) -> dict[str, Any]:
        figures = self.evaluation.figures
        if self.evaluation.cost is None:
            return figures
        placed = self.evaluation.plan.slot_expert[0] >= 0  # [layers, ranks, slots]
        replicas = float(placed.sum()) / (self.load.num_layers * self.load.num_experts)
        slots = float(placed.sum()) / (self.load.num_layers * self.load.num_ranks)
        speed = self.cost["network" if self.load.num_ranks > self.load.ranks_per_node else "peers"]
        bytes_sent = self.cost["expert_gradient_bytes"] * slots / replicas
        ring = 2 * (replicas - 1) * (bytes_sent / speed["bytes_per_second"] + speed["latency_seconds"])
        nothing = {"arena_refresh": 0.0, "exposed_copies": 0.0, "exposed_gradients": 0.0}
        fetched = _with_parts(figures, [nothing, nothing])
        layers: int = self.cost["moe_layers"]
        forward, both = (turns_of(phase) for phase in fetched["phases"])
        backward = (both - forward) / (figures["micro_steps"] * layers)
        exposed = max(ring, layers * ring - (layers - 1) * backward)
        shared = fetched["phases"][1]["parts"]["data_parallel"] + exposed
        return _with_parts(fetched, [{}, {"data_parallel": shared}])


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


def _padded(load: Load, groups: int) -> Load:
    """Raises each cell [micro_step, layer, rank, expert] to the largest of its group, layer and micro-step."""
    steps, layers, ranks, experts = load.array.shape
    cells = load.array.reshape(steps, layers, groups, ranks // groups, experts)
    return like(load, np.broadcast_to(cells.max((3, 4), keepdims=True), cells.shape).reshape(load.array.shape))


def _split(load: Load, count: int) -> list[Load]:
    """Splits a load into `count` expert-parallel groups."""
    if load.num_ranks % count:
        raise InputError(f"{count} groups do not divide {load.num_ranks} ranks")
    return [load] if count == 1 else load.groups(load.num_ranks // count)


def _with_parts(figures: Mapping[str, Any], parts: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Replaces the seconds of some parts of each phase, and adjusts phases and step."""
    phases = []
    for phase, other in zip(figures["phases"], parts, strict=True):
        of_phase = {**phase["parts"], **other}
        phases.append({**phase, "parts": of_phase, "seconds": sum(of_phase.values())})
    step = figures["step_seconds"] + sum(
        after["seconds"] - before["seconds"] for before, after in zip(figures["phases"], phases, strict=True)
    )
    return {**figures, "phases": phases, "step_seconds": step}
