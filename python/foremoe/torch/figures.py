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
    from .phase import Stage


class BesidePlan:
    """fallbacks: (micro-step, layer) that ran at homes, not as planned. The others are int64 [micro_steps, layers,
    ranks], and until share() of this rank alone.

    unplanned: rows (tokens at one of their experts) that each rank computed beside those that were planned for it;
    negative where it computed fewer. mismatched: rows of each rank that went home because their expert was not
    recorded. mismatched_tokens: those that have such rows.
    """

    def __init__(self, num_unrouted: Counts, on_mismatch: str) -> None:
        self.fallbacks: list[tuple[int, int]] = []
        self.unplanned = np.zeros_like(num_unrouted)
        self.mismatched = np.zeros_like(num_unrouted)
        self.mismatched_tokens = np.zeros_like(num_unrouted)
        self._shares = on_mismatch == "home" or bool(num_unrouted.any())

    def share(self, ep: ExpertParallel) -> None:
        """Tells all ranks what each computed beside the plan. Collective."""
        if self._shares:
            of_all = torch.from_numpy(np.stack([self.unplanned, self.mismatched, self.mismatched_tokens])).to(ep.device)
            dist.all_reduce(of_all, group=ep.group)
            self.unplanned, self.mismatched, self.mismatched_tokens = of_all.cpu().numpy()


def figures_of(stage: Stage) -> dict[str, Any]:
    """As Stage.figures() tells."""
    at_homes = rows_at_homes(stage.routes.counts)
    planned = planned_rows(stage.plan)
    computed = planned + stage.beside.unplanned
    for place in stage.beside.fallbacks:
        computed[place] += at_homes[place] - planned[place]
    figures = {
        "rho_vanilla": _spread(at_homes),
        "rho_planned": _spread(planned),
        "rho_computed": _spread(computed),
        "copies": sum(stage.guests.copies.values()),
        "host_copies": stage.guests.copies["host"],
        "fallbacks": len(stage.beside.fallbacks),
        "exposed_seconds": stage.guests.exposed_seconds,
    }
    if stage.routes.on_mismatch == "home":
        tokens = sum(int((of[..., 0] >= 0).sum()) for of in stage.routes.own)
        others = int(stage.beside.mismatched_tokens[..., stage.ep.rank].sum())
        figures["mismatched"] = stage.beside.mismatched.sum(-1).tolist()
    else:
        tokens = sum(int(getattr(layer, "replayed_rows", 0)) for layer in stage.ep.layers)
        others = sum(int(getattr(layer, "mismatched_rows", 0)) for layer in stage.ep.layers)
    return figures | {"mismatch": others / tokens if tokens else 0.0}


def _spread(rows: Counts) -> dict[str, float]:
    mean, most = spread(rows)
    return {"mean": mean, "max": most}
