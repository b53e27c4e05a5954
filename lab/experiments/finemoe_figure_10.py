"""Dispatch by number of GPUs.

FineMoE, arXiv 2511.16947, figures 10 and 16.

The figure gives dispatch times of FineEP and vanilla EP with NCCL and with DeepEP, for groups of several nodes. With
NCCL, FineEP takes less time than EP in a group of the same size, because it keeps tokens on their GPU where it can.
With DeepEP it takes more, due to data format conversion. According to §7.5, a FineEP group of d EP groups adds little
exchange time inside a node, or if EP spans many nodes anyway. We do not have the values.

We assume: The setting is that of figure 9: 32 experts, width 4,096, 8 × 2,048 tokens, Zipf s = 1. Every expert has two
replicas in the group, which takes as many guest slots as a rank has experts. The model knows bytes and links, but no
backend. The preset has a network card per GPU and the paper's nodes two for 8 GPUs, so the paper's exchange between
nodes takes four times as long. *EP, half the group* is two separate EP groups, which a FineEP group with d = 2 merges;
with 8 and with 16 GPUs each is within one node.

Result: In a group within one node FineEP's dispatch is shorter than that of EP, as the paper measures with NCCL: by 55
% by token and by 58 % by row. The busiest rank receives less, and a token whose expert is on its own GPU stays there.
Between nodes the gain depends on the dispatch. By row, FineEP saves 24 % with 16 GPUs and 39 % with 32. By token it
saves 9 and 3 %, since most tokens go to most nodes whichever replica serves them. Halving the group helps only if the
whole group spans several nodes: two groups of 8 GPUs exchange only over NVLink what one FineEP group of 16 sends
between nodes, and FineEP takes 1.7 times as long by token and six times by row. This is why the paper keeps FineEP
groups inside nodes. `foremoe` places guests near their tokens. By token it takes 95 % of FineEP's time with 16 GPUs and
77 % with 32 (70 and 74 % if it prefers links), by row 37 and 25 %, mainly because FineEP's symmetric placement leaves ρ
at 2 and 4 there.
"""

from kit import Arranged, System, drawn

GPT_WIDTH_4096 = {
    "name": "GPT, width 4096", "moe_layers": 8, "experts": 32, "top_k": 2, "hidden": 4096, "intermediate": 10923,
    "vocabulary": 50257, "heads": 32, "head_width": 128,
}
EVERY = dict(
    cluster="h100", dispatch=("token", "row"), model=GPT_WIDTH_4096, sequence_tokens=2048, routing="zipf", skew=1.0,
    layers=8, micro_steps=8, sequences_per_rank=8, tokens_per_rank=16384,
)
inputs = [
    drawn("8 GPUs", ranks=8, guest_slots=4, **EVERY),
    drawn("16 GPUs", ranks=16, guest_slots=2, **EVERY),
    drawn("32 GPUs", ranks=32, guest_slots=1, **EVERY),
]
systems = [
    System("EP", "vanilla"),
    Arranged("EP, half the group", "vanilla", groups=2),
    System("FineEP", "finemoe-symmetric"),
    System("foremoe"),
    System("foremoe, links", "foremoe", prefer="links"),
]
columns = ["dispatch_ms", "rho_mean"]
across = True
