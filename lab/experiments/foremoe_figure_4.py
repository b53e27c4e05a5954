"""Loads are stable from step to step, not from micro-step to micro-step.

ForeMoE, arXiv 2606.11867, figure 4.

The paper plots the expert loads of Qwen3-30B-A3B during RL post-training. Loads of whole steps are skewed and hardly
change; loads of micro-steps fluctuate. We do not have the plot's values.

We assume: *Change* is half the sum over experts of |share − previous share|: the share of tokens that go to different
experts than before. *Error of forecast* is the same difference between a micro-step and the mean of the previous step,
which a planner without foresight knows. Drawn inputs are five steps of 16 micro-steps on 8 ranks, with one sequence of
4,096 tokens per rank and micro-step, in GRPO groups of 8 that share a micro-step. Both routing models are ours. The
recorded input is the rollout in the repository: one step of 14 micro-steps with the routes of a small model.

Result: Drawn loads show the paper's pattern: between micro-steps, three to four times as many tokens change experts as
between steps. A forecast from the previous step therefore misplaces {math model | vanilla | forecast_error | 0} or
{mixed model | vanilla | forecast_error | 0} % of a micro-step's tokens. The recorded routes are skewed like drawn
loads, but change much less between micro-steps.
"""

import math

import numpy as np

from foremoe import _core
from kit import Column, Measured, System, drawn, recorded


def stability(m: Measured) -> dict[str, float]:
    return _core._load_stability(m.load, m.on.steps)


def forecast_error(m: Measured) -> float:
    """Mean share of misplaced tokens over micro-steps and layers from the second step on. NaN if there is one step."""
    counts = m.load.array.sum(2).astype(float)  # [micro_steps, layers, experts]
    steps = counts.reshape(m.on.steps, -1, *counts.shape[1:])
    before = steps[:-1].sum(1, keepdims=True)
    total, total_before = (of.sum(-1, keepdims=True) for of in (steps[1:], before))
    known = (total > 0) & (total_before > 0)
    error = np.abs(steps[1:] / np.maximum(total, 1) - before / np.maximum(total_before, 1)).sum(-1) / 2
    return float(error[known[..., 0]].mean()) if known.any() else math.nan


HOTTEST = Column(
    "hottest", "hottest expert", 2, "tokens of a step's most popular expert ÷ mean", lambda m: stability(m)["hottest"]
)
STEP_CHANGE = Column(
    "step_change", "change of step, %", 1, "share of tokens that go to different experts than in the previous step",
    lambda m: 100 * stability(m)["step_change"],
)
MICRO_STEP_CHANGE = Column(
    "micro_step_change", "change of micro-step, %", 1, "the same from micro-step to micro-step",
    lambda m: 100 * stability(m)["micro_step_change"],
)
FORECAST_ERROR = Column(
    "forecast_error", "error of forecast, %", 1,
    "share of a micro-step's tokens that the mean of the previous step assigns to other experts",
    lambda m: 100 * forecast_error(m),
)
EVERY = dict(ranks=8, experts=128, top_k=8, layers=4, sequences_per_rank=1, tokens_per_rank=4096, group_size=8)
inputs = [
    drawn("math model", step_spread=0.9, group_spread=0.5, micro_steps=80, steps=5, **EVERY),
    drawn("mixed model", step_spread=0.6, group_spread=1.0, micro_steps=80, steps=5, **EVERY),
    recorded(
        "recorded rollout", "data/rollout-math.safetensors",
        batching=dict(ranks=8, tokens_per_rank=4096),
    ),
]
systems = [
    System("vanilla"),
]
columns = [HOTTEST, STEP_CHANGE, MICRO_STEP_CHANGE, FORECAST_ERROR, "rho_mean", "rho_max"]
