"""What a stage did beside its plan, and what it was worth."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist

from foremoe.balance import planned_rows, rows_at_homes, spread

from .routes import Counts

if TYPE_CHECKING:
    from .parallel import ExpertParallel
    from .stage import Stage


class BesidePlan:
    """fallbacks: (micro-step, layer) that ran at homes, not as planned. unrouted: int64 [micro_steps, layers, ranks],
    rows without a route that each rank computed; until share(), this rank alone."""

    def __init__(self, num_unrouted: Counts) -> None:
        self.fallbacks: list[tuple[int, int]] = []
        self.unrouted = np.zeros_like(num_unrouted)
        self._shares = bool(num_unrouted.any())

    def share(self, ep: ExpertParallel) -> None:
        """Tells all ranks what each computed for rows without a route. Collective."""
        if self._shares:
            computed = torch.from_numpy(self.unrouted).to(ep.device)
            dist.all_reduce(computed, group=ep.group)
            self.unrouted = computed.cpu().numpy()


def figures_of(stage: Stage) -> dict[str, Any]:
    """As Stage.figures() tells."""
    at_homes = rows_at_homes(stage.routes.counts)
    planned = planned_rows(stage.plan)
    computed = planned + stage.beside.unrouted
    for place in stage.beside.fallbacks:
        computed[place] += at_homes[place] - planned[place]
    rows = sum(int(getattr(layer, "replayed_rows", 0)) for layer in stage.ep.layers)
    mismatched = sum(int(getattr(layer, "mismatched_rows", 0)) for layer in stage.ep.layers)
    return {
        "rho_vanilla": _spread(at_homes),
        "rho_planned": _spread(planned),
        "rho_computed": _spread(computed),
        "copies": sum(stage.guests.copies.values()),
        "host_copies": stage.guests.copies["host"],
        "fallbacks": len(stage.beside.fallbacks),
        "exposed_seconds": stage.guests.exposed_seconds,
        "mismatch": mismatched / rows if rows else 0.0,
    }


def _spread(rows: Counts) -> dict[str, float]:
    mean, most = spread(rows)
    return {"mean": mean, "max": most}
