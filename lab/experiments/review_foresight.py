"""What foresight is worth.

referee report on ForeMoE, point 2, and review of ForeMoE: requested there, never published.

The referee asks for an ablation that isolates foresight: the same planner with less knowledge.

We assume: All systems but vanilla, EPLB and LPLB are our planner with two guest slots. It places guests for the loads
that the label names. After the router has run, our exact split divides tokens over the existing replicas as evenly as
they permit, in all these systems. So foresight decides where guests are, never how tokens are split. *Former step's
mean* expects the previous step's mean in every micro-step. *Former step's micro-steps* chooses one set of guests from
all micro-steps of the previous step; *all micro-steps, placed once* (`static`) does the same with those of the current
step. A constant forecast gives constant guests, so these systems are `static` too; only *foremoe* changes guests inside
the step. In the *shared* systems (residency `shared`), guests are fetched for each micro-step and each micro-step is
placed on its own, so a moving average of the micro-steps so far is a further forecast. It begins with the former step's
mean and gives the newest micro-step a weight of 0.1. Systems with a forecast have to gather all ranks' counts between
router and dispatch, and are charged for that; EPLB, whose exact split needs those counts too, is not charged, in its
favour. The time of the split itself, which is then on the critical path too, is not charged, in favour of forecasts
(LPLB's is, 100 µs). EPLB and LPLB are not our planner: they fill every slot by the former step's mean and use the exact
split, and EPLB moves homes too. Both steps have the same popularity of experts but different groups. This favours
forecasts: drifting popularity would make them worse. Inputs are those of foremoe-seeds, with half the layers on 64
ranks; five draws.

Result: By token, foresight is worth less than our speedup over vanilla suggests. Placed for the former step's
micro-steps, our planner gains {bursty, 8 ranks | former step's micro-steps | speedup (token) | 3 ±} on 8 ranks and
{mixed, 64 ranks | former step's micro-steps | speedup (token) | 3 ±} on 64; with foresight it gains {bursty, 8 ranks |
foremoe | speedup (token) | 3 ±} and {mixed, 64 ranks | foremoe | speedup (token) | 3 ±}. So four fifths of the gain
need no foresight on 64 ranks, and half on 8. By row it is half and two thirds: {bursty, 8 ranks | former step's
micro-steps | speedup (row) | 3 ±} and {mixed, 64 ranks | former step's micro-steps | speedup (row) | 3 ±} without
foresight, {bursty, 8 ranks | foremoe | speedup (row) | 3 ±} and {mixed, 64 ranks | foremoe | speedup (row) | 3 ±} with
it. Knowing the micro-steps matters, not knowing the step: with this step's exact mean our planner gains only {bursty, 8
ranks | step's mean | speedup (token) | 2} and {mixed, 64 ranks | step's mean | speedup (token) | 2}, hardly more than
with the former step's mean ({bursty, 8 ranks | former step's mean | speedup (token) | 2} and {mixed, 64 ranks | former
step's mean | speedup (token) | 2}). A moving average of micro-steps is no better than that mean. However, our planner
uses means poorly: it stops when the expected loads are even, and leaves half of the guest slots empty ({mixed, 64 ranks
| step's mean | copies} copies per layer and event on 64 ranks, where 8 would fill them). EPLB and LPLB fill all slots
by the former step's mean, and are better than our planner with any mean. EPLB gains {bursty, 8 ranks | EPLB, former
step's mean | speedup (token) | 2} and {mixed, 64 ranks | EPLB, former step's mean | speedup (token) | 2} by token, on 8
ranks as much as ours placed for the former step's micro-steps. Changing guests inside the step pays on 8 ranks
({bursty, 8 ranks | all micro-steps, placed once | speedup (token) | 3} without it) but not on 64 ({mixed, 64 ranks |
all micro-steps, placed once | speedup (token) | 3}): there, guests placed once for all micro-steps are as fast by token
and by row, within the spread.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foremoe import InputError, Load, _core
from kit import Case, Gathering, Measured, System, drawn, like, paired

NEWEST = 0.1  # weight of the newest micro-step in the moving average: the default of eplb-ema


class Forecasting(System):
    """Places guests for forecast loads. Our exact split then divides the actual tokens over these replicas.

    forecast: "step": this step's mean micro-step. "former_step": the former step's mean micro-step.
    "former_micro_steps": the former step's micro-steps. "average": a moving average that starts as "former_step".
    """

    def __init__(self, label: str, policy: str, *, forecast: str, **options: Any) -> None:
        super().__init__(label, policy, **options)
        if forecast not in ("step", "former_step", "former_micro_steps", "average"):
            raise InputError(f"{label}: no forecast '{forecast}'")
        self.forecast = forecast

    def measure(self, case: Case) -> dict[str, Measured]:
        made = self.planned(case, self.expected(case))
        plan = _core._split_anew(made.plan, case.load)
        again = {dispatch: self.again(made, case, dispatch, plan) for dispatch in case.on.by_dispatch}
        return {dispatch: Gathering(of, case.load, case.on, made) for dispatch, of in again.items()}

    def expected(self, case: Case) -> Load:
        """The forecast load, in whole tokens."""
        assert case.former is not None
        if self.forecast == "former_micro_steps":
            return case.former
        counts = case.load.array.astype(float)  # [micro_steps, layers, ranks, experts]
        known = counts if self.forecast == "step" else case.former.array
        expected = np.broadcast_to(known.mean(0), counts.shape).copy()
        if self.forecast == "average":
            for m in range(1, len(counts)):
                expected[m] = NEWEST * counts[m - 1] + (1 - NEWEST) * expected[m - 1]
        return like(case.load, np.rint(expected).astype(np.int64))


EVERY = dict(cluster="h100", model="Qwen3-30B-A3B", dispatch=("token", "row"), former_step=True, draws=5, guest_slots=2)
inputs = [
    drawn(
        "bursty, 8 ranks", optimizer_shards=8, ranks=8, layers=4, micro_steps=32, sequences_per_rank=1,
        tokens_per_rank=4096, group_size=8, group_spread=1, **EVERY,
    ),
    drawn(
        "mixed, 64 ranks", ranks=64, layers=2, micro_steps=16, sequences_per_rank=1, tokens_per_rank=4096,
        group_size=16, step_spread=0.6, group_spread=1.0, **EVERY,
    ),
]
systems = [
    System("vanilla"),
    Forecasting("former step's mean", "static", forecast="former_step"),
    Forecasting("former step's micro-steps", "static", forecast="former_micro_steps"),
    Forecasting("step's mean", "static", forecast="step"),
    System("all micro-steps, placed once", "static"),
    System("foremoe"),
    Forecasting("shared, former step's mean", "foremoe", residency="shared", forecast="former_step"),
    Forecasting("shared, moving average", "foremoe", residency="shared", forecast="average"),
    Forecasting("shared, step's mean", "foremoe", residency="shared", forecast="step"),
    System("shared, every micro-step", "foremoe", residency="shared"),
    System("EPLB, former step's mean", "eplb-exact"),
    System("LPLB, former step's mean", "lplb"),
]
columns = ["speedup", paired("foremoe"), "rho_mean", "rho_max", "guests", "copies", "exposed_ms"]
secondary = True
