"""The figures that an experiment's table can have.

Exact figures are counted in loads and plans, modelled ones come from a replay on a modelled cluster, and what is
measured here is time on the machine that runs this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from .. import _core
from .._core import Evaluation, Load
from .gap import Gap, gap_of
from .migration import migration_seconds

Origin = Literal["exact", "modelled", "measured here"]
ORIGINS: tuple[Origin, ...] = ("exact", "modelled", "measured here")


def ratio(of: float, to: float) -> float:
    """of ÷ to; infinite or NaN where `to` is 0."""
    return of / to if to else of * math.inf


def fixed(figure: float, decimals: int) -> str:
    """As tables show it: never −0, and – for NaN."""
    return "–" if math.isnan(figure) else f"{round(figure, decimals) + 0.0:.{decimals}f}"


@dataclass(frozen=True, eq=False)
class Measured:
    """What one system does on one input. What takes long to compute is computed when a column asks for it.

    steps: how many steps of equal length the load's micro-steps are.
    """

    evaluation: Evaluation
    load: Load
    steps: int

    @cached_property
    def figures(self) -> dict[str, Any]:
        return self.evaluation.figures

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
        return self.figures["stages"][0]

    @property
    def update(self) -> Any:
        return self.figures["stages"][1]

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
        return float(sum(stage["parts"][part] for stage in self.figures["stages"] for part in ("dispatch", "combine")))

    @property
    def gemm_straggler_ms(self) -> float:
        seconds: float = self.recompute["parts"]["experts"] - self.recompute["mean_expert_seconds"]
        return self.turn_ms(seconds)


def _turns(phase: dict[str, Any]) -> float:
    seconds: float = phase["seconds"] - phase["parts"]["arena_refresh"] - phase["parts"]["optimizer"]
    return seconds


def _overhead(parts: dict[str, float]) -> float:
    return parts["arena_refresh"] + parts["planning"] + parts["exposed_copies"] + parts["exposed_gradients"]


def _busiest_link(phase: dict[str, Any]) -> int:
    return max((bytes_sent for row in phase["between_nodes"] for bytes_sent in row), default=0)


def _gib(size: int) -> float:
    return size / (1 << 30)


def _guest_bytes(memory: dict[str, int]) -> int:
    return memory["guest_weights"] + memory["guest_gradients"]


def _percent_less(first: float, of: float) -> float:
    return 0.0 if first == 0 else 100 * (first - of) / first


@dataclass(frozen=True)
class Column:
    """name: in files. title: in tables. is_relative: whether it compares with the first system.

    of: the figure of a system, beside the first one; NaN where it compares and the first one was skipped.
    """

    name: str
    title: str
    digits: int
    meaning: str
    is_relative: bool
    of: Callable[[Measured, Measured | None], float]
    origin: Origin = "exact"
    needs_model: bool = False  # and a cluster

    def over_steps(self, figures: Sequence[float]) -> float:
        """Of an input whose steps are planned one by one: their mean, or their largest where that is what it tells."""
        return max(figures) if self.name in _LARGEST else math.fsum(figures) / len(figures)


def _own(name: str, title: str, digits: int, meaning: str, value: Callable[[Measured], float]) -> Column:
    """A figure of the system alone."""
    return Column(name, title, digits, meaning, False, lambda measured, first: float(value(measured)))


def _versus_first(
    name: str, title: str, digits: int, meaning: str, value: Callable[[Measured, Measured], float]
) -> Column:
    """A figure that compares with the first system."""
    return Column(name, title, digits, meaning, True, lambda m, first: float(value(m, first)) if first else math.nan)


# fmt: off
_EXACT = [
    _own("rho_mean", "ρ mean", 4, "largest rank load ÷ mean, mean over layers and micro-steps",
         lambda m: m.figures["rho"]["mean"]),
    _own("rho_p99", "ρ p99", 4, "its 99th percentile", lambda m: m.figures["rho"]["p99"]),
    _own("rho_max", "ρ max", 4, "its largest value", lambda m: m.figures["rho"]["max"]),
    _own("below_1.1", "ρ < 1.1, %", 1, "share of (layer, micro-step) pairs",
         lambda m: 100 * m.pairs["share_of_bucket"][0]),
    _own("below_1.3", "1.1 to 1.3, %", 1, "share of pairs", lambda m: 100 * m.pairs["share_of_bucket"][1]),
    _own("below_1.5", "1.3 to 1.5, %", 1, "share of pairs", lambda m: 100 * m.pairs["share_of_bucket"][2]),
    _own("below_2", "1.5 to 2, %", 1, "share of pairs", lambda m: 100 * m.pairs["share_of_bucket"][3]),
    _own("from_2", "ρ ≥ 2, %", 1, "share of pairs", lambda m: 100 * m.pairs["share_of_bucket"][4]),
    _own("straggler", "straggler", 0, "tokens of the busiest rank above the mean, mean over pairs",
         lambda m: m.pairs["straggler"]),
    _versus_first("straggler_less", "straggler, % less", 1, "than the first system's",
         lambda m, first: _percent_less(first.pairs["straggler"], m.pairs["straggler"])),
    _own("waste", "waste, %", 1, "(max − mean) ÷ max rank load, mean over pairs", lambda m: 100 * m.pairs["waste"]),
    _own("copies", "copies", 1, "expert weights moved per layer and event, whole group",
         lambda m: m.figures["copies_per_layer_event"]),
    _own("copies_warm", "copies, warm", 1, "the same after the first event",
         lambda m: m.pairs["copies_after_first_event"]),
    _own("guests", "guests", 1, "experts that serve tokens away from home, per layer and event",
         lambda m: m.figures["guests_per_layer"]),
    _own("home_moves", "home moves", 0, "experts whose owner changed, all layers", lambda m: m.figures["home_moves"]),
    _own("node_link", "node link", 0, "tokens of the busiest node's link to others, mean over pairs",
         lambda m: m.figures["node_link_tokens"]["mean"]),
    _own("node_link_max", "node link max", 0, "the same, largest", lambda m: m.figures["node_link_tokens"]["max"]),
    _versus_first("node_link_of_first", "node link max ÷ first", 3, "its largest ÷ the first system's",
         lambda m, first: m.figures["node_link_tokens"]["max"] / max(1.0, first.figures["node_link_tokens"]["max"])),
    _own("sent", "sent, no locality", 0,
         "tokens that the busiest rank sends or receives when replicas are filled by rank",
         lambda m: m.sent["sent_without_locality"]),
    _own("sent_rank", "sent, rank first", 0, "the same when a source fills its own replicas first",
         lambda m: m.sent["sent_with_rank_locality"]),
    _own("sent_node", "sent, node next", 0, "the same when then those of its node follow",
         lambda m: m.sent["sent_with_node_locality"]),
    _own("between_nodes", "between nodes", 0, "so routed, tokens that the busiest node sends or receives",
         lambda m: m.sent["between_nodes"]),
    _own("hottest", "hottest expert", 2, "tokens of a step's most popular expert ÷ mean",
         lambda m: m.stability["hottest"]),
    _own("step_change", "change of step, %", 1, "share of tokens that go to other experts than in the step before",
         lambda m: 100 * m.stability["step_change"]),
    _own("micro_step_change", "change of micro-step, %", 1, "the same from micro-step to micro-step",
         lambda m: 100 * m.stability["micro_step_change"]),
    _own("forecast_error", "error of forecast, %", 1,
         "share of a micro-step's tokens that go to other experts than the mean of the step before tells",
         lambda m: 100 * m.forecast_error),
]
_MEASURED = [
    _own("all_plan_us", "all planning, µs", 0,
         "CPU time of all planning, also what is done once per step, ÷ (layers × micro-steps)",
         lambda m: 1e6 * m.planning_cpu_seconds / max(1, m.figures["layers"] * m.figures["micro_steps"])),
    _own("plan_seconds", "planning, s", 3, "of the whole step, wall clock", lambda m: m.figures["plan_seconds"]),
]
_MEASURED_OF_MODEL = [
    _own("plan_micro_step_ms", "planning, ms a micro-step", 2,
         "CPU time of all the model's layers, without what is done once per step", lambda m: m.plan_micro_step_ms),
    _own("plan_step_ms", "planning, ms a step", 1, "CPU time of all planning of the step, of all the model's layers",
         lambda m: 1e3 * m.planning_cpu_seconds * m.cost["moe_layers"] / max(1, m.figures["layers"])),
    _own("placement_s", "placement, s", 2, "planning before the first micro-step, all layers, CPU time ÷ threads",
         lambda m: m.placement["seconds"]),
    _own("exposed_placement_s", "after the rollout, s", 2, "what of placement the rollout's tail does not hide",
         lambda m: m.placement["exposed_seconds"]),
    _versus_first("placed_speedup", "speedup, placed", 3, "with what of placement the rollout's tail does not hide",
         lambda m, first: ratio(first.placement["step_seconds"], m.placement["step_seconds"])),
    _versus_first("gap_planning_ms", "+ planning", 1, "on the critical path, and placement that no rollout hides",
         lambda m, first: 1e3 * m.gap(first).planning),
    _own("placed_step_ms", "= step, placed, ms", 1, "the step with what of placement the rollout's tail does not hide",
         lambda m: 1e3 * m.placement["step_seconds"]),
    _own("of_free_placed", "of opt, placed, %", 1, "of opt, with what of placement the rollout's tail does not hide",
         lambda m: ratio(100 * (m.seconds - m.overhead), m.placement["step_seconds"])),
]
_MODELLED = [
    _versus_first("speedup", "speedup", 3,
         "step time of the first system ÷ this one's; a step is recompute and policy update",
         lambda m, first: ratio(first.seconds, m.seconds)),
    _versus_first("update_speedup", "training speedup", 3,
         "time of the policy update (forward and backward) of the first system ÷ this one's",
         lambda m, first: ratio(first.update["seconds"], m.update["seconds"])),
    _versus_first("ideal_speedup", "ideal speedup", 3,
         "were every rank at the mean load and mean traffic of this system, and nothing copied",
         lambda m, first: ratio(first.seconds, m.figures["ideal_step_seconds"])),
    _own("of_ideal", "of ideal, %", 1, "ideal step time ÷ step time",
         lambda m: ratio(100 * m.figures["ideal_step_seconds"], m.seconds)),
    _versus_first("of_perfect", "of perfect, %", 1,
         "first system's step were all ranks at the mean ÷ step time; above 100 where less is sent",
         lambda m, first: ratio(100 * first.figures["ideal_step_seconds"], m.seconds)),
    _versus_first("free_speedup", "speedup, opt", 3, "were planning and transfer free",
         lambda m, first: ratio(first.seconds, m.seconds - m.overhead)),
    _own("of_free", "of opt, %", 1, "step time with planning and transfer free ÷ step time",
         lambda m: 100 * (1 - ratio(m.overhead, m.seconds))),
    _versus_first("rl_speedup", "RL step speedup", 3, "with the rollout, which takes as long whoever plans",
         lambda m, first: ratio(first.figures["rl_step_seconds"], m.figures["rl_step_seconds"])),
    _own("step_ms", "step, ms", 1, "recompute and policy update", lambda m: 1e3 * m.seconds),
    _versus_first("gap_ideal_ms", "ideal, ms", 1,
         "every rank has the mean load and the first system's mean traffic, and nothing is copied; the columns with + "
         "add up from there to the step with placement",
         lambda m, first: 1e3 * m.gap(first).ideal),
    _versus_first("gap_whole_tokens_ms", "+ whole tokens", 1, "a rank with the mean, rounded up to a token",
         lambda m, first: 1e3 * m.gap(first).whole_tokens),
    _versus_first("gap_slots_ms", "+ slots", 1, "tokens that the plan leaves on the busiest rank beyond that",
         lambda m, first: 1e3 * m.gap(first).slots),
    _versus_first("gap_replicas_ms", "+ replicas", 1,
         "what else the slowest rank's experts take: replicas read weights of their own and fill tiles in part",
         lambda m, first: 1e3 * m.gap(first).replicas),
    _versus_first("gap_copies_ms", "+ copies", 1, "exposed copies and gradients, arenas filled, homes moved",
         lambda m, first: 1e3 * m.gap(first).copies),
    _versus_first("gap_exchange_ms", "+ exchange", 1,
         "beyond that of ideal; negative where the plan sends less than the first system's",
         lambda m, first: 1e3 * m.gap(first).exchange),
    _own("recompute_ms", "recompute, ms", 1, "stage time", lambda m: 1e3 * m.recompute["seconds"]),
    _own("update_ms", "policy update, ms", 1, "stage time", lambda m: 1e3 * m.update["seconds"]),
    _own("exposed_ms", "exposed, ms", 2, "of both stages, waited for copies and gradients",
         lambda m: 1e3 * m.figures["exposed_copy_seconds"]),
    _own("forward_ms", "forward, ms", 3, "of a layer and micro-step", lambda m: m.forward_ms),
    _own("backward_ms", "backward, ms", 3, "of a layer and micro-step",
         lambda m: m.turn_ms(_turns(m.update)) - m.forward_ms),
    _own("dense_ms", "attention, ms", 3, "attention, norms, router and shared experts of a layer's forward",
         lambda m: m.part_ms("dense")),
    _own("planning_ms", "planning, ms", 3,
         "on the critical path of a layer's forward: as published, or by the number of slots",
         lambda m: m.part_ms("planning")),
    _own("dispatch_ms", "dispatch, ms", 3, "of a layer's forward", lambda m: m.part_ms("dispatch")),
    _own("experts_ms", "experts, ms", 3, "of a layer's forward", lambda m: m.part_ms("experts")),
    _own("gemm_straggler_ms", "GEMM straggler, ms", 3,
         "seconds that the slowest rank's experts take above the mean rank's, in a layer's forward",
         lambda m: m.gemm_straggler_ms),
    _versus_first("gemm_straggler_less", "GEMM straggler, % less", 1, "than the first system's",
         lambda m, first: _percent_less(first.gemm_straggler_ms, m.gemm_straggler_ms)),
    _own("combine_ms", "combine, ms", 3, "of a layer's forward", lambda m: m.part_ms("combine")),
    _own("transfer_ms", "transfer, ms", 3, "of a layer: copies into the rank that receives most, over the host's link",
         lambda m: 1e3 * m.pairs["busiest_receiver"] * m.cost["fetch_seconds"]),
    _versus_first("exchange_more", "exchange, % more", 1, "seconds of dispatch and combine above the first system's",
         lambda m, first: -_percent_less(first.exchange_seconds, m.exchange_seconds)),
    _own("buffers_mib", "buffers, MiB", 0, "weights of guests of the rank that holds most",
         lambda m: m.recompute["memory"]["guest_weights"] / (1 << 20)),
    _own("fetch_ms", "copy from the host, ms", 3, "of one expert's weights", lambda m: 1e3 * m.cost["fetch_seconds"]),
    _versus_first("migration_ms", "migration, ms", 1,
         "weights and optimizer states moved from the first system's placement to this one's, on one node, all layers",
         lambda m, first: 1e3 * m.migration_seconds(first)),
    _versus_first("migration_of_50", "of 50 steps, %", 2, "migration ÷ 50 policy updates of this system",
         lambda m, first: 2 * ratio(m.migration_seconds(first), m.update["seconds"])),
    _versus_first("migration_pays", "pays after, steps", 2, "migration ÷ what it saves of a policy update; inf: never",
         lambda m, first: ratio(m.migration_seconds(first), max(0.0, first.update["seconds"] - m.update["seconds"]))),
    _own("guest_gib", "guests, GiB", 3, "weights and gradients of the guests of the rank that holds most",
         lambda m: _gib(_guest_bytes(m.update["memory"]))),
    _own("link_gib", "busiest node link, GiB", 3, "bytes from one node to another in a step, the most",
         lambda m: _gib(_busiest_link(m.recompute) + _busiest_link(m.update))),
    _own("utilisation", "computing, %", 1, "of the ranks' time in the policy update",
         lambda m: 100 * m.update["utilisation"]),
]
# fmt: on

# Columns that are defined for a system of several expert-parallel groups, or with padded rows: ρ, and times.
OF_GROUPS = (
    *("rho_mean", "rho_p99", "rho_max", "speedup", "update_speedup", "step_ms", "update_ms"),
    *("recompute_ms", "forward_ms", "dense_ms", "planning_ms", "dispatch_ms", "experts_ms", "combine_ms"),
    *("migration_ms", "migration_of_50", "migration_pays"),
)

_LARGEST = {"rho_max", "node_link_max", "node_link_of_first", "link_gib"}
_BY_ORIGIN: Sequence[tuple[list[Column], Origin, bool]] = (
    (_EXACT, "exact", False),
    (_MEASURED, "measured here", False),
    (_MEASURED_OF_MODEL, "measured here", True),
    (_MODELLED, "modelled", True),
)
COLUMNS = {
    c.name: replace(c, origin=origin, needs_model=model) for columns, origin, model in _BY_ORIGIN for c in columns
}
