"""What foresight is worth.

referee report on ForeMoE, point 2, and review of ForeMoE: asked for, published by nobody.

The referee asks for an ablation that isolates foresight: the same planner with less knowledge.

We assume: All but EPLB and LPLB are our planner with two guest slots. It places by the loads that the label names; once
the router has run, tokens are split over the replicas that are there as evenly as they permit, which is our exact split
for all. So foresight decides where guests are, never how tokens are split. *Former step's mean* expects in every
micro-step the mean of the step before, *former step's micro-steps* places one set of guests for all micro-steps of that
step, as `static` does for this step's in *all micro-steps, placed once*. A forecast that is constant gives guests that
are constant, so those systems are `static` too; *foremoe* alone changes guests inside the step. Where guests are
fetched anew for each micro-step (*shared*, residency `shared`), each is placed by itself, and a moving average of the
micro-steps so far can be one more forecast: it begins with the former step's mean, and the newest micro-step has a
weight of 0.1. Besides foresight one thing differs: who forecasts has to gather all ranks' counts between router and
dispatch, and pays for that; EPLB, whose exact split needs those counts too, does not, in its favour. The time of the
split itself, which is then on the critical path too, is not charged, in favour of forecasts (LPLB's is, 100 µs). EPLB
and LPLB are not our planner; they fill every slot by the former step's mean and have the exact split, and EPLB moves
homes too. Both steps have the same popularity of experts and other groups, which favours forecasts: popularity that
drifted would make them worse. Inputs are those of foremoe-seeds, with half the layers on 64 ranks; five draws.

Result: By token, foresight is worth less than our speedup over vanilla suggests. Placed for the former step's
micro-steps, our planner gains {bursty, 8 ranks | former step's micro-steps | speedup (token) | 3 ±} on 8 ranks and
{mixed, 64 ranks | former step's micro-steps | speedup (token) | 3 ±} on 64; with foresight {bursty, 8 ranks | foremoe |
speedup (token) | 3 ±} and {mixed, 64 ranks | foremoe | speedup (token) | 3 ±}. So four fifths of the gain need no
foresight on 64 ranks, and half on 8. By row it is two thirds and half: {bursty, 8 ranks | former step's micro-steps |
speedup (row) | 3 ±} and {mixed, 64 ranks | former step's micro-steps | speedup (row) | 3 ±} without, {bursty, 8 ranks |
foremoe | speedup (row) | 3 ±} and {mixed, 64 ranks | foremoe | speedup (row) | 3 ±} with it. What counts is to know
micro-steps, not the step: by this step's exact mean our planner gains only {bursty, 8 ranks | step's mean | speedup
(token) | 2} and {mixed, 64 ranks | step's mean | speedup (token) | 2}, hardly more than by the former step's mean
({bursty, 8 ranks | former step's mean | speedup (token) | 2} and {mixed, 64 ranks | former step's mean | speedup
(token) | 2}), and a moving average of micro-steps is no better than that mean. Our planner is a poor judge of means,
though: it stops when the expected loads are even, and leaves half of the guest slots empty ({mixed, 64 ranks | step's
mean | copies} copies per layer and event on 64 ranks, where 8 would fill them). EPLB and LPLB fill all slots by the
former step's mean, and are better than ours is by any mean: EPLB {bursty, 8 ranks | EPLB, former step's mean | speedup
(token) | 2} and {mixed, 64 ranks | EPLB, former step's mean | speedup (token) | 2} by token, on 8 ranks as quick as
ours by the former step's micro-steps. Changing guests inside the step pays on 8 ranks ({bursty, 8 ranks | all
micro-steps, placed once | speedup (token) | 3} without it) and not on 64 ({mixed, 64 ranks | all micro-steps, placed
once | speedup (token) | 3}): guests placed once for all micro-steps are even a little quicker there, and the difference
is less than the spread.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from foremoe import InputError, Load, _core
from kit import Case, Gathering, Measured, System, drawn, like, paired

NEWEST = 0.1  # weight of the newest micro-step in the moving average: the default of eplb-ema


class Forecasting(System):
    """Places by the loads that it expects. Tokens that come are split anew over these replicas, exactly.

    forecast: "step", this step's mean micro-step; "former_step", that of the step before; "former_micro_steps", the
    micro-steps of the step before, one after the other; "average", a moving average that begins with "former_step".
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
        """In whole tokens."""
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
