"""What the plan of the step before is worth.

review of ForeMoE, weakness W5: requested there, never published.

The review says that the paper warm-starts its planner from the step before, and asks what that is worth.

We assume: A run has eight steps of 16 or 8 micro-steps. Each is planned from homes (*cold*) or with the plan of the
step before (*warm*, `--previous`), which is kept in a layer only where the result is no worse. Guests are fetched again
in every step, since the optimizer has changed the weights. Popularity drifts: *drift 1* means that the last step
follows a completely different popularity, which a further seventh of the tokens follows in each step. Steps in between
mix the loads of two draws, which also makes their micro-steps more even and leaves less to gain. Figures are means over
the eight steps. Copies are per layer and event; *copies, warm* excludes a step's first event. Three draws; two layers
represent all. Planning is measured on one thread, with other programs running.

Result: It saves no time in a step. The speedups of warm and cold differ by a thousandth at most, by token and by row:
{8 ranks, drift 0 | cold | speedup (token) | 3 ±} and {8 ranks, drift 0 | warm | speedup (token) | 3} on 8 ranks and {64
ranks, drift 0 | cold | speedup (token) | 3 ±} and {64 ranks, drift 0 | warm | speedup (token) | 3} on 64 with constant
popularity; {64 ranks, drift 1 | cold | speedup (token) | 3 ±} and {64 ranks, drift 1 | warm | speedup (token) | 3} on
64 with drift 1. Copies are as many: {64 ranks, drift 0 | cold | copies} and {64 ranks, drift 0 | warm | copies} per
layer and event on 64 ranks. Guests placed once per step (*static*) come out the same to the last digit shown. Planning
takes about twice as long, since each layer is planned twice. The known micro-steps of a step thus determine its guests
better than the guests of the step before do.
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
