"""What the plan of the step before is worth.

review of ForeMoE, weakness W5: requested there, never published.

The review says that the paper warm-starts its planner from the step before, and asks how much this gains.

We assume: A run has eight steps of 16 or 8 micro-steps. Each step is planned from homes (*cold*) or with the previous
step's plan (*warm*, `--previous`). A layer uses the warm plan only if it is no worse than the cold plan. Guests are
fetched again in every step, since the optimizer has changed the weights. Popularity drifts: with *drift 1*, the last
step has a completely different popularity. In each step, a further seventh of the tokens follows it. Intermediate steps
mix the loads of two draws. This also makes their micro-steps more even, so there is less to gain. Figures are means
over the eight steps. Copies are per layer and event; *copies, warm* excludes a step's first event. There are three
draws, and two layers represent all. Planning is measured on one thread, with other programs running.

Result: Warm starts save no time in a step: the speedups of warm and cold starts differ by at most 0.3 %, and the copies
per layer and event by at most 0.3. Planning takes 1.7 to 2.9 times as long, because each layer is planned twice.
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
