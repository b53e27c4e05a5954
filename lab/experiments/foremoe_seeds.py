"""How far the figures depend on what is drawn.

Pith's referee report on ForeMoE, point 1: variance, asked for and not published.

The referee asks for the number of runs and the variance. Figures on this page are from one draw with the default seed
unless an experiment states otherwise.

We assume: Three inputs are drawn with consecutive seeds; figures are means over the draws ± standard deviation.
*Bursty* is the example of docs/users/command_line.md, with the same systems and optimizer shards: eight ranks, one
sequence of 4,096 tokens per rank and micro-step, GRPO groups of eight that differ. *DAPO-Math* is the input of
review-speedup. *Mixed* is that of figure 8 on 64 ranks with half the micro-steps. Each seed draws new popularities of
experts, groups and tokens. *Placed* charges planning, measured here. *Paired* compares these steps with ours, draw by
draw. Each input has both dispatches; *by token* is estimated, since these are loads.

Result: The standard deviation of speedups is below 2 % (by row on 64 ranks, below 4 %), nearly all due to the imbalance
of the drawn load. With planning included, the steps of UltraEP and ReLibra are 6 and 7 % longer than ours by token on
64 ranks, and 4.5 and 7 % by row. On 8 ranks, ReLibra's steps are 0.5 to 1.0 % shorter than ours, because ReLibra has
almost no planning.
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
