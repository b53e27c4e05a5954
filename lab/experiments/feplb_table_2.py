"""Time of a layer, forward and backward.

FEPLB, arXiv 2604.19654, table 2.

The table gives the time per MoE layer before balancing and with four systems, at EP 2, 4 and 8. We leave out Triton
Distributed and Tutel: they change how layers are computed rather than where, so they have no plan.

We assume: The input is that of feplb-straggler. An expert has 72 MiB as published, so 6,144 × 2,048. A layer's time
here includes the whole layer with attention, modelled on the H100 preset; backward does not recompute activations. We
do not know the paper's batch, so ratios are more reliable than milliseconds. FEPLB dispatches to homes and combines
from them. It plans after dispatch; weights and rows of guests follow while a rank computes its own experts, and the
rank then computes its guests. The paper does not specify how their results return. *FEPLB* returns them to their homes
over NVLink after the slowest rank has computed, before combine, without overlap. With *free return*, the return takes
no time. The two are bounds. FasterMoE dispatches by its plan and then broadcasts while a rank computes its own experts.
`foremoe` plans ahead. Copies of FEPLB and FasterMoE come from peers.

Result: FEPLB gains at most half of what is published. With a free return, its forward and backward are, by token, 7 and
8 % shorter than before balancing at EP 8 (published 13 and 15), and 3 and 4 % at EP 4 (published 7 and 8); by row 7 and
3 %. With the full return they are 4 and 6 % shorter at EP 8 and 2 and 3 % at EP 4, since it takes 0.32 and 0.17 ms per
layer and pass. A rank's own experts hide planning, copies and the rows sent to guests. Dispatch and combine stay as
imbalanced as before, in the paper and here; we know neither their share of the paper's layer nor its batch. At EP 2 its
forward gains 1 % (published 4), but its backward *loses* 1 %, where the paper's gains 3: guests are a separate product
here, and with so few rows its time is that of reading and writing 72 MiB of weights and their gradients. Times before
balancing rise with EP here but fall in the paper, whose batch per device, attention and other layer parts we do not
know. FasterMoE gains 6 % of forward and of backward by token at EP 8 (published 9 and 11), 2 % at EP 4 (published 5 and
8). At EP 2 its forward gains 1 % and its backward loses 1 % (published 4 and 6), due to a separate product for few rows
as in FEPLB. Its broadcasts of 72 MiB overlap with a rank's own experts, and its shadows are kept for the backward, as
in its code.
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
