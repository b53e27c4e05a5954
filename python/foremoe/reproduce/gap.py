"""What lies between a modelled step and the ideal one, part by part."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from .._core import Load, Plan


@dataclass(frozen=True)
class Gap:
    """Seconds. Their sum is the step with placement.

    ideal: every rank computes, sends and receives what the mean rank of the first system does, and nothing is copied.
    whole_tokens: the mean is no whole number of tokens, so that one rank has more. slots: tokens that the plan leaves
    on the busiest rank beyond that. Both as long as the mean rank takes for so many; slots at most as long as the
    slowest rank takes beyond the mean. replicas: what else the slowest rank's experts take, as each replica is a
    product of its own, reads its weights and fills its last tile in part. copies: of weights, gradients and homes,
    where they show, and what arenas are filled with. exchange: beyond the ideal; below 0 where less is sent. planning:
    on the critical path, and placement that no rollout hides.
    """

    ideal: float
    whole_tokens: float
    slots: float
    replicas: float
    copies: float
    exchange: float
    planning: float


def gap_of(figures: dict[str, Any], first: dict[str, Any], plan: Plan, load: Load) -> Gap:
    """figures, first: of evaluations with a cluster and a model; first: of the first system on the same load."""

    def of_both(of: dict[str, Any], *names: str) -> float:
        phases = [{**phase, **phase["parts"]} for phase in of["phases"]]
        return float(sum(phase[name] for phase in phases for name in names))

    mean = load.array.sum((2, 3)) / load.num_ranks  # tokens, [micro_steps, layers]
    whole = np.ceil(mean)
    mean_experts = of_both(figures, "mean_expert_seconds")
    per_token = mean_experts / max(1.0, mean.sum())
    whole_tokens = per_token * float((whole - mean).sum())
    beyond = max(0.0, of_both(figures, "experts") - mean_experts - whole_tokens)
    slots = min(per_token * float((plan.max_load - whole).sum()), beyond)
    ideal_experts = of_both(figures, "ideal_seconds") - of_both(figures, "ideal_exchange_seconds", "dense", "optimizer")
    return Gap(
        ideal=of_both(first, "ideal_seconds"),
        whole_tokens=whole_tokens,
        slots=slots,
        replicas=of_both(figures, "experts") - ideal_experts - whole_tokens - slots,
        copies=of_both(figures, "exposed_copies", "exposed_gradients", "arena_refresh") + figures["home_move_seconds"],
        exchange=of_both(figures, "dispatch", "combine") - of_both(first, "ideal_exchange_seconds"),
        planning=of_both(figures, "planning") + figures["placement"]["exposed_seconds"],
    )
