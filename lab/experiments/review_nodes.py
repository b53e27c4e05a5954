"""One group on one to eight nodes, and where copies stop hiding.

review of ForeMoE, suggestion I3: requested there, never published.

The review asks for several nodes over RDMA, where copies and tokens share slower links.

We assume: 64 ranks run Qwen3-30B-A3B, on one node of 64 ranks, two of 32, four of 16 and eight of 8. Links are an
H100's NVLink within a node and InfiniBand between nodes; H100 nodes of more than 8 are hypothetical, and isolate the
effect of the links. Fewer tokens per rank and micro-step leave less time behind which copies can hide. The routing
model is figure 8's *mixed* one, with groups of 16; four layers represent all. Figures are means of five draws.

Result: By token, balancing gains most within one node ({4096 tokens, nodes of 64 | foremoe | speedup (token) | 2 ±}) or
two ({4096 tokens, nodes of 32 | foremoe | speedup (token) | 2 ±}). With four and eight it gains {4096 tokens, nodes of
16 | foremoe | speedup (token) | 2 ±} and {4096 tokens, nodes of 8 | foremoe | speedup (token) | 2 ±}, since exchange
between nodes then takes more of a step, and is less uneven than experts are before balancing. By row it is the reverse:
of two, four and eight nodes, balancing gains more the smaller the nodes are, up to {4096 tokens, nodes of 8 | foremoe |
speedup (row) | 2 ±}, and two nodes are hardest to bring near a perfect step. By token, preferring links changes nothing
on two nodes and gains most on eight ({4096 tokens, nodes of 8 | foremoe, links | speedup (token) | 3 ±}), as long as
its copies, two and a half to six times as many, are hidden or nearly so: down to 1,024 tokens per rank and micro-step,
with both dispatches. From 512 tokens down it loses, and at 128 by token it is slower than vanilla ({128 tokens, nodes
of 8 | foremoe, links | speedup (token) | 3 ±}). Copies begin to be exposed at 2,048 tokens. At 128 tokens a step waits
{128 tokens, nodes of 8 | foremoe | exposed_ms (token) | 0} ms for them, and balancing still gains {128 tokens, nodes of
8 | foremoe | speedup (token) | 2 ±} by token and {128 tokens, nodes of 8 | foremoe | speedup (row) | 2 ±} by row.
`--max-copies-per-rank hidden` gains nothing by token, and by row on two nodes less than the spread of draws ({4096
tokens, nodes of 32 | foremoe, hidden copies | speedup (row)} instead of {4096 tokens, nodes of 32 | foremoe | speedup
(row)}). It changes nothing on four and eight nodes with 4,096 tokens and costs time elsewhere, little at 1,024 tokens.
It hides copies, but not the gradients of guests, many of which may go to one home. Below 1,024 tokens it allows no
copy, so nothing is balanced.
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
