"""Experiments carried out, judged and told."""

from __future__ import annotations

import math
import pathlib
import tomllib
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from experiments import HOT_RANK, MODELLED, PROSE, ROOT, TRACE, changed, modelled, run

import foremoe
from foremoe import reproduce
from foremoe.reproduce.columns import COLUMNS
from foremoe.reproduce.forecast import forecast_load
from foremoe.reproduce.measured import Measured
from foremoe.reproduce.text import aligned


@pytest.fixture(scope="module")
def hot_rank() -> reproduce.Result:
    return run(HOT_RANK)


def test_a_hot_rank_has_the_figures_that_its_definition_says(hot_rank: reproduce.Result) -> None:
    ((none, ours),) = hot_rank.cells
    assert none.figures == (2.5, 300, 60, 100, 0, 0)
    assert ours.figures[:2] == (1, 0)
    assert ours.figures[4] == 100
    assert ours.figures[5] > 0


def test_aims_are_judged_by_the_figure_closest_to_missing_them(hot_rank: reproduce.Result) -> None:
    balanced, straggler, relative = hot_rank.judged()
    assert balanced.met
    assert (straggler.met, straggler.worst, straggler.figures) == (False, 300, 2)
    assert relative.met and relative.worst == 0.4


def test_a_table_shows_our_figure_beside_the_published_one(hot_rank: reproduce.Result) -> None:
    head, none, ours = reproduce.text.to_rows(hot_rank)
    columns = ["ρ mean", "published", "straggler", "waste, %", "ρ ≥ 2, %", "straggler, % less", "copies"]
    assert head == ["input", "system", *columns]
    assert none == ["w2", "none", "2.5000", "2.4", "300", "60.0", "100.0", "0.0", "0.0"]
    assert ours[3] == "–"


def test_a_table_across_has_a_column_per_system() -> None:
    result = run(
        "across = true\n" + changed(HOT_RANK, '"straggler", "waste", "from_2", "straggler_less"', '"straggler"')
    )
    head, row = reproduce.text.to_rows(result)
    assert head == ["ρ mean / straggler / copies", "none", "ours"]
    assert row[:2] == ["w2", "2.5000 [2.4] / 300 / 0.0"]


def test_a_section_holds_what_the_file_says_and_whether_aims_are_met(hot_rank: reproduce.Result) -> None:
    text = reproduce.to_markdown(hot_rank)
    for words in (
        "## hot-rank: A hot rank\n\n*nowhere.* About.\n\n**What we assumed.** Reading.\n\n",
        "\n\n    foremoe reproduce hot-rank.toml\n\n|",
        "| w2 | none | 2.5000 | 2.4 | 300 |",
        "\n|---|---|",
        "\n\n– in a *published* column: not published to us. Exact: ρ mean;",
        "\n- Published: copies few (in words)\n",
        "\n- Aim: ρ mean of ours ≤ 1: met, it is 1.0000\n",
        "\n- Aim: straggler ≤ 250: missed, the worst is 300\n",
        "\n- Aim: ρ mean of ours ÷ that of none ≥ 0.4, ≤ 0.4: met, it is 0.400\n",
        "\n\n**What came out.** Finding.\n\n",
    ):
        assert words in text


def test_an_input_whose_file_is_missing_is_skipped_and_not_made_up() -> None:
    drawn = HOT_RANK[HOT_RANK.index('routing = "w2"') : HOT_RANK.index("[[system]]")]
    result = run(changed(HOT_RANK, drawn, 'file = "no/such/file.safetensors"\n'))
    assert all("no/such/file.safetensors" in cell.skipped and not cell.figures for cell in result.cells[0])
    assert not result.judged()[0].met
    assert "nothing to judge by" in reproduce.to_markdown(result)
    row = "| w2 | none | skipped: no file no/such/file.safetensors here | | | | | | |\n"
    assert row in reproduce.to_markdown(result)
    assert "skipped" in reproduce.to_json(result)["rows"][0]


def test_a_system_that_cannot_plan_is_skipped_and_without_the_first_nothing_is_compared() -> None:
    text = changed(HOT_RANK, 'policy = "vanilla"', 'policy = "finemoe-symmetric"\nguest_slots = 3')
    none, ours = run(text).cells[0]
    assert none.skipped and not ours.skipped
    columns = reproduce.parse_experiment(text, "mine.toml").columns
    assert any(column.is_relative for column in columns) and not all(column.is_relative for column in columns)
    for column, figure in zip(columns, ours.figures, strict=True):
        assert math.isnan(figure) == column.is_relative, column.name
    assert reproduce.to_json(run(text))["rows"][1]["straggler_less"] is None


def test_a_load_that_cannot_be_drawn_is_named_with_its_input() -> None:
    with pytest.raises(
        foremoe.InputError, match=r"hot-rank.toml: input\[0\] 'w2': ranks: must be at least 2"
    ) as caught:
        run(changed(HOT_RANK, "ranks = 4", "ranks = 1"))
    assert (caught.value.file, caught.value.field) == ("hot-rank.toml", "input[0].ranks")


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


def test_a_recorded_rollout_is_batched_for_the_ranks_that_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    text = f'{PROSE}columns = ["rho_mean", "hottest"]\n[[input]]\nlabel = "file"\nfile = "{TRACE}"\nranks = 4\n'
    (cell,) = run(text + '[[system]]\nlabel = "none"\npolicy = "vanilla"\n').cells[0]
    assert not caplog.records  # nothing was done that the experiment did not ask for
    load = foremoe.collect(foremoe.read_trace(TRACE), ranks=4)
    assert cell.figures[0] == foremoe.compare(load, "vanilla")[0]["rho"]["mean"]
    assert cell.figures[1] == foremoe._core._load_stability(load, 1)["hottest"]


def test_simulate_and_reproduce_agree_on_seconds() -> None:
    none, ours = run(MODELLED).cells[0]
    load = foremoe.synthesize_load(
        shape="Qwen3-30B-A3B", layers=2, micro_steps=4, ranks=8, tokens_per_rank=1024, seed=3
    )
    simulated = foremoe.simulate(load, ["vanilla", "foremoe"], cluster="h100", model="Qwen3-30B-A3B", guest_slots=2)
    assert [none.figures[0], ours.figures[0]] == [1e3 * s["step_seconds"] for s in simulated]
    assert ours.figures[1] == simulated[1]["speedup_over_vanilla"]
    assert ours.figures[2] > ours.figures[1] > none.figures[1] == 1
    assert none.figures[3] == 100
    # Copies from peers hide, and no arena is filled. All loads are gathered once: 4 micro-steps of 48 layers, in which
    # seven ranks have 128 counts of 4 bytes.
    gathered = 20e-6 + 4 * 48 * 7 * 128 * 4 / 370e9
    assert ours.figures[3] == pytest.approx(100 * (1 - 1e3 * gathered / ours.figures[0]))
    _, by_host = run(changed(MODELLED, "guest_slots = 2", 'guest_slots = 2\npath = "host"')).cells[0]
    assert by_host.figures[3] < 100


BOTH = changed(
    MODELLED + '[[aim]]\ncolumn = "speedup"\nsystem = "ours"\nat_least = 1\n'
    '[[published]]\ninput = "grpo"\nsystem = "ours"\ncolumn = "speedup"\nvalue = 1.45\n',
    '["step_ms", "speedup", "ideal_speedup", "of_free"]',
    '["rho_mean", "speedup", "placement_s", "placed_speedup", "experts_ms"]',
)


def with_dispatch(text: str, dispatch: str) -> str:
    return changed(text, "seed = 3", f"seed = 3\ndispatch = {dispatch}")


@pytest.mark.parametrize("in_flight", [1, 2])  # with 2, recompute has a plan of its own
def test_with_two_dispatches_a_step_is_planned_once_and_modelled_with_both(
    in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = changed(BOTH, "guest_slots = 2", f"guest_slots = 2\nin_flight = {in_flight}")
    by_token, by_row = (run(with_dispatch(text, f'"{dispatch}"')).cells[0] for dispatch in ("token", "row"))
    planned: list[str] = []
    evaluate = foremoe._core._evaluate

    def counted(load: foremoe.Load, **options: Any) -> foremoe.Evaluation:
        planned.append(options["policy"])
        return evaluate(load, **options)

    monkeypatch.setattr(foremoe._core, "_evaluate", counted)
    result = run(with_dispatch(text, '["token", "row"]'))
    assert planned == ["vanilla", "foremoe"]
    for both, token, row in zip(result.cells[0], by_token, by_row, strict=True):
        rho, speedup_by_token, speedup_by_row, placement, placed_by_token, placed_by_row, experts = both.figures
        assert (rho, speedup_by_token, experts) == (*token.figures[:2], token.figures[4])
        assert (rho, speedup_by_row, experts) == (*row.figures[:2], row.figures[4])
        if placement:  # measured, and charged with each dispatch
            assert 1 < speedup_by_token < speedup_by_row
            assert placed_by_token < speedup_by_token and placed_by_row < speedup_by_row


def test_figures_of_two_dispatches_stand_side_by_side_and_each_is_judged() -> None:
    told = "{grpo | ours | speedup (row) | 1} and {grpo|ours|rho_mean}"
    result = run(changed(with_dispatch(BOTH, '["token", "row"]'), "Finding.", f"By row {told}."))
    (head, _, ours) = reproduce.text.to_rows(result)
    assert head[2:6] == ["ρ mean", "speedup (token)", "speedup (row)", "published"]
    assert head[6:] == ["placement, s", "speedup, placed (token)", "speedup, placed (row)", "experts, ms"]
    figures = result.cells[0][1].figures
    assert ours[2:6] == [f"{figures[0]:.4f}", *(f"{figure:.3f}" for figure in figures[1:3]), "1.45"]
    text = reproduce.to_markdown(result)
    assert f"- Aim: speedup (token) of ours ≥ 1: met, it is {figures[1]:.3f}\n" in text
    assert f"- Aim: speedup (row) of ours ≥ 1: met, it is {figures[2]:.3f}\n" in text
    assert "modelled: experts, ms. modelled by token (estimated) and by row: speedup." in text
    assert f"By row {figures[2]:.1f} and {figures[0]:.4f}." in text
    row = reproduce.to_json(result)["rows"][1]
    assert row["speedup"] == {"token": figures[1], "row": figures[2]}
    assert (row["rho_mean"], row["dispatch_estimated"]) == (figures[0], True)
    with pytest.raises(foremoe.InputError, match=r"no column 'speedup'; there are rho_mean, speedup \(token\)"):
        run(changed(with_dispatch(BOTH, '["token", "row"]'), "Finding.", "{grpo | ours | speedup}"))


def test_columns_without_a_dispatch_have_the_same_figures_with_each() -> None:
    columns = [c.name for c in COLUMNS.values() if not c.depends_on_dispatch and c.origin != "measured here"]
    systems = {name: {"policy": name} for name in ("vanilla", "foremoe", "feplb", "fastermoe", "ultraep")}
    sizes = {"ranks": 16, "tokens_per_rank": 256, "steps": 2, "guest_slots": 2}
    by_token, by_row = (
        run(modelled([*columns, "step_ms"], systems, **sizes, dispatch=dispatch)).cells[0]
        for dispatch in ("token", "row")
    )
    for system, token, row in zip(systems, by_token, by_row, strict=True):
        for name, figure, other in zip(columns, token.figures[:-1], row.figures[:-1], strict=True):
            assert figure == other or math.isnan(figure), (system, name)
        assert token.figures[-1] < row.figures[-1]


def test_one_dispatch_is_named_below_the_table_alone() -> None:
    result = run(with_dispatch(BOTH, '"row"'))
    assert reproduce.text.to_rows(result)[0][3] == "speedup"
    assert "modelled by row: speedup." in reproduce.to_markdown(result)
    row = reproduce.to_json(result)["rows"][1]
    assert row["speedup"] == result.cells[0][1].figures[1] and "dispatch_estimated" not in row


def test_by_token_a_drawn_trace_is_counted_and_a_load_estimated() -> None:
    text = changed(MODELLED, "tokens_per_rank = 1024", "tokens_per_rank = 256\ntrace = true\nranks_per_node = 4")
    result = run(text)
    (on,) = result.experiment.inputs
    load = foremoe.collect(foremoe.synthesize_trace(**on.load))
    simulated = foremoe.simulate(load, ["vanilla", "foremoe"], guest_slots=2, **cast(Any, on.cost))
    assert [s["dispatch_estimated"] for s in simulated] == [False, False]
    assert [cell.figures[0] for cell in result.cells[0]] == [1e3 * s["step_seconds"] for s in simulated]
    assert "Modelled by token: step, ms" in reproduce.to_markdown(result)
    assert not reproduce.to_json(result)["rows"][0]["dispatch_estimated"]
    load_too = changed(text, "[[system]]", text[text.index("[[input]]") : text.index("[[system]]")] + "[[system]]")
    load_too = changed(changed(load_too, '"grpo"', '"load"'), "trace = true\n", "")
    both = run(load_too)
    assert both.cells[0][0].figures[0] != both.cells[1][0].figures[0]
    assert "by token (estimated, but for traces): step, ms" in reproduce.to_markdown(both)
    with pytest.raises(foremoe.InputError, match=r"'none' on 'grpo': cannot be by token on a trace") as caught:
        run(
            grouped := changed(
                changed(text, '"vanilla"', '"vanilla"\nep_groups = 2'), ', "ideal_speedup", "of_free"', ""
            )
        )
    assert caught.value.field == "system[0].ep_groups"
    assert run(with_dispatch(grouped, '"row"')).cells[0][0].figures[0] > 0


def test_a_cluster_that_changes_a_preset_is_one_whose_file_has_that_number(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "slow.toml"
    preset = (ROOT / "data" / "clusters" / "h100.toml").read_text()
    file.write_text(changed(preset, "[peers]\nbytes_per_second = 370e9", "[peers]\nbytes_per_second = 37e9"))
    other = '{ like = "h100", peers.bytes_per_second = 37e9 }'
    changed_, by_file, as_it_is = (
        [cell.figures[0] for cell in run(changed(MODELLED, '"h100"', cluster)).cells[0]]
        for cluster in (other, f'"{file}"', '"h100"')
    )
    assert changed_ == by_file
    assert changed_[0] > as_it_is[0]


def test_a_rollouts_tail_hides_placement() -> None:
    columns = '["placement_s", "exposed_placement_s", "speedup", "placed_speedup", "of_free", "of_free_placed"]'
    text = changed(MODELLED, '["step_ms", "speedup", "ideal_speedup", "of_free"]', columns)
    none, ours = run(text).cells[0]
    assert none.figures == (0, 0, 1, 1, 100, 100)
    placement, exposed, speedup, placed_speedup, of_free, of_free_placed = ours.figures
    assert placement == exposed > 0
    assert (placed_speedup < speedup, of_free_placed < of_free) == (True, True)
    _, ours = run(changed(text, "seed = 3", "seed = 3\nrollout_tail_seconds = 1e6")).cells[0]
    assert ours.figures[0] > 0 == ours.figures[1]
    assert ours.figures[2::2] == pytest.approx(ours.figures[3::2])


def test_stragglers_in_time_follow_those_in_tokens_and_exchanges_the_busiest_rank() -> None:
    columns = '"gemm_straggler_ms", "gemm_straggler_less", "experts_ms", "exchange_more", "dispatch_ms", "buffers_mib"'
    text = changed(MODELLED, '"step_ms", "speedup", "ideal_speedup", "of_free"', f'{columns}, "rho_mean"')
    text = changed(text, "tokens_per_rank = 1024", 'tokens_per_rank = 8192\nrouting = "w2"')
    none, ours = run(changed(text, "seed = 3\n", "")).cells[0]
    rho = none.figures[6]  # of a hot rank, the same in every micro-step: all but 1 / ρ of its time is straggling
    assert rho > 2 and none.figures[0] == pytest.approx((1 - 1 / rho) * none.figures[2], rel=0.02)
    assert (none.figures[1], none.figures[3], none.figures[5]) == (0, 0, 0)
    assert ours.figures[1] == pytest.approx(100 * (1 - ours.figures[0] / none.figures[0]))
    assert ours.figures[3] == pytest.approx(100 * (ours.figures[4] / none.figures[4] - 1)) and ours.figures[3] < -20
    assert ours.figures[5] == 48 * 2 * 9  # two experts of 9 MiB in each layer


def test_planning_is_told_of_all_the_models_layers_and_a_copy_by_the_hosts_link() -> None:
    columns = '"all_plan_us", "plan_micro_step_ms", "plan_step_ms", "fetch_ms"'
    _, ours = run(changed(MODELLED, '"step_ms", "speedup", "ideal_speedup", "of_free"', columns)).cells[0]
    microseconds, micro_step, step, fetch = ours.figures
    assert step == pytest.approx(4 * 48 * microseconds / 1000) and step > 4 * micro_step > 0
    host = H100["host"]  # an expert has 3 · 2048 · 768 weights of two bytes
    assert fetch == pytest.approx(1e3 * (host["latency_seconds"] + 3 * 2048 * 768 * 2 / host["bytes_per_second"]))


def test_every_column_has_a_figure() -> None:
    names = ", ".join(f'"{name}"' for name in COLUMNS)
    text = changed(MODELLED, '["step_ms", "speedup", "ideal_speedup", "of_free"]', f"[{names}]")
    _, ours = run(changed(text, "micro_steps = 4", "micro_steps = 4\nsteps = 2")).cells[0]
    assert all(map(math.isfinite, ours.figures))


def test_columns_that_do_not_fit_follow_in_further_blocks() -> None:
    rows = [["", "ρ", "long title"], ["first", "1", "2"], ["second", "skipped: why"]]
    assert aligned(rows) == "          ρ  long title\n  first   1           2\n  second  skipped: why\n"
    assert aligned(rows, 1) == aligned(rows, 12)  # a block has one column beside the first
    assert aligned(rows, 12) == (
        "          ρ\n  first   1\n  second  skipped: why\n\n          long title\n  first            2\n  second\n"
    )


GROUPS = (
    PROSE
    + """
columns = ["rho_mean", "rho_p99", "rho_max"]

[[input]]
label = "zipf"
routing = "zipf"
skew = 1.0
ranks = 8
experts = 32
top_k = 2
layers = 3
micro_steps = 5
tokens_per_rank = 512
seed = 4

[[system]]
label = "one group"
policy = "vanilla"

[[system]]
label = "{ep_groups} groups"
policy = "vanilla"
ep_groups = [2, 4]
"""
)


def test_in_groups_each_rank_has_more_experts_and_only_its_groups_tokens() -> None:
    """Held to counts alone: expert e is on rank e ÷ (experts of a rank) of the group of the token's rank."""
    ((one, two, four),) = run(GROUPS).cells
    load = foremoe.synthesize_load(
        routing="zipf", skew=1.0, ranks=8, experts=32, top_k=2, layers=3, micro_steps=5, tokens_per_rank=512, seed=4
    ).array
    for groups, cell in ((1, one), (2, two), (4, four)):
        ranks = 8 // groups
        served = load.reshape(5, 3, groups, ranks, ranks, 32 // ranks).sum((3, 5))  # [m, l, group, rank of the group]
        rho = served.max((2, 3)) * 8 / served.sum((2, 3))
        spread = (rho.mean(), np.percentile(rho, 99), rho.max())
        assert cell.figures == pytest.approx(spread, rel=1e-12), groups
    assert four.figures[0] < two.figures[0] < one.figures[0]


H100 = tomllib.loads((pathlib.Path(__file__).parents[2] / "data/clusters/h100.toml").read_text(encoding="utf-8"))
PEERS = H100["peers"]


def test_a_step_in_groups_takes_as_long_as_the_slowest_group() -> None:
    text = changed(MODELLED, 'policy = "vanilla"', 'policy = "vanilla"\nep_groups = 2')
    columns = text[text.index("columns = ") :].splitlines()[0]
    result = run(changed(text, columns, 'columns = ["recompute_ms", "update_ms", "step_ms", "speedup"]'))
    ((cell, ours),) = result.cells
    (on,) = result.experiment.inputs
    assert on.cost is not None
    whole = foremoe.synthesize_load(**on.load)
    alone = []
    for half in (whole.array[:, :, :4], whole.array[:, :, 4:]):
        load = foremoe.Load.from_array(np.ascontiguousarray(half), top_k=whole.top_k, ranks_per_node=4)
        (vanilla,) = foremoe.simulate(load, policies="vanilla", **on.cost)
        alone.append([vanilla["step_seconds"], *(phase["seconds"] for phase in vanilla["phases"])])
    assert alone[0] != alone[1]
    step, recompute, update = max(alone)
    # 32 experts a rank in each of 48 layers: float32 gradients of 3 · 2048 · 768 weights. Half of them are sent to the
    # other group, and half of the sums are sent back, over NVLink as the h100 preset has it.
    one_layer = 2 * (32 * 3 * 2048 * 768 * 4 / 2 / PEERS["bytes_per_second"] + PEERS["latency_seconds"])
    expected = (recompute, update + 48 * one_layer, step + 48 * one_layer)
    assert cell.figures[:3] == pytest.approx([1e3 * seconds for seconds in expected], rel=1e-9)
    assert cell.figures[3] == 1
    assert ours.figures[3] == pytest.approx(cell.figures[2] / ours.figures[2], rel=1e-9)


def test_groups_that_cannot_be_are_refused_with_system_and_input() -> None:
    with pytest.raises(
        foremoe.InputError, match=r"hot-rank.toml: system\[1\] '3 groups' on 'zipf': .*8 ranks"
    ) as raised:
        run(changed(GROUPS, "[2, 4]", "[3]"))
    assert raised.value.field == "system[1].ep_groups"


def test_planning_time_of_every_system_has_what_it_does_once_per_step() -> None:
    times = SimpleNamespace(base_cpu_seconds=2e-3, planning_cpu_seconds=1e-3)
    evaluation = SimpleNamespace(plan=SimpleNamespace(times=times), figures={"layers": 3, "micro_steps": 5}, cost=None)
    measured = Measured(cast(Any, evaluation), cast(Any, None), 1, cast(Any, evaluation))
    assert COLUMNS["all_plan_us"].of(measured, None) == pytest.approx(200)
