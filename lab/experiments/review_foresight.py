"""What foresight is worth.

referee report on ForeMoE, point 2, and review of ForeMoE: requested there, never published.

The referee asks for an ablation that isolates foresight: the same planner with less knowledge.

We assume: All systems except vanilla, EPLB and LPLB use our planner with two guest slots. It places guests for the
loads that the label names. After the router has run, our exact split balances tokens over the existing replicas in all
these systems. Foresight therefore affects only where guests are, not how tokens are split. *Former step's mean* expects
the previous step's mean in every micro-step. *Former step's micro-steps* chooses one set of guests from all micro-steps
of the previous step; *all micro-steps, placed once* (`static`) does the same for the current step. A constant forecast
gives constant guests, so these systems are `static` too. Only *foremoe* changes guests inside the step. In the *shared*
systems (residency `shared`), each micro-step is placed separately and fetches its guests. One of them uses a moving
average of past micro-steps as a forecast. The average begins with the previous step's mean and gives the newest
micro-step a weight of 0.1. Systems with a forecast gather all ranks' counts between router and dispatch, and are
charged for this. EPLB's exact split needs these counts too, but is not charged, which favours EPLB. The split itself is
also on the critical path but not charged, which favours forecasts (LPLB is charged 100 µs). EPLB and LPLB do not use
our planner. They fill every slot according to the previous step's mean and use the exact split. EPLB also moves homes.
Both steps have the same popularity of experts but different groups. This favours forecasts: drifting popularity would
make them worse. Inputs are those of foremoe-seeds, with half the layers on 64 ranks. Figures are means of five draws.

Result: Without foresight, our planner reaches about two thirds of its gain on 64 ranks, and half of it on 8 ranks. The
planner needs each micro-step's loads: by token on 64 ranks, it gains {mixed, 64 ranks | step's mean | speedup (token) |
2} with the step's exact mean and {mixed, 64 ranks | former step's mean | speedup (token) | 2} with the previous step's,
instead of {mixed, 64 ranks | foremoe | speedup (token) | 2}. On 8 ranks and by row, EPLB and LPLB, which fill all slots
according to the previous step's mean, gain more than our planner with any mean; by token on 64 ranks they gain no more.
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
