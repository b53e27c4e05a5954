"""Experts at homes that are not contiguous: results, figures, files and refusals."""

from __future__ import annotations

import tempfile
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import RANKS, gather
from refusals import ODD, OTHERS, input_error
from safetensors.torch import load_file
from training import (
    EXPERTS,
    begin,
    draw_batches,
    draw_homes,
    draw_routes,
    loss_of,
    make_eager_model,
    make_model,
    run_phase,
    run_step,
    spread,
)

import foremoe
from foremoe._engine import shares

CASES: dict[str, dict[str, Any]] = {
    f"{residency}, {dispatch}": {"residency": residency, "dispatch": dispatch}
    for residency in ("static", "resident", "shared")
    for dispatch in ("row", "token")
} | {
    "host path": {"path": "host", "guest_slots": 2},
    "host path, shared": {"path": "host", "residency": "shared"},
    "rows without a route at homes": {"unrouted": "home"},
    "routers choose": {"wrong": 0.2},
    "checkpointing": {"checkpointing": True, "residency": "shared"},
    "fsdp2": {"wrapper": "fsdp2"},
    "uneven": {"uneven": True},
}


@pytest.mark.parametrize("case", CASES)
def test_losses_and_gradients_match_one_eager_process(rank: int, case: str) -> None:
    result = run_step(rank, torch.float64, seed=1, homes=draw_homes(), **CASES[case])
    assert result["fallbacks"] == 0
    assert sum(gather(result["copies"])) > 0
    assert result["mismatched"] in (None, result["mismatched_expected"])
    if case == "rows without a route at homes":
        assert result["rho_computed"] == pytest.approx(result["rho_expected"])


def test_figures_at_homes_are_those_of_the_given_homes(rank: int) -> None:
    homes = draw_homes()
    ep, _, trained = begin(homes=homes, guest_slots=0)
    figures = run_phase(ep, trained).figures()
    of_all = gather(draw_routes(rank, 2, 3))
    ratios, violations = [], []
    for m in range(2):
        for layer in range(len(homes)):
            ids = torch.cat([of[m][:, :-1, layer].flatten() for of in of_all]).numpy()
            rows = np.bincount(homes[layer][ids], minlength=RANKS)
            ratios.append(rows.max() / rows.mean())
            loads = np.bincount(ids, minlength=homes.shape[1])
            violations.append((loads.max() / loads.mean() - 1, abs(loads / loads.mean() - 1).mean()))
    assert figures["rho_vanilla"] == pytest.approx({"mean": np.mean(ratios), "max": max(ratios)})
    assert figures["rho_computed"] == figures["rho_vanilla"]
    assert (figures["max_vio"], figures["avg_vio"]) == pytest.approx(tuple(np.mean(violations, 0)))


def test_forwards_without_a_plan_run_the_experts_of_the_router(rank: int) -> None:
    (batch,) = draw_batches(rank, 1, 3)
    ep, model, _ = begin(homes=draw_homes())
    eager = make_eager_model()
    with torch.no_grad(), ep.evaluate():
        found = loss_of(model, batch)
    assert float(found) == pytest.approx(float(loss_of(eager, batch)), rel=1e-12)


def test_files_equal_those_of_the_unspread_model(rank: int) -> None:
    folders = [tempfile.mkdtemp() if rank == 0 else ""]
    dist.broadcast_object_list(folders)
    ep, model, _ = begin(homes=draw_homes())
    ep.save_pretrained(model, folders[0])
    make_model(torch.float64).save_pretrained(f"{folders[0]}/eager")  # transformers writes on rank 0 only
    dist.barrier()
    saved, eager = (load_file(f"{folders[0]}{of}/model.safetensors") for of in ("", "/eager"))
    assert saved.keys() == eager.keys() and all(torch.equal(saved[name], eager[name]) for name in saved)


def test_all_forms_of_homes_are_accepted_and_plans_record_their_digest(rank: int) -> None:
    homes = draw_homes()
    load = foremoe.Load.from_array(np.ones((1, *homes.shape[:1], RANKS, EXPERTS), np.int64), top_k=2)
    plan = foremoe.plan(load, homes=homes)
    for given in (homes, plan):
        ep, _, trained = begin(homes=given)
        assert run_phase(ep, trained).plan.homes_digest == plan.homes_digest != ""
        ep.detach()
    ep, _, trained = begin(homes=foremoe.plan(load).home)
    assert run_phase(ep, trained).plan.homes_digest == ""


@pytest.mark.parametrize("residency", ["resident", "shared"])
def test_plans_made_in_shares_record_the_digest(rank: int, residency: str) -> None:
    homes = draw_homes()
    ep, _, trained = begin(homes=homes, residency=residency)
    with mock.patch.object(shares, "SMALLEST", 1):
        plan = run_phase(ep, trained).plan
    load = foremoe.Load.from_array(np.ones((1, *homes.shape[:1], RANKS, EXPERTS), np.int64), top_k=2)
    assert plan.homes_digest == foremoe.plan(load, homes=homes).homes_digest
    assert np.array_equal(plan.home, homes)


def test_homes_that_do_not_fit_or_differ_between_ranks_are_refused_on_all_ranks(rank: int) -> None:
    unequal = draw_homes()
    unequal[1, 3] = (unequal[1, 3] + 1) % RANKS
    for homes in (draw_homes()[:2], unequal, draw_homes().astype(np.int64), 4):
        said = input_error(lambda homes=homes: spread(make_model(torch.float64), homes=homes))
        assert "homes" in said
    said = input_error(lambda: spread(make_model(torch.float64), homes=draw_homes() if rank == ODD else None))
    assert f"on rank {ODD}, contiguous on {OTHERS}; expected the same on all ranks" in said
    said = input_error(lambda: spread(make_model(torch.float64), homes=unequal if rank == ODD else None))
    assert rank == ODD or said.startswith(f"rank {ODD} refused: homes")


def test_a_previous_plan_of_other_homes_is_refused_on_all_ranks(rank: int) -> None:
    ep, _, trained = begin()
    previous = run_phase(ep, trained).plan
    ep.detach()
    ep, _, trained = begin(homes=draw_homes())
    said = input_error(lambda: ep.plan(draw_routes(rank, 2, 3), previous=previous))
    assert said.startswith("previous: was made from other homes: their digest is contiguous, that of these ranks ")
    previous = run_phase(ep, trained).plan
    run_phase(ep, trained, previous=previous)


def test_a_state_dict_on_one_rank_is_refused_if_others_call_something_else(rank: int) -> None:
    ep, model, _ = begin(homes=draw_homes())
    with pytest.raises(RuntimeError, match="ranks make different collective calls"):
        if rank == 0:
            model.state_dict()
        else:
            ep.plan(draw_routes(rank, 1, 3))
