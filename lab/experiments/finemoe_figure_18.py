"""Scheduling behind the exchange of a part of the tokens.

FineMoE, arXiv 2511.16947, figures 14 and 18.

With pipelining, some tokens are not scheduled, and their exchange hides the scheduling of the other tokens. The figure
gives dispatch times on 8 GPUs with 128 experts, against the scheduled fraction of tokens (1.0: no pipelining).
Pipelining shortens dispatch. The gain falls with a larger scheduled fraction, because the exchange of the other tokens
is then too short to hide scheduling. We do not have the values.

We assume: As in figure 17, the width is 2,048, there are 4 sequences of 4,096 random tokens, and scheduling is
communication-aware with α1 = 0.1 and α2 = 1. On one node α2 has no effect. *Skewed* has Zipf loads, s = 0.8. Every
expert has two replicas, which needs 16 guest slots. The charge for scheduling depends on the number of slots (`lab/run
finemoe-figure-11`), not on the number of scheduled tokens. The exchange of the unscheduled tokens takes their share of
the whole dispatch time, and the second exchange adds a latency. *Planning* is the part of scheduling that is not
hidden; dispatch in the paper includes both.

Result: As in the paper, scheduling and dispatch together take less time with pipelining, and more time with a larger
scheduled fraction. With skewed loads, balance suffers if less than 0.6 of the tokens are scheduled: experts then lose
more than the dispatch gains.
"""

from kit import System, drawn

GPT_128_EXPERTS = {
    "name": "GPT, 128 experts", "moe_layers": 4, "experts": 128, "top_k": 2, "hidden": 2048, "intermediate": 5461,
    "vocabulary": 50257, "heads": 16, "head_width": 128,
}
EVERY = dict(
    cluster="h100", dispatch=("token", "row"), model=GPT_128_EXPERTS, ranks=8, layers=4, micro_steps=8,
    sequences_per_rank=4, tokens_per_rank=16384, routing="zipf", guest_slots=16,
)
inputs = [
    drawn("random tokens", skew=0, **EVERY),
    drawn("skewed", skew=0.8, **EVERY),
]
systems = [
    *(
        System(f"scheduled: {part}", "finemoe-symmetric", alpha_ranks=0.1, alpha_nodes=1, scheduled_fraction=part)
        for part in (1, 0.8, 0.6, 0.4, 0.2)
    ),
]
columns = ["planning_ms", "dispatch_ms", "experts_ms", "forward_ms", "rho_mean"]
