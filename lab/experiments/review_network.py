"""Speedup by bandwidth between nodes.

review of ForeMoE, suggestion I3: requested there, never published.

The review asks for several nodes over RDMA; FineMoE's nodes have two network cards for eight GPUs.

We assume: 64 ranks on eight nodes, with the routing model, model and half the layers of review-nodes, on H100 nodes
with different networks. A card reaches nine tenths of its rate, as the preset's 45 of 50 GB/s, and all have the
preset's latency. Shared cards are not modelled: each of the four ranks that share one has a quarter of its rate even if
the others send nothing, so two cards of 800 Gb/s equal eight of 200. This exaggerates the cost of an uneven exchange
over two cards. 800 Gb/s per rank is more than the preset's PCIe 5.0 carries; the model does not limit rows by it.
*EPLB* knows the step's mean. *UltraEP* searches the whole group, *inside nodes* each node separately. Five draws.

Result: By token, every system gains less from balancing as the network gets slower: ForeMoE gains {8 cards of 800 Gb/s
| foremoe | speedup (token) | 2 ±} with eight cards of 800 Gb/s, {8 cards of 400 Gb/s | foremoe | speedup (token) | 3 ±}
with 400, {8 cards of 200 or 2 of 800 Gb/s | foremoe | speedup (token) | 2 ±} with 200, {8 cards of 100 or 2 of 400 Gb/s
| foremoe | speedup (token) | 2 ±} with 100, and {2 cards of 100 Gb/s | foremoe | speedup (token) | 2 ±} with two cards
of 100. Exchange then is most of the step, and by token hardly becomes more even. Less traffic helps: preferring links
gains {8 cards of 400 Gb/s | foremoe, links | speedup (token) | 2 ±} with 400 Gb/s and {2 cards of 100 Gb/s | foremoe,
links | speedup (token) | 2 ±} with two cards of 100. By row the order is reversed, as exchange follows the busiest
rank: ours gains {8 cards of 800 Gb/s | foremoe | speedup (row) | 2 ±} with 800 Gb/s and {2 cards of 100 Gb/s | foremoe
| speedup (row) | 2 ±} with two cards of 100. ReLibra, whose copies stay inside nodes, is next by token on every network
({8 cards of 400 Gb/s | ReLibra | speedup (token) | 3 ±} with 400 Gb/s, {2 cards of 100 Gb/s | ReLibra | speedup (token)
| 2 ±} with two cards of 100). With planning it is 5 to 6 % behind ours on every network, draw by draw. UltraEP's copies
follow the router and cross the network, so it always waits for them. By token its gain falls from {8 cards of 400 Gb/s
| UltraEP | speedup (token) | 2} with 400 Gb/s to {2 cards of 100 Gb/s | UltraEP | speedup (token) | 2} with two cards
of 100, no more than EPLB's; by row it passes ReLibra from 400 Gb/s down. Inside nodes it never waits but balances less,
and is no faster on any network.
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
    System("UltraEP inside nodes", "ultraep", inside_nodes=1),
    System("ReLibra", "relibra"),
    System("foremoe"),
    System("foremoe, links", "foremoe", prefer="links"),
]
columns = ["speedup", "placed_speedup", paired("foremoe", placed=True), "of_perfect", "exposed_ms"]
secondary = True
