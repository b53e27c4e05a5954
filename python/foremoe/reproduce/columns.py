"""The figures that an experiment's table can have.

Exact figures are counted in loads and plans, modelled ones come from a replay on a modelled cluster, and what is
measured here is time on the machine that runs this.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from .. import _core
from .gap import Gap
from .measured import Measured

Origin = Literal["exact", "modelled", "measured here"]
ORIGINS: tuple[Origin, ...] = ("exact", "modelled", "measured here")


def ratio(of: float, to: float) -> float:
    """of ÷ to; infinite or NaN where `to` is 0."""
    return of / to if to else of * math.inf


def fixed(figure: float, decimals: int) -> str:
    """As tables show it: never −0, and – for NaN."""
    return "–" if math.isnan(figure) else f"{round(figure, decimals) + 0.0:.{decimals}f}"


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
    needs_own_routes: bool = False  # a plan on the routes by which it was made
    depends_on_dispatch: bool = False

    def over_steps(self, figures: Sequence[float], statistic: str = "") -> float:
        """Of an input whose steps are planned one by one. statistic: a key of OVER_STEPS; empty: the mean, or the
        largest where that is what the column tells. NaN if any figure is.
        """
        if any(map(math.isnan, figures)):
            return math.nan
        return OVER_STEPS[statistic or ("largest" if self.name in _LARGEST else "mean")](figures)


def _own(name: str, title: str, digits: int, meaning: str, value: Callable[[Measured], float]) -> Column:
    """A figure of the system alone."""
    return Column(name, title, digits, meaning, False, lambda measured, first: float(value(measured)))


def _versus_first(
    name: str, title: str, digits: int, meaning: str, value: Callable[[Measured, Measured], float]
) -> Column:
    """A figure that compares with the first system."""
    return Column(name, title, digits, meaning, True, lambda m, first: float(value(m, first)) if first else math.nan)


def _of_gap(name: str, title: str, meaning: str, part: Callable[[Gap], float]) -> Column:
    """Milliseconds of what lies between this system's step and the first one's ideal."""
    column = _versus_first(name, title, 1, meaning, lambda m, first: 1e3 * part(m.gap(first)))
    return replace(column, needs_own_routes=True)


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
    _own("placement_s", "placement, s", 2, "planning before the first micro-step: slowest rank, and the gather",
         lambda m: m.placement["seconds"]),
    _own("exposed_placement_s", "after the rollout, s", 2, "what of placement the rollout's tail does not hide",
         lambda m: m.placement["exposed_seconds"]),
    _versus_first("placed_speedup", "speedup, placed", 3, "with what of placement the rollout's tail does not hide",
         lambda m, first: ratio(first.placement["step_seconds"], m.placement["step_seconds"])),
    _of_gap("gap_planning_ms", "+ planning", "on the critical path, and placement that no rollout hides",
         lambda gap: gap.planning),
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
    _of_gap("gap_ideal_ms", "ideal, ms",
         "every rank has the mean load and the first system's mean traffic, and nothing is copied; the columns with + "
         "add up from there to the step with placement",
         lambda gap: gap.ideal),
    _of_gap("gap_whole_tokens_ms", "+ whole tokens", "a rank with the mean, rounded up to a token",
         lambda gap: gap.whole_tokens),
    _of_gap("gap_slots_ms", "+ slots", "tokens that the plan leaves on the busiest rank beyond that",
         lambda gap: gap.slots),
    _of_gap("gap_replicas_ms", "+ replicas",
         "what else the slowest rank's experts take: replicas read weights of their own and fill tiles in part",
         lambda gap: gap.replicas),
    _of_gap("gap_copies_ms", "+ copies", "exposed copies and gradients, arenas filled, homes moved",
         lambda gap: gap.copies),
    _of_gap("gap_exchange_ms", "+ exchange",
         "beyond that of ideal; negative where the plan sends less than the first system's",
         lambda gap: gap.exchange),
    _own("recompute_ms", "recompute, ms", 1, "phase time", lambda m: 1e3 * m.recompute["seconds"]),
    _own("update_ms", "policy update, ms", 1, "phase time", lambda m: 1e3 * m.update["seconds"]),
    _own("exposed_ms", "exposed, ms", 2, "of both phases, waited for copies and gradients",
         lambda m: 1e3 * m.figures["exposed_copy_seconds"]),
    _own("forward_ms", "forward, ms", 3, "of a layer and micro-step", lambda m: m.forward_ms),
    _own("backward_ms", "backward, ms", 3, "of a layer and micro-step", lambda m: m.backward_ms),
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

# Columns that need a cluster, and have the same figures however rows travel: of a plan, of experts, of single copies.
_OF_ANY_DISPATCH = (
    *("plan_micro_step_ms", "plan_step_ms", "placement_s", "exposed_placement_s", "dense_ms", "experts_ms"),
    *("gemm_straggler_ms", "gemm_straggler_less", "transfer_ms", "fetch_ms", "migration_ms", "buffers_mib"),
    "guest_gib",
)

OVER_STEPS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "least": min,
    "median": statistics.median,
    "largest": max,
}
_LARGEST = {"rho_max", "node_link_max", "node_link_of_first", "link_gib"}
_BY_ORIGIN: Sequence[tuple[list[Column], Origin, bool]] = (
    (_EXACT, "exact", False),
    (_MEASURED, "measured here", False),
    (_MEASURED_OF_MODEL, "measured here", True),
    (_MODELLED, "modelled", True),
)
COLUMNS = {
    c.name: replace(c, origin=origin, needs_model=model, depends_on_dispatch=model and c.name not in _OF_ANY_DISPATCH)
    for columns, origin, model in _BY_ORIGIN
    for c in columns
}
DISPATCHES: tuple[str, ...] = next(
    tuple(option["words"]) for option in _core._option_tables()["cost"] if option["name"] == "dispatch"
)


@dataclass(frozen=True)
class Heading:
    """A column of an experiment's table. dispatch: how rows travel; empty where the column does not depend on it or
    each input has one dispatch.
    """

    column: Column
    dispatch: str = ""

    @property
    def name(self) -> str:
        return self._with_dispatch(self.column.name)

    @property
    def title(self) -> str:
        return self._with_dispatch(self.column.title)

    def _with_dispatch(self, text: str) -> str:
        return f"{text} ({self.dispatch})" if self.dispatch else text
