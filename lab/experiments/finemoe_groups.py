"""Dispatch in groups of 64 to 256 GPUs.

FineMoE, arXiv 2511.16947, section 7.5.

Section 7.5 says that FineEP makes the group d times as large as EP's. It says that the overhead is minimal inside a
node, and negligible where EP is very large (64, as for DeepSeek-V3), since nearly all communication is between nodes
anyway. Figures 10 and 16 compare FineEP with EP of the same size; no figure shows this claim.

We assume: The model shape is DeepSeek-V3 on 64 to 256 GPUs, eight to a node. Every expert has two replicas in the
group, which takes as many guest slots as a rank has experts: four, two, one; `foremoe` has as many. *EP, half the
group* is two separate EP groups, which a FineEP group with d = 2 merges; each rank then holds twice as many experts,
with their optimizer states. *Two cards* is the network of the paper's nodes: a quarter of the preset's for each GPU.
Popularity follows Zipf with s = 0.5. With the paper's s = 1 (figure 9), 256 experts and top-8, nearly every token would
choose the most popular expert. Tokens choose experts of four of eight groups. The model knows bytes and links, but no
backend. One layer and four micro-steps of one sequence of 4,096 tokens per rank stand for all; one draw.

Result: The claim does not hold by token. FineEP's dispatch takes {64 GPUs, 8 cards | FineEP | dispatch_ms (token) | 1}
ms with 64 GPUs, where EP of the same group takes {64 GPUs, 8 cards | EP | dispatch_ms (token) | 1} and EP of half of it
{64 GPUs, 8 cards | EP, half the group | dispatch_ms (token) | 1}; with 256 it is {256 GPUs, 8 cards | FineEP |
dispatch_ms (token) | 1}, {256 GPUs, 8 cards | EP | dispatch_ms (token) | 1} and {256 GPUs, 8 cards | EP, half the group
| dispatch_ms (token) | 1}. A larger group has more nodes to which a token must go. FineEP can take longer than EP in
the same group, probably because a token sent to a replica elsewhere no longer shares its way to the node of its other
experts. By row, the claim holds against EP of half the group up to 256 GPUs ({256 GPUs, 8 cards | FineEP | dispatch_ms
(row) | 0} and {256 GPUs, 8 cards | EP, half the group | dispatch_ms (row) | 0} ms), since the busiest rank determines
the exchange. On nodes with two cards, FineEP makes the step slower than EP by token with 64 and 128 GPUs ({64 GPUs, 2
cards | FineEP | speedup (token) | 3} and {128 GPUs, 2 cards | FineEP | speedup (token) | 3}). `foremoe` balances the
ranks ({256 GPUs, 8 cards | foremoe | rho_mean} in the mean with 256 GPUs, where one guest slot doubles a rank's
experts) and is the fastest on eight cards with 128 and 256 GPUs. With 64 it is not. By token, two groups of half the
size have a speedup of {64 GPUs, 8 cards | EP, half the group | speedup (token) | 2} and ours {64 GPUs, 8 cards |
foremoe | speedup (token) | 2}; by row FineEP has {64 GPUs, 8 cards | FineEP | speedup (row) | 2} and ours {64 GPUs, 8
cards | foremoe | speedup (row) | 2}. Nor is it on two cards by token: two groups of half the size have {64 GPUs, 2
cards | EP, half the group | speedup (token) | 2}, {128 GPUs, 2 cards | EP, half the group | speedup (token) | 2} and
{256 GPUs, 2 cards | EP, half the group | speedup (token) | 2}, ours {64 GPUs, 2 cards | foremoe | speedup (token) | 2},
{128 GPUs, 2 cards | foremoe | speedup (token) | 2} and {256 GPUs, 2 cards | foremoe | speedup (token) | 2}. If the
network is slow and memory permits it, smaller groups gain more than balance.
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
