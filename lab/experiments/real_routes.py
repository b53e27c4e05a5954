"""Routes of a real model.

gpt-oss-20b, by data/rollout-gptoss.safetensors.

gpt-oss-20b answered questions of MMLU, MMLU-Pro, GPQA and SORRY-bench, and the experts of every token it generated were
recorded: 135,281 tokens in 437 sequences, top-4 of 32 experts, seven of its 24 layers.

We assume: Sequences are batched for 8 and 16 ranks with so many tokens per rank and micro-step: by category, in the
order of data sets and categories, so that a micro-step is of one or two of them; or shuffled, in five random orders. 64
ranks cannot divide 32 experts. A step is a training step on H100 nodes of 8, dispatch by token, with the sizes of
gpt-oss-20b but full attention in every layer. It is no RL: greedy decoding, one sample per prompt, no prompt tokens, at
most 511 tokens a sequence; the source flags about 30 % of the sequences as repetitive. A step has 5 to 34 micro-steps,
so planning and copies weigh more than in training runs.

Result: On one node every system that plans by the recorded routes reaches about the same from 1,024 tokens on: with
1,024 by category and one guest slot ours gains {8 ranks, 1024 tokens, G = 1, by category | foremoe | speedup | 3},
`static` {8 ranks, 1024 tokens, G = 1, by category | static | speedup | 3} and ReLibra {8 ranks, 1024 tokens, G = 1, by
category | relibra | speedup | 3}; EPLB, which knows the step's mean, gains {8 ranks, 1024 tokens, G = 1, by category |
eplb | speedup | 3}. Planning takes 1 to 3 % of these short steps from ours, and less than 1 % from `static` and
ReLibra, so that with one slot both are 1 to 2 % ahead with planning included. With 512 tokens ReLibra is 3 % behind.
With two slots `static` nearly balances every micro-step (ρ {8 ranks, 1024 tokens, G = 2, by category | static | rho_max
| 3} at most). On two nodes the busiest rank has twice the mean, and gains are larger: with 4,096 tokens {16 ranks, 4096
tokens, G = 1, by category | foremoe | speedup | 3} by category and {16 ranks, 4096 tokens, G = 1, shuffled | foremoe |
speedup | 3 ±} shuffled, beside {16 ranks, 4096 tokens, G = 1, shuffled | eplb | speedup | 3} of EPLB, {16 ranks, 4096
tokens, G = 1, shuffled | relibra | speedup | 3} of ReLibra and {16 ranks, 4096 tokens, G = 1, shuffled | ultraep |
speedup | 3} of UltraEP, which the router of each layer makes wait. Small micro-steps hide few copies between nodes:
with 512 tokens and one slot our default gains {16 ranks, 512 tokens, G = 1, by category | foremoe | speedup | 3} and
`static`, which copies less, {16 ranks, 512 tokens, G = 1, by category | static | speedup | 3}; `shared`, which copies
at every use, is slower than no plan. `--residency auto` finds `static` there, but has planned four times, which costs
more than it saves in steps so short. So for these routes `static` suffices.
"""

from kit import System, paired, recorded

GPT_OSS_20B = {
    "name": "gpt-oss-20b", "moe_layers": 24, "experts": 32, "top_k": 4, "hidden": 2880, "intermediate": 2880,
    "vocabulary": 201088, "heads": 64, "kv_heads": 8, "head_width": 64,
}
SIZES = ((8, 512, 1), (8, 1024, 1), (8, 1024, 2), (8, 4096, 1), (16, 512, 1), (16, 1024, 1), (16, 1024, 2), (16, 4096, 1))
inputs = [
    recorded(
        f"{ranks} ranks, {tokens} tokens, G = {slots}, {order}", "data/rollout-gptoss.safetensors",
        batching={"ranks": ranks, "tokens_per_rank": tokens}, guest_slots=slots, cluster="h100", model=GPT_OSS_20B,
        shuffled=order == "shuffled", draws=draws,
    )
    for order, draws in (("by category", 1), ("shuffled", 5))
    for ranks, tokens, slots in SIZES
]
systems = [
    System("vanilla"),
    System("eplb"),
    System("eplb-ema"),
    System("feplb"),
    System("fastermoe"),
    System("flexmoe"),
    System("lplb"),
    System("ultraep"),
    System("relibra"),
    System("static"),
    System("foremoe"),
    System("foremoe, shared", "foremoe", residency="shared"),
    System("foremoe, auto", "foremoe", residency="auto"),
]
columns = ["rho_mean", "rho_max", "copies", "speedup", "placed_speedup", paired("foremoe", placed=True)]
