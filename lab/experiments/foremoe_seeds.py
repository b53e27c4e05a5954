"""How far the figures depend on what is drawn.

Pith's referee report on ForeMoE, point 1: variance, asked for and not published.

The referee asks for the number of runs and the variance. Figures on this page come from one draw with the default seed
unless an experiment states otherwise.

We assume: Three inputs are drawn with consecutive seeds; figures are means over the draws ± standard deviation.
*Bursty* is that of docs/users/command_line.md, with its systems and its optimizer's shards: eight ranks, one sequence
of 4,096 tokens per rank and micro-step, GRPO groups of eight that differ. *DAPO-Math* is that of review-speedup,
*mixed* that of figure 8 on 64 ranks with half as many micro-steps. Each draw redraws popularity of experts, groups and
tokens. *Placed* charges planning, measured here; *paired* compares that step with ours, draw by draw. Each input has
both dispatches; *by token* is estimated, since these are loads.

Result: By token, the speedup of `foremoe` is {bursty, 10 draws | foremoe | speedup (token) | 3 ±} on *bursty*,
{DAPO-Math, 10 draws | foremoe | speedup (token) | 3 ±} on *DAPO-Math* and {mixed, 64 ranks, 5 draws | foremoe | speedup
(token) | 3 ±} on 64 ranks; by row {bursty, 10 draws | foremoe | speedup (row) | 3 ±}, {DAPO-Math, 10 draws | foremoe |
speedup (row) | 3 ±} and {mixed, 64 ranks, 5 draws | foremoe | speedup (row) | 3 ±}. The standard deviation of speedups
is below two per cent, by row at 64 ranks below four, and nearly all of it comes from the imbalance of the drawn load.
The following figures compare systems on the same draws and include planning. On 64 ranks, the steps of ReLibra and
UltraEP are 6 % longer than ours by token and 7 and 5 % by row; `static` is level (0.5 ± 0.5 % longer by token);
`shared`, which needs a thirtieth of the memory, is 1 % longer; preferring links is 5 % shorter by token and 3 % by row.
On 8 ranks, `shared` is level, and ReLibra is 0.5 and 0.9 % faster than ours, as it has almost no planning to pay for.
UltraEP is 3 and 6 % slower, half of it due to its planning time of 72 µs, published for 64 ranks and 256 experts
(*planned at once* has none); `static` is 6 % slower. FEPLB, which is charged in full for the return of its results, is
slower than vanilla at 64 ranks in every draw: {mixed, 64 ranks, 5 draws | feplb | speedup (token) | 2} by token.
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
