"""Plans of recorded routes, executed on others: which rows move, and that each is served where it has to be."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from experiments import PROSE

import foremoe
from foremoe import _core, reproduce
from foremoe.reproduce.other_routes import OtherRoutes, executed_quotas, other_routes

HEAD = (
    PROSE
    + """
columns = ["rho_mean", "step_ms", "exposed_ms"]

[every_input]
cluster = "h100"
model = "Qwen3-30B-A3B"
ranks = 8
layers = 1
micro_steps = 4
tokens_per_rank = 512
"""
)
OTHER_ROUTES = """
[[input]]
label = "{wrong_percent} % wrong"
wrong_percent = [0, 10]

[[input]]
label = "{missing_percent} % missing"
missing_percent = [0, 10, 100]
"""
SYSTEMS = """
[[system]]
label = "vanilla"
policy = "vanilla"

[[system]]
label = "vanilla, ahead"
policy = "vanilla"
foresight = true

[[system]]
label = "static"
policy = "static"

[[system]]
label = "static, ahead"
policy = "static"
foresight = true
"""
EXPERIMENT = HEAD + OTHER_ROUTES + SYSTEMS


def load_of(**options: Any) -> foremoe.Load:
    return foremoe.synthesize_load(layers=2, experts=16, top_k=2, micro_steps=3, ranks=4, group_spread=1.0, **options)


def test_every_source_keeps_its_rows() -> None:
    load = load_of()
    others = other_routes(load, wrong=0.2, missing=0.1, seed=1)
    assert (others.executed.array.sum(-1) == load.array.sum(-1)).all()
    assert (others.executed.array == others.recorded.array - others.gone + others.come).all()
    assert (others.recorded.array >= others.gone).all()
    rows = load.array.sum()
    assert others.recorded.array.sum() == pytest.approx(0.9 * rows, rel=0.02)
    assert others.gone.sum() == pytest.approx(0.2 * 0.9 * rows, rel=0.05)


def test_the_same_seed_moves_the_same_rows() -> None:
    first, again, other = (other_routes(load_of(), wrong=0.2, missing=0.1, seed=seed) for seed in (1, 1, 2))
    assert first.executed.digest == again.executed.digest != other.executed.digest


def test_a_row_goes_to_another_expert_and_not_where_nobody_goes() -> None:
    counts = np.zeros((1, 1, 2, 4), np.int64)
    counts[0, 0, 0] = [1000, 0, 10, 0]
    counts[0, 0, 1] = [0, 500, 0, 0]  # there is no other expert
    others = other_routes(foremoe.Load.from_array(counts, top_k=1), wrong=1.0, missing=0.0, seed=1)
    assert others.executed.array[0, 0].tolist() == [[10, 0, 1000, 0], [0, 500, 0, 0]]


def test_quotas_lose_what_is_gone_and_homes_get_what_comes() -> None:
    counts = np.zeros((1, 1, 2, 4), np.int64)
    counts[0, 0, :, 0] = 100
    load = foremoe.Load.from_array(counts, top_k=1)
    plan = foremoe.plan(load, guest_slots=1)  # expert 0 at home on rank 0, and a guest on rank 1
    assert plan.slot_tokens[0, 0].tolist() == [[100, 0, 0], [0, 0, 100]]
    gone, come = np.zeros_like(counts), np.zeros_like(counts)
    gone[0, 0, 1, 0], come[0, 0, 1, 3] = 40, 40
    executed = foremoe.Load.from_array(counts - gone + come, top_k=1)
    quotas = executed_quotas(plan, OtherRoutes(load, executed, gone, come), seed=1)
    [[home, _, _], [_, three, guest]] = quotas[0, 0].tolist()
    assert (home + guest, three) == (160, 40)
    assert 70 < home < 90 and home != guest


def test_a_plan_without_homes_is_refused() -> None:
    others = other_routes(load_of(), wrong=0.2, missing=0.0, seed=1)
    plan = foremoe.plan(others.recorded, "eplb", guest_slots=1)
    with pytest.raises(foremoe.InputError, match="policy: eplb moves experts away from their homes"):
        executed_quotas(plan, others, seed=1)


def test_quotas_of_another_shape_or_for_another_load_are_seen() -> None:
    load = load_of()
    plan = foremoe.plan(load, "static", guest_slots=1)
    with pytest.raises(foremoe.InputError, match=r"slot_tokens: are not \[events, layers, ranks, slots\]"):
        _core._evaluate_quotas(plan, plan.slot_tokens[:1].copy(), load, {})
    assert not _core._evaluate_quotas(plan, plan.slot_tokens + 1, load, {}).figures["ok"]


def test_whoever_plans_gathers_counts_and_placement_is_paid() -> None:
    columns = 'columns = ["step_ms", "recompute_ms", "dispatch_ms", "placed_speedup", "placement_s", "speedup"]'
    head = HEAD.replace('columns = ["rho_mean", "step_ms", "exposed_ms"]', columns)
    as_recorded = '[[input]]\nlabel = "as recorded"\n' + SYSTEMS.replace("foresight = true", "")
    other, known = (
        reproduce.run_experiment(reproduce.parse_experiment(head + rest, "mine.toml")).cells[0]
        for rest in (OTHER_ROUTES + SYSTEMS, as_recorded)
    )
    # Seven ranks' counts of 128 experts in 4 bytes, over 370 GB/s, after 20 µs; 4 micro-steps of 48 layers.
    once = 1e3 * (20e-6 + 7 * 128 * 4 / 370e9)
    for with_gather, without in zip(other, known, strict=True):
        step, recompute, dispatch = (a - b for a, b in zip(with_gather.figures[:3], without.figures[:3], strict=True))
        assert step == pytest.approx(2 * 4 * 48 * once)
        assert recompute == pytest.approx(4 * 48 * once)
        assert dispatch == pytest.approx(once)
    vanilla, _, _, planned_ahead = other
    _, _, _, placed_speedup, placement, speedup = planned_ahead.figures
    assert placement > 0
    step_seconds = planned_ahead.figures[0] / 1e3
    assert placed_speedup == pytest.approx(speedup * step_seconds / (step_seconds + placement))
    assert vanilla.figures[3:] == (1, 0, 1)


def test_figures_are_those_of_what_is_executed() -> None:
    result = reproduce.run_experiment(reproduce.parse_experiment(EXPERIMENT, "mine.toml"))
    none_wrong, wrong, none_missing, missing, all_missing = ([cell.figures for cell in row] for row in result.cells)
    for vanilla, vanilla_ahead, static, static_ahead in (none_wrong, wrong, none_missing, missing, all_missing):
        assert vanilla == vanilla_ahead, "all rows at homes are all rows at homes, whatever was recorded"
        assert static[0] <= static_ahead[0] <= vanilla[0]
    for row in (none_wrong, none_missing):
        assert row[2] == row[3], "nothing is wrong"
    for row in (wrong, missing):
        assert row[2][0] < row[3][0] < row[0][0]
    # Nothing was known, which a system that plans ahead learns from all ranks once: 4 micro-steps of 48 layers.
    gathered = 1e3 * (20e-6 + 4 * 48 * 7 * 128 * 4 / 370e9)
    rho, step, *rest = all_missing[3]
    assert (rho, step - gathered, *rest) == pytest.approx(all_missing[0])
