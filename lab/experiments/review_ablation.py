"""The review's ablation.

review of ForeMoE, section 6.4.

A table of the review shows its two planner parts and the two transfer paths, one at a time.

We assume: Input, policies and cluster are those of review-speedup. There are two guest slots per rank unless the name
says otherwise. *CPU path only* and *GPU-direct only* are the whole planner of the review with all copies from the
host's memory, or all from peers. The table also shows the paths for our planner.

Result: By token, MDA alone gains {DAPO-Math | MDA only | speedup (token) | 2} and {CodeForces | MDA only | speedup
(token) | 2}, as in the review (1.18 and 1.15); by row it gains {DAPO-Math | MDA only | speedup (row) | 2} and
{CodeForces | MDA only | speedup (row) | 2}. On the other rows we disagree with it, with both inputs and both
dispatches. BPO alone gains {DAPO-Math | BPO only | speedup (token) | 2} and {CodeForces | BPO only | speedup (token) |
2} by token where the review has 1.21 and 1.17, and both together balance worse than MDA alone. That is mostly slots:
BPO's relocations and replicas fill those that MDA needs, and with eight guest slots per rank ρ of both is nearly that
of MDA alone. Then they are as quick, too. Of the paths the peers are the better one here, for the review's planner
({DAPO-Math | GPU-direct only | speedup (token) | 2}, and {DAPO-Math | CPU path only | speedup (token) | 2} by the CPU
path, by token) and for ours ({DAPO-Math | foremoe, GPU-direct only | speedup (token) | 2} and {DAPO-Math | foremoe, CPU
path only | speedup (token) | 2}), where the review has the CPU path: copies inside one node run over NVLink and need no
arena. Both together, *foremoe*, are therefore peers alone.
"""

from kit import Published, System, drawn

EVERY = dict(
    cluster="h100", dispatch=("token", "row"), model="Qwen3-30B-A3B", ranks=8, layers=8, micro_steps=32,
    sequences_per_rank=4, sequence_tokens=512, tokens_per_rank=2048, group_size=16, former_step=True, guest_slots=2,
)
inputs = [
    drawn("DAPO-Math", step_spread=1.3, group_spread=1.8, **EVERY),
    drawn("CodeForces", step_spread=1.1, group_spread=1.8, **EVERY),
]
systems = [
    System("none", "vanilla"),
    System("BPO only", "foremoe-review-bpo"),
    System("MDA only", "foremoe-review-mda"),
    System("BPO + MDA", "foremoe-review"),
    System("MDA only, G = 8", "foremoe-review-mda", guest_slots=8),
    System("BPO + MDA, G = 8", "foremoe-review", guest_slots=8),
    System("CPU path only", "foremoe-review", path="host"),
    System("GPU-direct only", "foremoe-review", path="peer"),
    System("foremoe"),
    System("foremoe, CPU path only", "foremoe", path="host"),
    System("foremoe, GPU-direct only", "foremoe", path="peer"),
]
columns = ["speedup", "of_ideal", "rho_mean", "rho_max", "copies", "exposed_ms"]
published = [
    *Published.table("speedup", {
        "DAPO-Math": {
            "BPO only": 1.21, "MDA only": 1.18, "BPO + MDA": 1.45, "CPU path only": 1.31,
            "foremoe, CPU path only": 1.31, "GPU-direct only": 1.28, "foremoe, GPU-direct only": 1.28,
        },
        "CodeForces": {
            "BPO only": 1.17, "MDA only": 1.15, "BPO + MDA": 1.38, "CPU path only": 1.28,
            "foremoe, CPU path only": 1.28, "GPU-direct only": 1.24, "foremoe, GPU-direct only": 1.24,
        },
    }),
]
secondary = True
