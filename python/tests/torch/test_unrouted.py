"""Rows without a route, computed at homes: all that reads them is as in one eager process, whose routers choose there.

One spawn of four processes runs all checks; each rank reports what it found.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from training import assert_equal_to_eager, draw_partial_routes, recompute, run_step, steps_of


def work(rank: int) -> dict[str, Any]:
    f64 = torch.float64
    found: dict[str, Any] = {}
    for residency in ("static", "resident", "shared"):
        options = {"residency": residency, "unrouted": "home"}
        found[f"float64, {residency}, plain"] = run_step(rank, f64, **options)
        found[f"float64, {residency}, checkpointing"] = run_step(rank, f64, seed=1, checkpointing=True, **options)
        found[f"float64, {residency}, uneven"] = run_step(rank, f64, seed=3, uneven=True, **options)
        found[f"float32, {residency}"] = run_step(rank, torch.float32, seed=1, **options)
    found["float64, host"] = run_step(rank, f64, seed=4, path="host", unrouted="home")
    for wrapper in ("ddp", "fsdp2"):
        found[f"float64, {wrapper}"] = run_step(rank, f64, seed=5, wrapper=wrapper, checkpointing=True, unrouted="home")
    worst, figures = recompute(rank, draw_partial_routes, unrouted="home")
    found["recompute"] = {"worst": worst, **{name: figures[name]["mean"] for name in ("rho_planned", "rho_computed")}}
    return found


def test_losses_and_gradients_are_those_of_one_eager_process(found: list[dict[str, Any]]) -> None:
    assert_equal_to_eager(found)


def test_figures_count_them_as_computed_and_not_as_planned(found: list[dict[str, Any]]) -> None:
    for of in found:
        for case, result in steps_of(of).items():
            assert result["rho_computed"] == pytest.approx(result["rho_expected"], rel=1e-12), case
            assert result["rho_computed"] > 1.01 * result["rho_planned"], case
            assert 0.5 < result["mismatch"] <= 1, "of rows that have a route"
        assert of["recompute"]["rho_computed"] > 1.01 * of["recompute"]["rho_planned"]
        assert of["recompute"] == found[0]["recompute"] | {"worst": of["recompute"]["worst"]}


def test_guests_were_there(found: list[dict[str, Any]]) -> None:
    for case in steps_of(found[0]):
        assert sum(of[case]["copies"] for of in found) > 0, case


def test_a_phase_of_forwards_alone_gives_the_same_outputs(found: list[dict[str, Any]]) -> None:
    for of in found:
        assert of["recompute"]["worst"] < 1e-12
