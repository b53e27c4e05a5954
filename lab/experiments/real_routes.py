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

Result: TODO
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
