"""Batch sizes, routes that change, and large nodes.

FEPLB, arXiv 2604.19654, as described: edge cases and future work, without figures.

The description expects that the straggler shrinks alike whatever the batch, that FEPLB follows routes that change while
what history tells grows stale, and that nodes of many devices would balance better.

We assume: At EP 8 the load of feplb-straggler is drawn with 256 to 65,536 tokens per rank. *Hot rank moves* (w6) has
the hot rank m mod 8 in micro-step m, so that the mean of the past says nothing, and *bursts* (w7) heats drawn experts
in every fourth micro-step. *EP 64, one node* has all ranks on NVLink, as 72 of a GB200 rack are (128 experts are not
divided by 72). EPLB by a moving average stands for history. Everyone has eight guest slots but ours, which has two.

Result: The batch does not matter, as the description expects: 69 to 71 % from 256 to 65,536 tokens. Where routes change
from one micro-step to the next FEPLB does not do better than history. Of bursts it removes nothing, since the hottest
expert has more tokens than ranks differ by, and to move it whole would not help; going on with smaller ones removes a
fifth. Where the hot rank moves, its four dynamic experts are too few. Larger nodes make this worse, not better: from 69
% at EP 16 to 34 % at EP 64, where a rank has two experts to choose from, and the hottest alone has more than the mean
rank. The paper's wish for nodes of 72 therefore needs tokens that split, as its outlook says too. Ours splits them, and
removes 99 % everywhere with a quarter of the slots.
"""

from kit import System, drawn

EVERY = dict(experts=128, top_k=8, layers=6, micro_steps=16, guest_slots=8)
FITTED = dict(sequences_per_rank=1, layout="shuffled", group_size=1, step_spread=0.57, group_spread=0.5, **EVERY)
inputs = [
    *(
        drawn(f"{tokens} tokens", ranks=8, tokens_per_rank=tokens, **FITTED)
        for tokens in (256, 1024, 4096, 16384, 65536)
    ),
    drawn("hot rank moves", routing="w6", ranks=8, tokens_per_rank=4096, **EVERY),
    drawn("bursts", routing="w7", ranks=8, tokens_per_rank=4096, **EVERY),
    *(
        drawn(f"EP {ranks}, one node", ranks=ranks, ranks_per_node=64, tokens_per_rank=4096, **FITTED)
        for ranks in (16, 32, 64)
    ),
]
systems = [
    System("before", "vanilla"),
    System("EPLB by moving average", "eplb-ema"),
    System("FEPLB", "feplb", dyn=4),
    System("FEPLB, smaller too", "feplb-smaller"),
    System("foremoe", guest_slots=2),
]
columns = ["straggler_less", "rho_mean", "copies"]
across = True
