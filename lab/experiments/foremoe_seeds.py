"""How far the figures depend on what is drawn.

Pith's referee report on ForeMoE, point 1: variance, asked for and not published.

The referee asks for the number of runs, and for variance. Figures of this page are of one draw each, with the default
seed, where the experiment says nothing else.

We assume: Three inputs are drawn anew with seeds one after the other; figures are means over the draws ± standard
deviation. *Bursty* is that of docs/users/command_line.md, with its systems and its optimizer's shards: eight ranks, one
sequence of 4,096 tokens per rank and micro-step, GRPO groups of eight that differ. *DAPO-Math* is that of
review-speedup, *mixed* that of figure 8 on 64 ranks with half as many micro-steps. A draw draws everything: popularity
of experts, groups and tokens. *Placed* charges planning, measured here; *paired* compares that step with ours, draw by
draw. Each input has both dispatches; *by token* is estimated, since these are loads.

Result: By token, ours gains {bursty, 10 draws | foremoe | speedup (token) | 3 ±} on *bursty*, {DAPO-Math, 10 draws |
foremoe | speedup (token) | 3 ±} on *DAPO-Math* and {mixed, 64 ranks, 5 draws | foremoe | speedup (token) | 3 ±} on 64
ranks; by row {bursty, 10 draws | foremoe | speedup (row) | 3 ±}, {DAPO-Math, 10 draws | foremoe | speedup (row) | 3 ±}
and {mixed, 64 ranks, 5 draws | foremoe | speedup (row) | 3 ±}. Speedups spread by less than two per cent of themselves,
by row at 64 ranks by less than four, and nearly all of that is how uneven the drawn load is before planning. With
planning charged, and paired by draw: on 64 ranks ReLibra's and UltraEP's steps are 6 % longer than ours by token and 7
and 5 % by row; `static` is level (0.5 ± 0.5 % longer by token); `shared`, which needs a thirtieth of the memory, is 1 %
longer; preferring links is 5 % shorter by token and 3 % by row. On 8 ranks `shared` is level, ReLibra is 0.5 and 0.9 %
quicker than ours, as it has almost no planning to pay, UltraEP 3 and 6 % slower, half of which is its planning time of
72 µs, published for 64 ranks and 256 experts (*planned at once* has none), and `static` 6 %. FEPLB, whose results pay
in full for their way back, is slower than vanilla at 64 ranks in any draw: {mixed, 64 ranks, 5 draws | feplb | speedup
(token) | 2} by token.
"""

from kit import System, drawn, paired

EVERY = dict(cluster="h100", model="Qwen3-30B-A3B", dispatch=("token", "row"), guest_slots=2)
inputs = [
    drawn(
        "bursty, 10 draws", draws=10, optimizer_shards=8, ranks=8, layers=4, micro_steps=32, sequences_per_rank=1,
        tokens_per_rank=4096, group_size=8, group_spread=1, **EVERY,
    ),
    drawn(
        "DAPO-Math, 10 draws", draws=10, ranks=8, layers=8, micro_steps=32, sequences_per_rank=4, sequence_tokens=512,
        tokens_per_rank=2048, group_size=16, step_spread=1.3, group_spread=1.8, **EVERY,
    ),
    drawn(
        "mixed, 64 ranks, 5 draws", draws=5, ranks=64, layers=4, micro_steps=16, sequences_per_rank=1,
        tokens_per_rank=4096, group_size=16, step_spread=0.6, group_spread=1.0, **EVERY,
    ),
]
systems = [
    System("vanilla"),
    System("eplb"),
    System("feplb"),
    System("ultraep"),
    System("ultraep, planned at once", "ultraep", planning_us=0),
    System("relibra"),
    System("static"),
    System("foremoe"),
    System("foremoe, shared", "foremoe", residency="shared"),
    System("foremoe, links", "foremoe", prefer="links"),
]
columns = [
    "speedup", "placed_speedup", paired("foremoe", placed=True), "placement_s", "guest_gib", "of_ideal", "rho_mean",
    "rho_max", "copies", "exposed_ms",
]
secondary = True
