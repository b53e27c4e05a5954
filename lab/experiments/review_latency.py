"""What planning and one copy take.

review of ForeMoE, section 6.5.

The review gives the times of the paper's planner: 50 ms once per step for the base placement and 5 ms per micro-step
for the moves, each 5 % of the time that hides them. A copy of an expert takes 0.4 ms from the host. In the worst case 8
% of a step is not hidden.

We assume: The inputs are those of review-speedup with the review's 8 micro-steps. Planning is CPU time of all 48
layers, measured here, and includes writing the plan. Compare *BPO only* per step, and *MDA only* per micro-step. Times
per micro-step exclude what ours does once per step; times per step include it. *Of opt* is the step without exposed
copies and arenas ÷ the step with them: the review's 8 % would be 92.6.

Result: The review's planner needs far less time here than the review says: its base placement a fifth of 50 ms or less,
and its moves two fifths of 5 ms or less in each micro-step. The review does not say how many layers its times cover;
ours cover all. Per micro-step, our planner takes up to twice as long as the review's planner. Over a step it takes
about ten times as long, nearly all of it for placement, and more than the review gives for the base placement. A copy
from the host takes half of the review's time, since an expert is 9.4 MB and not 12.5, and the link is faster than 32
GB/s. All copies hide, also those of the review's planner, since they may come from peers; the review has up to 8 % of
overhead.
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
