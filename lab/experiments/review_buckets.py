"""The review's shares of micro-steps by imbalance.

review of ForeMoE, section 6.3.

A table of the review shows the share of micro-steps in each range of ρ.

We assume: The routing model has two parameters, the skew of a step and how much GRPO groups differ. We fitted both to
the unbalanced row alone, and no other parameter. Each pair of layer and micro-step counts once. This is stricter than
counting micro-steps, where layers average out. The model, the batch and the 32 micro-steps are those of review-speedup.
*FEPLB, smaller too* represents another planner that moves only whole experts, with equal slots.

Result: With ForeMoE and two guest slots, every pair has a ρ below 1.1. Neither the review's planner as described nor
EMA reaches its published share. The planner's base placement fills the slots that its moves need, and EMA knows only
averages. The routing model matches the mean of the unbalanced row, but has fewer balanced and fewer extreme micro-steps
than the review.
"""

from kit import Aim, Column, Published, System, drawn

BUCKETS = [
    Column(name, title, 1, "share of (layer, micro-step) pairs", lambda m, at=at: 100 * m.pairs["share_of_bucket"][at])
    for at, (name, title) in enumerate(
        {
            "below_1.1": "ρ < 1.1, %", "below_1.3": "1.1 to 1.3, %", "below_1.5": "1.3 to 1.5, %",
            "below_2": "1.5 to 2, %", "from_2": "ρ ≥ 2, %",
        }.items()
    )
]
inputs = [
    drawn(
        "DAPO-Math", ranks=8, experts=128, top_k=8, layers=16, micro_steps=32, sequences_per_rank=4,
        tokens_per_rank=2048, group_size=16, step_spread=1.3, group_spread=1.8, former_step=True, guest_slots=2,
    ),
]
systems = [
    System("none", "vanilla"),
    System("EMA", "ema"),
    System("EPLB by moving average", "eplb-ema"),
    System("foremoe-review"),
    System("FEPLB, smaller too", "feplb-smaller"),
    *(System(f"foremoe, G = {slots}", "foremoe", guest_slots=slots) for slots in (1, 2)),
]
columns = ["rho_mean", *BUCKETS, "rho_max"]
published = [
    *Published.table("below_1.1", {"DAPO-Math": {"none": 3, "EMA": 9, "foremoe-review": 61}}),
    *Published.table("below_1.3", {"DAPO-Math": {"none": 12, "EMA": 21, "foremoe-review": 32}}),
    *Published.table("below_1.5", {"DAPO-Math": {"none": 18, "EMA": 24, "foremoe-review": 6}}),
    *Published.table("below_2", {"DAPO-Math": {"none": 34, "EMA": 31, "foremoe-review": 1}}),
    *Published.table("from_2", {"DAPO-Math": {"none": 33, "EMA": 15, "foremoe-review": 0}}),
]
aims = [
    Aim("below_1.1", system="foremoe, G = 2", at_least=95),
    Aim("rho_max", system="foremoe, G = 2", at_most=1.3),
]
secondary = True
