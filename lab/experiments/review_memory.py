"""Speedup against the memory of guests.

review of ForeMoE, weakness W4 and suggestion I5: requested there, never published.

The review says that the paper does not report what replicas cost in memory. It requests a Pareto front of speedup over
memory as the replication budget varies.

We assume: 64 ranks run Qwen3-30B-A3B with the mixed routing model of figure 8. Four layers are simulated. Each
represents twelve of the model's 48, and memory is that of all 48. Under `shared`, layers share their buffers, so memory
does not grow with the number of layers.

Result: If guests may change inside the step, one guest slot per rank gives {mixed | resident, G = 1 | speedup (row) |
2} of at most {mixed | resident, G = 8 | speedup (row) | 2} by row, and {mixed | resident, G = 1 | speedup (token) | 2}
of at most {mixed | resident, G = 8 | speedup (token) | 2} by token. More slots hardly make loads more even, but keep
more tokens in their node. If guests are chosen once per step, two slots are needed for even loads. `shared` needs
memory for only two layers, a thirty-sixth of the memory of `resident` in this model. With two slots, it is slower than
`resident` by 9 % by token and 5 % by row.
"""

from kit import System, drawn

inputs = [
    drawn(
        "mixed", cluster="h100", dispatch=("token", "row"), model="Qwen3-30B-A3B", ranks=64, layers=4, micro_steps=32,
        sequences_per_rank=1, tokens_per_rank=4096, group_size=16, step_spread=0.6, group_spread=1.0,
    ),
]
systems = [
    System("vanilla"),
    *(System(f"static, G = {slots}", "foremoe", residency="static", guest_slots=slots) for slots in (1, 2, 4, 8)),
    *(System(f"resident, G = {slots}", "foremoe", residency="resident", guest_slots=slots) for slots in (1, 2, 4, 8)),
    *(System(f"shared, G = {slots}", "foremoe", residency="shared", guest_slots=slots) for slots in (1, 2, 4)),
]
columns = ["guest_gib", "speedup", "placed_speedup", "of_ideal", "rho_mean", "copies", "placement_s"]
secondary = True
