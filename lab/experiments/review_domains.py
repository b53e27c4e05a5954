"""From concentrated to uniform routing, from small to large micro-steps.

review of ForeMoE, limitation L2 and suggestion I4: requested there, never published.

The review says that the paper is evaluated on concentrated domains alone, and asks where balancing stops paying.

We assume: 64 ranks run Qwen3-30B-A3B on H100 nodes. `step_spread` sets how much experts differ in popularity over the
step, and `group_spread` how much GRPO groups differ. With 0 and 0, routing has no preference and micro-steps are uneven
by chance alone. Groups of 16 sequences share a micro-step; four layers represent all. The second half of the table has
figure 8's *mixed* routing and varies the number of tokens per rank and micro-step.

Result: Balancing pays if experts or groups differ in popularity. Without any preference in routing, a plan gains 3 % by
token, since its guests keep tokens in their node, and 1 % by row. From 2,048 tokens per rank and micro-step on, more
tokens increase the speedup by only 5 % by token and 3 % by row. With fewer, more copies are exposed and the gain falls.
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
