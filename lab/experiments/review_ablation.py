"""The review's ablation.

review of ForeMoE, section 6.4.

A table of the review shows each of its two planner parts and each of the two transfer paths alone.

We assume: Input, policies and cluster are those of review-speedup. Each rank has two guest slots unless the label gives
another number. *CPU path only* and *GPU-direct only* are the review's whole planner with all copies from host memory or
all from peers. The table also shows each path for our planner.

Result: By token, MDA alone has about the gain that the review gives. The other results disagree with the review. BPO
with MDA balances worse than MDA alone, because BPO's relocations and replicas fill the slots that MDA needs. Copies
from peers are faster than the CPU path here, whereas the review favours the CPU path.
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
