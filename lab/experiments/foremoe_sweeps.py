"""What sweeps of stage B buy.

Our own question.

With two guest slots on 64 ranks, the planner only adds initial guests to a step and does not revise them.

We assume: The inputs are load tables of 64 ranks; two guest slots. *With* runs `--stages BLPTS`, *without*
`BLPT`. Plans prefer balance; under the other preferences, sweeps always run. Steps are modelled on H100 with token
dispatch. Placement is the time for the slowest rank's layers, without the gather.

Result: Without sweeps, the step is 0.3 to 1.4 % shorter on five of six inputs and equal on one, and planning takes a
quarter to a third of the time.
"""

from kit import System, measured_here, recorded

MODELS = {"q30": "Qwen3-30B-A3B", "v3": "DeepSeek-V3"}
TABLES = ("q30-ep64", "q30-ep64-shuffled", "q30-ep64-bursty", "v3-ep64", "v3-ep64-skewed", "v3-ep64-bursty")
inputs = [
    recorded(
        table, f"data/load-{table}.safetensors", cluster="h100", model=MODELS[table.split("-")[0]], guest_slots=2,
        plan_gather_seconds=0.0,
    )
    for table in TABLES
]
systems = [
    System("vanilla"),
    System("with", "foremoe", prefer="balance", stages="BLPTS"),
    System("without", "foremoe", prefer="balance"),
]
PLACEMENT = measured_here(
    "placement_ms", "placement, ms", 1, "planning before the first micro-step", lambda m: 1e3 * m.placement["seconds"]
)
columns = ["rho_mean", "rho_max", "copies", "speedup", "placed_speedup", PLACEMENT]
