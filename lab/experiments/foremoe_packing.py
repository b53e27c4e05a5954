"""Packing: which sequences share a micro-step.

Our own question, asked by no paper.

`foremoe pack` chooses the sequences of every micro-step and rank, so that all micro-steps use the experts alike. Guests
then need no exchange between micro-steps.

We assume: *Mixed* is the recorded rollout on 8 H100 with 2,048 tokens per rank and micro-step: in the order of the
recording, and in five random orders. *Bursty* has one sequence of 2,048 tokens per rank and micro-step on 64 H100, in
the order of GRPO groups whose popularity differs; *mini-batches of 4* keeps sequences within four micro-steps of that
order. One layer, three draws. One guest slot. Steps of one input are comparable with those of its packing, since both
have the same sequences.

Result: Packed, `static` is as even as the default plan: on bursty, its ρ falls from {bursty | static | rho_mean | 3} to
{bursty, packed | static | rho_mean | 3}, and its step from {bursty | static | step_ms | 0} to {bursty, packed | static |
step_ms | 0} ms. The default plan needs {bursty, packed | foremoe | copies | 1} copies instead of {bursty | foremoe | copies
| 1}, in mini-batches of 4 {bursty, packed in mini-batches of 4 | foremoe | copies | 1}, but its step does not gain: {bursty |
foremoe | step_ms | 0} ms in the order of groups, {bursty, packed | foremoe | step_ms | 0} ms packed. On mixed, whose
micro-steps are alike in any order, packing saves dense work: the default plan's step falls from {mixed, shuffled | foremoe |
step_ms | 0} to {mixed, packed | foremoe | step_ms | 0} ms.
"""

from kit import System, drawn, recorded

MODELLED = {"cluster": "h100", "model": "Qwen3-30B-A3B"}
BURSTY = {
    "ranks": 64, "experts": 128, "layers": 1, "micro_steps": 32, "sequences_per_rank": 1, "tokens_per_rank": 2048,
    "group_spread": 1, "trace": True, "draws": 3,
}
FILE, SHUFFLED = "data/rollout-mixed.safetensors", {"shuffled": True, "draws": 5}
OF_MIXED, OF_BURSTY = {"ranks": 8, "tokens_per_rank": 2048}, {"ranks": 64, "tokens_per_rank": 2048}
inputs = [
    recorded("mixed", FILE, batching=OF_MIXED, **MODELLED),
    recorded("mixed, shuffled", FILE, batching=OF_MIXED, **SHUFFLED, **MODELLED),
    recorded("mixed, packed", FILE, packed=OF_MIXED, **SHUFFLED, **MODELLED),
    drawn("bursty", **BURSTY, **MODELLED),
    drawn("bursty, packed", packed=OF_BURSTY, **BURSTY, **MODELLED),
    drawn("bursty, packed in mini-batches of 4", packed={**OF_BURSTY, "mini_batches": 8}, **BURSTY, **MODELLED),
]
systems = [System("vanilla"), System("static"), System("foremoe")]
columns = ["rho_mean", "rho_max", "copies", "step_ms"]
