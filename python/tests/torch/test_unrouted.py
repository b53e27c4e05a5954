"""Rows without a route are served at home. Results equal those of one eager process with its own routing."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from processes import gather
from training import draw_partial_routes, recompute, run_step

import foremoe
from foremoe.torch import routes

RESIDENCIES = ("static", "resident", "shared")
CASES: dict[str, dict[str, Any]] = {
    **{f"{of}, plain": {"residency": of} for of in RESIDENCIES},
    **{f"{of}, checkpointing": {"residency": of, "seed": 1, "checkpointing": True} for of in RESIDENCIES},
    **{f"{of}, uneven": {"residency": of, "seed": 3, "uneven": True} for of in RESIDENCIES},
    **{f"{of}, float32": {"residency": of, "seed": 1, "dtype": torch.float32} for of in RESIDENCIES},
    "host": {"seed": 4, "path": "host"},
    **{wrapper: {"seed": 5, "wrapper": wrapper, "checkpointing": True} for wrapper in ("ddp", "fsdp2")},
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_match_one_eager_process(rank: int, case: str) -> None:
    result = run_step(rank, **{"dtype": torch.float64, "unrouted": "home", **CASES[case]})
    assert result["rho_computed"] == pytest.approx(result["rho_expected"], rel=1e-12), "they count as computed"
    assert result["rho_computed"] > 1.01 * result["rho_planned"], "and not as planned"
    assert 0.5 < result["mismatch"] <= 1, "of rows that have a route"
    assert sum(gather(result["copies"])) > 0


def test_a_forward_only_phase_gives_the_same_outputs(rank: int) -> None:
    worst, figures = recompute(rank, draw_partial_routes, unrouted="home")
    assert worst < 1e-12
    planned, computed = (figures[name]["mean"] for name in ("rho_planned", "rho_computed"))
    assert computed > 1.01 * planned
    assert gather((planned, computed)) == 4 * [(planned, computed)]


def test_routes_are_those_that_were_counted_if_the_trainer_overwrites_its_tensor(monkeypatch: Any) -> None:
    given = torch.tensor([[[0, 1]], [[2, 3]]], dtype=torch.int32)
    count = foremoe._core._count_routes

    def overwritten(*arguments: Any) -> Any:
        counted = count(*arguments)
        given.zero_()
        return counted

    monkeypatch.setattr(foremoe._core, "_count_routes", overwritten)
    shape: Any = types.SimpleNamespace(layers=[0], top_k=2, num_experts=4)
    kept = routes._counted_micro_step(shape, given, 0, "home", True)
    assert kept.routes.tolist() == [[[0, 1]], [[2, 3]]] and kept.counts.tolist() == [[1, 1, 1, 1, 0]]
