"""Dispatch in groups of 64 to 256 GPUs.

FineMoE, arXiv 2511.16947, section 7.5.

According to section 7.5, FineEP's group is d times as large as EP's. The overhead is called minimal inside a node, and
negligible if EP is very large (64, as for DeepSeek-V3), since nearly all communication is between nodes anyway. Figures
10 and 16 compare FineEP with EP of the same size; no figure shows this claim.

We assume: The model shape is DeepSeek-V3 on 64 to 256 GPUs, eight to a node. Every expert has two replicas in the
group, so a rank has one guest slot per home expert: four, two or one. `foremoe` has the same number. *EP, half the
group* is the two separate EP groups that a FineEP group with d = 2 merges. There, each rank has twice the experts and
optimizer states. *Two cards* is the network of the paper's nodes: a quarter of the preset's for each GPU. Popularity
follows Zipf with s = 0.5. With the paper's s = 1 (figure 9), 256 experts and top-8, nearly every token would choose the
most popular expert. A token's experts are in four of eight groups. The model counts bytes and link speeds, and knows no
communication library. One layer and four micro-steps, with one sequence of 4,096 tokens per rank, represent all. There
is one draw.

Result: By token, the claim does not hold: FineEP's dispatch takes longer than that of EP in groups of half the size,
because a larger group has more nodes to which a token must go. By row, the claim holds up to 256 GPUs, because the
busiest rank determines the exchange. If the network is slow and memory permits it, smaller groups gain more by token
than balance.
"""

from kit import Arranged, System, drawn

EVERY = dict(
    dispatch=("token", "row"), model="DeepSeek-V3", routing="zipf", skew=0.5, expert_groups=8, groups_per_token=4,
    layers=1, micro_steps=4, sequences_per_rank=1, tokens_per_rank=4096,
)
TWO_CARDS = {"like": "h100", "network.bytes_per_second": 11.25e9}
inputs = [
    drawn(f"{ranks} GPUs, {cards} cards", cluster=cluster, ranks=ranks, guest_slots=slots, **EVERY)
    for cards, cluster in ((8, "h100"), (2, TWO_CARDS))
    for ranks, slots in ((64, 4), (128, 2), (256, 1))
]
systems = [
    System("EP", "vanilla"),
    Arranged("EP, half the group", "vanilla", groups=2),
    System("FineEP", "finemoe-symmetric"),
    System("foremoe"),
]
columns = ["dispatch_ms", "rho_mean", "speedup"]
