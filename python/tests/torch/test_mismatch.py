"""Under on_mismatch="home", routers that choose other experts than recorded train as in one eager process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from processes import gather
from training import draw_routes, recompute, run_step

import foremoe
from foremoe.torch.dispatch import chosen_slots

CASES: dict[str, dict[str, Any]] = {
    "as recorded": {"wrong": 0.0},
    "some": {"wrong": 0.1},
    "static, all": {"seed": 2, "residency": "static", "wrong": 1.0},
    "shared, uneven, home": {"seed": 3, "residency": "shared", "uneven": True, "unrouted": "home", "wrong": 0.1},
    "host, home": {"seed": 4, "path": "host", "unrouted": "home", "wrong": 0.2},
    "checkpointing": {"seed": 1, "checkpointing": True, "wrong": 0.1},
    "whole checkpoint, float32": {"seed": 1, "dtype": torch.float32, "checkpointing": "whole", "wrong": 0.1},
}


@pytest.mark.parametrize("case", CASES)
def test_unrecorded_choices_are_counted_by_micro_step_and_layer(rank: int, case: str) -> None:
    result = run_step(rank, **{"dtype": torch.float64, **CASES[case]})
    assert sum(gather(result["copies"])) > 0
    assert result["mismatched"] == result["mismatched_expected"]
    assert result["unplanned"] == result["unplanned_expected"]
    assert (sum(map(sum, result["mismatched"])) > 0) == (result["mismatch"] > 0) == (case != "as recorded")
    if case == "as recorded":
        assert result["rho_computed"] == result["rho_planned"]
    if case == "static, all":
        assert result["mismatch"] == 1
        assert result["rho_computed"] == pytest.approx(result["rho_at_homes"], rel=1e-12)


def test_a_forward_only_phase_gives_the_same_outputs(rank: int) -> None:
    worst, figures = recompute(rank, draw_routes, wrong=0.2, unrouted="home")
    assert worst < 1e-12
    assert gather(figures["mismatched"]) == 4 * [figures["mismatched"]]
    assert all(0 < rows < 4 * 22 * 2 for layers in figures["mismatched"] for rows in layers)


def test_recorded_rows_fill_the_planned_quotas_or_are_served_at_home_after_a_fallback() -> None:
    ranks, own = 4, 2
    random = np.random.default_rng(1)
    popularity = random.random(ranks * own) ** 5
    routes = np.array([[random.permutation(8)[:2] for _ in range(64)] for _ in range(ranks)], np.int32)
    routes[random.random(routes.shape[:2]) < 0.5] = np.argsort(popularity)[-2:]
    counts = np.stack([np.bincount(of.ravel(), minlength=8) for of in routes])[None, None]
    load = foremoe.Load.from_array(counts, top_k=2)
    plan = foremoe.plan(load, guest_slots=1)
    assert plan.slot_tokens[..., own:].sum() > 0
    slots = plan.num_slots
    served = np.zeros(ranks * slots, np.int64)
    for rank, of in enumerate(routes):
        turns = foremoe.RankTurns(plan, load, rank=rank)
        as_planned, at_homes = (turn.slots(of) for turn in (turns["forward", 0, 0], turns.at_homes("forward", 0, 0)))
        assert (plan.slot_expert[0, 0].ravel()[as_planned] == of).all()
        assert (at_homes == of // own * slots + of % own).all()
        served += np.bincount(as_planned.ravel(), minlength=ranks * slots)
    assert (served.reshape(ranks, slots) == plan.slot_tokens[0, 0]).all()


def test_recorded_choices_go_to_planned_slots_in_any_order_and_others_go_home() -> None:
    planned, recorded = torch.tensor([[2, 4], [0, 5], [-1, -1]]), torch.tensor([[0, 2], [0, 3], [-1, -1]])
    ids = torch.tensor([[2, 0], [3, 1], [1, 2]])  # two ranks of two homes and a guest slot
    slots, as_recorded = chosen_slots(planned, recorded, ids, ids, own=2, slots=3)
    assert slots.tolist() == [[4, 2], [5, 1], [1, 3]]
    assert as_recorded.tolist() == [[True, True], [True, False], [False, False]]
