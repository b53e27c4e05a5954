"""When it pays: nodes, tokens per micro-step, dispatch.

Our own question, and the first question of cluster operators.

The gain depends on the number of nodes of an expert-parallel group, the tokens per rank and micro-step, and the
dispatch.

We assume: Qwen3-30B-A3B runs on H100 nodes of 8, with the *mixed* routing model of figure 8. Each rank has one sequence
per micro-step, with the input's number of tokens, in GRPO groups of 16. Two layers represent all. Figures are means of
three draws. Planning is charged as if no rollout hid it. *RL step* is the remaining gain if the training step takes 40
% of the RL step and the rollout 60 %.

Result: The gain grows with tokens, up to about 2,048 per rank and micro-step. By row it grows with nodes; by token it
is larger on two nodes than on four. With 256 tokens on one to four nodes, copies and planning consume the gain by
token. With planning included, ReLibra is 0.4 to 4 % faster than ours on one node, and with 256 tokens up to 13 % on
more nodes, where its guests stay within a node. From 2,048 tokens on, ours is 1 to 31 % faster than ReLibra on several
nodes by token, and 8 to 16 % by row.
"""

from kit import FIRST, System, drawn, measured_here, paired, ratio

ROLLOUT = 0.6
RL_STEP = measured_here(
    "rl_60", "RL step", 3, "speedup, placed, of an RL step if rollout takes 60 % of the first system's RL step",
    lambda m, first: 1 / (ROLLOUT + (1 - ROLLOUT) / ratio(first.placed_seconds, m.placed_seconds)), versus=FIRST,
    by_dispatch=True,
)
inputs = [
    drawn(
        f"{nodes} node{'s' * (nodes > 1)}, {tokens} tokens", cluster="h100", model="Qwen3-30B-A3B", ranks=8 * nodes,
        layers=2, micro_steps=16, sequences_per_rank=1, tokens_per_rank=tokens, group_size=16, step_spread=0.6,
        group_spread=1.0, dispatch=("token", "row"), guest_slots=2, draws=3,
    )
    for nodes in (1, 2, 4, 8, 16)
    for tokens in (256, 512, 1024, 2048, 4096, 8192)
]
systems = [System("vanilla"), System("relibra"), System("static"), System("foremoe")]
columns = ["speedup", "placed_speedup", paired("foremoe", placed=True), RL_STEP, "rho_mean", "copies"]
