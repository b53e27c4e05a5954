"""Systems that place every expert anew.

LAER-MoE (ASPLOS'26), SmartMoE (ATC 2023), SYMI (arXiv 2504.19925), EPLB.

Four systems place any expert on any rank. The cost depends on how weights are moved. EPLB, SmartMoE and SYMI move an
expert from a rank that has it. LAER-MoE shards every expert over all ranks (FSEP), gathers the experts of a rank's
slots before each pass of a layer, and scatters their gradients, both in parallel with computation. The papers measure
other models, clusters and tasks, so no published figures are shown.

We assume: Inputs are those of review-speedup and foremoe-seeds. All systems know the step before. *Newcomers*
(`sharded=0`): experts are whole, and a rank copies only those it did not hold, from the faster of peers and host.
*laer-oracle* runs LAER-MoE's planner on each micro-step's own load, that is, with foresight. In every row, `copies`
counts the plan's newcomers, even where experts are sharded and gathered in each pass. *Guests* includes staging
buffers, and room for the gradients of all experts away from home, which accumulate separately until they are sent home.
A system whose owners move with their experts, such as SmartMoE, would not need that room. Planning time is not charged:
LAER-MoE's planner runs in parallel with training.

Result: Moving weights is not what slows these systems. Sharded experts cost LAER-MoE nothing here: the gathers hide
behind computation on one node and on eight, and need less than two fifths of our guest memory. Copying only newcomers
moves fewer bytes but is no faster. With the oracle's layouts, where nearly every expert moves in every micro-step, it
waits {DAPO-Math | laer-oracle, newcomers | exposed_ms (token) | 0} to {mixed, 64 ranks | laer-oracle, newcomers |
exposed_ms (token) | 0} ms per step by token, and gradients away from home need memory ({DAPO-Math | laer-oracle,
newcomers | guest_gib | 0} GiB including guests). The loss comes from not knowing the micro-step: LAER-MoE, which plans
from the five before, leaves ρ at {DAPO-Math | laer | rho_mean | 2} and {mixed, 64 ranks | laer | rho_mean | 2}, and
gains {DAPO-Math | laer | speedup (token) | 2}, {CodeForces | laer | speedup (token) | 2} and {mixed, 64 ranks | laer |
speedup (token) | 2} by token. With our foresight, free layouts are faster than ours on one node: laer-oracle gains
{DAPO-Math | laer-oracle | speedup (token) | 2} and {CodeForces | laer-oracle | speedup (token) | 2} by token,
eplb-oracle {DAPO-Math | eplb-oracle | speedup (token) | 2} and {CodeForces | eplb-oracle | speedup (token) | 2}, ours
{DAPO-Math | foremoe | speedup (token) | 2} and {CodeForces | foremoe | speedup (token) | 2}. All three are balanced,
but where homes may also move, ranks hold more of the experts that their own tokens choose, and fewer rows travel. An
engine with whole experts keeps homes where the optimizer state is (`foremoe.torch` refuses such plans); with sharded
experts there are no homes. On eight nodes LAER-MoE's greedy leaves ρ at {mixed, 64 ranks | laer-oracle | rho_mean | 2}.
It gains {mixed, 64 ranks | laer-oracle | speedup (token) | 2} by token, as ours does, and {mixed, 64 ranks |
laer-oracle | speedup (row) | 2} by row, where ours gains {mixed, 64 ranks | foremoe | speedup (row) | 2}.
"""

from kit import System, drawn

EVERY = dict(cluster="h100", dispatch=("token", "row"), model="Qwen3-30B-A3B", former_step=True, guest_slots=2)
inputs = [
    drawn(
        "DAPO-Math", ranks=8, layers=8, micro_steps=32, sequences_per_rank=4, sequence_tokens=512,
        tokens_per_rank=2048, group_size=16, step_spread=1.3, group_spread=1.8, **EVERY,
    ),
    drawn(
        "CodeForces", ranks=8, layers=8, micro_steps=32, sequences_per_rank=4, sequence_tokens=512,
        tokens_per_rank=2048, group_size=16, step_spread=1.1, group_spread=1.8, **EVERY,
    ),
    drawn(
        "mixed, 64 ranks", ranks=64, layers=4, micro_steps=16, sequences_per_rank=1, tokens_per_rank=4096,
        group_size=16, step_spread=0.6, group_spread=1.0, **EVERY,
    ),
]
systems = [
    System("vanilla"),
    System("smartmoe"),
    System("symi"),
    System("eplb-ema"),
    System("eplb-oracle"),
    System("laer"),
    System("laer, newcomers", "laer", sharded=0),
    System("laer-oracle"),
    System("laer-oracle, newcomers", "laer-oracle", sharded=0),
    System("foremoe"),
]
columns = ["speedup", "rho_mean", "copies", "exposed_ms", "dispatch_ms", "guest_gib"]
