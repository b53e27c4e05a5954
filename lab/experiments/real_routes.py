"""Routes of a real model.

gpt-oss-20b, recorded in data/rollout-gptoss.safetensors.

gpt-oss-20b answered questions of MMLU, MMLU-Pro, GPQA and SORRY-bench. The recording has the experts of 135,281
generated tokens in 437 sequences, top-4 of 32 experts, in seven of the model's 24 layers.

We assume: Sequences are batched for 8 and 16 ranks with the number of tokens per rank and micro-step in the label. *By
category* keeps the order of data sets and categories, so that a micro-step covers one or two categories. *Shuffled*
uses five random orders. 32 experts cannot be divided among 64 ranks. A step is a training step on H100 nodes of 8,
dispatched by token. The model has the sizes of gpt-oss-20b, but full attention in every layer. The data is not from RL:
it has greedy decoding, one sample per prompt, no prompt tokens and at most 511 tokens per sequence. The source flags
about 30 % of the sequences as repetitive. A step has 5 to 34 micro-steps, so planning and copies weigh more than in
training runs.

Result: On one node with 1,024 tokens or more, all systems that plan from the recorded routes reach similar speedups:
with one guest slot and 1,024 tokens by category, ForeMoE gains {8 ranks, 1024 tokens, G = 1, by category | foremoe |
speedup | 3}, `static` {8 ranks, 1024 tokens, G = 1, by category | static | speedup | 3} and ReLibra {8 ranks, 1024
tokens, G = 1, by category | relibra | speedup | 3}. The gain is larger on two nodes: with 4,096 tokens by category,
ForeMoE gains {16 ranks, 4096 tokens, G = 1, by category | foremoe | speedup | 3}. `static` is enough for these routes:
with 512 tokens on two nodes, it is faster than our default, because it copies less.
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
