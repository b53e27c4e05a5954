"""Dispatch by number of GPUs.

FineMoE, arXiv 2511.16947, figures 10 and 16.

The figure has dispatch times of FineEP and vanilla EP by NCCL and by DeepEP, for groups of several nodes. By NCCL
FineEP takes less time than EP in a group of the same size, because it keeps tokens on their GPU where it can. By DeepEP
it takes more, for what it does to data formats. According to §7.5 a FineEP group of d EP groups costs little more
exchange inside a node, and where EP spans many nodes anyway. We do not have the values.

We assume: The setting is that of figure 9: 32 experts, width 4,096, 8 × 2,048 tokens, Zipf s = 1. Every expert has two
replicas in the group, which takes as many guest slots as a rank has experts. The model knows bytes and links, and no
backend. The preset has a network card per GPU, where the paper's nodes have two for 8 GPUs, so that its exchange
between nodes takes four times as long. *EP, half the group* is two EP groups side by side, of which a FineEP group is
made with d = 2; with 8 and with 16 GPUs such a group is within one node.

Result: In a group within one node FineEP's dispatch is shorter than that of EP, as the paper measures by NCCL: by 55 %
by token and by 58 % by row. The busiest rank gets less, and a token whose expert is on its own GPU stays there. Between
nodes the dispatch decides. By row, FineEP saves 24 % with 16 GPUs and 39 % with 32. By token it saves 9 and 3 %, since
most tokens go to most nodes whoever serves them. Half the group is no better inside a node. Beyond a node it is: two
groups of 8 GPUs exchange over NVLink alone what one FineEP group of 16 sends between nodes, and takes 1.7 times as long
for by token and six times by row. That is why the paper keeps FineEP groups inside nodes. Ours has guests where tokens
are. By token it takes 95 % of FineEP's time with 16 GPUs and 77 % with 32 (70 and 74 % where it prefers links), by row
37 and 25 %, above all because FineEP's symmetric placement leaves ρ at 2 and 4 there.
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
