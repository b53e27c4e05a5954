"""Experiments of several steps or draws: what systems know of steps before, and begin with."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from experiments import HOT_RANK, changed, modelled, run

import foremoe
from foremoe import reproduce
from foremoe.reproduce.columns import COLUMNS
from foremoe.reproduce.forecast import forecast_load
from foremoe.reproduce.measured import Measured


def test_a_former_step_has_the_same_popularities_and_other_tokens() -> None:
    text = changed(HOT_RANK, 'routing = "w2"', "former_step = true\nseed = 5")
    experiment = reproduce.parse_experiment(text, "mine.toml")
    load, former = reproduce.run._load_of(experiment.inputs[0], 1)
    assert former is not None
    assert load.array.shape == former.array.shape == (2, 1, 4, 16)
    assert (load.array != former.array).any()
    both = foremoe.synthesize_load(**{**experiment.inputs[0].load, "micro_steps": 4})
    assert (both.array[:2] == former.array).all() and (both.array[2:] == load.array).all()


def test_with_former_plans_systems_begin_where_they_were_at_the_end_of_the_step_before() -> None:
    text = changed(HOT_RANK, 'routing = "w2"', 'former_step = true\nformer_plan = true\nrouting = "zipf"\nskew = 1.5')
    text = changed(text, 'policy = "foremoe"\nguest_slots = 4\ntolerance = 0', 'policy = "flexmoe"\nguest_slots = 4')
    text = changed(text[: text.index("[[aim]]")], "experts = 16", "experts = 64")
    on = reproduce.parse_experiment(text, "mine.toml").inputs[0]
    load, former = reproduce.run._load_of(on, 1)
    assert former is not None
    before = foremoe._core._evaluate(former, "flexmoe", {"guest_slots": 4}, {}).plan
    figures = [
        foremoe._core._evaluate(load, "flexmoe", {"guest_slots": 4}, {}, None, plan, former).figures["rho"]["mean"]
        for plan in (before, None)
    ]
    assert figures[0] != figures[1], "the case shows nothing"
    for keys, expected in zip(("former_plan = true", "former_plan = false"), figures, strict=True):
        assert run(changed(text, "former_plan = true", keys)).cells[0][1].figures[0] == expected
    with pytest.raises(foremoe.InputError, match=r"input\[0\]\.former_plan: has no effect"):
        run(changed(text, "former_step = true\n", ""))


def test_a_forecast_errs_by_the_tokens_that_go_elsewhere_than_the_step_before_told() -> None:
    array = np.zeros((4, 1, 2, 4), np.int64)  # two steps of two micro-steps
    array[:, 0, 1] = [[6, 2, 0, 0], [2, 6, 0, 0], [4, 2, 2, 0], [0, 0, 0, 3]]
    load = foremoe.Load.from_array(array, top_k=1)
    evaluation = foremoe._core._evaluate(load, "vanilla", {}, {})
    # The first step has halves of both. Of 8 tokens 2 go elsewhere then, and of 3 all: a quarter, and 1.
    column = COLUMNS["forecast_error"]
    assert column.of(Measured(evaluation, load, 2, evaluation), None) == pytest.approx(100 * (0.25 + 1) / 2)
    assert math.isnan(column.of(Measured(evaluation, load, 1, evaluation), None))


def test_several_draws_give_the_mean_of_each_figure_and_how_far_they_are_apart() -> None:
    text = changed(HOT_RANK, 'routing = "w2"', "seed = 5\nstep_spread = 1\ndraws = 3")
    text = changed(text, "at_most = 250", "at_most = 1000")
    finding = changed(text, "Finding.", "It is {w2 | none | straggler | 2 ±}, about {w2 | none | straggler | 1}.")
    told: list[str] = []
    result = reproduce.run_experiment(reproduce.parse_experiment(finding, "mine.toml"), progress=told.append)
    assert [what.rsplit(", ", 1)[1] for what in told] == [f"seed {seed}" for seed in (5, 5, 6, 6, 7, 7)]
    single = [run(changed(text, "seed = 5", f"seed = {seed}").replace("draws = 3\n", "")) for seed in (5, 6, 7)]
    for system in (0, 1):
        cell = result.cells[0][system]
        figures = np.array([one.cells[0][system].figures for one in single])
        assert cell.figures == pytest.approx(figures.mean(0))
        assert cell.spread == pytest.approx(np.sqrt(((figures - figures.mean(0)) ** 2).sum(0) / 2))
        assert single[0].cells[0][system].spread == ()
    assert result.cells[0][0].spread[1] > 1
    assert result.judged()[1].worst == result.cells[0][0].figures[1]
    straggler, apart = result.cells[0][0].figures[1], result.cells[0][0].spread[1]
    assert f"| {straggler:.0f} ± {apart:.0f} |" in reproduce.to_markdown(result)
    assert f"It is {straggler:.2f} ± {apart:.2f}, about {straggler:.1f}." in reproduce.to_markdown(result)
    (row, _) = reproduce.to_json(result)["rows"]
    assert (row["draws"], row["straggler"], row["spread"]["straggler"]) == (3, straggler, apart)


def test_steps_planned_one_by_one_keep_no_guests_and_have_their_own_figures() -> None:
    text = changed(HOT_RANK, 'routing = "w2"', "seed = 5\nstep_spread = 1")
    text = changed(text, "micro_steps = 2", "micro_steps = 6")
    text = changed(text, '"copies"]', '"copies", "rho_max"]')
    load = foremoe.synthesize_load(**reproduce.parse_experiment(text, "mine.toml").inputs[0].load)
    ((_, at_once),) = run(text).cells
    ((_, each),) = run(changed(text, "micro_steps = 6", "micro_steps = 6\nsteps = 3\nplan_each_step = true")).cells
    options = {"guest_slots": 4, "tolerance": 0}
    plans = [
        foremoe.compare(foremoe.Load.from_array(load.array[m : m + 2], top_k=2), "foremoe", **options)[0]
        for m in (0, 2, 4)
    ]
    assert each.figures[0] == pytest.approx(sum(plan["rho"]["mean"] for plan in plans) / 3)
    assert each.figures[-2] == pytest.approx(sum(plan["copies"] for plan in plans) / 6)
    assert each.figures[-1] == max(plan["rho"]["max"] for plan in plans)
    assert each.figures[-2] > at_once.figures[-2]  # what a step wants is fetched again


def test_figures_of_steps_are_their_least_median_or_largest() -> None:
    text = changed(HOT_RANK, 'routing = "w2"', "seed = 5\nstep_spread = 1").split("[[published]]")[0]
    text = changed(text, "micro_steps = 2", 'micro_steps = 6\nsteps = 3\nplan_each_step = true\nover_steps = "mean"')
    text = changed(changed(text, '"mean"', '["mean", "least", "median", "largest"]'), '"w2"', '"{over_steps}"')
    result = run(text)
    load = foremoe.synthesize_load(**result.experiment.inputs[0].load).array.sum((1, 2))  # [micro_steps, experts]
    rho = load.reshape(3, 2, 4, 4).sum(-1).max(-1).mean(-1) / 200  # vanilla's, [step]
    assert len(set(rho)) == 3
    ours = [cells[0].figures[0] for cells in result.cells]
    assert ours == pytest.approx([rho.mean(), rho.min(), sorted(rho)[1], rho.max()])


@pytest.mark.parametrize("statistic", ["mean", "least", "median", "largest"])
def test_a_statistic_over_steps_is_nan_if_any_step_is(statistic: str) -> None:
    for figures in itertools.permutations((1.0, 2.0, math.nan)):
        assert math.isnan(COLUMNS["rho_mean"].over_steps(figures, statistic))


def test_steps_drift_from_one_popularity_to_another_and_a_warm_system_begins_where_it_was() -> None:
    text = changed(HOT_RANK, 'routing = "w2"', "seed = 5\nstep_spread = 1\ndrift = 0.5").split("[[published]]")[0]
    text = changed(text, "micro_steps = 2", "micro_steps = 6\nsteps = 3\nplan_each_step = true")
    on = reproduce.parse_experiment(text, "mine.toml").inputs[0]
    load, former = reproduce.run._load_of(on, 1)
    assert former is None
    first, second = (foremoe.synthesize_load(**{**on.load, "seed": 5 + more}).array for more in (0, 1_000_000))
    assert (load.array[:2] == first[:2]).all()
    assert (load.array[2:4] == np.rint(0.75 * first[2:4] + 0.25 * second[2:4])).all()
    assert (load.array[4:] == np.rint(0.5 * first[4:] + 0.5 * second[4:])).all()

    given: list[foremoe.Plan | None] = []

    def evaluate(*arguments: Any, previous: foremoe.Plan | None = None, **keywords: Any) -> Any:
        given.append(previous)
        return _evaluate(*arguments, previous=previous, **keywords)

    _evaluate = foremoe._core._evaluate
    for keys, warm in (("", False), ("\nwarm = true", True)):
        given.clear()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(foremoe._core, "_evaluate", evaluate)
            run(changed(text, 'policy = "foremoe"', f'policy = "foremoe"{keys}'))
        assert [plan is not None for plan in given] == [False] * 4 + [warm] * 2


def test_a_system_that_forecasts_places_by_what_it_expects_and_splits_what_comes() -> None:
    ours = {"policy": "foremoe", "guest_slots": 2}
    shared = {**ours, "residency": "shared"}
    systems = {
        "none": {"policy": "vanilla"},
        "ours": ours,
        "step": {**ours, "forecast": "step"},
        "former step": {**ours, "forecast": "former_step"},
        "former step, shared": {**shared, "forecast": "former_step"},
        "average": {**shared, "forecast": "average"},
    }
    result = run(modelled(["rho_mean", "step_ms"], systems, former_step=True, group_spread=1.5))
    figures = {system.label: cell.figures for _, system, cell in result.runs()}
    rho = {label: of[0] for label, of in figures.items()}
    assert 1 <= rho["ours"] < rho["step"] < rho["none"]
    assert rho["ours"] < rho["former step"] < rho["none"]
    assert rho["average"] != rho["former step, shared"]
    on = result.experiment.inputs[0]
    load, former = reproduce.run._load_of(on, 1)
    assert former is not None
    mean = np.rint(former.array.mean(0)).astype(np.int64)
    expected = forecast_load("former_step", load, former)
    assert all((micro_step == mean).all() for micro_step in expected.array)
    placed = foremoe.plan(expected, guest_slots=2)
    split = foremoe._core._split_anew(placed, load)
    assert (split.slot_expert == placed.slot_expert).all()
    assert rho["former step"] == foremoe.figures(split, load)["rho"]["mean"]
    # The average begins with the former step's mean, and a tenth of each micro-step comes in.
    average = forecast_load("average", load, former).array
    assert (average[0] == mean).all()
    assert (average[1] == np.rint(0.9 * former.array.mean(0) + 0.1 * load.array[0])).all()


def test_who_forecasts_rightly_pays_for_gathering_counts_and_for_nothing_else() -> None:
    systems = {"ours": {"policy": "foremoe", "guest_slots": 2}}
    systems["step"] = {**systems["ours"], "forecast": "step"}
    ours, step = run(modelled(["rho_mean", "copies", "dispatch_ms", "step_ms"], systems, routing="w2")).cells[0]
    assert step.figures[:2] == ours.figures[:2]
    # Seven ranks' counts of 128 experts in 4 bytes, over 370 GB/s, after 20 µs; two phases, 4 micro-steps, 48 layers.
    once = 1e3 * (20e-6 + 7 * 128 * 4 / 370e9)
    assert step.figures[2] - ours.figures[2] == pytest.approx(once)
    assert step.figures[3] - ours.figures[3] == pytest.approx(2 * 4 * 48 * once)
