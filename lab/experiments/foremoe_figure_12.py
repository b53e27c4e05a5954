"""Planning against the phases, transfer against attention.

ForeMoE, arXiv 2606.11867, figure 12.

The paper compares planning time per step with the time of recompute and policy update, and transfer time per layer with
attention. We do not have the values.

We assume: Planning of all layers of a whole step is measured on all processors of this machine. The phases are
modelled. Transfer is modelled as the time to copy a layer's experts in a micro-step to the rank that receives most,
over its link to the host with no other traffic. *Attention* is everything in a layer before its experts. The paper
plans on its cluster, where each machine can plan some of the layers.

Result: A layer's copies take less than a third of its attention, so attention can hide them. On the two cores of this
machine, planning all 48 layers takes less than a tenth of the time of recompute (by token) with two guest slots, and
about a fifth with one. On a cluster, each rank plans one layer, in parallel.
"""

from kit import System, drawn, modelled

TRANSFER = modelled(
    "transfer_ms", "transfer, ms", 3, "copies of a layer to the rank that receives most, over its link to the host",
    lambda m: 1e3 * m.pairs["busiest_receiver"] * m.cost["fetch_seconds"], by_dispatch=False,
)
DENSE = modelled(
    "dense_ms", "attention, ms", 3, "attention, norms, router and shared experts of a layer's forward",
    lambda m: m.part_ms("dense"), by_dispatch=False,
)
EVERY = dict(
    cluster="h100", dispatch=("token", "row"), ranks=64, micro_steps=16, sequences_per_rank=1, tokens_per_rank=4096,
    group_size=16,
)
inputs = [
    drawn("Qwen3-30B-A3B, math", model="Qwen3-30B-A3B", step_spread=0.9, group_spread=0.5, **EVERY),
    drawn("Qwen3-30B-A3B, mixed", model="Qwen3-30B-A3B", step_spread=0.6, group_spread=1.0, **EVERY),
]
systems = [
    *(System(f"foremoe, G = {slots}", "foremoe", guest_slots=slots) for slots in (1, 2)),
]
columns = ["plan_seconds", "recompute_ms", "update_ms", TRANSFER, DENSE]
