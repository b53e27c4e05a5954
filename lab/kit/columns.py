"""The columns that a table can have. Columns used by a single experiment are defined in its file.

Exact figures are counted in loads and plans. Modelled figures are from a replay on a modelled cluster. Figures measured
here are times on the machine that runs the experiment.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from .measured import Measured

Origin = Literal["exact", "modelled", "measured here"]
ORIGINS: tuple[Origin, ...] = ("exact", "modelled", "measured here")
FIRST = ""  # the first system of the experiment
OVER_STEPS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "least": min,
    "median": statistics.median,
    "largest": max,
}


@dataclass(frozen=True)
class Column:
    """name: used by experiments. title: shown in tables. value: computes a system's figure. versus: label of a second
    system on the same draw; the figure is then value(measured, other). largest: use the largest figure of the steps
    instead of the mean. dispatch: how rows are sent; empty if the figure does not depend on it.
    """

    name: str
    title: str
    digits: int
    meaning: str
    value: Callable[..., float]
    versus: str | None = None
    origin: Origin = "exact"
    by_dispatch: bool = False
    largest: bool = False
    dispatch: str = ""

    def over_steps(self, figures: Sequence[float], statistic: str) -> float:
        """Combines figures of separately planned steps. statistic: a key of OVER_STEPS or empty. NaN if a figure is."""
        if any(map(math.isnan, figures)):
            return math.nan
        return OVER_STEPS[statistic or ("largest" if self.largest else "mean")](figures)

    def with_dispatch(self, dispatch: str) -> Column:
        """The column for one dispatch of a table that has several."""
        by = f" ({dispatch})"
        return replace(self, name=self.name + by, title=self.title + by, dispatch=dispatch)


modelled = partial(Column, origin="modelled", by_dispatch=True)
measured_here = partial(Column, origin="measured here")


def ratio(of: float, to: float) -> float:
    """Returns of ÷ to; infinite or NaN if `to` is 0."""
    return of / to if to else of * math.inf


def percent_less(first: float, of: float) -> float:
    return 0.0 if first == 0 else 100 * (first - of) / first


def paired(label: str, *, placed: bool = False) -> Column:
    """Compares a system's step with another's, draw by draw. placed: include planning, measured here."""
    what = "step, placed" if placed else "step"

    def more(m: Measured, other: Measured) -> float:
        seconds = [of.placed_seconds if placed else of.seconds for of in (m, other)]
        return 100 * (ratio(*seconds) - 1)

    return (measured_here if placed else modelled)(
        "placed_paired" if placed else "paired",
        f"{what}, % above {label}'s",
        1,
        f"{what} ÷ {label}'s on the same draw, − 1",
        more,
        versus=label,
        by_dispatch=True,
    )


# fmt: off
_ALL = [
    Column("rho_mean", "ρ mean", 4, "largest rank load ÷ mean, mean over layers and micro-steps",
           lambda m: m.figures["rho"]["mean"]),
    Column("rho_max", "ρ max", 4, "the largest of these", lambda m: m.figures["rho"]["max"], largest=True),
    Column("straggler_less", "straggler, % less", 1, "the busiest rank's tokens above the mean, versus the first",
           lambda m, first: percent_less(first.pairs["straggler"], m.pairs["straggler"]), FIRST),
    Column("copies", "copies", 1, "expert weights moved per layer and event, whole group",
           lambda m: m.figures["copies_per_layer_event"]),
    Column("copies_warm", "copies, warm", 1, "the same after the first event",
           lambda m: m.pairs["copies_after_first_event"]),
    Column("guests", "guests", 1, "experts that serve tokens away from home, per layer and event",
           lambda m: m.figures["guests_per_layer"]),
    Column("sent_node", "sent, node next", 0, "tokens that the busiest rank sends or receives when a source fills its "
           "own replicas first, then those of its node", lambda m: m.sent["sent_with_node_locality"]),
    measured_here("all_plan_us", "all planning, µs", 0,
           "CPU time of all planning, including work done once per step, ÷ (layers × micro-steps)",
           lambda m: 1e6 * m.planning_cpu_seconds / max(1, m.figures["layers"] * m.figures["micro_steps"])),
    measured_here("plan_seconds", "planning, s", 3, "wall-clock time for the whole step",
           lambda m: m.figures["plan_seconds"]),
    measured_here("placement_s", "placement, s", 2, "planning before the first micro-step: slowest rank and gather",
           lambda m: m.placement["seconds"]),
    measured_here("placed_speedup", "speedup, placed", 3, "including placement that the rollout's tail does not hide",
           lambda m, first: ratio(first.placed_seconds, m.placed_seconds), FIRST, by_dispatch=True),
    modelled("speedup", "speedup", 3,
           "step time of the first system ÷ this one's; a step is recompute and policy update",
           lambda m, first: ratio(first.seconds, m.seconds), FIRST),
    modelled("update_speedup", "training speedup", 3,
           "time of the policy update (forward and backward) of the first system ÷ this one's",
           lambda m, first: ratio(first.update["seconds"], m.update["seconds"]), FIRST),
    modelled("of_ideal", "of ideal, %", 1, "ideal step time ÷ step time",
           lambda m: ratio(100 * m.figures["ideal_step_seconds"], m.seconds)),
    modelled("of_perfect", "of perfect, %", 1,
           "first system's step with all ranks at the mean ÷ step time; above 100 where less is sent",
           lambda m, first: ratio(100 * first.figures["ideal_step_seconds"], m.seconds), FIRST),
    modelled("of_free", "of opt, %", 1, "step time with planning and transfer free ÷ step time",
           lambda m: 100 * (1 - ratio(m.overhead, m.seconds))),
    modelled("step_ms", "step, ms", 1, "recompute and policy update", lambda m: 1e3 * m.seconds),
    modelled("recompute_ms", "recompute, ms", 1, "phase time", lambda m: 1e3 * m.recompute["seconds"]),
    modelled("update_ms", "policy update, ms", 1, "phase time", lambda m: 1e3 * m.update["seconds"]),
    modelled("exposed_ms", "exposed, ms", 2, "time waiting for copies and gradients, both phases",
           lambda m: 1e3 * m.figures["exposed_copy_seconds"]),
    modelled("forward_ms", "forward, ms", 3, "time of a layer and micro-step", lambda m: m.forward_ms),
    modelled("planning_ms", "planning, ms", 3,
           "time on the critical path of a layer's forward: as published, or by the number of slots",
           lambda m: m.part_ms("planning")),
    modelled("dispatch_ms", "dispatch, ms", 3, "in a layer's forward", lambda m: m.part_ms("dispatch")),
    modelled("experts_ms", "experts, ms", 3, "in a layer's forward", lambda m: m.part_ms("experts"), by_dispatch=False),
    modelled("pairs", "pairs, % of the first's", 1,
           "rows that cross nodes; by token, pairs of a token and another node that serves it",
           lambda m, first: 100 * ratio(m.figures["pairs"], first.figures["pairs"]), FIRST),
    modelled("busiest_nic", "busiest NIC", 3,
           "rows between nodes of the rank that sends or receives the most in a dispatch ÷ mean",
           lambda m: ratio(m.figures["nic_rows"]["max"], m.figures["nic_rows"]["mean"])),
    modelled("guest_gib", "guests, GiB", 3, "weights and gradients of guests on the rank that holds the most",
           lambda m: sum(m.update["memory"][of] for of in ("guest_weights", "guest_gradients")) / (1 << 30),
           by_dispatch=False),
]
# fmt: on
COLUMNS = {column.name: column for column in _ALL}
