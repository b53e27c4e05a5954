"""Loads by which a system places that does not know those of the micro-steps to come."""

from __future__ import annotations

import numpy as np

from .._core import Load

FORECASTS = {
    "former_step": "the mean micro-step of the step before",
    "former_micro_steps": "the micro-steps of the step before, one after the other",
    "average": "a moving average of the micro-steps so far, which begins with that mean",
    "step": "the mean micro-step of this step",
}
OF_FORMER_STEP = ("former_step", "former_micro_steps", "average")
_NEWEST = 0.1  # weight of the newest micro-step in the average: the default of eplb-ema


def forecast_load(kind: str, load: Load, former: Load | None) -> Load:
    """What is expected of the micro-steps, in whole tokens. kind: a key of FORECASTS.

    former: the load of the step before, for those of OF_FORMER_STEP.
    """
    if kind == "former_micro_steps":
        assert former is not None
        return former
    counts = load.array.astype(float)  # [micro_steps, layers, ranks, experts]
    if kind == "step":
        expected = np.broadcast_to(counts.mean(0), counts.shape)
    else:
        assert former is not None
        expected = np.broadcast_to(former.array.mean(0), counts.shape)
    if kind == "average":
        expected = expected.copy()
        for m in range(1, len(counts)):
            expected[m] = _NEWEST * counts[m - 1] + (1 - _NEWEST) * expected[m - 1]
    array = np.rint(expected).astype(np.int64)
    return Load.from_array(array, top_k=load.top_k, ranks_per_node=load.ranks_per_node, name=load.name)
