"""Systems that place every expert anew.

LAER-MoE (ASPLOS'26), SmartMoE (ATC 2023), SYMI (arXiv 2504.19925), EPLB.

Four systems can place any expert on any rank. The cost depends on how weights are moved. EPLB, SmartMoE and SYMI move
an expert from a rank that has it. LAER-MoE shards every expert over all ranks (FSEP), gathers the experts of a rank's
slots before each pass of a layer, and scatters their gradients, both in parallel with computation. The papers measure
other models, clusters and tasks, so no published figures are shown.

We assume: Inputs are those of review-speedup and foremoe-seeds. All systems know the previous step. *Newcomers*
(`sharded=0`): experts are not sharded, and a rank copies only experts that it lacks, from peers or the host, whichever
is faster. *laer-oracle* runs LAER-MoE's planner on each micro-step's own load, that is, with foresight. In every row,
`copies` counts the plan's newcomers, even if experts are sharded and gathered in each pass. *Guests* includes staging
buffers, and buffers in which a rank accumulates the gradients of experts that are away from home until it sends them
home. A system that moves ownership with the expert, such as SmartMoE, would not need the gradient buffers. Planning
time is not charged: LAER-MoE's planner runs in parallel with training.

Result: Moving weights does not slow these systems down: LAER-MoE hides its gathers behind computation on one node and
on eight. Without foresight, LAER-MoE leaves ρ at {DAPO-Math | laer | rho_mean | 2} on one node (DAPO-Math) and {mixed,
64 ranks | laer | rho_mean | 2} on eight. With our foresight, free layouts are faster than ours on one node, because
homes may also move and fewer rows travel.
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
