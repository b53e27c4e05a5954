"""Speedup, balance and planning time by model and size of the group.

review of ForeMoE, weakness W1 and suggestion I1: requested there, never published.

The review says that the paper has one model at one size, and asks for larger models and groups.

We assume: Four models run on expert-parallel groups of 8 to 128 ranks on H100 nodes, and DeepSeek-V3 on 256 too. The
routing model is figure 8's *mixed* one, with one sequence of 4,096 tokens per rank and micro-step in GRPO groups of 16.
Two layers represent all. Tokens of DeepSeek-V3 choose experts of four of its eight groups. Figures are means of five
draws, except for DeepSeek-V3, which has one. *All planning* is the CPU time of a step ÷ (layers × micro-steps),
measured here. *Speedup, placed* charges the part that precedes the first micro-step, divided among the ranks, as if no
tail of a rollout hid it.

Result: By token, the speedup is 1.2 to 1.3 at 8 ranks and 1.6 to 2.0 at 128, but does not grow steadily, because
exchange between more nodes takes more of the step. By row, the speedup grows with the group in every model. The
remaining distance to a perfect step is uneven exchange between nodes, and planning reduces the speedup by at most 1 %
if no rollout hides it.
"""

from kit import System, drawn

EVERY = dict(
    cluster="h100", dispatch=("token", "row"), layers=2, micro_steps=16, sequences_per_rank=1, tokens_per_rank=4096,
    group_size=16, step_spread=0.6, group_spread=1.0,
)
GROUPS = dict(expert_groups=8, groups_per_token=4)  # a token chooses experts of 4 of the model's 8 groups
inputs = [
    *(
        drawn(f"{model}, {ranks} ranks", model=model, ranks=ranks, draws=5, **EVERY)
        for model in ("Qwen3-30B-A3B", "Qwen3-235B-A22B", "Kimi-K2")
        for ranks in (8, 16, 32, 64, 128)
    ),
    *(
        drawn(f"DeepSeek-V3, {ranks} ranks", model="DeepSeek-V3", ranks=ranks, **GROUPS, **EVERY)
        for ranks in (8, 16, 32, 64, 128, 256)
    ),
]
systems = [
    System("vanilla"),
    System("foremoe", guest_slots=2),
]
columns = ["speedup", "placed_speedup", "of_perfect", "rho_mean", "rho_max", "copies", "exposed_ms", "all_plan_us"]
secondary = True
