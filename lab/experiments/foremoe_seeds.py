"""How far the figures depend on what is drawn.

Pith's referee report on ForeMoE, point 1: variance, asked for and not published.

The referee asks for the number of runs, and for variance. Figures of this page are of one draw each, with the default
seed, where the experiment says nothing else.

We assume: Three inputs are drawn anew with seeds one after the other; figures are means over the draws ± standard
deviation. *Bursty* is that of docs/users/command_line.md, with its systems and its optimizer's shards: eight ranks, one
sequence of 4,096 tokens per rank and micro-step, GRPO groups of eight that differ. *DAPO-Math* is that of
review-speedup, *mixed* that of figure 8 on 64 ranks with half as many micro-steps. A draw draws everything: popularity
of experts, groups and tokens. The share of a step that placement takes is measured, and not among the columns. Each
input has both dispatches; *by token* is estimated, since these are loads.

Result: By token, ours gains 1.290 ± 0.012 on *bursty*, 1.350 ± 0.015 on *DAPO-Math* and 1.479 ± 0.019 on 64 ranks; by
row 1.376 ± 0.017, 1.470 ± 0.022 and 2.874 ± 0.102. Speedups spread by less than two per cent of themselves, by row at
64 ranks by less than four, and nearly all of that is how uneven the drawn load is before planning: vanilla's part of
the ideal spreads as much, `foremoe`'s by four thousandths of itself at most. Parts of the ideal show how little one
system varies; they do not order systems, since each has its own ideal: ReLibra has the largest part at 64 ranks and is
slower than ours. Speedups are without placement, while what UltraEP plans is charged. Placement takes 3 to 5 % of the
step by row at 64 ranks where nothing hides it (review-gap, foremoe-figure-11), more of the shorter step by token. With
it, ours and UltraEP come out close to each other there. The order of a single draw holds, but for ours and ReLibra at 8
ranks, which are as quick. At 64 ranks, ours chosen once per step (`static`) is a little quicker than `resident`
although its part of the ideal is smaller, since it sends less; and ReLibra passes UltraEP by token, though not by row.
FEPLB, whose results pay in full for their way back, is slower than vanilla at 64 ranks in any draw: {mixed, 64 ranks, 5
draws | feplb | speedup (token) | 2} by token.
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
    "speedup", "placed_speedup", paired("foremoe", placed=True), "placement_s", "of_ideal", "rho_mean", "rho_max", "copies",
    "exposed_ms",
]
secondary = True
