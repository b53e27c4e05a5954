"""The gap between a modelled step and the ideal one, taken apart."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from experiments import modelled, run

import foremoe
from foremoe import reproduce
from foremoe.reproduce.gap import Gap, gap_of

# Every part of the gap to the ideal, of systems that have it.
GAP = modelled(
    [
        "gap_ideal_ms", "gap_whole_tokens_ms", "gap_slots_ms", "gap_replicas_ms", "gap_copies_ms", "gap_exchange_ms",
        "gap_planning_ms", "placed_step_ms", "step_ms",
    ],
    {
        "none": {"policy": "vanilla"},
        "ours": {"policy": "foremoe"},
        "from the host": {"policy": "foremoe", "path": "host"},
        "EMA": {"policy": "ema"},
        "free": {"policy": "eplb"},
        "FEPLB": {"policy": "feplb"},
        "FasterMoE": {"policy": "fastermoe"},
        "UltraEP": {"policy": "ultraep"},
    },
    ranks=16, tokens_per_rank=1000, former_step=True, guest_slots=2,
)  # fmt: skip


@pytest.fixture(scope="module")
def result() -> reproduce.Result:
    return run(GAP)


def test_the_parts_add_up_to_the_step_with_placement(result: reproduce.Result) -> None:
    for system, cell in zip(result.experiment.systems, result.cells[0], strict=True):
        *parts, placed, step = cell.figures
        assert sum(parts) == pytest.approx(placed, rel=1e-12), system.label
        assert placed >= step
        assert min(parts[:5]) >= 0, system.label


def test_each_part_is_of_the_systems_that_have_its_cause(result: reproduce.Result) -> None:
    names = [column.name for column in result.experiment.columns]
    parts = {
        system.label: dict(zip(names, cell.figures, strict=True))
        for system, cell in zip(result.experiment.systems, result.cells[0], strict=True)
    }
    none, ours = parts["none"], parts["ours"]
    assert none["gap_slots_ms"] > 20 * ours["gap_slots_ms"] > 0
    assert none["gap_exchange_ms"] > ours["gap_exchange_ms"]
    assert none["gap_copies_ms"] == none["gap_planning_ms"] == 0 < ours["gap_planning_ms"]
    assert parts["from the host"]["gap_copies_ms"] > ours["gap_copies_ms"]
    assert parts["EMA"]["gap_copies_ms"] > 0  # homes that moved, with their state
    assert parts["UltraEP"]["gap_planning_ms"] > 0 == parts["FEPLB"]["gap_planning_ms"]  # hidden by own experts


def test_a_mean_that_is_no_whole_number_leaves_one_rank_with_more() -> None:
    array = np.zeros((1, 1, 4, 4), np.int64)
    array[0, 0, 0] = [3, 3, 2, 2]
    load = foremoe.Load.from_array(array, top_k=1)
    none = dict.fromkeys(("exposed_copies", "exposed_gradients", "arena_refresh", "planning"), 0.0)
    parts = {**none, "experts": 3.5, "dispatch": 2.0, "combine": 1.0, "dense": 5.0, "optimizer": 0.5}
    seconds: dict[str, Any] = {"mean_expert_seconds": 2.5, "ideal_seconds": 9.5, "ideal_exchange_seconds": 2.0}
    recompute: dict[str, Any] = {"parts": parts, **seconds}
    update = {"parts": dict.fromkeys(parts, 0.0), **dict.fromkeys(seconds, 0.0)}
    figures = {"phases": [recompute, update], "home_move_seconds": 0.0, "placement": {"exposed_seconds": 0.25}}
    gap = gap_of(figures, figures, foremoe.plan(load, policy="vanilla"), load)
    # The mean is 2.5 tokens in 2.5 s, so the half token that makes it whole is 0.5 s; ideal experts take 2 s.
    assert gap == Gap(ideal=9.5, whole_tokens=0.5, slots=0, replicas=1, copies=0, exchange=1, planning=0.25)
