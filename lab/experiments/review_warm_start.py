"""What the plan of the step before is worth.

review of ForeMoE, weakness W5: asked for, published by nobody.

The review says that the paper warm-starts its planner from the step before, and asks what that is worth.

We assume: A run of eight steps of 16 or 8 micro-steps, each planned from homes (*cold*) or with the plan of the step
before (*warm*, `--previous`), which keeps what it finds in a layer only where that is no worse. Guests are fetched
again in every step, since the optimizer has changed the weights. Popularity drifts: *drift 1* means that the last step
follows another popularity altogether, a seventh of the tokens more in each step. Steps in between mix the loads of two
draws, which also evens out their micro-steps, so that there is less to gain. Figures are means over the eight steps;
copies are per layer and event, *warm* of the column's name without a step's first event. Three draws; two layers stand
for all. Planning is measured, on one thread, with other programs beside it.

Result: Nothing, in seconds of a step. Warm and cold differ by a thousandth of the speedup at most, by token as by row:
{8 ranks, drift 0 | cold | speedup (token) | 3 ±} and {8 ranks, drift 0 | warm | speedup (token) | 3} on 8 ranks, {64
ranks, drift 0 | cold | speedup (token) | 3 ±} and {64 ranks, drift 0 | warm | speedup (token) | 3} on 64, where
popularity stays; {64 ranks, drift 1 | cold | speedup (token) | 3 ±} and {64 ranks, drift 1 | warm | speedup (token) |
3} on 64 where it changes. Copies are as many: {64 ranks, drift 0 | cold | copies} and {64 ranks, drift 0 | warm |
copies} per layer and event on 64 ranks. Guests placed once per step (*static*) come out the same to the last digit
shown. Planning takes about twice as long, since each layer is planned twice. So the micro-steps of a step, which are
known, say more about where its guests belong than the guests of the step before do.
"""

from kit import System, drawn

EVERY = dict(
    cluster="h100", model="Qwen3-30B-A3B", dispatch=("token", "row"), layers=2, steps=8, plan_each_step=True,
    sequences_per_rank=1, tokens_per_rank=4096, group_size=16, step_spread=0.6, group_spread=1.0, draws=3,
    guest_slots=2,
)
inputs = [
    *(drawn(f"8 ranks, drift {drift}", ranks=8, micro_steps=128, drift=drift, **EVERY) for drift in (0, 0.2, 1)),
    *(drawn(f"64 ranks, drift {drift}", ranks=64, micro_steps=64, drift=drift, **EVERY) for drift in (0, 0.2, 1)),
]
systems = [
    System("vanilla"),
    System("cold", "foremoe"),
    System("warm", "foremoe", warm=True),
    System("cold, static", "static"),
    System("warm, static", "static", warm=True),
]
columns = ["speedup", "rho_mean", "copies", "copies_warm", "exposed_ms", "plan_seconds"]
secondary = True
