"""The review's ablation.

review of ForeMoE, section 6.4.

A table of the review shows its two planner parts and the two transfer paths, one at a time.

We assume: Input, policies and cluster are those of review-speedup. Each rank has two guest slots unless the label gives
another number. *CPU path only* and *GPU-direct only* are the review's whole planner with all copies from host memory or
all from peers. The table also shows both paths for our planner.

Result: By token, MDA alone gains {DAPO-Math | MDA only | speedup (token) | 2} and {CodeForces | MDA only | speedup
(token) | 2}, as in the review (1.18 and 1.15); by row it gains {DAPO-Math | MDA only | speedup (row) | 2} and
{CodeForces | MDA only | speedup (row) | 2}. The other rows disagree with the review, with both inputs and both
dispatches. BPO alone gains {DAPO-Math | BPO only | speedup (token) | 2} and {CodeForces | BPO only | speedup (token) |
2} by token, where the review has 1.21 and 1.17, and BPO with MDA balances worse than MDA alone. The main cause is
slots: BPO's relocations and replicas fill those that MDA needs. With eight guest slots per rank, ρ of both together is
nearly that of MDA alone, and they are as fast. Of the two paths, peers are faster here. By token, the review's planner
gains {DAPO-Math | GPU-direct only | speedup (token) | 2} from peers and {DAPO-Math | CPU path only | speedup (token) |
2} by the CPU path; ours gains {DAPO-Math | foremoe, GPU-direct only | speedup (token) | 2} and {DAPO-Math | foremoe,
CPU path only | speedup (token) | 2}. The review favours the CPU path. Here, copies inside a node use NVLink and need no
arena. With both paths allowed, *foremoe* therefore copies from peers only.
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
