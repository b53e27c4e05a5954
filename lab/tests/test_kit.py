"""Tests that experiments are run, judged and formatted correctly."""

from __future__ import annotations

import math
import types
from typing import Any

import numpy as np
import pytest

import foremoe
from kit import Aim, Case, Measured, Published, System, drawn, like, paired, recorded
from kit.columns import COLUMNS
from kit.experiment import experiment_of
from kit.inputs import ROOT
from kit.run import run_experiment
from kit.text import to_json, to_markdown, to_rows, to_text
from small import NONE, OURS, SHAPE, STRAGGLER, W2, experiment, figures, hot_rank, modelled, run

SPREAD = {"step_spread": 1, "seed": 5, **SHAPE}


def test_a_hot_rank_has_the_figures_of_its_definition() -> None:
    ((none, ours),) = run_experiment(hot_rank()).cells
    assert none.figures == (2.5, 300, 0, 0)
    assert ours.figures[:3] == (1, 0, 100) and ours.figures[3] > 0


def test_aims_are_judged_by_the_figure_closest_to_missing_them() -> None:
    balanced, straggler, relative = run_experiment(hot_rank()).judged()
    assert balanced.met
    assert (straggler.met, straggler.worst, straggler.figures) == (False, 300, 2)
    assert relative.met and relative.worst == 0.4


def test_a_section_has_the_texts_and_our_figures_beside_published_ones() -> None:
    result = run_experiment(hot_rank(result="ρ is {w2 | none | rho_mean}, in short {w2|none|rho_mean|1}."))
    text = to_markdown(result)
    for words in (
        "## small: A title\n\n*nowhere.* About.\n\n**What we assumed.** Assumed.\n\n    lab/run small\n\n|",
        "| input | system | ρ mean | published | straggler | straggler, % less | copies |\n|---|---|",
        "| w2 | none | 2.5000 | 2.4 | 300 | 0.0 | 0.0 |",
        "| w2 | ours | 1.0000 | – | 0 |",
        "\n\n– in a *published* column: no published figure. Exact: ρ mean;",
        "\n- Published: copies few (in words)\n",
        "\n- Aim: ρ mean of ours ≤ 1: met, it is 1.0000\n",
        "\n- Aim: straggler ≤ 250: missed, the worst is 300\n",
        "\n- Aim: ρ mean of ours ÷ that of none ≥ 0.4, ≤ 0.4: met, it is 0.400\n",
        "\n\n**What came out.** ρ is 2.5000, in short 2.5.\n\n",
    ):
        assert words in text
    assert "\n  w2       none  2.5000        2.4 " in to_text(result)


def test_a_table_across_has_a_column_per_system() -> None:
    head, row = to_rows(run_experiment(hot_rank(across=True)))
    assert head == ["ρ mean / straggler / straggler, % less / copies", "none", "ours"]
    assert row[:2] == ["w2", "2.5000 [2.4] / 300 / 0.0 / 0.0"]


def test_a_system_that_cannot_plan_is_skipped_and_a_skipped_first_system_leaves_comparisons_empty() -> None:
    cannot = System("none", "finemoe-symmetric", guest_slots=3)
    result = run(["rho_mean", "straggler_less"], [cannot, OURS], [W2], aims=[Aim("rho_mean", system="none", at_most=9)])
    none, ours = result.cells[0]
    assert none.skipped and ours.figures[0] == 1 and math.isnan(ours.figures[1])
    assert to_json(result)["rows"][1]["straggler_less"] is None
    assert not result.judged()[0].met and "nothing to judge by" in to_markdown(result)
    assert f"| w2 | none | skipped: {none.skipped} | |" in to_markdown(result)


@pytest.mark.parametrize(
    ("keywords", "problem"),
    [
        ({"aims": [Aim("rho_max", at_most=1)]}, "no column 'rho_max'; there are rho_mean"),
        ({"published": [Published("rho_mean", 1, "w3", "none")]}, "no input 'w3'"),
        ({"aims": [Aim("rho_mean", relative_to="nobody", at_most=1)]}, "no relative_to 'nobody'"),
        ({"result": "{w2 | none}"}, r"'\{w2 \| none\}', expected"),
        ({"result": "{w2 | none | rho_mean | two}"}, "expected"),
        ({"result": "{w2 | nobody | rho_mean}"}, "no system 'nobody'"),
        ({"result": "{w2 | none | all_plan_us}"}, "is measured, and differs from run to run"),
        ({"result": "{w2 | none | rho_mean | 2 ±}"}, "'w2' has one draw"),
        ({"aims": [Aim("rho_mean")]}, "neither at_least nor at_most"),
        ({"published": 2 * [Published("rho_mean", 1, "w2", "none")]}, "published 'rho_mean of none on w2 ' twice"),
    ],
)
def test_references_to_unknown_cells_are_rejected(keywords: dict[str, Any], problem: str) -> None:
    with pytest.raises(foremoe.InputError, match=problem):
        experiment(["rho_mean", "all_plan_us"], [NONE, OURS], [W2], **keywords)
    with pytest.raises(foremoe.InputError, match="system 'none' twice"):
        experiment(["rho_mean"], [NONE, NONE], [W2])


def test_unknown_names_and_exclusive_options_are_rejected() -> None:
    with pytest.raises(foremoe.InputError, match="no versus 'ourz'"):
        experiment(["rho_mean", paired("ourz")], [NONE], [W2])
    for make, problem in (
        (lambda: drawn("w", trace=True, former_step=True, **SPREAD), "trace, former_step exclude each other"),
        (lambda: drawn("w", drift=0.5, **SPREAD), "need several steps"),
        (lambda: drawn("w", dispatch="rwo", **SPREAD), "no dispatch 'rwo'"),
        (lambda: drawn("w", former_plan=True, **SPREAD), "former_plan needs former_step"),
        (lambda: recorded("w", "data/rollout-math.safetensors", draws=3), "every draw is the same"),
        (lambda: recorded("w", "data/load-q30-ep8.safetensors", shuffled=True), "is batched already"),
    ):
        with pytest.raises(foremoe.InputError, match=problem):
            make()
    text = "Title.\n\nSource.\n\nAbout.\n\nWe assume: Nothing.\n\n"
    for more, names, problem in (
        ("Results: It is so.", {}, "a paragraph begins with 'Results'"),
        ("Result: It is so.", {"aim": []}, "'aim' is not a field of an experiment"),
        ("Result: It is so.", {"columns": ["rho_men"]}, "no column 'rho_men'"),
    ):
        module = types.ModuleType("mine", text + more)
        vars(module).update({"inputs": [W2], "systems": [NONE], "columns": ["rho_mean"]} | names)
        with pytest.raises(foremoe.InputError, match=problem):
            experiment_of(module, "mine")


def test_a_failing_run_names_its_system_and_input() -> None:
    with pytest.raises(foremoe.InputError, match=r"small: ours on w2: .*stages"):
        run(["rho_mean"], [System("ours", "foremoe", stages="Q")], [W2])


def test_a_recorded_rollout_is_batched_for_the_requested_ranks(caplog: pytest.LogCaptureFixture) -> None:
    file = "data/rollout-math.safetensors"
    result = run(["rho_mean"], [NONE], [recorded("file", file, batching={"ranks": 4})])
    assert not caplog.records  # no warning about batching again
    load = foremoe.collect(foremoe.read_trace(ROOT / file), ranks=4)
    assert result.cells[0][0].figures[0] == foremoe.compare(load, "vanilla")[0]["rho"]["mean"]


def test_simulate_and_the_kit_agree_on_seconds() -> None:
    systems = [NONE, System("ours", "foremoe"), System("from the host", "foremoe", path="host")]
    of = figures(run(["step_ms", "speedup", "of_free", "placement_s", "placed_speedup"], systems, [modelled()]))
    load = foremoe.synthesize_load(
        shape="Qwen3-30B-A3B", layers=2, micro_steps=4, ranks=8, tokens_per_rank=1024, seed=3
    )
    simulated = foremoe.simulate(load, ["vanilla", "foremoe"], cluster="h100", model="Qwen3-30B-A3B", guest_slots=2)
    assert [of["none"]["step_ms"], of["ours"]["step_ms"]] == [1e3 * s["step_seconds"] for s in simulated]
    assert of["ours"]["speedup"] == simulated[1]["speedup_over_vanilla"]
    assert of["none"]["of_free"] == 100 > of["ours"]["of_free"] > of["from the host"]["of_free"]
    placed, step = of["ours"]["placement_s"], of["ours"]["step_ms"] / 1e3
    assert of["ours"]["placed_speedup"] == pytest.approx(of["ours"]["speedup"] * step / (step + placed))
    hidden = modelled(rollout_tail_seconds=1e6)
    assert figures(run(["speedup", "placed_speedup"], systems[:2], [hidden]))["ours"]["placed_speedup"] == (
        pytest.approx(of["ours"]["speedup"])
    )


def test_several_draws_give_means_with_spread_and_systems_are_paired_draw_by_draw() -> None:
    columns = ["step_ms", "speedup", paired("ours")]
    systems = [NONE, System("ours", "foremoe")]
    hidden = {"rollout_tail_seconds": 1e6}  # hides placement, which is measured and varies
    result = run(columns, systems, [modelled(draws=3, **hidden)], result="{grpo | none | step_ms | 2 ±}")
    single = [run(columns, systems, [modelled(seed=seed, **hidden)]).cells[0] for seed in (3, 4, 5)]
    for system in (0, 1):
        alone = np.array([cells[system].figures[:2] for cells in single])
        cell = result.cells[0][system]
        assert cell.figures[:2] == pytest.approx(alone.mean(0))
        assert cell.spread[:2] == pytest.approx(np.sqrt(((alone - alone.mean(0)) ** 2).sum(0) / 2))
    (none, ours), (mean, apart) = result.cells[0], (result.cells[0][0].figures[0], result.cells[0][0].spread[0])
    assert (ours.figures[2], ours.spread[2]) == (0, 0)
    gains = [100 * (of_none.figures[0] / of_ours.figures[0] - 1) for of_none, of_ours in single]
    assert none.figures[2] == pytest.approx(np.mean(gains))
    assert f"{mean:.2f} ± {apart:.2f}" in to_markdown(result)
    assert to_json(result)["rows"][0]["spread"]["step_ms"] == apart


def test_a_former_step_has_the_same_popularities_and_other_tokens() -> None:
    of = drawn("w", micro_steps=2, former_step=True, **SPREAD).draw(5)
    both = foremoe.synthesize_load(micro_steps=4, **SPREAD).array
    assert of.former is not None
    assert (of.former.array == both[:2]).all() and (of.load.array == both[2:]).all()


def test_steps_drift_and_are_planned_separately_and_warm_systems_start_from_the_former_plan() -> None:
    on = drawn("w", micro_steps=6, steps=3, plan_each_step=True, drift=0.5, **SPREAD)
    load = on.draw(5).load.array
    first, second = (foremoe.synthesize_load(micro_steps=6, **{**SPREAD, "seed": s}).array for s in (5, 1_000_005))
    assert (load[:2] == first[:2]).all()
    assert (load[2:4] == np.rint(0.75 * first[2:4] + 0.25 * second[2:4])).all()
    assert (load[4:] == np.rint(0.5 * first[4:] + 0.5 * second[4:])).all()
    begun: list[bool] = []

    class Watched(System):
        def measure(self, case: Case) -> dict[str, Measured]:
            begun.append(self.previous(case) is not None)
            return super().measure(case)

    for warm in (False, True):
        begun.clear()
        cell = run(["rho_max", "copies"], [Watched("ours", "foremoe", warm=warm)], [on]).cells[0][0]
        assert begun == [False, warm, warm]
    plans = [foremoe.compare(like(on.draw(5).load, load[m : m + 2]), "foremoe")[0] for m in (0, 2, 4)]
    cold = run(["rho_max", "copies"], [System("ours", "foremoe")], [on]).cells[0][0]
    assert cold.figures[0] == max(plan["rho"]["max"] for plan in plans)
    assert cold.figures[1] == pytest.approx(sum(plan["copies_per_layer_event"] for plan in plans) / 3)
    assert len(cell.figures) == 2


def test_figures_of_steps_are_their_least_median_or_largest() -> None:
    statistics = ("", "least", "median", "largest")
    inputs = [
        drawn(of or "mean", micro_steps=6, steps=3, plan_each_step=True, over_steps=of, **SPREAD) for of in statistics
    ]
    load = foremoe.synthesize_load(micro_steps=6, **SPREAD).array.sum((1, 2))  # [micro_steps, experts]
    rho = load.reshape(3, 2, 4, 4).sum(-1).max(-1).mean(-1) / 200  # vanilla's, [step]
    found = [cells[0].figures[0] for cells in run(["rho_mean"], [NONE], inputs).cells]
    assert found == pytest.approx([rho.mean(), rho.min(), sorted(rho)[1], rho.max()])
    assert math.isnan(COLUMNS["rho_mean"].over_steps([1.0, math.nan], "least"))


@pytest.mark.parametrize("in_flight", [1, 2])  # with 2, recompute has a separate plan
def test_with_two_dispatches_a_step_is_planned_once_and_modelled_with_both(
    in_flight: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    columns: list[Any] = ["rho_mean", "speedup", "experts_ms"]
    systems = [NONE, System("ours", "foremoe", in_flight=in_flight)]
    by_token, by_row = (run(columns, systems, [modelled(dispatch=d)]).cells[0] for d in ("token", "row"))
    planned: list[str] = []
    evaluate = foremoe._core._evaluate

    def counted(load: foremoe.Load, policy: str, *arguments: Any, **options: Any) -> foremoe.Evaluation:
        planned.append(policy)
        return evaluate(load, policy, *arguments, **options)

    monkeypatch.setattr(foremoe._core, "_evaluate", counted)
    result = run(
        columns, systems, [modelled(dispatch=("token", "row"))], aims=[Aim("speedup", system="ours", at_least=1)],
        published=[Published("speedup", 1.45, "grpo", "ours")], result="By row {grpo | ours | speedup (row) | 1}.",
    )  # fmt: skip
    assert planned == ["vanilla", "foremoe"]
    for both, token, row in zip(result.cells[0], by_token, by_row, strict=True):
        assert both.figures == (token.figures[0], token.figures[1], row.figures[1], token.figures[2])
    (head, _, ours), text = to_rows(result), to_markdown(result)
    assert head[2:] == ["ρ mean", "speedup (token)", "speedup (row)", "published", "experts, ms"]
    assert ours[5] == "1.45"
    assert "Exact: ρ mean. modelled: experts, ms. modelled by token (estimated) and by row: speedup." in text
    assert [judged.worst for judged in result.judged()] == list(result.cells[0][1].figures[1:3])
    assert f"By row {result.cells[0][1].figures[2]:.1f}." in text
    assert set(to_json(result)["rows"][1]["speedup"]) == {"token", "row"}


def test_columns_without_a_dispatch_have_the_same_figures_with_each() -> None:
    columns: list[Any] = [c for c in COLUMNS.values() if not c.by_dispatch and c.origin != "measured here"]
    systems = [System(name, prefer="balance") for name in ("vanilla", "foremoe", "feplb", "fastermoe", "ultraep")]
    by_token, by_row = (
        run([*columns, "step_ms"], systems, [modelled(ranks=16, tokens_per_rank=256, dispatch=d)]).cells[0]
        for d in ("token", "row")
    )
    for token, row in zip(by_token, by_row, strict=True):
        assert token.figures[:-1] == row.figures[:-1] and token.figures[-1] < row.figures[-1]


def test_by_token_a_drawn_trace_is_counted_and_a_load_estimated() -> None:
    sizes: dict[str, Any] = {"tokens_per_rank": 256, "ranks_per_node": 4}
    trace, load = modelled(trace=True, **sizes), modelled("load", **sizes)
    result = run(["step_ms"], [NONE], [trace, load])
    assert [row["dispatch_estimated"] for row in to_json(result)["rows"]] == [False, True]
    assert result.cells[0][0].figures[0] != result.cells[1][0].figures[0]
    assert "by token (estimated, but for traces): step, ms" in to_markdown(result)
    assert STRAGGLER.origin == "exact"


def test_published_figures_of_a_skipped_system_are_listed_below_the_table() -> None:
    cannot = System("none", "finemoe-symmetric", guest_slots=3)
    result = run(["rho_mean"], [cannot], [W2], published=[Published("rho_mean", 2.4, "w2", "none")])
    assert "- Published: ρ mean of none, w2 2.4\n" in to_markdown(result)
