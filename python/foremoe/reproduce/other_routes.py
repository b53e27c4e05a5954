"""Loads whose routes are not those that were recorded, and plans of the recorded ones executed on them.

A row is a token at one of its experts. It may go elsewhere than recorded, and leaves the replica that was planned for
it. Or it has no recorded route, and no plan knows of it. Both are served at the home of the expert that the router
chose, as foremoe.torch does under on_mismatch="home" and unrouted="home".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .._core import Load, Plan
from .._errors import InputError

Counts = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True)
class OtherRoutes:
    """recorded: what is known ahead. executed: recorded − gone + come.

    gone, come: int64 [micro_steps, layers, ranks, experts], rows that leave their planned replicas, and that go home.
    """

    recorded: Load
    executed: Load
    gone: Counts
    come: Counts


def other_routes(load: Load, *, wrong: float, missing: float, seed: int) -> OtherRoutes:
    """A part of a load's rows is recorded, and a part of those goes elsewhere. Same arguments, same rows.

    load: of all rows; that of the rows that are executed is as large. wrong: share of the recorded rows that go to
    another expert than recorded, drawn by how many rows of the same source rank, layer and micro-step each of the
    others has: popular experts stay popular. missing: share of rows that are not recorded. Both 0 … 1.
    """
    random = np.random.default_rng([seed, 0x0E15E])  # apart from what drew the load
    unrecorded = random.binomial(load.array, missing)
    recorded = load.array - unrecorded
    gone = random.binomial(recorded, wrong)
    come = np.zeros_like(gone)
    for place in np.ndindex(*gone.shape[:3]):
        popular = np.broadcast_to(recorded[place].astype(float), (load.num_experts, load.num_experts)).copy()
        np.fill_diagonal(popular, 0)
        elsewhere = popular.sum(1)
        gone[place][elsewhere == 0] = 0  # there is no other expert that anybody chose
        of = gone[place].nonzero()[0]
        come[place] = random.multinomial(gone[place][of], popular[of] / elsewhere[of, None]).sum(0)

    def like(counts: Counts) -> Load:
        return Load.from_array(counts, top_k=load.top_k, ranks_per_node=load.ranks_per_node, name=load.name)

    come += unrecorded
    return OtherRoutes(like(recorded), like(recorded - gone + come), gone, come)


def executed_quotas(plan: Plan, others: OtherRoutes, *, seed: int) -> Counts:
    """[events, layers, ranks, slots]: the quotas of a plan for others.recorded as others.executed fills them.

    Rows that are gone are drawn among the replicas of their expert. Raises InputError for a plan under which an expert
    is not at its home.
    """
    random = np.random.default_rng([seed, 0x0E15F])
    quotas = plan.slot_tokens.copy()
    for event, m in enumerate(plan.event_micro_step):
        for layer in range(plan.num_layers):
            slots, tokens = plan.slot_expert[event, layer], quotas[event, layer]
            holds = slots == np.arange(plan.num_experts)[:, None, None]  # [expert, rank, slot]
            gone, come = others.gone[m, layer].sum(0), others.come[m, layer].sum(0)
            for e in ((gone > 0) | (come > 0)).nonzero()[0]:
                rank, slot = holds[e].nonzero()
                tokens[rank, slot] -= random.multivariate_hypergeometric(tokens[rank, slot], gone[e])
                home = (rank == plan.home[layer, e]).nonzero()[0]
                if len(home) == 0:
                    raise InputError(f"policy: {plan.policy} moves experts away from their homes", field="policy")
                tokens[rank[home[0]], slot[home[0]]] += come[e]
    return quotas
