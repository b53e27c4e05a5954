"""When it pays: nodes, tokens per micro-step, dispatch.

Our own question, and the first question of cluster operators.

The gain depends on the number of nodes of an expert-parallel group, the tokens per rank and micro-step, and the
dispatch.

We assume: Qwen3-30B-A3B runs on H100 nodes of 8, with the *mixed* routing model of figure 8. Each rank has one sequence
per micro-step, with the input's number of tokens, in GRPO groups of 16. Two layers stand for all; three draws. Planning
is charged as if no rollout hid it. *RL step* is the remaining gain if the training step takes 40 % of the RL step and
the rollout 60 %.

Result: The gain needs tokens. With 256 per rank and micro-step, copies and planning consume it by token ({1 node, 256
tokens | foremoe | speedup (token) | 2} on one node, {2 nodes, 256 tokens | foremoe | speedup (token) | 2} on two);
beyond 2,048 it hardly grows. It grows with nodes: with 4,096 tokens by token {1 node, 4096 tokens | foremoe | speedup
(token) | 2 ±}, {2 nodes, 4096 tokens | foremoe | speedup (token) | 2 ±}, {4 nodes, 4096 tokens | foremoe | speedup
(token) | 2 ±}, {8 nodes, 4096 tokens | foremoe | speedup (token) | 2 ±} and {16 nodes, 4096 tokens | foremoe | speedup
(token) | 2 ±} on 1, 2, 4, 8 and 16 nodes, and by row {1 node, 4096 tokens | foremoe | speedup (row) | 2 ±} to {16
nodes, 4096 tokens | foremoe | speedup (row) | 2 ±}. Planning takes up to 7 % of steps of 256 tokens and less than 1 %
from 4,096 tokens on. With planning charged, ReLibra is 0.5 to 5 % faster than ours on one node, as it has almost no
planning; on more nodes ours is faster by up to 12 %, except for 256 tokens on 16 nodes. `static` is level with ours on
8 nodes and within 2 % on 16. It is faster with small micro-steps on few nodes, and 5 % slower on one and two nodes from
2,048 tokens on. If 60 % of an RL step is rollout, a training speedup of 1.49 gives 1.15 for the RL step.
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
