"""Routes of a real model.

gpt-oss-20b, recorded in data/rollout-gptoss.safetensors.

gpt-oss-20b answered questions of MMLU, MMLU-Pro, GPQA and SORRY-bench, and the experts of every generated token were
recorded: 135,281 tokens in 437 sequences, top-4 of 32 experts, seven of its 24 layers.

We assume: Sequences are batched for 8 and 16 ranks with the number of tokens per rank and micro-step in the label. *By
category* keeps the order of data sets and categories, so that a micro-step covers one or two categories. *Shuffled*
uses five random orders. 64 ranks cannot divide 32 experts. A step is a training step on H100 nodes of 8, with dispatch
by token and the sizes of gpt-oss-20b but full attention in every layer. The data is not from RL: greedy decoding, one
sample per prompt, no prompt tokens, at most 511 tokens per sequence. The source flags about 30 % of the sequences as
repetitive. A step has 5 to 34 micro-steps, so planning and copies weigh more than in training runs.

Result: On one node, all systems that plan from the recorded routes reach similar speedups from 1,024 tokens on. With
1,024 tokens by category and one guest slot, ForeMoE gains {8 ranks, 1024 tokens, G = 1, by category | foremoe | speedup
| 3}, `static` {8 ranks, 1024 tokens, G = 1, by category | static | speedup | 3} and ReLibra {8 ranks, 1024 tokens, G =
1, by category | relibra | speedup | 3}; EPLB, which knows only the step's mean, gains {8 ranks, 1024 tokens, G = 1, by
category | eplb | speedup | 3}. Planning costs ForeMoE 1 to 3 % of these short steps, and `static` and ReLibra less than
1 %, so with one slot and planning included both are 1 to 2 % ahead. With 512 tokens ReLibra is 3 % behind. With two
slots `static` nearly balances every micro-step (ρ at most {8 ranks, 1024 tokens, G = 2, by category | static | rho_max
| 3}). On two nodes the busiest rank has twice the mean, and gains are larger. With 4,096 tokens ForeMoE gains {16
ranks, 4096 tokens, G = 1, by category | foremoe | speedup | 3} by category. Shuffled, it gains {16 ranks, 4096 tokens,
G = 1, shuffled | foremoe | speedup | 3 ±}, EPLB {16 ranks, 4096 tokens, G = 1, shuffled | eplb | speedup | 3}, ReLibra
{16 ranks, 4096 tokens, G = 1, shuffled | relibra | speedup | 3} and UltraEP {16 ranks, 4096 tokens, G = 1, shuffled |
ultraep | speedup | 3}, since UltraEP starts its copies only after each layer's router. Small micro-steps hide few
copies between nodes. With 512 tokens and one slot our default gains {16 ranks, 512 tokens, G = 1, by category | foremoe
| speedup | 3} and `static`, which copies less, {16 ranks, 512 tokens, G = 1, by category | static | speedup | 3};
`shared`, which copies at every use, is slower than no plan. `--residency auto` finds `static` there, but plans four
times, which costs more than it saves in such short steps. For these routes `static` is enough.
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
