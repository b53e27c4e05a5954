"""When it pays: nodes, tokens per micro-step, dispatch.

Our own question, and the first of whoever runs a cluster.

The gain depends on how many nodes an expert-parallel group has, on the tokens that a rank has in a micro-step, and on how
rows travel.

We assume: Qwen3-30B-A3B on H100 nodes of 8, the *mixed* routing model of figure 8, one sequence per rank and micro-step
of as many tokens as the input says, in GRPO groups of 16. Two layers stand for all; three draws. Planning is charged, as
if no rollout hid it. *RL step* is what remains of that where the training step is 40 % of the RL step and the rollout 60
%.

Result: The gain needs tokens: with 256 per rank and micro-step it is lost to copies and planning by token ({1 node, 256
tokens | foremoe | speedup (token) | 2} on one node, {2 nodes, 256 tokens | foremoe | speedup (token) | 2} on two), and
from 2,048 on it hardly grows. It grows with nodes: with 4,096 tokens by token {1 node, 4096 tokens | foremoe | speedup
(token) | 2 ±}, {2 nodes, 4096 tokens | foremoe | speedup (token) | 2 ±}, {4 nodes, 4096 tokens | foremoe | speedup
(token) | 2 ±}, {8 nodes, 4096 tokens | foremoe | speedup (token) | 2 ±} and {16 nodes, 4096 tokens | foremoe | speedup
(token) | 2 ±} on 1, 2, 4, 8 and 16 nodes, and by row {1 node, 4096 tokens | foremoe | speedup (row) | 2 ±} to {16
nodes, 4096 tokens | foremoe | speedup (row) | 2 ±}. Planning takes up to 7 % of steps of 256 tokens and less than 1 %
from 4,096 tokens on. On one node ReLibra is 0.5 to 5 % quicker than ours with planning included, as it has almost none
to pay; on more nodes ours is quicker by up to 12 %, but for 256 tokens on 16 nodes. `static` is level with ours on 8
nodes and within 2 % on 16; it is quicker where micro-steps are small and nodes few, and 5 % slower on one and two nodes
from 2,048 tokens on. Of an RL step that is 60 % rollout, a training step that is 1.49 times as quick leaves 1.15.
"""

from kit import FIRST, System, drawn, measured_here, paired, ratio

ROLLOUT = 0.6
RL_STEP = measured_here(
    "rl_60", "RL step", 3, "speedup, placed, of an RL step whose rollout takes 60 % of the first system's",
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
