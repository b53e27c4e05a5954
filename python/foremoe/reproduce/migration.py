"""Replicas moved between steps, with their optimizer states."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .._core import Plan


def migration_seconds(before: Plan, after: Plan, cost: Mapping[str, Any]) -> float:
    """From the last placement of a plan to the first one of another: weights and optimizer states of all experts that
    the rank which receives most in a layer does not have yet, over its links to peers, layer after layer. NaN between
    plans of different ranks.
    """
    had, has = before.slot_expert[-1], after.slot_expert[0]  # [layers, ranks, slots]
    if had.shape[:2] != has.shape[:2]:
        return math.nan
    held = (has[..., :, None] == had[..., None, :]).any(-1)
    received = ((has >= 0) & ~held).sum(-1).max(1).mean()
    link = cost["peers"]
    one = cost["expert_state_bytes"] / link["bytes_per_second"] + link["latency_seconds"]
    return float(received * cost["moe_layers"] * one)
