"""Scheduling time by experts and GPUs.

FineMoE, arXiv 2511.16947, figure 11.

The paper measures the scheduling time of one micro-batch, mostly that of solving LP 1 with warm-started HiGHS: at least
about 100 µs, and below 1 ms at 64 GPUs and 256 experts.

We assume: We measure the CPU time of all planning of a step on this machine, ÷ (layers × micro-steps); work done once
per step counts too. On the symmetric placement with two replicas of every expert (four experts per rank), including
rounding to whole tokens, we compare LP 1 by CLP with warm start, LP 4 by CLP, and LP 1 by our exact assignment, which
has the same optimum. *foremoe* is our planner on the same slots, which chooses replicas as well as quotas. *Stable*
micro-steps differ by sampling alone, which is the best case for a warm start; *new orders* draws popularity anew in
each. The table also shows what the simulator charges wherever FineMoE's time is modelled: a time per slot of the group
(each is a variable of LP 1), set between the two kinds of load: 1 µs for LP 1 by CLP, 4 µs for LP 4, 0.06 µs for our
assignment. The all-gather of loads is not charged.

Result: CLP stays below 1 ms for LP 1, like the paper's HiGHS, except with 64 GPUs and new orders (1.1 ms), and below
the paper's 100 µs at the smallest. Its time grows with the number of slots, and is two to five times as long if
popularity is new in each micro-step. LP 4 takes 2 to 32 times as long. Our assignment reaches the optimum of LP 1 in a
sixth of CLP's time or less. The charged LP time lies between the two kinds of load from 16 GPUs on, and above both at
8. From 32 GPUs on, the symmetric placement no longer balances this skew, as a popular expert has two replicas among 128
or 256. Our planner chooses replicas as well as quotas. With 8 and 32 GPUs it takes 0.2 to 0.6 times as long as CLP
needs for quotas alone, with 16 0.8 to 1.1 times, and with 64 0.5 to 1.2 times. It spends most of this time once per
step, on choosing initial guests and testing whether guests can stay. This work ends before the first micro-step,
whereas FineMoE's time falls between router and dispatch of each layer.
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
