"""Against planning and transfer that cost nothing.

ForeMoE, arXiv 2606.11867, figure 11.

The paper compares ForeMoE's steps with ForeMoE-opt, which plans and transfers offline. We do not have the values.

We assume: Quotas are planned while earlier micro-steps run. Placement of all layers needs the routes of all micro-steps
and ends before the first micro-step begins, so only the tail of the rollout can hide it. *Of opt* assumes that the tail
hides placement; *of opt, placed* assumes no tail. Placement is the CPU time of the slowest rank plus the gather,
measured here; each of four layers represents a quarter of the model's layers. *opt* omits placement, the refresh of the
host's arena and every wait for a copy or a gradient. Configurations are those of figure 8. We also test one guest slot,
because fewer slots need more copies.

Result: If the tail of the rollout hides placement, as the aim assumes, a step waits for almost nothing. If nothing
hides placement, it takes less than half a percent of the step, because the 64 ranks share it.
"""

from kit import FIRST, Aim, System, drawn, measured_here, modelled, ratio

FREE_SPEEDUP = modelled(
    "free_speedup", "speedup, opt", 3, "speedup if planning and transfer were free",
    lambda m, first: ratio(first.seconds, m.seconds - m.overhead), versus=FIRST,
)
OF_FREE_PLACED = measured_here(
    "of_free_placed", "of opt, placed, %", 1, "of opt, plus placement time not hidden by the rollout's tail",
    lambda m: ratio(100 * (m.seconds - m.overhead), m.placed_seconds), by_dispatch=True,
)
EVERY = dict(
    cluster="h100", dispatch=("token", "row"), ranks=64, layers=4, micro_steps=32, sequences_per_rank=1,
    tokens_per_rank=4096, group_size=16,
)
inputs = [
    *(
        drawn(f"{model}, math", model=model, step_spread=0.9, group_spread=0.5, **EVERY)
        for model in ("Qwen3-30B-A3B", "Qwen3-235B-A22B", "GLM-4.5-Air")
    ),
    *(
        drawn(f"{model}, mixed", model=model, step_spread=0.6, group_spread=1.0, **EVERY)
        for model in ("Qwen3-30B-A3B", "Qwen3-235B-A22B", "GLM-4.5-Air")
    ),
]
systems = [
    System("vanilla"),
    *(System(f"foremoe, G = {slots}", "foremoe", guest_slots=slots) for slots in (1, 2)),
]
columns = ["speedup", FREE_SPEEDUP, "of_free", "placement_s", "placed_speedup", OF_FREE_PLACED, "exposed_ms", "copies"]
aims = [
    Aim("of_free", system="foremoe, G = 2", at_least=99),
]
