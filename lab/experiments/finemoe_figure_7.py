"""Training throughput of five models.

FineMoE, arXiv 2511.16947, figure 7.

The main result is the end-to-end speedup over Megatron-LM of the five models of table 2 on 16 or 32 H100. FineMoE is up
to 47.6 % faster than Megatron-LM, and 36.9 % in the mean. It is 13.9 % faster than FlexMoE, the second-fastest system.
DeepSpeed pads the load of each expert to the largest and is slow with 16 or 32 experts; with 8 it is faster than
Megatron-LM, due to other optimizations. SmartMoE is sometimes slower than Megatron-LM. We do not have the plot's
values.

We assume: The paper uses pipeline stages between nodes, so that each node is one data-parallel group of 8 GPUs with two
expert-parallel groups of four. We model one such group, which runs all layers of the model. Pipeline bubbles are
omitted, because they affect all systems alike. A step is the policy update, forward and backward, with each GPU's
micro-batches from the global batch of table 2; two layers represent all. GPT's experts have two matrices and ours have
three, so our experts have two thirds of the width. Table 2 does not give the number of key-value heads. We assume that
GPT has one per query head, and Mixtral eight. The paper does not publish loads. *Zipf* has the load of figures 8 and 9,
s = 1, with the same order of popularity in all micro-batches: the best case for placements by history. *Documents*
draws a popularity for each sequence, with the spreads of the review's experiments here (0.6, 1.0). All systems know the
load of the previous step. *vanilla* is Megatron-LM. *padded* is DeepSpeed's padding without its optimizations. As in
DeepSpeed's code, every source pads its rows for each expert to the largest count of any, and experts compute all rows.
Padded rows are not tokens, so *padded* has figures by row alone. SmartMoE, FlexMoE, EPLB and FineMoE train in place:
replicas have their own weights and optimizer states, and gradients are reduced once per step. Moving replicas between
steps is not charged. In the paper, it takes less than 1 % (`lab/run finemoe-figure-12`). SmartMoE and FlexMoE also move
replicas within the step without charge. EPLB is included as an expert scheduler that, like FlexMoE, places all replicas
by history. FineMoE is charged for scheduling by the number of slots (`lab/run finemoe-figure-11`), without overlap; the
paper overlaps scheduling, but its measured times exceed our charge. In vanilla and the systems that train in place, the
all-reduce of gradients overlaps with the last backward. `foremoe` fetches its guests and sends gradients home during
computation; it needs routes ahead of training, which pre-training does not have.

Result: FineMoE's published mean gain is between its mean gains on our two loads. Unlike in the paper, SmartMoE is never
slower than vanilla here, and padding costs more than a third of the throughput even with 8 experts. `foremoe`, which
knows the routes, is up to 4 % faster than FineMoE with documents, and within 1.2 % of it with Zipf loads.
"""

from finemoe_models import inputs_of
from kit import Arranged, Published, System

inputs = [
    *inputs_of(", Zipf", layers=2, routing="zipf", skew=1.0),
    *inputs_of(", documents", layers=2, group_size=1, step_spread=0.6, group_spread=1.0),
]
systems = [
    Arranged("vanilla", groups=2),
    Arranged("padded", "vanilla", groups=2, padded=True),
    Arranged("smartmoe", groups=2, in_place=True),
    Arranged("flexmoe", in_place=True),
    Arranged("eplb", in_place=True),
    Arranged("finemoe-symmetric", in_place=True),
    Arranged("finemoe", in_place=True),
    System("foremoe"),
]
columns = ["update_speedup", "rho_mean"]
published = [
    Published(
        "update_speedup", "1.476 at most, 1.369 in the mean", system="finemoe",
        note="1.139 times FlexMoE in the mean; from the text, we do not have the plot's values",
    ),
]
across = True
