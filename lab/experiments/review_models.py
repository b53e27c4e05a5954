"""Speedup, balance and planning time by model and size of the group.

review of ForeMoE, weakness W1 and suggestion I1: requested there, never published.

The review says that the paper has one model at one size, and asks for larger models and groups.

We assume: Four models run on expert-parallel groups of 8 to 128 ranks on H100 nodes, and DeepSeek-V3 on 256 too. The
routing model is figure 8's *mixed* one, with one sequence of 4,096 tokens per rank and micro-step in GRPO groups of 16.
Two layers represent all. Tokens of DeepSeek-V3 choose experts of four of its eight groups. Figures are means of five
draws, except for DeepSeek-V3, which has one. *All planning* is the CPU time of a step ÷ (layers × micro-steps),
measured here. *Speedup, placed* charges the part that precedes the first micro-step, divided among the ranks, as if no
tail of a rollout hid it.

Result: By token the gain is a factor of 1.2 to 1.3 at 8 ranks and of 1.6 to 2.0 at 128, but does not grow steadily with
the group: with Qwen3-30B-A3B it is {Qwen3-30B-A3B, 16 ranks | foremoe | speedup (token) | 2} at 16 ranks,
{Qwen3-30B-A3B, 32 ranks | foremoe | speedup (token) | 2} at 32 and {Qwen3-30B-A3B, 64 ranks | foremoe | speedup (token)
| 2} at 64. With more ranks the busiest is further from the mean, but with more nodes exchange takes more of the step.
By row it grows with the group in every model, from 1.2 to 1.4 at 8 ranks to 2.8 to 4.0 at 128, since by row exchange
follows the busiest rank. Mean balance stays within 0.7 % of perfect; ρ max is {DeepSeek-V3, 8 ranks | foremoe |
rho_max} at worst. The remaining distance to a perfect step is uneven exchange between nodes: by token 4 to 10 % from 64
ranks on, most with DeepSeek-V3; by row 6 to 12 % at 16 and 32 ranks. Models with large experts (Kimi-K2, DeepSeek-V3,
Qwen3-235B-A22B) wait for some copies with 16 or 32 ranks and more, because only two layers of 4,096 tokens hide them.
Planning takes 0.1 to 0.3 ms per layer and micro-step at 8 ranks, 0.6 to 1 ms at 64, and 6 ms at 256. The ranks share
it: where nothing hides it, it reduces the speedup by at most 1 % at 8 and 16 ranks, and by 0.3 % from 64 ranks on.
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
