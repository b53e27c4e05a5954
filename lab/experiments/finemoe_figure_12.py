"""Moving to other replicas: what it takes and when it pays.

FineMoE, arXiv 2511.16947, figure 12.

FineMoE replaces its symmetric placement by an asymmetric one if the loads require it. This moves weights and optimizer
states while training stops. The figure gives the time of such a migration for several models: *typically hundreds of
milliseconds*. With a migration every 50 iterations, training takes less than 1 % longer.

We assume: The models are those of figure 7, with Zipf loads, s = 1. Both placements are of one group of 8 GPUs. A rank
copies the experts that it lacks in the asymmetric placement from peers, at the speed of NVLink, layer after layer. The
rank that receives most determines the time. An expert has 2 bytes of weights and 12 bytes of optimizer state per
parameter; each of two replicas has half of the optimizer state, as in ZeRO-1. In the paper, a GPU has half or a quarter
of the layers. Here it has all layers, also in the step, so shares of a step are comparable, but milliseconds are 2 to 4
times the paper's. Steps are policy updates, trained in place.

Result: At the full speed of NVLink, a migration takes at most {GPT 32×1.3B | finemoe | migration_of_50 (token)} % of 50
steps, less than the paper's bound of 1 %. The paper's migrations take longer, because they also wait for re-initialised
states, which are not modelled. With constant loads, a migration pays off within one step for every model.
"""

from finemoe_models import inputs_of
from kit import FIRST, Arranged, Measured, Published, modelled, ratio


def migration_seconds(m: Measured, first: Measured) -> float:
    """Time from the first system's last placement to this system's first, layer after layer. In each layer, it is the
    time in which the rank that receives most fetches the weights and optimizer states of its new experts from peers."""
    had, has = first.evaluation.plan.slot_expert[-1], m.evaluation.plan.slot_expert[0]  # [layers, ranks, slots]
    held = (has[..., :, None] == had[..., None, :]).any(-1)
    received = ((has >= 0) & ~held).sum(-1).max(1).mean()
    link = m.cost["peers"]
    one = m.cost["expert_state_bytes"] / link["bytes_per_second"] + link["latency_seconds"]
    return float(received * m.cost["moe_layers"] * one)


MIGRATION = modelled(
    "migration_ms", "migration, ms", 1,
    "weights and optimizer states moved from the first system's placement to this one's, on one node, all layers",
    lambda m, first: 1e3 * migration_seconds(m, first), versus=FIRST, by_dispatch=False,
)
OF_50_STEPS = modelled(
    "migration_of_50", "of 50 steps, %", 2, "migration ÷ 50 policy updates of this system",
    lambda m, first: 2 * ratio(migration_seconds(m, first), m.update["seconds"]), versus=FIRST,
)
PAYS = modelled(
    "migration_pays", "pays after, steps", 2, "migration ÷ time saved per policy update; inf: never",
    lambda m, first: ratio(migration_seconds(m, first), max(0.0, first.update["seconds"] - m.update["seconds"])),
    versus=FIRST,
)
inputs = inputs_of(layers=4, routing="zipf", skew=1.0)
systems = [
    Arranged("finemoe-symmetric", in_place=True),
    Arranged("finemoe", in_place=True),
]
columns = ["update_speedup", MIGRATION, OF_50_STEPS, PAYS, "rho_mean"]
published = [
    Published("migration_ms", "hundreds", system="finemoe", note="across model configurations; 2 or 4 pipeline stages"),
    Published("migration_of_50", "less than 1", system="finemoe"),
]
