"""The evaluation of one system on one case. Columns read their figures from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from foremoe import Evaluation, Load, _core

from .inputs import Input


@dataclass(frozen=True, eq=False)
class Measured:
    """One system on one case. Expensive figures are computed when a column first reads them.

    evaluation: with one dispatch. planned: the evaluation that made the plan. It has the placement time; its dispatch
    or routes may differ.
    """

    evaluation: Evaluation
    load: Load
    on: Input
    planned: Evaluation

    @cached_property
    def figures(self) -> dict[str, Any]:
        return self.evaluation.figures

    @cached_property
    def pairs(self) -> dict[str, Any]:
        """Figures over the (layer, micro-step) pairs with load."""
        return _core._pair_figures(self.evaluation.plan, self.load, False)

    @cached_property
    def sent(self) -> dict[str, Any]:
        """`pairs` plus sent tokens; computes the tokens that each source sends to each replica."""
        return _core._pair_figures(self.evaluation.plan, self.load, True)

    @property
    def planning_cpu_seconds(self) -> float:
        """Measured CPU time of all planning, per micro-step and once per step, summed over threads."""
        times = self.evaluation.plan.times
        return times.base_cpu_seconds + times.planning_cpu_seconds

    @property
    def recompute(self) -> Any:
        return self.figures["phases"][0]

    @property
    def update(self) -> Any:
        return self.figures["phases"][1]

    @property
    def cost(self) -> dict[str, Any]:
        """Cost parameters of the modelled cluster and model."""
        assert self.evaluation.cost is not None
        return self.evaluation.cost

    @property
    def seconds(self) -> float:
        """Time of the modelled step."""
        return float(self.figures["step_seconds"])

    @property
    def placement(self) -> dict[str, float]:
        """Measured placement time of `planned`. Evaluating an existing plan again does not place experts."""
        placement: dict[str, float] = self.planned.figures["placement"]
        return placement

    @property
    def placed_seconds(self) -> float:
        """Step time including placement that the rollout's tail does not hide."""
        return self.seconds + self.placement["exposed_seconds"]

    @property
    def overhead(self) -> float:
        """Seconds that copying and planning add to the step."""
        names = ("arena_refresh", "planning", "exposed_copies", "exposed_gradients")
        return self.of_both(*names)

    def of_both(self, *names: str) -> float:
        """Sums the named figures or parts over both phases."""
        phases = [{**phase, **phase["parts"]} for phase in self.figures["phases"]]
        return float(sum(phase[name] for phase in phases for name in names))

    def turn_ms(self, seconds: float) -> float:
        """Milliseconds per layer and micro-step, from a phase's seconds over all layers of the model."""
        pairs = max(1.0, float(self.figures["layers"]) * self.figures["micro_steps"])
        milliseconds: float = 1e3 * seconds / (pairs * float(self.cost["moe_layers"]) / self.load.num_layers)
        return milliseconds

    def part_ms(self, part: str) -> float:
        return self.turn_ms(float(self.recompute["parts"][part]))

    @property
    def forward_ms(self) -> float:
        return self.turn_ms(turns_of(self.recompute))

    @property
    def backward_ms(self) -> float:
        return self.turn_ms(turns_of(self.update)) - self.forward_ms


@dataclass(frozen=True, eq=False)
class Gathering(Measured):
    """One system whose plan does not give the row counts. In every forward of every layer, ranks gather all ranks'
    counts per expert between router and dispatch. The gather time is added to `dispatch` and to the ideal step.
    """

    @cached_property
    def figures(self) -> dict[str, Any]:
        figures = dict(self.evaluation.figures)
        if self.evaluation.cost is None:
            return figures
        seconds: float = self.load.num_micro_steps * self.cost["moe_layers"] * self.cost["gather_seconds"]
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
        return figures


def turns_of(phase: dict[str, Any]) -> float:
    """Seconds of a phase without what precedes its first turn and follows its last."""
    outside = ("arena_refresh", "optimizer", "data_parallel")
    seconds: float = phase["seconds"] - sum(phase["parts"][name] for name in outside)
    return seconds
