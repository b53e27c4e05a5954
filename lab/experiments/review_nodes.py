"""One group on one to eight nodes, and where copies stop hiding.

review of ForeMoE, suggestion I3: requested there, never published.

The review asks for several nodes over RDMA, where copies and tokens share slower links.

We assume: 64 ranks run Qwen3-30B-A3B on one node of 64 ranks, two nodes of 32, four of 16 or eight of 8. Links are an
H100's NVLink within a node and InfiniBand between nodes; Hypothetical H100 nodes of more than 8 ranks isolate the
effect of the links. With fewer tokens per rank and micro-step, there is less computation to hide copies. The routing
model is figure 8's *mixed* one, with groups of 16; four layers represent all. Figures are means of five draws.

Result: By token, balancing gains most on one or two nodes, because exchange takes more of the step on more nodes. By
row it gains more on eight nodes than on two or four. With fewer than 4,096 tokens, more copies are exposed, but
balancing still gains at 128 tokens. With 512 tokens or fewer, preferring links loses, because it needs six times the
copies.
"""

from kit import System, drawn, paired

EVERY = dict(
    cluster="h100", draws=5, dispatch=("token", "row"), model="Qwen3-30B-A3B", ranks=64, layers=4, micro_steps=16,
    sequences_per_rank=1, group_size=16, step_spread=0.6, group_spread=1.0,
)
inputs = [
    *(
        drawn(f"4096 tokens, nodes of {ranks_per_node}", ranks_per_node=ranks_per_node, tokens_per_rank=4096, **EVERY)
        for ranks_per_node in (64, 32, 16, 8)
    ),
    *(
        drawn(f"{tokens} tokens, nodes of 8", ranks_per_node=8, tokens_per_rank=tokens, **EVERY)
        for tokens in (2048, 1024, 512, 256, 128)
    ),
]
systems = [
    System("vanilla"),
    System("foremoe", guest_slots=2),
    System("foremoe, links", "foremoe", guest_slots=2, prefer="links"),
    System("foremoe, hidden copies", "foremoe", guest_slots=2, max_copies_per_rank="hidden"),
]
columns = ["speedup", paired("foremoe"), "of_perfect", "rho_mean", "copies", "exposed_ms", "update_ms"]
secondary = True
