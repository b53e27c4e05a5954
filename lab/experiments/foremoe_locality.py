"""Locality: fewer tokens cross nodes.

Our own question, asked by no paper: what is left to gain in exchange where loads are balanced.

With dispatch by token, a token crosses once to each other node that serves it. A plan changes which nodes serve it: by
which replicas it has (`prefer`), and by which of a source's tokens go to which replica (`rows`).

We assume: 64 H100 in nodes of 8, dispatched by token. *Long* has sequences of 4,096 tokens, two per rank and
micro-step, and one layer; *short* has one sequence of 2,048 and two layers. Groups of prompts differ (`group_spread`
0.5 and 1). All routes are known, so rows are counted. Experts are drawn independently, which real routers do not do.
With *rows by token*, every system chooses its sources' tokens that way. Three draws.

Result: ReLibra and UltraEP do not choose guests by nodes. With rows by token and G = 4, `prefer="time"` gains {long, G =
4 | foremoe, time | speedup | 3} over vanilla on long sequences and {short, G = 4 | foremoe, time | speedup | 3} on short
ones, UltraEP {long, G = 4 | ultraep | speedup | 3} and {short, G = 4 | ultraep | speedup | 3}, and `static` with the same
preference {long, G = 4 | static, time | speedup | 3} and {short, G = 4 | static, time | speedup | 3}.
"""

from kit import System, drawn

SHAPES = {
    "long": {"layers": 1, "micro_steps": 3, "tokens_per_rank": 8192, "sequences_per_rank": 2, "group_spread": 0.5},
    "short": {"layers": 2, "micro_steps": 4, "tokens_per_rank": 2048, "sequences_per_rank": 1, "group_spread": 1},
}
inputs = [
    drawn(
        f"{name}, G = {slots}{'' if rows == 'token' else ', rows in order'}", cluster="h100", model="Qwen3-30B-A3B",
        ranks=64, trace=True, guest_slots=slots, rows=rows, draws=3, **shape,
    )
    for name, shape in SHAPES.items()
    for slots, rows in ((1, "token"), (2, "order"), (2, "token"), (4, "token"))
]
systems = [
    System("vanilla"),
    System("ultraep"),
    System("ultraep, whole group", "ultraep", whole_group=1),
    System("relibra"),
    System("static"),
    System("static, time", "static", prefer="time"),
    System("foremoe"),
    System("foremoe, links", "foremoe", prefer="links"),
    System("foremoe, time", "foremoe", prefer="time"),
]
columns = ["speedup", "step_ms", "pairs", "busiest_nic", "exposed_ms", "rho_mean", "copies"]
