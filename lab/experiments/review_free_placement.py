"""Systems that place every expert anew.

LAER-MoE (ASPLOS'26), SmartMoE (ATC 2023), SYMI (arXiv 2504.19925), EPLB.

Four systems put any expert on any rank. What that costs depends on how weights get there. EPLB, SmartMoE and SYMI move
an expert from a rank that has it. LAER-MoE shards every expert over all ranks (FSEP), gathers the experts of a rank's
slots before each pass of a layer, and scatters their gradients, both beside computing. The papers measure other models,
clusters and tasks, so nothing is printed beside our figures.

We assume: Inputs are those of review-speedup and foremoe-seeds. All systems know the step before. *Newcomers*:
`sharded=0`, experts are whole, and only those that a rank did not hold are copied, from the quicker of peers and host.
*laer-oracle* places every micro-step by its own load: foresight with LAER-MoE's planner. `copies` are newcomers of the
plan in every row, also where experts are sharded and gathered in each pass. *Guests* has staging buffers too, and room
for the gradients of all experts away from home, which accumulate apart until they go there; a system whose owners move
with their experts, as SmartMoE's, would not need it. Planning time is not charged: LAER-MoE's planner runs beside the
training.

Result: Weights are not what these systems lose by. Sharded experts cost LAER-MoE nothing here: what each pass gathers
hides behind computing on one node and on eight, and needs less than two fifths of our guest memory. Copying newcomers
alone moves fewer bytes and is no quicker: with the oracle's layouts, where nearly every expert moves in every
micro-step, it waits {DAPO-Math | laer-oracle, newcomers | exposed_ms (token) | 0} to {mixed, 64 ranks | laer-oracle,
newcomers | exposed_ms (token) | 0} ms of a step by token, and gradients away from home need room ({DAPO-Math |
laer-oracle, newcomers | guest_gib | 0} GiB with what guests need). What they lose by is that they do not know the
micro-step: LAER-MoE, by the five before, leaves ρ at {DAPO-Math | laer | rho_mean | 2} and {mixed, 64 ranks | laer |
rho_mean | 2}, and gains {DAPO-Math | laer | speedup (token) | 2}, {CodeForces | laer | speedup (token) | 2} and {mixed,
64 ranks | laer | speedup (token) | 2} by token. With our foresight free layouts pass ours on one node: laer-oracle
gains {DAPO-Math | laer-oracle | speedup (token) | 2} and {CodeForces | laer-oracle | speedup (token) | 2} by token,
eplb-oracle {DAPO-Math | eplb-oracle | speedup (token) | 2} and {CodeForces | eplb-oracle | speedup (token) | 2}, ours
{DAPO-Math | foremoe | speedup (token) | 2} and {CodeForces | foremoe | speedup (token) | 2}. All three are balanced;
but where homes may move too, ranks hold more of what they send, and fewer rows travel. An engine with whole experts
keeps homes where their optimizer's state is (`foremoe.torch` refuses such plans); with sharded experts homes are
nowhere. On eight nodes LAER-MoE's greedy leaves ρ at {mixed, 64 ranks | laer-oracle | rho_mean | 2}, and gains {mixed,
64 ranks | laer-oracle | speedup (token) | 2} by token, as ours, and by row {mixed, 64 ranks | laer-oracle | speedup
(row) | 2}, where ours has {mixed, 64 ranks | foremoe | speedup (row) | 2}.
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
