"""The review's speedups.

review of ForeMoE, section 6.2.

This table is from a review of the paper. It compares no balancing, EMA, ForeMoE and an oracle without latency on two
data sets, with Qwen3-30B-A3B on 64 H100. The review's 64 experts, top-2 and width of 7,168 are not those of this model.

We assume: We use the real shape of Qwen3-30B-A3B (128 experts, top-8), expert-parallel over 8 ranks as in the review.
The review's steps have 8 micro-steps; ours have 32. *EMA* relocates experts once, before the step, according to the
previous step's mean (lab/policies.md). *EPLB by moving average* places experts every 8 micro-steps, four times in all.
The routing model of *DAPO-Math* is fitted to the unbalanced row of the review's bucket table alone (review-buckets). We
chose the routing model of *CodeForces*; it is slightly less skewed. *foremoe-review* is the planner as the review
describes it. *Oracle* is our planner with eight slots and no tolerance; all its copies hide. The ideal speedup also
assumes the mean load and the mean traffic on every rank. The review gives utilisation and peak without a data set, so
they are shown beside DAPO-Math. Figures are means of ten draws. The review does not define utilisation: ours is the
share of the policy update in which ranks compute. The review's peak may be that of a micro-step; ours is that of a
layer in a micro-step, which is larger.

Result: By token, `foremoe` gains less than ForeMoE in the review; by row it gains about as much. `foremoe` is as fast
as the oracle (95 % in the review), and exchange causes its remaining distance to the ideal (review-gap). The planner as
the review describes it gains about two fifths of ours by token, because its base placement fills the slots that its
moves need (review-ablation).
"""

from kit import FIRST, Published, System, drawn, modelled, paired, ratio

IDEAL = modelled(
    "ideal_speedup", "ideal speedup", 3,
    "with every rank at this system's mean load and mean traffic, and no copies",
    lambda m, first: ratio(first.seconds, m.figures["ideal_step_seconds"]), versus=FIRST,
)
COMPUTING = modelled(
    "utilisation", "computing, %", 1, "share of ranks' time, policy update", lambda m: 100 * m.update["utilisation"]
)
EVERY = dict(
    cluster="h100", draws=10, dispatch=("token", "row"), model="Qwen3-30B-A3B", ranks=8, layers=8, micro_steps=32,
    sequences_per_rank=4, sequence_tokens=512, tokens_per_rank=2048, group_size=16, former_step=True, guest_slots=2,
)
inputs = [
    drawn("DAPO-Math", step_spread=1.3, group_spread=1.8, **EVERY),
    drawn("CodeForces", step_spread=1.1, group_spread=1.8, **EVERY),
]
systems = [
    System("none", "vanilla"),
    System("EMA", "ema"),
    System("EPLB by moving average", "eplb-ema"),
    System("foremoe-review"),
    System("foremoe"),
    System("oracle", "foremoe", guest_slots=8, tolerance=0),
]
columns = ["speedup", paired("foremoe"), IDEAL, "of_ideal", "rho_max", COMPUTING]
published = [
    *Published.table("speedup", {
        "DAPO-Math": {"EMA": 1.08, "foremoe-review": 1.45, "oracle": 1.52},
        "CodeForces": {"EMA": 1.06, "foremoe-review": 1.38, "oracle": 1.46},
    }),
    *Published.table("utilisation", {"DAPO-Math": {"none": 62, "EMA": 67, "foremoe-review": 88, "oracle": 92}}),
    *Published.table("rho_max", {"DAPO-Math": {"oracle": 1.08, "none": 2.3, "EMA": 1.88, "foremoe-review": 1.21}}),
]
secondary = True
