"""Experiments whose rows travel by token, by row, or both."""

from __future__ import annotations

import math
from typing import Any, cast

import pytest
from experiments import MODELLED, changed, modelled, run

import foremoe
from foremoe import reproduce
from foremoe.reproduce.columns import COLUMNS

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
