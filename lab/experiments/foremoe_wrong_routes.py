"""Plans on wrong routes.

ForeMoE, arXiv 2606.11867, referee report on its page on Pith.

The referee asks what happens if routes diverge after the rollout. The paper replays routes; we know of no published
answer.

We assume: A row is a token at one of its experts. *Elsewhere* is the share of rows whose router chooses another expert
than recorded. The other expert is drawn by popularity in the same micro-step, layer and source rank, so the load
remains equally skewed. *Not recorded* is the share of rows without a recorded route, as if replay covered only part of
the tokens. `foremoe`, `static` and `relibra` plan with the recorded routes. Rows that follow their recorded route go to
their planned replicas, all others to the homes of their experts, as with `on_mismatch="home"`. The other systems do not
use routes in advance and are unaffected: `eplb-ema`, `ema` and `flexmoe` place experts by past loads, and `ultraep`
plans after the router has run. Input and cluster are those of review-speedup (DAPO-Math), with four layers. Seed 1
draws the input and the rows that change. No plan knows the actual row counts, so in every system the ranks gather all
counts in every forward of every layer. The modelled time includes this. *Speedup, placed* also charges planning before
the first micro-step, measured here. UltraEP's step includes 72 µs of planning per layer and micro-step, as published
for 64 ranks and 256 experts. This is too much for 8 ranks and 128 experts. *Planned at once* is UltraEP without it.

Result: The gain decreases in proportion to the share of wrong rows: with a fifth of its rows wrong, a plan keeps four
fifths of its gain. Unrecorded rows and wrongly recorded rows cost the same. With placement included, `foremoe` is level
with UltraEP, which plans after the router, if a fifth of the rows go elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from foremoe import Load, Plan, _core
from kit import Case, Drawn, Gathering, Input, Measured, System, accepted, drawn, like

Counts = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class OtherRoutes(Drawn):
    """The executed load if routes differ from the recorded ones. A row may leave its planned replica for another
    expert, or it may have no recorded route, so that no plan includes it. Both go to the home of the expert that the
    router chose, as in foremoe.torch with on_mismatch="home" and unrouted="home".

    load: recorded − gone + come. gone: rows that leave their planned replicas. come: rows that go to homes. Both are
    int64 [micro_steps, layers, ranks, experts].
    """

    recorded: Load | None = None
    gone: Counts | None = None
    come: Counts | None = None


def on_other_routes(on: Input, *, wrong: float = 0.0, missing: float = 0.0) -> Input:
    """Returns the input with unrecorded and rerouted rows. A share `missing` of the rows is not recorded. A share
    `wrong` of the recorded rows goes to another expert, drawn in proportion to its rows in the same micro-step, layer
    and source rank, so popular experts stay popular.
    """

    def draw(seed: int) -> OtherRoutes:
        of = on.draw(seed)
        random = np.random.default_rng([seed, 0x0E15E])  # independent of the stream that drew the load
        unrecorded = random.binomial(of.load.array, missing)
        recorded = of.load.array - unrecorded
        gone = random.binomial(recorded, wrong)
        come = np.zeros_like(gone)
        for place in np.ndindex(*gone.shape[:3]):
            popular = np.broadcast_to(recorded[place].astype(float), (of.load.num_experts, of.load.num_experts)).copy()
            np.fill_diagonal(popular, 0)
            elsewhere = popular.sum(1)
            gone[place][elsewhere == 0] = 0  # no other expert has rows
            those = gone[place].nonzero()[0]
            come[place] = random.multinomial(gone[place][those], popular[those] / elsewhere[those, None]).sum(0)
        come += unrecorded
        return OtherRoutes(like(of.load, recorded - gone + come), of.former, like(of.load, recorded), gone, come)

    return replace(on, draw=draw)


class OnOtherRoutes(System):
    """foresight: the policy plans with the recorded routes. Other policies use no recorded routes."""

    def __init__(self, label: str, policy: str = "", *, foresight: bool = False, **options: Any) -> None:
        super().__init__(label, policy, **options)
        self.foresight = foresight

    def measure(self, case: Case) -> dict[str, Measured]:
        if not self.foresight:
            measured = super().measure(case)
            return {d: Gathering(m.evaluation, m.load, m.on, m.planned) for d, m in measured.items()}
        assert isinstance(case.drawn, OtherRoutes) and case.drawn.recorded is not None
        made = self.planned(case, case.drawn.recorded)
        quotas = executed_quotas(made.plan, case.drawn, case.seed)
        known = {"previous_load": case.former, "threads": case.threads}
        return {
            dispatch: Gathering(accepted(
                _core._evaluate_quotas(made.plan, quotas, case.load, self.options_of(case, dispatch), self.own, **known)
            ), case.load, case.on, made)
            for dispatch in case.on.by_dispatch
        }  # fmt: skip


def executed_quotas(plan: Plan, of: OtherRoutes, seed: int) -> Counts:
    """Returns the quotas [events, layers, ranks, slots] of a plan for of.recorded when of.load is executed. Rows in
    of.gone are drawn at random from the replicas of their expert.
    """
    assert of.gone is not None and of.come is not None
    random = np.random.default_rng([seed, 0x0E15F])
    quotas: Counts = plan.slot_tokens.copy()
    for event, m in enumerate(plan.event_micro_step):
        for layer in range(plan.num_layers):
            slots, tokens = plan.slot_expert[event, layer], quotas[event, layer]
            holds = slots == np.arange(plan.num_experts)[:, None, None]  # [expert, rank, slot]
            gone, come = of.gone[m, layer].sum(0), of.come[m, layer].sum(0)
            for e in ((gone > 0) | (come > 0)).nonzero()[0]:
                rank, slot = holds[e].nonzero()
                tokens[rank, slot] -= random.multivariate_hypergeometric(tokens[rank, slot], gone[e])
                (home,) = (rank == plan.home[layer, e]).nonzero()[0]
                tokens[rank[home], slot[home]] += come[e]
    return quotas


EVERY = dict(
    cluster="h100", dispatch=("token", "row"), model="Qwen3-30B-A3B", ranks=8, layers=4, micro_steps=32,
    sequences_per_rank=4, sequence_tokens=512, tokens_per_rank=2048, group_size=16, step_spread=1.3, group_spread=1.8,
    former_step=True, seed=1, guest_slots=2,
)
inputs = [
    *(on_other_routes(drawn(f"{p} % elsewhere", **EVERY), wrong=p / 100) for p in (0, 1, 5, 10, 20)),
    *(on_other_routes(drawn(f"{p} % not recorded", **EVERY), missing=p / 100) for p in (5, 20)),
]
systems = [
    OnOtherRoutes("vanilla"),
    OnOtherRoutes("eplb-ema"),
    OnOtherRoutes("ema"),
    OnOtherRoutes("flexmoe"),
    OnOtherRoutes("ultraep"),
    OnOtherRoutes("ultraep, planned at once", "ultraep", planning_us=0),
    OnOtherRoutes("relibra", foresight=True),
    OnOtherRoutes("static", foresight=True),
    OnOtherRoutes("foremoe", foresight=True),
]
columns = ["rho_mean", "rho_max", "speedup", "placement_s", "placed_speedup", "step_ms", "exposed_ms"]
