"""What a plan is worth, as flat dictionaries for a logger of metrics."""

from __future__ import annotations

from typing import Any

import numpy as np

import foremoe
from foremoe.balance import imbalance, planned_rows

from .capacity import Buffers, home_slots, planned_slots


def figures(load: foremoe.Load, plan: foremoe.Plan, buffers: Buffers) -> dict[str, float]:
    """ρ and the factor of buffers, with experts at home and as planned."""
    counts = load.array.sum(2)  # [micro_steps, layers, experts]
    at_homes = counts.reshape(*counts.shape[:2], load.num_ranks, -1).sum(-1)
    return {
        **spread("rho_vanilla", at_homes),
        **spread("rho_planned", planned_rows(plan)),
        "foremoe/rank_capacity_factor_vanilla": buffers.factor(load, home_slots(load)),
        "foremoe/rank_capacity_factor": buffers.factor(load, planned_slots(plan)),
        "foremoe/planning_seconds": plan.times.wall_seconds,
    }


def spread(name: str, rows: np.ndarray[Any, Any]) -> dict[str, float]:
    """ρ over the last axis: mean and max over layers and micro-steps, without those that have no rows."""
    rho = imbalance(rows)
    rho = rho[rho > 0]
    mean, most = (float(rho.mean()), float(rho.max())) if rho.size else (1.0, 1.0)
    return {f"foremoe/{name}": mean, f"foremoe/{name}_max": most}
