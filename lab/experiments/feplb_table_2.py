"""Time of a layer, forward and backward.

FEPLB, arXiv 2604.19654, table 2.

The table has the time per MoE layer before balancing and with four systems, at EP 2, 4 and 8. We leave out Triton
Distributed and Tutel: they change how layers are computed rather than where, so they have no plan.

We assume: The input is that of feplb-straggler. An expert has 72 MiB as published, so 6,144 × 2,048. A layer's time
here includes all of the layer, attention too, and is modelled on the H100 preset; backward does not recompute
activations. We do not know the paper's batch, so ratios are more reliable than milliseconds. FEPLB's dispatch and
combine are those of homes. It plans after dispatch; weights and rows of guests follow while a rank computes its own
experts, then it computes its guests. How their results come back is not specified. *FEPLB* returns them to their homes
over NVLink when the slowest rank has computed, before combine, and nothing hides that. With *free return* they are back
in no time. These are bounds. FasterMoE broadcasts after the dispatch, which goes by its plan, beside a rank's own
experts. Ours is planned ahead. Copies of FEPLB and FasterMoE come from peers.

Result: FEPLB gains at most half of what is published. With a free return its forward and its backward are, by token, 7
and 8 % shorter than before balancing at EP 8 (published 13 and 15), and 3 and 4 % at EP 4 (published 7 and 8); by row 7
and 3 %. With the return in full they are 4 and 6 % shorter at EP 8, 2 and 3 % at EP 4: it takes 0.32 and 0.17 ms per
layer and pass. What a rank has at home hides planning, copies and rows on their way to guests. Dispatch and combine
stay as imbalanced as they were, in the paper as here; how much of its layer they are we do not know, nor its batch. At
EP 2 its forward gains 1 % (published 4), but its backward *loses* 1 %, where the paper's gains 3: guests are a product
of their own here, and one of so few rows is as long as its 72 MiB of weights and their gradients take to read and
write. Times before balancing rise with EP here and fall in the paper: its batch per device, attention and the rest of
its layers are not known to us. FasterMoE gains 6 % of forward and of backward by token at EP 8 (published 9 and 11), 2
% at EP 4 (published 5 and 8). At EP 2 its forward gains 1 % and its backward loses 1 % (published 4 and 6), by a
separate product for few rows as FEPLB's does. Its broadcasts of 72 MiB hide behind a rank's own experts, and its
shadows stay for the backward, as in its code.
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
