"""What each stage of the planner is worth.

ForeMoE, arXiv 2606.11867, figure 9.

The paper enables the stages of its planner one after the other (B base placement, L relocation, P replication, T token
assignment), then its two transfer paths, and gives speedups over veRL. We do not have the values.

We assume: We use the stages of our planner with the same names; their algorithms are not the paper's. Without T, an
expert's tokens are split equally over the replicas that serve it. With one path alone, all copies come from host
memory, or all from peers. With both, each phase takes the fastest of host, peers, and the engine's balance by bytes ÷
bandwidth. The other rows have both. The input is the first configuration of figure 8, with both routing models.

Result: Base placement (B) gains most. With tokens split equally over its replicas, ρ falls from {math | vanilla |
rho_mean | 1} to {math | B | rho_mean | 1} on *math*, and the speedup is {math | B | speedup (token) | 2} by token and
{math | B | speedup (row) | 2} by row. T comes second: exact quotas reduce ρ to {math | BLPT | rho_mean | 2} and raise
the speedup from {math | BLP | speedup (token) | 2} to {math | BLPT | speedup (token) | 2} by token and from {math | BLP
| speedup (row) | 2} to {math | BLPT | speedup (row) | 2} by row. On *mixed*, B reaches {mixed | B | speedup (token) |
2} and {mixed | B | speedup (row) | 2}, and all stages {mixed | BLPT | speedup (token) | 2} and {mixed | BLPT | speedup
(row) | 2}. BL is *worse* than B here: our L moves an expert's whole quota to a guest and leaves its home idle, where
equal splits over the guests of B work better. With T on, L and P raise the speedup on *mixed* from {mixed | BT |
speedup (token) | 3} to {mixed | BLPT | speedup (token) | 3} by token and from {mixed | BT | speedup (row) | 3} to
{mixed | BLPT | speedup (row) | 3} by row. Guests chosen once per step can come close with two slots, but not with one
(`static` in review-memory). Either path alone hides all copies, by token all but {math | BLPT | exposed_ms (token) | 0}
ms of a step of seconds. With both paths, the plan therefore uses peers alone, which need no arena to fill.
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
