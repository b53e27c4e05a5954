"""Training throughput of five models.

FineMoE, arXiv 2511.16947, figure 7.

The main result is the end-to-end speedup over Megatron-LM of the five models of table 2 on 16 or 32 H100. FineMoE is up
to 47.6 % faster than Megatron-LM and 36.9 % in the mean, and 13.9 % ahead of FlexMoE, the second. DeepSpeed pads the
load of each expert to the largest and is slow with 16 or 32 experts; with 8 it beats Megatron-LM by other
optimizations. SmartMoE is sometimes slower than Megatron-LM. We do not have the plot's values.

We assume: The paper uses pipeline stages between nodes, so that each node is one data-parallel group of 8 GPUs with two
expert-parallel groups of four. We model one such group, which runs all layers of the model; pipeline bubbles are left
out, as they affect all systems alike. A step is the policy update, forward and backward, with each GPU's micro-batches
from the global batch of table 2; two layers stand for all. Experts of GPT have two matrices and ours three, so their
width is two thirds. Table 2 does not give the number of key-value heads: here GPT has as many as query heads, Mixtral
eight. The text does not publish loads. *Zipf* has the load of figures 8 and 9, s = 1, with the same order of popularity
in all micro-batches: the best case for placements by history. *Documents* draws a popularity for each sequence, with
the spreads of the review's experiments here (0.6, 1.0). Systems know the load of the previous step. *vanilla* is
Megatron-LM. *padded* is DeepSpeed's padding without its optimizations: every source sends every expert as many rows as
the largest cell has, and all of them are computed (as in its code: one capacity for all, from the largest count of any
rank). Padded rows are not tokens, so it has figures by row alone. SmartMoE, FlexMoE, EPLB and FineMoE train in place:
replicas keep weights and optimizer states, gradients are reduced once per step, and moving replicas between steps is
not charged (the paper: below 1 %; `lab/run finemoe-figure-12`). SmartMoE and FlexMoE even move within the step for
free. EPLB is included as an expert scheduler that, like FlexMoE, places all replicas by history. FineMoE is charged for
scheduling by the number of slots (`lab/run finemoe-figure-11`), without overlap; the paper overlaps it and measures
more. The all-reduce of gradients of systems that train in place, and of vanilla's, overlaps with the last backward
while that lasts. `foremoe` fetches its guests and sends gradients home during computation; it needs routes ahead of
training, which pre-training does not have.

Result: All ranks are in one node, so the two dispatches differ by 1 % at most; figures here are by token. FineMoE's
published gains lie between those on our two loads. *finemoe* is {GPT 16×3.2B, Zipf | finemoe | update_speedup (token)}
to {Mixtral 8×7B, Zipf | finemoe | update_speedup (token)} times as fast as vanilla with Zipf loads and {GPT 32×1.3B,
documents | finemoe | update_speedup (token)} to {Mixtral 8×7B, documents | finemoe | update_speedup (token)} times with
documents, 1.52 and 1.32 in the mean over the models (published: at most 1.476, 1.369 in the mean). Its mean is 16 % and
17 % above that of *flexmoe* (published: 13.9 % in the mean). Three things differ from the paper. First, SmartMoE is
never slower than vanilla here. Second, padding costs more than a third of the throughput even with 8 experts, where
DeepSpeed beats Megatron-LM in the paper: either other optimizations compensate for it, or the paper's loads of 8
experts are more even than ours. Third, EPLB, which places all replicas by history, is within 6 % of FineMoE with Zipf
loads, and ahead of it with 32 experts and, by little, with 16; with documents it falls behind. Without replacement
(*finemoe-symmetric*), documents with 16 and 32 experts lose nothing, but Zipf loads and 8 experts do. `foremoe`, which
knows the routes, is up to 4 % faster than FineMoE with documents, and between 1 % slower and 1 % faster with Zipf
loads, although it fetches its guests. FineMoE is charged for its scheduling in full; if it were hidden, FineMoE would
be ahead with most Zipf loads.
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
