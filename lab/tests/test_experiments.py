"""Tests that all experiments of lab/experiments load, and that their own computations are correct."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

import foremoe
from experiments import foremoe_figure_4, foremoe_rollout, foremoe_wrong_routes, review_foresight, review_gap
from experiments.foremoe_wrong_routes import OnOtherRoutes, OtherRoutes, executed_quotas, on_other_routes
from experiments.review_foresight import Forecasting
from kit import Case, Drawn, Input, Measured, System, drawn
from kit.experiment import experiment_named, experiment_names
from small import NONE, figures, modelled, run

GATHER_MS = 1e3 * (20e-6 + 7 * 128 * 4 / 370e9)  # 7 ranks' 4-byte counts of 128 experts, over NVLink


def test_every_experiment_loads_and_has_all_texts() -> None:
    names = experiment_names()
    assert names.index("foremoe-figure-4") < names.index("foremoe-figure-10") < names.index("review-gap")
    for name in names:
        experiment = experiment_named(name)
        assert experiment.title and experiment.source and experiment.about and experiment.assumed, name
    with pytest.raises(foremoe.InputError, match="no experiment 'figure-8'; there are real-routes, foremoe-figure-4, "):
        experiment_named("figure-8")


def measured(load: foremoe.Load, steps: int = 1) -> Measured:
    evaluation = foremoe._core._evaluate(load, "vanilla", {}, {})
    return Measured(evaluation, load, Input("", lambda seed: Drawn(load), steps=steps), evaluation)


def test_the_forecast_error_is_the_share_of_tokens_that_the_former_step_mispredicts() -> None:
    array = np.zeros((4, 1, 2, 4), np.int64)  # two steps of two micro-steps
    array[:, 0, 1] = [[6, 2, 0, 0], [2, 6, 0, 0], [4, 2, 2, 0], [0, 0, 0, 3]]
    load = foremoe.Load.from_array(array, top_k=1)
    # In the first step, experts 0 and 1 have half each. In the second, 2 of 8 tokens move (1/4), then 3 of 3 (1).
    assert foremoe_figure_4.forecast_error(measured(load, 2)) == pytest.approx((0.25 + 1) / 2)
    assert math.isnan(foremoe_figure_4.forecast_error(measured(load)))


def test_the_parts_of_the_gap_add_up_and_appear_only_in_systems_that_cause_them() -> None:
    systems = [
        NONE, System("ours", "foremoe"), System("from the host", "foremoe", path="host"), System("ema"), System("eplb"),
        System("feplb"), System("fastermoe"), System("ultraep"),
    ]  # fmt: skip
    on = modelled(ranks=16, tokens_per_rank=1000, former_step=True)
    result = run([*review_gap.columns, "step_ms"], systems, [on])
    for system, cell in zip(systems, result.cells[0], strict=True):
        *parts, placed, step = cell.figures
        assert sum(parts) == pytest.approx(placed, rel=1e-12), system.label
        assert placed >= step and min(parts[:5]) >= 0, system.label
    of = figures(result)
    none, ours = of["none"], of["ours"]
    assert none["gap_slots_ms"] > 20 * ours["gap_slots_ms"] > 0
    assert none["gap_exchange_ms"] > ours["gap_exchange_ms"]
    assert none["gap_copies_ms"] == none["gap_planning_ms"] == 0 < ours["gap_planning_ms"]
    assert of["from the host"]["gap_copies_ms"] > ours["gap_copies_ms"]
    assert of["ema"]["gap_copies_ms"] > 0  # homes moved, with their optimizer state
    assert of["ultraep"]["gap_planning_ms"] > 0 == of["feplb"]["gap_planning_ms"]  # hidden by home experts


def test_a_fractional_mean_is_charged_as_whole_tokens() -> None:
    array = np.zeros((1, 1, 4, 4), np.int64)
    array[0, 0, 0] = [3, 3, 2, 2]
    none = dict.fromkeys(("exposed_copies", "exposed_gradients", "arena_refresh", "planning"), 0.0)
    parts = {**none, "experts": 3.5, "dispatch": 2.0, "combine": 1.0, "dense": 5.0, "optimizer": 0.5}
    seconds: dict[str, Any] = {"mean_expert_seconds": 2.5, "ideal_seconds": 9.5, "ideal_exchange_seconds": 2.0}
    phases = [
        {"parts": parts, **seconds},
        {"parts": dict.fromkeys(parts, 0.0), **dict.fromkeys(seconds, 0.0)},
    ]

    class Modelled(Measured):
        @property
        def figures(self) -> dict[str, Any]:  # type: ignore[override]
            return {"phases": phases, "home_move_seconds": 0.0}

        @property
        def placement(self) -> dict[str, float]:
            return {"exposed_seconds": 0.25}

    of = measured(foremoe.Load.from_array(array, top_k=1))
    m = Modelled(of.evaluation, of.load, of.on, of.planned)
    # The mean of 2.5 tokens takes 2.5 s, so rounding up half a token adds 0.5 s; ideal experts take 2 s.
    expected = review_gap.Gap(ideal=9.5, whole_tokens=0.5, slots=0, replicas=1, copies=0, exchange=1, planning=0.25)
    assert review_gap.gap_of(m, m) == expected


def test_a_forecasting_system_places_by_expected_loads_and_splits_actual_loads() -> None:
    systems = [
        NONE,
        System("ours", "foremoe"),
        Forecasting("step", "foremoe", forecast="step"),
        Forecasting("former step", "foremoe", forecast="former_step"),
        Forecasting("former step, shared", "foremoe", forecast="former_step", residency="shared"),
        Forecasting("average", "foremoe", forecast="average", residency="shared"),
    ]
    on = modelled(former_step=True, group_spread=1.5)
    rho = {label: of["rho_mean"] for label, of in figures(run(["rho_mean"], systems, [on])).items()}
    assert 1 <= rho["ours"] < rho["step"] < rho["none"]
    assert rho["ours"] < rho["former step"] < rho["none"]
    assert rho["average"] != rho["former step, shared"]
    (case,) = on.cases(3, 1)
    assert case.former is not None
    mean = case.former.array.mean(0)
    expected = systems[3].expected(case)  # type: ignore[attr-defined]
    assert (expected.array == np.rint(mean).astype(np.int64)).all()
    placed = foremoe.plan(expected, guest_slots=2)
    split = foremoe._core._split_anew(placed, case.load)
    assert (split.slot_expert == placed.slot_expert).all()
    assert rho["former step"] == foremoe.figures(split, case.load)["rho"]["mean"]
    # The average starts at the previous step's mean and gives each new micro-step a weight of 0.1.
    average = systems[5].expected(case).array  # type: ignore[attr-defined]
    assert (average[1] == np.rint(0.9 * mean + 0.1 * case.load.array[0])).all()


def test_a_correct_forecast_costs_only_the_gathering_of_counts() -> None:
    systems = [System("ours", "foremoe"), Forecasting("step", "foremoe", forecast="step")]
    constant = modelled(routing="w2", former_step=True)
    ours, step = run(["rho_mean", "copies", "dispatch_ms", "step_ms"], systems, [constant]).cells[0]
    assert step.figures[:2] == ours.figures[:2]
    assert step.figures[2] - ours.figures[2] == pytest.approx(GATHER_MS)
    assert step.figures[3] - ours.figures[3] == pytest.approx(2 * 4 * 48 * GATHER_MS)
    assert review_foresight.NEWEST == 0.1


SMALL = {"layers": 2, "experts": 16, "top_k": 2, "micro_steps": 3, "ranks": 4, "group_spread": 1.0}


def other(seed: int, wrong: float, missing: float) -> OtherRoutes:
    of = on_other_routes(drawn("", **SMALL), wrong=wrong, missing=missing).draw(seed)
    assert isinstance(of, OtherRoutes)
    return of


def test_every_source_keeps_its_row_count_and_a_seed_reproduces_the_moves() -> None:
    load, of = foremoe.synthesize_load(**SMALL).array, other(1, 0.2, 0.1)
    assert of.recorded is not None and of.gone is not None and of.come is not None
    assert (of.load.array.sum(-1) == load.sum(-1)).all()
    assert (of.load.array == of.recorded.array - of.gone + of.come).all()
    assert of.recorded.array.sum() == pytest.approx(0.9 * load.sum(), rel=0.02)
    assert of.gone.sum() == pytest.approx(0.2 * 0.9 * load.sum(), rel=0.05)
    assert of.load.digest == other(1, 0.2, 0.1).load.digest != other(2, 0.2, 0.1).load.digest


def test_a_wrong_row_moves_only_to_another_expert_that_its_source_uses() -> None:
    counts = np.zeros((1, 1, 2, 4), np.int64)
    counts[0, 0, 0] = [1000, 0, 10, 0]
    counts[0, 0, 1] = [0, 500, 0, 0]  # this source uses no other expert
    on = Input("", lambda seed: Drawn(foremoe.Load.from_array(counts, top_k=1)))
    executed = on_other_routes(on, wrong=1.0).draw(1).load
    assert executed.array[0, 0].tolist() == [[10, 0, 1000, 0], [0, 500, 0, 0]]


def test_departing_rows_reduce_quotas_and_arriving_rows_go_to_homes() -> None:
    counts = np.zeros((1, 1, 2, 4), np.int64)
    counts[0, 0, :, 0] = 100
    load = foremoe.Load.from_array(counts, top_k=1)
    plan = foremoe.plan(load, guest_slots=1)  # expert 0 has its home on rank 0 and a guest on rank 1
    assert plan.slot_tokens[0, 0].tolist() == [[100, 0, 0], [0, 0, 100]]
    gone, come = np.zeros_like(counts), np.zeros_like(counts)
    gone[0, 0, 1, 0], come[0, 0, 1, 3] = 40, 40
    executed = foremoe.Load.from_array(counts - gone + come, top_k=1)
    quotas = executed_quotas(plan, OtherRoutes(executed, None, load, gone, come), seed=1)
    [[home, _, _], [_, three, guest]] = quotas[0, 0].tolist()
    assert (home + guest, three) == (160, 40)
    assert 70 < home < 90 and home != guest


def test_figures_describe_executed_routes_and_include_gathering_of_counts() -> None:
    systems = [
        OnOtherRoutes(f"{policy}{', ahead' * ahead}", policy, foresight=ahead)
        for policy in ("vanilla", "static")
        for ahead in (False, True)
    ]
    on = modelled(layers=1, tokens_per_rank=512)
    inputs = [
        dataclasses.replace(on_other_routes(on, **{of: p}), label=f"{of} {p}")
        for of, p in (("wrong", 0.0), ("wrong", 0.1), ("missing", 0.0), ("missing", 0.1), ("missing", 1.0))
    ]
    columns = ["rho_mean", "step_ms", "exposed_ms"]
    rows = [[cell.figures for cell in row] for row in run(columns, systems, inputs).cells]
    for vanilla, vanilla_ahead, static, static_ahead in rows:
        assert vanilla == vanilla_ahead, "with all rows at homes, the recorded routes do not matter"
        assert static[0] <= static_ahead[0] <= vanilla[0]
    for right in (rows[0], rows[2]):
        assert right[2] == right[3], "nothing is wrong"
    for wrong in (rows[1], rows[3]):
        assert wrong[2][0] < wrong[3][0] < wrong[0][0]
    (known,) = run(columns, [System("vanilla")], [on]).cells[0]
    assert rows[0][0][1] - known.figures[1] == pytest.approx(2 * 4 * 48 * GATHER_MS)
    # No route was recorded. A system that plans ahead gathers counts once, for 4 micro-steps of 48 layers.
    gathered = 1e3 * (20e-6 + 4 * 48 * 7 * 128 * 4 / 370e9)
    rho, step, *rest = rows[4][3]
    assert (rho, step - gathered, *rest) == pytest.approx(rows[4][0])
    assert foremoe_wrong_routes.systems[-1].label == "foremoe" and Case


@pytest.mark.parametrize("by", ["eplb", "foremoe"])
def test_replicas_for_a_rollout_serve_equal_parts(by: str) -> None:
    steps = np.zeros((2, 16, 1, 2, 4), np.int64)
    steps[0, :12, 0, 1] = [20, 20, 100, 20]  # the former step, until its last window
    steps[0, 12:, 0, 1] = steps[1, :, 0, 0] = [60, 20, 20, 20]
    load = foremoe.Load.from_array(steps.reshape(32, 1, 2, 4), top_k=1)
    case = Case(Input("", lambda seed: Drawn(load), steps=2), Drawn(load), load, None, 1, 1)
    of = {
        knows: foremoe_rollout.Placing("", by, knows).measure(case)[""].rho
        for knows in ("nothing", "window", "windows", "this", "former")
    }
    # Each rank has three slots. Of eplb, expert 0 has three replicas, so each slot serves 20 of 120 tokens.
    assert of["window"] == of["windows"] == of["this"] == pytest.approx((1, 1))
    assert of["nothing"] == pytest.approx((80 / 60, 80 / 60))
    if by == "eplb":
        assert of["former"][0] > 1.1
    else:  # replicas are on both ranks, where they serve this step as well
        assert of["former"] == pytest.approx((1, 1))
