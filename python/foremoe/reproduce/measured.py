"""What one system does on one input, for columns to take figures from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from .. import _core
from .._core import Evaluation, Load
from .gap import Gap, gap_of
from .migration import migration_seconds


@dataclass(frozen=True, eq=False)
class Measured:
    """What takes long to compute is computed when a column asks for it.

    evaluation: with one dispatch. steps: how many steps of equal length the load's micro-steps are. planned: the
    evaluation that made the plan, and so has the time of placement; it may have another dispatch or other routes.
    """

    evaluation: Evaluation
    load: Load
    steps: int
    planned: Evaluation

    @cached_property
    def figures(self) -> dict[str, Any]:
        return self.with_placement(self.evaluation.figures)

    def with_placement(self, figures: dict[str, Any]) -> dict[str, Any]:
        """The figures with the placement of `planned`: nothing was placed for an evaluation of a plan that is there."""
        if self.evaluation.cost is None:
            return figures
        placement = self.planned.figures["placement"]
        placed = figures["step_seconds"] + placement["exposed_seconds"]
        return {**figures, "placement": {**placement, "step_seconds": placed}}

    @cached_property
    def pairs(self) -> dict[str, Any]:
        """Over the (layer, micro-step) pairs with load."""
        return _core._pair_figures(self.evaluation.plan, self.load, False)

    @cached_property
    def sent(self) -> dict[str, Any]:
        """The same, also what is sent: of which source's tokens go to which replica."""
        return _core._pair_figures(self.evaluation.plan, self.load, True)

    @cached_property
    def stability(self) -> dict[str, Any]:
        return _core._load_stability(self.load, self.steps)

    @cached_property
    def forecast_error(self) -> float:
        """Share of tokens, mean over micro-steps and layers from the second step on; NaN of one step."""
        counts = self.load.array.sum(2).astype(float)  # [micro_steps, layers, experts]
        steps = counts.reshape(self.steps, -1, *counts.shape[1:])
        before = steps[:-1].sum(1, keepdims=True)
        total, total_before = (of.sum(-1, keepdims=True) for of in (steps[1:], before))
        known = (total > 0) & (total_before > 0)
        if not known.any():
            return math.nan
        error = np.abs(steps[1:] / np.maximum(total, 1) - before / np.maximum(total_before, 1)).sum(-1) / 2
        return float(error[known[..., 0]].mean())

    @property
    def planning_cpu_seconds(self) -> float:
        """Measured: of every micro-step and of what is done once per step, summed over threads."""
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
        """Of the modelled cluster and model."""
        assert self.evaluation.cost is not None
        return self.evaluation.cost

    def turn_ms(self, seconds: float) -> float:
        """Milliseconds of one layer and micro-step. A simulated phase has all layers of the model."""
        pairs: float = max(1.0, float(self.figures["layers"]) * self.figures["micro_steps"])
        layers_per_layer = float(self.cost["moe_layers"]) / self.load.num_layers
        return 1e3 * seconds / (pairs * layers_per_layer)

    def part_ms(self, part: str) -> float:
        return self.turn_ms(float(self.recompute["parts"][part]))

    @property
    def forward_ms(self) -> float:
        return self.turn_ms(_turns(self.recompute))

    @property
    def backward_ms(self) -> float:
        return self.turn_ms(_turns(self.update)) - self.forward_ms

    @property
    def seconds(self) -> Any:
        return self.figures["step_seconds"]

    @property
    def placement(self) -> Any:
        """Measured seconds of placement, and the modelled step with what of them is not hidden."""
        return self.figures["placement"]

    def migration_seconds(self, first: Measured) -> float:
        """Between steps: from the last placement of the first system to the first one of this system."""
        return migration_seconds(first.evaluation.plan, self.evaluation.plan, self.cost)

    @property
    def overhead(self) -> float:
        """Seconds that copying and planning add to the step."""
        return _overhead(self.recompute["parts"]) + _overhead(self.update["parts"])

    def gap(self, first: Measured) -> Gap:
        return gap_of(self.figures, first.figures, self.evaluation.plan, self.load)

    @property
    def plan_micro_step_ms(self) -> float:
        return float(1e-3 * self.figures["plan_us_per_layer_micro_step"] * self.cost["moe_layers"])

    @property
    def exchange_seconds(self) -> float:
        return float(sum(phase["parts"][part] for phase in self.figures["phases"] for part in ("dispatch", "combine")))

    @property
    def gemm_straggler_ms(self) -> float:
        seconds: float = self.recompute["parts"]["experts"] - self.recompute["mean_expert_seconds"]
        return self.turn_ms(seconds)


def _turns(phase: dict[str, Any]) -> float:
    seconds: float = phase["seconds"] - phase["parts"]["arena_refresh"] - phase["parts"]["optimizer"]
    return seconds


def _overhead(parts: dict[str, float]) -> float:
    return parts["arena_refresh"] + parts["planning"] + parts["exposed_copies"] + parts["exposed_gradients"]
