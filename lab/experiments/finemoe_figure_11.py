"""Scheduling time by experts and GPUs.

FineMoE, arXiv 2511.16947, figure 11.

The paper measures the scheduling time of one micro-batch. Most of it is solving LP 1 with warm-started HiGHS. It is at
least about 100 µs, and below 1 ms at 64 GPUs and 256 experts.

We assume: Scheduling time is the CPU time of all planning of a step on this machine ÷ (layers × micro-steps), including
work done once per step. We compare LP 1 by CLP with warm start, LP 4 by CLP, and LP 1 by our exact assignment, which
has the same optimum. All three use the symmetric placement with two replicas of every expert (four experts per rank),
and round to whole tokens. *foremoe* is our planner on the same slots, which also chooses replicas. *Stable* micro-steps
differ by sampling alone, the best case for a warm start; *new orders* draws a new popularity in each micro-step. The
table also shows the time that the simulator charges for FineMoE: a time per slot of the group (a variable of LP 1), set
between the two kinds of load. It is 1 µs for LP 1 by CLP, 4 µs for LP 4 and 0.06 µs for our assignment. The all-gather
of loads is not charged.

Result: Like the paper's HiGHS, CLP solves LP 1 in about 1 ms or less; LP 4 takes 2 to 35 times as long. Our assignment
reaches the optimum of LP 1 in at most a fourth of CLP's time. Our planner, which also chooses replicas, takes 0.3 to 4
times as long as CLP, mostly before the first micro-step.
"""

from kit import Published, System, drawn


def model(experts: int) -> dict[str, object]:
    return {
        "name": f"{experts} experts", "moe_layers": 2, "experts": experts, "top_k": 2, "hidden": 2048,
        "intermediate": 5461, "vocabulary": 50257, "heads": 16, "head_width": 128,
    }  # fmt: skip


EVERY = dict(
    cluster="h100", dispatch="token", routing="zipf", skew=0.6, layers=2, micro_steps=32, tokens_per_rank=8192,
    guest_slots=4,
)
inputs = [
    drawn(f"{ranks} GPUs, {4 * ranks} experts, {name}", model=model(4 * ranks), ranks=ranks, **routes, **EVERY)
    for name, routes in (("stable", {}), ("new orders", {"permute_probability": 1}))
    for ranks in (8, 16, 32, 64)
]
systems = [
    System("LP 1 by CLP", "finemoe-symmetric"),
    System("LP 4 by CLP", "finemoe-symmetric", alpha_ranks=0.1, alpha_nodes=1),
    System("LP 1, our assignment", "finemoe-symmetric", solver="exact"),
    System("foremoe"),
]
columns = ["all_plan_us", "planning_ms", "rho_mean"]
published = [
    Published("all_plan_us", "at least about 100", system="LP 1 by CLP", note="the smallest of the figure"),
    Published("all_plan_us", "below 1000", system="LP 1 by CLP", note="64 GPUs, 256 experts"),
]
