"""Plans on wrong routes.

ForeMoE, arXiv 2606.11867, referee report on its page on Pith.

The referee asks what happens where routes diverge after the rollout. The paper replays routes; nothing was published
that we know.

We assume: A row is a token at one of its experts. *Elsewhere* is the share of rows whose router chooses another expert
than recorded, drawn by how popular the others are in the same micro-step, layer and source rank, so that the load stays
as skewed as it was. *Not recorded* is the share of rows without a recorded route, as where replay covers a part of the
tokens. `foremoe`, `static` and `relibra` plan what was recorded. Rows that go as recorded take their planned replicas,
all others the homes of their experts, as `on_mismatch="home"` has it. The other systems know no routes ahead, so
nothing goes wrong for them: `eplb-ema`, `ema` and `flexmoe` place by the past, `ultraep` plans when the router has run.
Input and cluster are those of review-speedup (DAPO-Math, seed 1; the rows that change are drawn with that seed too),
with four layers. As no plan can tell how many rows come, ranks gather all counts in every forward of every layer,
whoever plans: that is in the modelled time. *Speedup, placed* also charges what is planned before the first micro-step,
measured here; UltraEP's planning is in the step: 72 µs in each layer and micro-step, as published for 64 ranks and 256
experts, which is against it on 8 and 128. *Planned at once* is UltraEP without them.

Result: A plan degrades in proportion; there is no cliff. Rows that leave it are spread over homes as all rows of
vanilla are, so with a share p of them ρ comes close to 1 + p · (ρ of vanilla − 1). A plan with a fifth of its rows
wrong keeps four fifths of its gain: {0 % elsewhere | foremoe | speedup (token) | 2} becomes {20 % elsewhere | foremoe |
speedup (token) | 2} by token, {0 % elsewhere | foremoe | speedup (row) | 2} becomes {20 % elsewhere | foremoe | speedup
(row) | 2} by row. Rows that were not recorded cost as much as rows that were recorded wrong. UltraEP, which plans when
the router of a layer has run, does not suffer ({0 % elsewhere | ultraep | speedup (token) | 2} by token). With a tenth
of the rows elsewhere ours and ReLibra's are still quicker, also with placement charged. With a fifth they are little
quicker, and with placement charged ours is level with UltraEP. If UltraEP's planning took no time, it would gain {20 %
elsewhere | ultraep, planned at once | speedup (token) | 2} by token with a fifth elsewhere, more than ours, but less if
all rows go as recorded ({0 % elsewhere | ultraep, planned at once | speedup (token) | 2}). `static` is as quick as
UltraEP by token while all rows go as recorded, and slower otherwise. Placement takes ours 1 % behind ReLibra, which
inside one node plans micro-step by micro-step and has almost none to pay. Systems that place by the past do not suffer,
but gain 2 to 6 % by token and 4 to 9 % by row to begin with.
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
    """What is executed where routes are not those that were recorded. A row may go elsewhere than recorded, and leaves
    the replica that was planned for it; or it has no recorded route, and no plan knows of it. Both are served at the
    home of the expert that the router chose, as foremoe.torch does under on_mismatch="home" and unrouted="home".

    load: recorded − gone + come. gone, come: int64 [micro_steps, layers, ranks, experts], rows that leave their planned
    replicas, and that go home.
    """

    recorded: Load | None = None
    gone: Counts | None = None
    come: Counts | None = None


def on_other_routes(on: Input, *, wrong: float = 0.0, missing: float = 0.0) -> Input:
    """The input where a share `missing` of its rows is not recorded, and a share `wrong` of those that are goes to
    another expert, drawn by how many rows of the same source rank, layer and micro-step each of the others has: popular
    experts stay popular.
    """

    def draw(seed: int) -> OtherRoutes:
        of = on.draw(seed)
        random = np.random.default_rng([seed, 0x0E15E])  # apart from what drew the load
        unrecorded = random.binomial(of.load.array, missing)
        recorded = of.load.array - unrecorded
        gone = random.binomial(recorded, wrong)
        come = np.zeros_like(gone)
        for place in np.ndindex(*gone.shape[:3]):
            popular = np.broadcast_to(recorded[place].astype(float), (of.load.num_experts, of.load.num_experts)).copy()
            np.fill_diagonal(popular, 0)
            elsewhere = popular.sum(1)
            gone[place][elsewhere == 0] = 0  # there is no other expert that anybody chose
            those = gone[place].nonzero()[0]
            come[place] = random.multinomial(gone[place][those], popular[those] / elsewhere[those, None]).sum(0)
        come += unrecorded
        return OtherRoutes(like(of.load, recorded - gone + come), of.former, like(of.load, recorded), gone, come)

    return replace(on, draw=draw)


class OnOtherRoutes(System):
    """foresight: it plans what was recorded. Others know no routes ahead, and nothing goes wrong for them."""

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
    """[events, layers, ranks, slots]: the quotas of a plan for of.recorded as of.load fills them. Rows that are gone
    are drawn among the replicas of their expert.
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
