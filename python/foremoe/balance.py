"""How evenly the ranks are loaded: the rows that a plan gives them, and ρ of these."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ._core import Plan


def planned_rows(plan: Plan) -> npt.NDArray[np.int64]:
    """Tokens that each rank serves, [micro_steps, layers, ranks]."""
    rows = np.zeros((plan.num_micro_steps, plan.num_layers, plan.num_ranks), np.int64)
    rows[plan.event_micro_step] = plan.slot_tokens.sum(-1)  # equal in both passes
    return rows


def imbalance(rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """ρ over the last axis, the ranks: busiest ÷ mean; 0 where there are no rows."""
    total = rows.sum(-1)
    rho: npt.NDArray[np.float64] = rows.max(-1) * float(rows.shape[-1]) / np.maximum(total, 1)
    return rho
