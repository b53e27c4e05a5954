"""What planning and one copy take.

review of ForeMoE, section 6.5.

According to the review, the paper's planner takes 50 ms once per step for the base placement and 5 ms per micro-step
for the moves, each being 5 % of the time that hides it. Copying an expert from the host takes 0.4 ms. In the worst
case, 8 % of a step is not hidden.

We assume: The inputs are those of review-speedup with the review's 8 micro-steps. Planning is the CPU time of all 48
layers, measured here, and includes writing the plan. Compare *BPO only* per step, and *MDA only* per micro-step. Times
per step include our work that is done once per step; times per micro-step exclude it. *Of opt* is the step without
exposed copies and arenas ÷ the step with them. The review's 8 % corresponds to 92.6.

Result: The review's planner takes about a tenth of the published time for the base placement and less than a third for
the moves. Compared with both parts together, our planner takes about 1.7 times as long per micro-step and 5 times as
long per step. Most of this time is placement. All copies hide here, whereas the review has up to 8 % of overhead.
"""

from kit import Published, System, drawn, measured_here, modelled

PLAN_STEP = measured_here(
    "plan_step_ms", "planning, ms a step", 1, "CPU time of all planning of a step, for all layers of the model",
    lambda m: 1e3 * m.planning_cpu_seconds * m.cost["moe_layers"] / max(1, m.figures["layers"]),
)
PLAN_MICRO_STEP = measured_here(
    "plan_micro_step_ms", "planning, ms a micro-step", 2,
    "CPU time for all layers of the model, without work done once per step",
    lambda m: 1e-3 * m.figures["plan_us_per_layer_micro_step"] * m.cost["moe_layers"],
)
FETCH = modelled(
    "fetch_ms", "copy from the host, ms", 3, "of one expert's weights", lambda m: 1e3 * m.cost["fetch_seconds"],
    by_dispatch=False,
)
EVERY = dict(
    cluster="h100", dispatch=("token", "row"), model="Qwen3-30B-A3B", ranks=8, layers=8, micro_steps=8,
    sequences_per_rank=4, sequence_tokens=512, tokens_per_rank=2048, group_size=16, guest_slots=2,
)
inputs = [
    drawn("DAPO-Math", step_spread=1.3, group_spread=1.8, **EVERY),
    drawn("CodeForces", step_spread=1.1, group_spread=1.8, **EVERY),
]
systems = [
    System("none", "vanilla"),
    System("BPO only", "foremoe-review-bpo"),
    System("MDA only", "foremoe-review-mda"),
    System("BPO + MDA", "foremoe-review"),
    System("foremoe"),
]
columns = [PLAN_STEP, PLAN_MICRO_STEP, "placement_s", FETCH, "of_free", "step_ms"]
published = [
    *Published.table("plan_step_ms", {"DAPO-Math": {"BPO only": 50}}),
    *Published.table("plan_micro_step_ms", {"DAPO-Math": {"MDA only": 5}}),
    *Published.table("fetch_ms", {"DAPO-Math": {"BPO + MDA": 0.4}}),
    Published("of_free", 92.6, note="up to 8 % overhead in the worst case, else about none"),
]
secondary = True
