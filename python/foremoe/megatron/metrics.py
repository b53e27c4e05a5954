"""Metrics of a plan, as flat dictionaries for a metrics logger."""

from __future__ import annotations

from typing import Any

import numpy as np

import foremoe
from foremoe._balance import planned_rows, rows_at_homes, spread, violations

from .capacity import Buffers, home_slots, planned_slots


def figures(load: foremoe.Load, plan: foremoe.Plan, buffers: Buffers) -> dict[str, float]:
    """Returns ρ and the required buffer capacity factor, with experts at home and as planned, and max_vio, avg_vio."""
    return {
        **named_spread("rho_vanilla", rows_at_homes(load.array)),
        **named_spread("rho_planned", planned_rows(plan)),
        **{f"foremoe/{name}": value for name, value in violations(load.array).items()},
        "foremoe/rank_capacity_factor_vanilla": buffers.factor(load, home_slots(load)),
        "foremoe/rank_capacity_factor": buffers.factor(load, planned_slots(plan)),
        "foremoe/planning_seconds": plan.times.wall_seconds,
    }


def named_spread(name: str, rows: np.ndarray[Any, Any]) -> dict[str, float]:
    """Returns ρ over the last axis: mean and maximum over layers and micro-steps."""
    mean, most = spread(rows)
    return {f"foremoe/{name}": mean, f"foremoe/{name}_max": most}
