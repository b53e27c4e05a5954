"""GEMM stragglers, and memory of buffers.

FEPLB, arXiv 2604.19654, figures 5 and 6 and the comparison at EP 8.

The paper also measures how much longer grouped GEMMs take on the slowest device than on the mean device. FEPLB halves
this difference at EP 2 and removes two thirds at EP 8. FEPLB's buffers take 576 MiB for eight experts.

We assume: Input and cluster are those of feplb-table-2. The straggler is the expert time of the slowest rank minus that
of the mean rank, in a layer's forward on the H100 preset, mean over layers and micro-steps. Expert time includes
sorting rows and the activation function besides the three products, and for FEPLB a second grouped product for its
guests. Milliseconds depend on the batch, which is not published; percentages are comparable. Buffer memory is that of
the guests' weights. FEPLB has one set for all layers; `foremoe` has one set per layer, or two sets under `shared`.

Result: FEPLB removes a larger part of the straggler's time than published at EP 2 and 4, and about the published part
at EP 8. This agreement confirms nothing, because we chose our reading of the search to fit the published percentages.
`foremoe` removes more. With half of FEPLB's slots, `foremoe` needs nine times its buffer memory, or the same memory
under `shared`.
"""

from feplb_inputs import inputs_of
from kit import FIRST, Aim, Measured, Published, System, modelled, percent_less


def straggler_ms(m: Measured) -> float:
    return m.turn_ms(m.recompute["parts"]["experts"] - m.recompute["mean_expert_seconds"])


STRAGGLER = modelled(
    "gemm_straggler_ms", "GEMM straggler, ms", 3,
    "expert time of the slowest rank minus that of the mean rank, in a layer's forward", straggler_ms,
    by_dispatch=False,
)
STRAGGLER_LESS = modelled(
    "gemm_straggler_less", "GEMM straggler, % less", 1, "reduction compared with the first system's straggler",
    lambda m, first: percent_less(straggler_ms(first), straggler_ms(m)), versus=FIRST, by_dispatch=False,
)
BUFFERS = modelled(
    "buffers_mib", "buffers, MiB", 0, "guest weights on the rank with the most",
    lambda m: m.recompute["memory"]["guest_weights"] / (1 << 20), by_dispatch=False,
)
inputs = inputs_of(keep_activations=True, cluster="h100")
systems = [
    System("before", "vanilla"),
    System("FasterMoE", "fastermoe", intermediate=2048),
    System("FEPLB", "feplb", dyn=4, guest_slots=8),
    *(System(f"foremoe, G = {slots}", "foremoe", guest_slots=slots) for slots in (1, 4)),
    System("foremoe, shared, G = 4", "foremoe", residency="shared"),
]
columns = [STRAGGLER, STRAGGLER_LESS, "straggler_less", BUFFERS]
published = [
    *Published.table("gemm_straggler_less", {"EP 2": {"FEPLB": 50}, "EP 4": {"FEPLB": 62}, "EP 8": {"FEPLB": 68}}),
    *Published.table("gemm_straggler_ms", {"EP 8": {"FEPLB": 0.352, "FasterMoE": 0.625}}),
    *Published.table("straggler_less", {
        "EP 2": {"FEPLB": 51, "FasterMoE": 55}, "EP 4": {"FEPLB": 63, "FasterMoE": 47},
        "EP 8": {"FEPLB": 70, "FasterMoE": 39},
    }),
    *Published.table("buffers_mib", {"EP 8": {"FEPLB": 576}}),
    Published("gemm_straggler_ms", 0.743, input="EP 8", note="of Tutel, which has no plan"),
    Published("gemm_straggler_ms", "over 1.4", input="EP 8", note="of Triton Distributed, which has no plan"),
]
aims = [
    Aim("buffers_mib", system="FEPLB", at_least=576, at_most=576),
]
