"""Rows per rank under a plan, the imbalance ratio ρ, and the load violations of experts."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ._core import Plan


def planned_rows(plan: Plan) -> npt.NDArray[np.int64]:
    """Returns the tokens that each rank serves, [micro_steps, layers, ranks]."""
    rows = np.zeros((plan.num_micro_steps, plan.num_layers, plan.num_ranks), np.int64)
    rows[plan.event_micro_step] = plan.slot_tokens.sum(-1)  # equal in both passes
    return rows


def imbalance(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Returns ρ = maximum ÷ mean over the last axis (ranks); 0 if there are no rows."""
    total = rows.sum(-1)
    rho: npt.NDArray[np.float64] = rows.max(-1) * float(rows.shape[-1]) / np.maximum(total, 1)
    return rho


def rows_at_homes(counts: npt.NDArray[np.int64], order: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.int64]:
    """Returns the rows that each rank would compute with experts at home, [micro_steps, layers, ranks].

    counts: Rows by source rank, [micro_steps, layers, ranks, experts]. order: Experts of each layer sorted by home,
    [layers, experts]; None: homes are contiguous.
    """
    of_experts: npt.NDArray[np.int64] = counts.sum(2)
    if order is not None:
        of_experts = np.take_along_axis(of_experts, order[None], -1)
    rows: npt.NDArray[np.int64] = of_experts.reshape(*counts.shape[:3], -1).sum(-1)
    return rows


def spread(rows: npt.NDArray[np.int64]) -> tuple[float, float]:
    """Returns mean and maximum of ρ over all axes but the last, ignoring layers without rows; (1, 1) if none has."""
    rho = imbalance(rows)
    rho = rho[rho > 0]
    return (float(rho.mean()), float(rho.max())) if rho.size else (1.0, 1.0)


def violations(counts: npt.NDArray[np.int64]) -> dict[str, float]:
    """Returns max_vio and avg_vio: maximum of d and mean of |d| over experts, d = load ÷ mean − 1.

    Both are means over layers and micro-steps with rows; 0 if none has. A plan does not change them: ρ − 1 is the
    largest d of ranks.

    counts: [micro_steps, layers, ranks, experts].

    Source: MaxVio of arXiv 2408.15664; avg_vio as in verl.
    """
    loads = counts.sum(2)
    loads = loads[loads.any(-1)]
    if not loads.size:
        return {"max_vio": 0.0, "avg_vio": 0.0}
    d = loads / loads.mean(-1, keepdims=True) - 1
    return {"max_vio": float(d.max(-1).mean()), "avg_vio": float(abs(d).mean())}
