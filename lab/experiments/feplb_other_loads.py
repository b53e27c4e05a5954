"""Batch sizes, routes that change, and large nodes.

FEPLB, arXiv 2604.19654, as described: edge cases and future work, without figures.

The description expects the same relative gain at every batch size. It also expects that FEPLB follows changing routes
better than history does, and balances better on nodes of many devices.

We assume: At EP 8, the load of feplb-straggler is drawn with 256 to 65,536 tokens per rank. In *hot rank moves* (w6),
the hot rank is m mod 8 in micro-step m, so the past mean carries no information. *Bursts* (w7) makes drawn experts hot
in every fourth micro-step. *EP 64, one node* has all ranks on NVLink, like the 72 of a GB200 rack (128 experts are not
divisible by 72). EPLB with a moving average represents history. `foremoe` has two guest slots; all other systems have
eight.

Result: The batch size does not matter, as the description expects. If routes change from one micro-step to the next,
FEPLB is no better than history. FEPLB balances larger nodes worse, because a rank has fewer experts and the hottest
expert moves only as a whole; `foremoe` splits it.
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
