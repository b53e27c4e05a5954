"""How many experts may move.

FEPLB, arXiv 2604.19654, figure 6.

On each device, up to `dyn` experts may move. Two already help much, four gain 1 to 3 points more, and eight another 1
to 3.

We assume: The input is that of feplb-straggler. We test two other readings of the greedy search at dyn = 4. One
continues with smaller experts if the busiest does not help; the other has a fixed set of dynamic experts (lowest ids).

Result: `dyn` matters even less than published: the search stops at the first expert that does not help, before it has
moved `dyn` experts.
"""

from kit import Published, System, drawn

EVERY = dict(
    experts=128, top_k=8, layers=6, micro_steps=16, sequences_per_rank=1, tokens_per_rank=4096, layout="shuffled",
    group_size=1, step_spread=0.57, group_spread=0.5, guest_slots=8,
)
inputs = [drawn(f"EP {ranks}", ranks=ranks, **EVERY) for ranks in (2, 4, 8)]
systems = [
    System("before", "vanilla"),
    *(System(f"FEPLB, dyn {dyn}", "feplb", dyn=dyn) for dyn in (2, 4, 8)),
    System("FEPLB, dyn 4, smaller too", "feplb", dyn=4, try_smaller=1),
    System("FEPLB, dyn 4, fixed set", "feplb", dyn=4, first_experts=1),
    *(System(f"foremoe, G = {slots}", "foremoe", guest_slots=slots) for slots in (2, 4, 8)),
]
columns = ["straggler_less", "copies"]
published = [
    *Published.table("straggler_less", {
        "EP 2": {"FEPLB, dyn 4": 51}, "EP 4": {"FEPLB, dyn 4": 63}, "EP 8": {"FEPLB, dyn 4": 70},
    }),
]
across = True
