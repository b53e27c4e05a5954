"""What a plan is worth, as flat dictionaries for a logger of metrics."""

from __future__ import annotations

from typing import Any

import numpy as np

import foremoe


def figures(load: foremoe.Load, plan: foremoe.Plan) -> dict[str, float]:
    """ρ with experts at home and as planned."""
    counts = load.array.sum(2)  # [micro_steps, layers, experts]
    at_homes = counts.reshape(*counts.shape[:2], load.num_ranks, -1).sum(-1)
    planned = np.zeros(at_homes.shape, np.int64)
    planned[plan.event_micro_step] = plan.slot_tokens.sum(-1)
    return {
        **spread("rho_vanilla", at_homes),
        **spread("rho_planned", planned),
        "foremoe/planning_seconds": plan.times.wall_seconds,
    }


def spread(name: str, rows: np.ndarray[Any, Any]) -> dict[str, float]:
    """Busiest ÷ mean over the last axis: mean and max over the others, without pairs that have no rows."""
    total = rows.sum(-1)
    rho = rows.max(-1)[total > 0] / total[total > 0] * rows.shape[-1]
    mean, most = (float(rho.mean()), float(rho.max())) if rho.size else (1.0, 1.0)
    return {f"foremoe/{name}": mean, f"foremoe/{name}_max": most}
