"""Dispatch by number of GPUs.

FineMoE, arXiv 2511.16947, figures 10 and 16.

The figure gives dispatch times of FineEP and vanilla EP with NCCL and with DeepEP, for groups of several nodes. With
NCCL, FineEP takes less time than EP in a group of the same size, because it leaves tokens on their GPU if possible.
With DeepEP, FineEP takes more time, due to data format conversion. According to §7.5, a FineEP group of d EP groups
adds little exchange time inside a node, or if EP spans many nodes anyway. We do not have the values.

We assume: As in figure 9, there are 32 experts, the width is 4,096, and 8 × 2,048 tokens follow Zipf with s = 1. Every
expert has two replicas in the group, so a rank has one guest slot per home expert. Our model counts bytes and link
speeds, and does not distinguish NCCL from DeepEP. The preset has one network card per GPU. The paper's nodes have two
for 8 GPUs, so the paper's exchange between nodes takes four times as long. *EP, half the group* is two separate EP
groups, which a FineEP group with d = 2 merges; with 8 and with 16 GPUs each is within one node.

Result: On one node, FineEP's dispatch takes less than half of EP's time, because more tokens stay on their rank and the
busiest rank receives fewer. Between nodes, FineEP saves 24 to 39 % by row and 30 to 45 % by token. One FineEP group of
16 GPUs takes 1.3 times (by token) and five times (by row) the time of two EP groups of 8. So the paper keeps FineEP
groups inside nodes.
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
