"""Moving to other replicas: what it takes and when it pays.

FineMoE, arXiv 2511.16947, figure 12.

FineMoE replaces its symmetric placement by an asymmetric one when loads call for it. This moves weights and optimizer
states while training stops. The figure gives the time of such a migration for several models: *typically hundreds of
milliseconds*. Every 50 iterations, it adds less than 1 %.

We assume: The models are those of figure 7, with Zipf loads, s = 1. Both placements are of one group of 8 GPUs. Experts
of the asymmetric placement that a rank lacks come from peers, at the speed of NVLink, layer after layer; the rank that
receives most sets the time. An expert has 2 bytes of weights and 12 of optimizer state per parameter; each of two
replicas keeps half of the latter, as in ZeRO-1. In the paper, a GPU has half or a quarter of the layers. Here it has
all of them, in the step too, so shares of a step are comparable and milliseconds are 2 to 4 times as many. Steps are
policy updates, trained in place.

Result: In all layers, migration takes {GPT 32×1.3B | finemoe | migration_ms | 0} to {Mixtral 8×7B | finemoe |
migration_ms | 0} ms at the full speed of NVLink. For the layers of one of the paper's stages, it would take a half or a
quarter of that, 47 to 94 ms. The paper measures hundreds, because it also waits for re-initialised states, which are
not modelled. Of 50 steps, migration is at most {GPT 32×1.3B | finemoe | migration_of_50 (token)} %, where the paper
says less than 1 %; with ten times the time it would still be below 1 %. With constant loads, it pays off within one
step for every model, most of all with 8 experts, where two replicas of each balance least.
"""

from finemoe_models import inputs_of
from kit import FIRST, Arranged, Measured, Published, modelled, ratio


def migration_seconds(m: Measured, first: Measured) -> float:
    """Time to change from the last placement of the first system to this system's first. In each layer, the rank that
    receives most fetches the weights and optimizer states of its new experts from peers. Layers follow each other."""
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
