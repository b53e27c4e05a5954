"""Figures of systems that run otherwise than one plan says: `ep_groups`, `in_place`, `padded`, on other routes.

OF_GROUPS in columns.py lists the columns for which the first three are meant. Other routes have all columns but those
that need a plan on its own routes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .._core import Evaluation
from .measured import Measured


@dataclass(frozen=True, eq=False)
class MeasuredGroups(Measured):
    """What one system does in several expert-parallel groups, each planned on its own: a Measured of the group whose
    step is slowest, but for ρ, which is of all ranks.

    The policy update ends in an all-reduce of the gradients of the experts, of which each group has a copy; what the
    last backward does not hide of it is charged.

    groups: all, in the order of their ranks. ranks_per_node: of the whole load; groups in several nodes reduce over the
    network.
    """

    groups: tuple[Measured, ...]
    slowest: Measured
    ranks_per_node: int

    @staticmethod
    def of(groups: Sequence[Measured], ranks_per_node: int) -> MeasuredGroups:
        modelled = groups[0].evaluation.cost is not None
        slowest = max(groups, key=lambda group: float(group.seconds)) if modelled else groups[0]
        whose = (slowest.evaluation, slowest.load, slowest.steps, slowest.planned)
        return MeasuredGroups(*whose, tuple(groups), slowest, ranks_per_node)

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
class MeasuredInPlace(Measured):
    """What one system does where each replica of an expert keeps its own weights and optimizer state, as in training
    with expert data parallelism: nothing is fetched within a step, and gradients do not go home. The policy update ends
    in an all-reduce of the replicas' gradients, as of MeasuredGroups. Moving replicas between steps is not in it.
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
        figures = _with_parts(figures, [nothing, nothing])
        return _with_all_reduce(figures, self.cost, replicas, slots, link)


@dataclass(frozen=True, eq=False)
class MeasuredPadded(Measured):
    """What one system does with padded rows: `evaluation` is of those, `load` is what was padded, and tokens pass all
    that is not experts once, as in `unpadded`.
    """

    unpadded: Evaluation

    @cached_property
    def figures(self) -> dict[str, Any]:
        figures = self.evaluation.figures
        if self.evaluation.cost is None:
            return figures
        return _with_parts(figures, [{"dense": real["parts"]["dense"]} for real in self.unpadded.figures["phases"]])


@dataclass(frozen=True, eq=False)
class MeasuredOnOtherRoutes(Measured):
    """What one system does where routes may be other than recorded, or forecast. Then no plan tells how many rows come,
    so under every policy, ranks gather all ranks' counts by expert between router and dispatch, in every forward of
    every layer. That is part of `dispatch`, and of the ideal step too.
    """

    @cached_property
    def figures(self) -> dict[str, Any]:
        figures = dict(self.evaluation.figures)
        if self.evaluation.cost is None:
            return figures
        seconds = self.gather_seconds
        figures["phases"] = [
            {
                **phase,
                "seconds": phase["seconds"] + seconds,
                "parts": {**phase["parts"], "dispatch": phase["parts"]["dispatch"] + seconds},
            }
            for phase in figures["phases"]
        ]
        for step in ("step_seconds", "ideal_step_seconds", "rl_step_seconds"):
            figures[step] += 2 * seconds
        return self.with_placement(figures)

    @property
    def gather_seconds(self) -> float:
        """Of a phase. None of a system that plans by all counts and has gathered them."""
        seconds: float = self.load.num_micro_steps * self.cost["moe_layers"] * self.cost["gather_seconds"]
        return seconds


def _with_all_reduce(
    figures: Mapping[str, Any], cost: Mapping[str, Any], copies: float, experts: float, link: str
) -> dict[str, Any]:
    """The figures with an update that ends in rings over the copies of each expert, as far as the last micro-step's
    backward does not hide them: a layer's ring begins when its backward is done, and turns beside that of the layers
    before. experts: of a rank in one layer.
    """
    size, speed = cost["expert_gradient_bytes"] * experts, cost[link]
    ring = 2 * (copies - 1) * (size / copies / speed["bytes_per_second"] + speed["latency_seconds"])
    recompute, update = figures["phases"]
    forward, both = (  # without another all-reduce, which is no part and hides nothing
        sum(phase["parts"].values()) - phase["parts"]["arena_refresh"] - phase["parts"]["optimizer"]
        for phase in (recompute, update)
    )
    layers: int = cost["moe_layers"]
    backward = (both - forward) / (figures["micro_steps"] * layers)
    exposed = max(ring, layers * ring - (layers - 1) * backward)
    return _with_phases(figures, [recompute, {**update, "seconds": update["seconds"] + exposed}])


def _with_parts(figures: Mapping[str, Any], parts: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """The figures with other seconds of some parts of each phase."""
    phases = []
    for phase, other in zip(figures["phases"], parts, strict=True):
        of_phase = {**phase["parts"], **other}
        phases.append({**phase, "parts": of_phase, "seconds": sum(of_phase.values())})
    return _with_phases(figures, phases)


def _with_phases(figures: Mapping[str, Any], phases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures with other phases, and a step that is longer or shorter by as much."""
    step = figures["step_seconds"] + sum(
        after["seconds"] - before["seconds"] for before, after in zip(figures["phases"], phases, strict=True)
    )
    return {**figures, "phases": phases, "step_seconds": step}
