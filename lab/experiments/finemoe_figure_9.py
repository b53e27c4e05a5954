"""Where a layer's time goes.

FineMoE, arXiv 2511.16947, figure 9.

The figure shows one MoE layer on 8 H100 with 32 experts, micro-batch 8 × 2,048 tokens, top-2, width 4,096, Zipf s = 1.
Computing experts takes most of the time, and FineMoE's experts take least. Dispatch and combine take about 1.3 ms each
in Megatron-LM. We do not have the other values.

We assume: GPT's expert has two matrices of width 4 × 4,096. Our expert has three, so its width is 10,923 for the same
work. *vanilla* and *smartmoe* are two expert-parallel groups of four GPUs, like the paper's Megatron-LM: they have 32
more expert replicas than one group of eight, and the figures are those of the slower group. The other systems have 32
guest slots. All systems except *vanilla* and `foremoe` train in place, as in finemoe-figure-7: replicas retain their
weights, so nothing is fetched, and moving replicas is not charged. Every system knows the previous step's load and
starts from that step's final placement. All micro-steps have the same popularity. FineMoE is charged for gathering
loads and for scheduling (*planning*, 20 and 64 µs). With *overlap*, rows are sorted for dispatch during this time;
sorting takes bytes ÷ memory bandwidth. In the paper, dispatch takes 0.4 ms longer than Megatron-LM's even with overlap
(§7.7), so both rows favour FineMoE. `foremoe` plans ahead, gathers loads once per step and fetches its guests.

Result: Experts take most of the time, as published, and FineMoE's experts take 0.63 to 0.67 of vanilla's time. With
constant popularity, `foremoe` gains next to nothing over FineMoE from knowing the routes.
"""

from kit import Arranged, Published, System, drawn, modelled

COMBINE = modelled("combine_ms", "combine, ms", 3, "of a layer's forward", lambda m: m.part_ms("combine"))
GPT_WIDTH_4096 = {
    "name": "GPT, width 4096", "moe_layers": 8, "experts": 32, "top_k": 2, "hidden": 4096, "intermediate": 10923,
    "vocabulary": 50257, "heads": 32, "head_width": 128,
}
inputs = [
    drawn(
        "s = 1", cluster="h100", dispatch=("token", "row"), model=GPT_WIDTH_4096, sequence_tokens=2048, routing="zipf",
        skew=1.0, ranks=8, layers=8, micro_steps=8, former_step=True, former_plan=True, sequences_per_rank=8,
        tokens_per_rank=16384, guest_slots=4,
    ),
]
systems = [
    Arranged("vanilla", groups=2),
    Arranged("smartmoe", groups=2, in_place=True),
    Arranged("flexmoe", in_place=True),
    Arranged("finemoe-symmetric", in_place=True),
    Arranged("finemoe", in_place=True),
    Arranged("finemoe, overlap", "finemoe", in_place=True, overlap=1),
    System("foremoe"),
]
columns = ["rho_mean", "dispatch_ms", "experts_ms", COMBINE, "planning_ms", "forward_ms"]
published = [
    *Published.table("dispatch_ms", {"s = 1": {"vanilla": 1.3}}),
    *Published.table("combine_ms", {"s = 1": {"vanilla": 1.3}}),
]
