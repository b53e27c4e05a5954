"""Time of a layer, forward and backward.

FEPLB, arXiv 2604.19654, table 2.

The table gives the time per MoE layer before balancing and with four systems, at EP 2, 4 and 8. We omit Triton
Distributed and Tutel, because they change how layers are computed but have no plan.

We assume: The input is that of feplb-straggler. An expert has 72 MiB as published, hence 6,144 × 2,048. A layer's time
here includes attention, modelled on the H100 preset; the backward does not recompute activations. We do not know the
paper's batch, so ratios are more reliable than milliseconds. FEPLB dispatches to homes and combines from them. FEPLB
plans after dispatch. Weights and rows of guests are sent while a rank computes its own experts; the rank then computes
its guests. The paper does not specify how guests' results return. In *FEPLB*, they return to their homes over NVLink
after the slowest rank has computed, before combine, without overlap. With *free return*, the return takes no time.
These two rows are bounds. FasterMoE dispatches by its plan and then broadcasts while a rank computes its own experts.
`foremoe` plans ahead. Copies of FEPLB and FasterMoE come from peers.

Result: FEPLB gains at most half of what is published. Dispatch and combine remain imbalanced. We know neither their
share of the layer's time in the paper nor the paper's batch. At EP 2, FEPLB and FasterMoE lengthen the backward by 1 %,
because the separate product for guests reads and writes 72 MiB of weights and their gradients for few rows.
"""

from feplb_inputs import inputs_of
from kit import Published, System, modelled

BACKWARD = modelled("backward_ms", "backward, ms", 3, "of a layer and micro-step", lambda m: m.backward_ms)
inputs = inputs_of(keep_activations=True, cluster="h100", dispatch=("token", "row"))
systems = [
    System("before", "vanilla"),
    System("FasterMoE", "fastermoe", intermediate=2048),
    System("FEPLB", "feplb", dyn=4, guest_slots=8),
    System("FEPLB, free return", "feplb", dyn=4, guest_slots=8, charge_return=0),
    System("foremoe, G = 4", "foremoe"),
]
columns = ["forward_ms", BACKWARD, "speedup", "exposed_ms"]
published = [
    *Published.table("forward_ms", {
        "EP 2": {"before": 8.2, "FasterMoE": 7.9, "FEPLB": 7.9},
        "EP 4": {"before": 7.3, "FasterMoE": 6.9, "FEPLB": 6.8},
        "EP 8": {"before": 6.9, "FasterMoE": 6.3, "FEPLB": 6.0},
    }),
    *Published.table("backward_ms", {
        "EP 2": {"before": 14.9, "FasterMoE": 14.0, "FEPLB": 14.4},
        "EP 4": {"before": 13.2, "FasterMoE": 12.2, "FEPLB": 12.1},
        "EP 8": {"before": 12.5, "FasterMoE": 11.1, "FEPLB": 10.6},
    }),
]
