"""Numbers of a foremoe.report page, and their formatting."""

from __future__ import annotations

import numpy as np
import pytest
from reports import MODEL, shared_load, shared_report

import foremoe
from foremoe.report import numbers
from foremoe.report.facts import PolicyResult, Report
from foremoe.report.gather import Request, gather_report


@pytest.fixture
def load() -> foremoe.Load:
    return shared_load()


@pytest.fixture
def report() -> Report:
    return shared_report()


def planned(report: Report) -> dict[str, PolicyResult]:
    return {p.policy: p for p in report.planned}


def test_the_numbers_match_simulate(load: foremoe.Load, report: Report) -> None:
    options = {"cluster": "h100", "model": MODEL, "rollout_seconds": 2, "memory_budget": 80, "residency": "resident"}
    names = ["vanilla", "static", "eplb", "foremoe"]
    for figures in foremoe.simulate(load, names, guest_slots=1, **options):
        ours = planned(report)[figures["policy"]]
        assert ours.step_seconds == figures["step_seconds"]
        assert ours.speedup == pytest.approx(figures["speedup_over_vanilla"])
        assert ours.rl_speedup == pytest.approx(figures["rl_step_speedup"])
        assert ours.mean_rho == pytest.approx(figures["rho"]["mean"])
        assert ours.rho.max() == pytest.approx(figures["rho"]["max"])
        assert ours.memory_bytes == figures["memory_bytes_per_rank"]
        assert ours.largest_micro_batch == figures["largest_micro_batch_tokens"]
        memory = [phase["memory"] for phase in figures["phases"]]
        assert ours.guest_bytes == max(m["guest_weights"] + m["guest_gradients"] for m in memory)
        seconds = [phase["seconds"] for phase in figures["phases"]]
        moved = figures["home_move_seconds"]
        assert [ours.recompute.seconds, ours.policy_update.seconds - moved] == pytest.approx(seconds)
        rows = sum(t["row_bytes"] for phase in figures["phases"] for t in phase["traffic"])
        assert sum(link.rows for link in ours.links) == rows


def test_before_shows_vanilla_and_after_shows_foremoe_or_the_fastest(load: foremoe.Load, report: Report) -> None:
    assert [p.policy for p in report.policies] == ["vanilla", "static", "eplb", "finemoe-symmetric", "foremoe"]
    assert (report.before.policy, report.after.policy) == ("vanilla", "foremoe")
    without = gather_report(load, Request(("static", "eplb"), (1,), {"cluster": "h100", "model": MODEL}))
    assert without.after is max(without.planned[1:], key=lambda p: p.speedup)


def test_loads_are_shown_for_the_layer_with_the_worst_vanilla_balance(load: foremoe.Load, report: Report) -> None:
    homes = load.array.sum(2).reshape(3, 2, 4, 32).sum(-1)  # [micro_steps, layers, ranks]
    worst = int((homes.max(-1) / homes.mean(-1)).sum(0).argmax())
    assert report.loads.layer == worst
    np.testing.assert_array_equal(report.loads.before, homes[:, worst])
    np.testing.assert_array_equal(report.loads.after.sum(1), homes[:, worst].sum(1))


def test_ablation_and_memory_are_plans_of_foremoe(load: foremoe.Load, report: Report) -> None:
    assert list(report.ablation) == ["vanilla", "B", "BL", "BLP", "BLPT"]
    assert report.ablation["BLPT"].step_seconds == report.after.step_seconds
    points = [(p.residency, p.guest_slots) for p in report.memory]
    slots = [(residency, n) for residency in ("static", "resident", "shared") for n in (1, 2)]
    assert points == [("no guests", 0), *slots]
    assert report.memory[3].result.step_seconds == report.after.step_seconds


def test_lanes_have_no_gaps_and_end_with_the_window(report: Report) -> None:
    for window in report.windows:
        assert list(window.lanes) == [0, 1, 2, 3]
        for lane in window.lanes.values():
            work = [span for span in lane if not span.beneath]
            edges = [span.begin for span in work[1:]]
            assert [span.end for span in work[:-1]] == pytest.approx(edges, abs=2e-9)
            assert work[0].begin == pytest.approx(0, abs=2e-9)
            assert work[-1].end == pytest.approx(window.seconds, abs=2e-9)


def test_numbers_have_three_digits_and_the_unit_that_fits() -> None:
    seconds = {0: "0 s", 12.345: "12.3 s", 1234.5: "1234 s", 0.0034: "3.40 ms", 78e-6: "78.0 µs", 108e-6: "108 µs"}
    seconds |= {0.99999: "1.00 s", 9.9999: "10.0 s"}
    for value, text in seconds.items():
        assert numbers.seconds_text(value).replace("\u00a0", " ") == text
    for value, text in {0: "0 B", 999: "999 B", 999.9: "1.00 kB", 2.7e9: "2.70 GB", 4e18: "4000 PB"}.items():
        assert numbers.bytes_text(value).replace("\u00a0", " ") == text
    assert [numbers.ratio_text(v) for v in (1.0024, 12.34)] == ["1.002", "12.3"]
    assert [numbers.times_text(v) for v in (1.4237, 312)] == ["1.42×", "312×"]
    assert [numbers.counted(v, "rank") for v in (1, 1234)] == ["1 rank", "1,234 ranks"]
