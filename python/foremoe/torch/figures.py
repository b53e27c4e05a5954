"""Deviations of a phase from its plan, and the figures of the phase."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import foremoe
from foremoe._balance import planned_rows, rows_at_homes, spread, violations
from foremoe._engine.communication import gathered
from foremoe._engine.guests import Guests
from foremoe._engine.ranks import Ranks

from .misplaced import Sample, judge
from .routes import Counts, Routes
from .spread import SpreadExperts


class PlanDeviations:
    """Deviations of a phase from its plan. Arrays are int64 [micro_steps, layers, ranks]; until share() is called, they
    contain only this rank's rows.

    fallbacks: (micro-step, layer) that ran at homes instead of as planned. skipped: Micro-steps of this rank without
    their backward. differs: Per layer, bool []: whether the layer ran experts other than the replayed ones. None if it
    has not run. unplanned: Rows (tokens at one of their experts) that each rank computed minus rows planned for it.
    mismatched: Rows of each source rank served at home because their expert was not recorded. mismatched_tokens: Tokens
    with mismatched rows. sample: For the comparison of routes; None if any routes are accepted. read: float64 [],
    dropped rows that gradients reached, summed over layers.
    """

    def __init__(self, routes: Routes, experts: SpreadExperts) -> None:
        self.fallbacks: list[tuple[int, int]] = []
        self.skipped = 0
        self.differs: list[Tensor | None] = [None] * routes.num_unrouted.shape[1]
        self.unplanned = np.zeros_like(routes.num_unrouted)
        self.mismatched = np.zeros_like(routes.num_unrouted)
        self.mismatched_tokens = np.zeros_like(routes.num_unrouted)
        device = experts.ranks.device
        self.sample = (
            Sample(routes.own, experts.num_experts, device)
            if routes.on_mismatch == "refuse" and any(hasattr(layer, "own_choice") for layer in experts.layers)
            else None
        )
        self.read = torch.zeros((), dtype=torch.float64, device=device)
        self._shares = routes.on_mismatch == "home" or bool(routes.num_unrouted.any())

    def refusal(self, ranks: Ranks) -> str:
        """Returns why a rank's routes do not belong to its rows, or "". Sums `read` over ranks. Collective; waits for
        the device."""
        own = np.concatenate([[self.read.item()], self.sample.numbers() if self.sample is not None else []])
        numbers = gathered(torch.from_numpy(own).to(ranks.device), ranks.rows.group).cpu().numpy()
        self.read = torch.tensor(numbers[:, 0].sum())
        return judge(numbers[:, 1:]) if self.sample is not None else ""

    def share(self, ranks: Ranks) -> None:
        """Sums unplanned and mismatched rows over ranks, if any are possible. Collective."""
        if self._shares:
            mine = np.stack([self.unplanned, self.mismatched, self.mismatched_tokens])
            of_all = torch.from_numpy(mine).to(ranks.device)
            dist.all_reduce(of_all, group=ranks.rows.group)
            self.unplanned, self.mismatched, self.mismatched_tokens = of_all.cpu().numpy()


def figures_of(
    plan: foremoe.Plan, guests: Guests, routes: Routes, beside: PlanDeviations, experts: SpreadExperts
) -> dict[str, Any]:
    """Returns the figures documented at Phase.figures()."""
    at_homes = rows_at_homes(routes.counts, experts.ranks.table.order)
    planned = planned_rows(plan)
    computed = planned + beside.unplanned
    for place in beside.fallbacks:
        computed[place] += at_homes[place] - planned[place]
    figures = {
        "rho_vanilla": _spread(at_homes),
        "rho_planned": _spread(planned),
        "rho_computed": _spread(computed),
        **violations(routes.counts),
        "most_rows": int(computed.max(initial=0)),
        "copies": sum(guests.copies.values()),
        "host_copies": guests.copies["host"],
        "guest_weight_bytes": guests.weight_bytes,
        "guest_gradient_bytes": guests.gradient_bytes,
        "fallbacks": len(beside.fallbacks),
        "skipped": beside.skipped,
        "dropped": routes.dropped / routes.num_rows if routes.num_rows else 0.0,
        "dropped_read": float(beside.read) / (routes.dropped * len(experts.layers)) if routes.dropped else 0.0,
        "exposed_seconds": guests.exposed_seconds,
    }
    if routes.on_mismatch == "home":
        tokens = sum(int((of[..., 0] >= 0).sum()) for of in routes.own)
        others = int(beside.mismatched_tokens[..., experts.ranks.rank].sum())
        figures["mismatched"] = beside.mismatched.sum(-1).tolist()
    else:
        tokens = sum(int(getattr(layer, "replayed_rows", 0)) for layer in experts.layers)
        others = sum(int(getattr(layer, "mismatched_rows", 0)) for layer in experts.layers)
    return figures | {"mismatch": others / tokens if tokens else 0.0}


def _spread(rows: Counts) -> dict[str, float]:
    mean, most = spread(rows)
    return {"mean": mean, "max": most}
