"""Speedup by bandwidth between nodes.

review of ForeMoE, suggestion I3: requested there, never published.

The review asks for several nodes over RDMA; FineMoE's nodes have two network cards for eight GPUs.

We assume: 64 ranks run on eight H100 nodes with different networks. The routing model and the model are those of
review-nodes, with half the layers. A card reaches nine tenths of its rate, like the preset's 45 of 50 GB/s. All cards
have the preset's latency. Shared cards are not modelled: each of the four ranks that share one has a quarter of its
rate even if the others send nothing, so two cards of 800 Gb/s equal eight of 200. This exaggerates the cost of an
uneven exchange over two cards. 800 Gb/s per rank is more than the preset's PCIe 5.0 carries; the model does not limit
rows by it. *EPLB* knows the step's mean. *UltraEP* searches the whole group, *inside nodes* each node separately.
Figures are means of five draws.

Result: By token, every system gains less from balancing on slower networks, because exchange takes most of the step and
hardly becomes more even. By row, `foremoe` gains more, because the busiest rank determines exchange time. By token with
planning included, ReLibra's steps are 12 to 18 % longer than ours and those of UltraEP, whose guests stay within a
node, 26 to 30 %. On the slowest networks, preferring links shortens our step by up to 4 %.
"""

from kit import System, drawn, paired

EVERY = dict(
    dispatch=("token", "row"), model="Qwen3-30B-A3B", ranks=64, layers=2, micro_steps=16, sequences_per_rank=1,
    tokens_per_rank=4096, group_size=16, step_spread=0.6, group_spread=1.0, draws=5, guest_slots=2,
)
NETWORKS = {
    "8 cards of 800 Gb/s": 90e9,
    "8 cards of 400 Gb/s": 45e9,
    "8 cards of 200 or 2 of 800 Gb/s": 22.5e9,
    "8 cards of 100 or 2 of 400 Gb/s": 11.25e9,
    "2 cards of 200 Gb/s": 5.625e9,
    "2 cards of 100 Gb/s": 2.8125e9,
}  # bytes per second per rank
inputs = [
    drawn(label, cluster={"like": "h100", "network.bytes_per_second": speed}, **EVERY) for label, speed in NETWORKS.items()
]
systems = [
    System("vanilla"),
    System("EPLB, step mean", "eplb"),
    System("UltraEP", "ultraep"),
    System("UltraEP, whole group", "ultraep", whole_group=1),
    System("ReLibra", "relibra"),
    System("foremoe"),
    System("foremoe, links", "foremoe", prefer="links"),
]
columns = ["speedup", "placed_speedup", paired("foremoe", placed=True), "of_perfect", "exposed_ms"]
secondary = True
