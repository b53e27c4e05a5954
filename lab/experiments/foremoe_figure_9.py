"""What each stage of the planner is worth.

ForeMoE, arXiv 2606.11867, figure 9.

The paper enables the stages of its planner one after the other (B base placement, L relocation, P replication, T token
assignment), then its two transfer paths. It gives speedups over veRL. We do not have the values.

We assume: Our planner's stages have the same names, but other algorithms than the paper's. Without T, an expert's
tokens are split equally over the replicas that serve it. With one path alone, all copies come from host memory, or all
from peers. With both, each phase uses the fastest of host, peers and the engine's split by bytes ÷ bandwidth. All other
rows use both paths. The input is the first configuration of figure 8, with both routing models.

Result: By token, base placement (B) alone gains three quarters of the speedup; token assignment (T) adds most of the
rest. P makes the loads even, and L changes nothing once P is on, since ours moves an expert's whole quota. The peer
path alone is as fast as both paths; the host path alone is at most 1 % slower.
"""

from kit import System, drawn

EVERY = dict(
    cluster="h100", dispatch=("token", "row"), model="Qwen3-30B-A3B", ranks=64, layers=4, micro_steps=32,
    sequences_per_rank=1, tokens_per_rank=4096, group_size=16, guest_slots=2,
)
inputs = [
    drawn("math", step_spread=0.9, group_spread=0.5, **EVERY),
    drawn("mixed", step_spread=0.6, group_spread=1.0, **EVERY),
]
systems = [
    System("vanilla"),
    *(System(f"{stages}", "foremoe", stages=stages) for stages in ("B", "BL", "BLP", "BLPT", "BT", "BPT")),
    *(System(f"BLPT, path {path} alone", "foremoe", path=path) for path in ("host", "peer")),
    System("BLPT, both paths", "foremoe", path="auto"),
]
columns = ["speedup", "of_ideal", "rho_mean", "rho_max", "copies", "exposed_ms"]
