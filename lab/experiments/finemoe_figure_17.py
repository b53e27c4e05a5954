"""Communication-aware scheduling.

FineMoE, arXiv 2511.16947, figure 17.

The paper measures the execution time of a layer on 16 GPUs with 32 experts. The layer is faster if the LP also
minimises traffic that leaves a GPU (α1 = 0.1) and traffic that leaves a node (α2 = 1). We do not have the values.

We assume: There are two nodes of 8 GPUs, the width is 2,048, and experts are those of the paper's GPT 32 × 1.3B. Tokens
are random (all experts are alike). We read the printed sequence length of 4 as 4,096, with micro-batch 4. Every expert
has two replicas, which needs two guest slots. Traffic is counted, once per assignment for rows to another node. The
layer's time is modelled. FineMoE is charged for scheduling by the number of slots (finemoe-figure-11), without overlap.
The paper overlaps scheduling, but its measured times exceed our charge. `foremoe` plans ahead and is not charged.

Result: With both levels, traffic between nodes decreases and the exchange is shorter, as in the paper. The longer
solution time of LP 4 offsets much of this: by token, the layer is 2 % faster than with LP 1 on random tokens, as in the
paper, but 0.6 % slower if groups differ. Choosing guests by nodes, as `foremoe` does by default, reduces traffic
between nodes much further.
"""

from kit import Column, System, drawn

BETWEEN_NODES = Column(
    "between_nodes", "between nodes", 0, "tokens that the busiest node sends or receives with this routing",
    lambda m: m.sent["between_nodes"],
)
GPT_WIDTH_2048 = {
    "name": "GPT, width 2048", "moe_layers": 4, "experts": 32, "top_k": 2, "hidden": 2048, "intermediate": 5461,
    "vocabulary": 50257, "heads": 32, "head_width": 64,
}
EVERY = dict(
    cluster="h100", dispatch=("token", "row"), model=GPT_WIDTH_2048, ranks=16, layers=4, micro_steps=8,
    sequences_per_rank=4, tokens_per_rank=16384, guest_slots=2,
)
inputs = [
    drawn("random tokens", routing="zipf", skew=0, **EVERY),
    drawn("groups that differ", step_spread=0.5, group_spread=0.7, group_size=16, **EVERY),
]
systems = [
    System("vanilla"),
    System("LP 1", "finemoe-symmetric"),
    System("LP 4, GPUs", "finemoe-symmetric", alpha_ranks=0.1),
    System("LP 4, GPUs and nodes", "finemoe-symmetric", alpha_ranks=0.1, alpha_nodes=1),
    System("foremoe"),
    System("foremoe, links", "foremoe", prefer="links"),
]
columns = ["rho_mean", "sent_node", BETWEEN_NODES, "dispatch_ms", "forward_ms", "all_plan_us"]
