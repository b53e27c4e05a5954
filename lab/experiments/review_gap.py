"""What lies between a step and the oracle's.

review of ForeMoE, weakness W3: requested there, never published.

In the review, ForeMoE reaches 95 % of its oracle. The review says that the paper does not explain the other 5 %: the
planner, memory for replicas, exposed copies, or balancing per layer.

We assume: *Ideal* is a step in which every rank computes the mean load, sends and receives the mean rows of the first
system, and copies nothing. Each further column adds the time of one cause on the critical path, and they add up to the
last column. *Slots* is the busiest rank's load beyond the mean and beyond whole tokens: what the plan's slots cannot
hold, and what the planner leaves, since ours stops within 0.6 % of the mean. *Exact* has no tolerance, and *8 slots*
has four times as many. *Replicas*: each replica is a separate matrix product, which reads the weights once more and
fills its last tile only in part. Whole tokens take nothing, because the mean is a whole number in drawn loads. Copies
include refreshing the arenas and sending gradients home. Planning is what online systems charge, plus placement
(measured here) that no rollout's tail hides. The first two inputs are those of review-speedup; the third is the mixed
routing model of figure 8 on 64 ranks of eight nodes.

Result: Balance is not what ours lacks. Its slots leave less than a thousandth of the ideal step, whole tokens nothing,
and copies next to nothing. Replicas take 4 to 5 thousandths at 8 ranks and less at 64, since parts of experts do not
fill their tiles; more slots make that worse. The rest is exchange, since sources send unevenly even where all ranks
receive the same: by token 3 % of the ideal step in one node and 4 % between eight nodes, by row 1.5 and 7 %. Preferring
links removes that between nodes by token (the plan sends less than vanilla's mean), and nearly half of it by row.
Balancing exactly saves almost nothing: at most 1 in 1,000, and at 64 ranks by token its exchange makes it 3 in 1,000
slower. Placement, measured here, takes 1 % of the ideal step at 8 ranks where no rollout hides it, and 0.2 % at 64,
whose ranks share it. So none of the review's guesses holds for ours: not the planner's time, not its balance, not
memory, not copies, and experts are balanced in every layer. The table also shows why the gain from balancing depends on
the dispatch: of vanilla's time beyond the ideal step at 64 ranks, uneven exchange is 28 % by token, and 86 % by row.
The planner as the review describes it mainly lacks balance, and its uneven loads make exchange uneven. EPLB that knows
each micro-step is as even as ours in one node, and waits little for its copies ({DAPO-Math | EPLB that knows the
micro-step | gap_copies_ms (token) | 0} ms by token). It is faster than ours there. Since homes may move too, fewer rows
travel, and exchange takes {DAPO-Math | EPLB that knows the micro-step | gap_exchange_ms (token) | 0} ms more than in
the ideal step, where ours takes {DAPO-Math | foremoe | gap_exchange_ms (token) | 0} (review-free-placement). With 64
ranks of two experts each it is less even, and sends more than ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from kit import FIRST, Column, Measured, System, drawn, measured_here, modelled


@dataclass(frozen=True)
class Gap:
    """The parts of a step in seconds. Their sum is the step with placement.

    ideal: every rank computes, sends and receives what the mean rank of the first system does, and copies nothing.
    whole_tokens: rounding the mean up to whole tokens. slots: further tokens that the plan leaves on the busiest rank.
    Both are charged at the mean rank's time per token; slots at most what the slowest rank takes beyond the mean.
    replicas: the remaining time of the slowest rank's experts, since each replica is a separate product, reads its
    weights and partly fills its last tile. copies: exposed copies of weights, gradients and homes, and filling of
    arenas. exchange: time beyond the ideal; negative if less is sent. planning: on the critical path, plus placement
    that no rollout hides.
    """

    ideal: float
    whole_tokens: float
    slots: float
    replicas: float
    copies: float
    exchange: float
    planning: float


def gap_of(m: Measured, first: Measured) -> Gap:
    mean = m.load.array.sum((2, 3)) / m.load.num_ranks  # tokens, [micro_steps, layers]
    whole = np.ceil(mean)
    mean_experts = m.of_both("mean_expert_seconds")
    per_token = mean_experts / max(1.0, mean.sum())
    whole_tokens = per_token * float((whole - mean).sum())
    beyond = max(0.0, m.of_both("experts") - mean_experts - whole_tokens)
    slots = min(per_token * float((m.evaluation.plan.max_load - whole).sum()), beyond)
    ideal_experts = m.of_both("ideal_seconds") - m.of_both("ideal_exchange_seconds", "dense", "optimizer")
    return Gap(
        ideal=first.of_both("ideal_seconds"),
        whole_tokens=whole_tokens,
        slots=slots,
        replicas=m.of_both("experts") - ideal_experts - whole_tokens - slots,
        copies=m.of_both("exposed_copies", "exposed_gradients", "arena_refresh") + m.figures["home_move_seconds"],
        exchange=m.of_both("dispatch", "combine") - first.of_both("ideal_exchange_seconds"),
        planning=m.of_both("planning") + m.placement["exposed_seconds"],
    )


def part(name: str, title: str, meaning: str, origin: Callable[..., Column] = modelled) -> Column:
    return origin(
        f"gap_{name}_ms", title, 1, meaning, lambda m, first: 1e3 * getattr(gap_of(m, first), name), versus=FIRST,
        by_dispatch=True,
    )  # fmt: skip


EVERY = dict(
    cluster="h100", dispatch=("token", "row"), model="Qwen3-30B-A3B", micro_steps=32, group_size=16, former_step=True,
    guest_slots=2,
)
inputs = [
    drawn(
        "DAPO-Math", ranks=8, layers=8, sequences_per_rank=4, sequence_tokens=512, tokens_per_rank=2048,
        step_spread=1.3, group_spread=1.8, **EVERY,
    ),
    drawn(
        "CodeForces", ranks=8, layers=8, sequences_per_rank=4, sequence_tokens=512, tokens_per_rank=2048,
        step_spread=1.1, group_spread=1.8, **EVERY,
    ),
    drawn(
        "mixed, 64 ranks", ranks=64, layers=4, sequences_per_rank=1, tokens_per_rank=4096, step_spread=0.6,
        group_spread=1.0, **EVERY,
    ),
]
systems = [
    System("none", "vanilla"),
    System("EMA", "ema"),
    System("EPLB that knows the micro-step", "eplb-oracle"),
    System("foremoe-review"),
    System("foremoe"),
    System("foremoe, exact", "foremoe", tolerance=0),
    System("foremoe, 8 slots", "foremoe", guest_slots=8),
    System("foremoe, links", "foremoe", prefer="links"),
]
columns = [
    part(
        "ideal", "ideal, ms",
        "every rank has the mean load and the first system's mean traffic, and nothing is copied; the columns with + "
        "add up from there to the step with placement",
    ),
    part("whole_tokens", "+ whole tokens", "rounding the mean load up to whole tokens"),
    part("slots", "+ slots", "further tokens that the plan leaves on the busiest rank"),
    part(
        "replicas", "+ replicas",
        "remaining time of the slowest rank's experts: each replica reads its weights and partly fills its last tile",
    ),
    part("copies", "+ copies", "exposed copies and gradients, arenas filled, homes moved"),
    part(
        "exchange", "+ exchange",
        "time beyond the ideal exchange; negative where the plan sends less than the first system's",
    ),
    part("planning", "+ planning", "on the critical path, and placement that no rollout hides", measured_here),
    measured_here(
        "placed_step_ms", "= step, placed, ms", 1, "the step, with placement that the rollout's tail does not hide",
        lambda m: 1e3 * m.placed_seconds, by_dispatch=True,
    ),
]
secondary = True
