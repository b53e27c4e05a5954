"""From concentrated to uniform routing, from small to large micro-steps.

review of ForeMoE, limitation L2 and suggestion I4: requested there, never published.

The review says that the paper is evaluated on concentrated domains alone, and asks where balancing stops paying.

We assume: 64 ranks run Qwen3-30B-A3B on H100 nodes. `step_spread` is how much experts differ in popularity over the
step, and `group_spread` how much GRPO groups differ. With 0 and 0, routing has no preference and micro-steps are uneven
by chance alone. Groups of 16 sequences share a micro-step; four layers represent all. The second half of the table has
figure 8's *mixed* routing and varies the number of tokens per rank and micro-step.

Result: Balancing pays as soon as experts or groups differ. By token the gain is 1.13 where either spread is small (0.3
and 0, or 0 and 0.5), grows to {step 0.9, group 1 | foremoe | speedup (token) | 2}, and comes within 5 % of a perfect
step. By row it is 1.4 to 1.5 for the small spreads, and up to {step 0.9, group 1 | foremoe | speedup (row) | 2}. Where
routing has no preference, vanilla is within 1.3 % of even; balancing then gains 1 % by token and costs 2 in 1,000 by
row. The number of tokens hardly matters from 2,048 per rank and micro-step on. With fewer tokens, copies are exposed
and the fixed part of a layer's time grows. At 128 tokens the gain has fallen from {mixed, 2048 tokens | foremoe |
speedup (token) | 2} to {mixed, 128 tokens | foremoe | speedup (token) | 2} by token, which is little, and from {mixed,
2048 tokens | foremoe | speedup (row) | 2} to {mixed, 128 tokens | foremoe | speedup (row) | 2} by row.
"""

from kit import System, drawn

EVERY = dict(
    cluster="h100", dispatch=("token", "row"), model="Qwen3-30B-A3B", ranks=64, layers=4, micro_steps=16,
    sequences_per_rank=1, group_size=16,
)
inputs = [
    *(
        drawn(f"step {step}, group {group}", tokens_per_rank=4096, step_spread=step, group_spread=group, **EVERY)
        for group in (0, 0.5, 1)
        for step in (0, 0.3, 0.6, 0.9)
    ),
    *(
        drawn(f"mixed, {tokens} tokens", step_spread=0.6, group_spread=1.0, tokens_per_rank=tokens, **EVERY)
        for tokens in (128, 512, 2048, 8192, 32768)
    ),
]
systems = [
    System("vanilla"),
    System("foremoe", guest_slots=2),
]
columns = ["speedup", "of_perfect", "rho_mean", "copies", "exposed_ms"]
secondary = True
