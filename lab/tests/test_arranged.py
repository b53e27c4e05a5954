"""Systems in several groups, with padded rows, and with replicas that train in place."""

from __future__ import annotations

import tomllib
from typing import Any

import numpy as np
import pytest

import foremoe
from experiments import finemoe_figure_12
from kit import Arranged, System, drawn
from kit.inputs import ROOT
from small import experiment, figures, modelled, run

PEERS = tomllib.loads((ROOT / "data/clusters/h100.toml").read_text(encoding="utf-8"))["peers"]
MODEL = {
    "name": "wide", "moe_layers": 6, "experts": 32, "top_k": 2, "hidden": 512, "intermediate": 65536,
    "vocabulary": 1000, "heads": 4, "head_width": 64,
}  # fmt: skip
WEIGHTS = 3 * 512 * 65536  # of one expert
LOAD: dict[str, Any] = {
    "routing": "zipf", "skew": 1.0, "ranks": 8, "layers": 3, "micro_steps": 4, "tokens_per_rank": 512, "seed": 4,
}  # fmt: skip
ON = drawn("wide", model=MODEL, cluster="h100", dispatch="row", guest_slots=4, **LOAD)
SYSTEMS: list[System] = [
    Arranged("vanilla", groups=2),
    Arranged("padded", "vanilla", groups=2, padded=True),
    System("fetched", "finemoe-symmetric"),
    Arranged("in place", "finemoe-symmetric", in_place=True),
]


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_in_groups_each_rank_has_more_experts_and_only_its_groups_tokens(groups: int) -> None:
    """The reference uses counts alone: expert e is on rank e ÷ (experts per rank) of the token's own group."""
    sizes = {"experts": 32, "top_k": 2, **LOAD}
    cell = run(["rho_mean", "rho_max"], [Arranged("vanilla", groups=groups)], [drawn("zipf", **sizes)]).cells[0][0]
    ranks = 8 // groups
    load = foremoe.synthesize_load(**sizes).array
    served = load.reshape(4, 3, groups, ranks, ranks, 32 // ranks).sum((3, 5))  # [m, l, group, rank of the group]
    rho = served.max((2, 3)) * 8 / served.sum((2, 3))
    assert cell.figures == pytest.approx((rho.mean(), rho.max()), rel=1e-12)


def test_a_step_in_groups_is_the_one_that_foremoe_simulates() -> None:
    on = modelled()
    cell = run(["recompute_ms", "update_ms", "step_ms"], [Arranged("vanilla", groups=2)], [on]).cells[0][0]
    (job,) = foremoe.simulate(on.draw(3).load, "vanilla", ep=4, cluster="h100", model="Qwen3-30B-A3B", guest_slots=1)
    assert len({group["step_seconds"] for group in job["groups"]}) == 2
    assert job["phases"][1]["parts"]["data_parallel"] > 0
    seconds = [*(phase["seconds"] for phase in job["phases"]), job["step_seconds"]]
    assert cell.figures == pytest.approx([1e3 * s for s in seconds], rel=1e-12)


def test_padding_raises_cells_to_the_largest_and_leaves_dense_time_unchanged() -> None:
    of = figures(run(["rho_mean", "experts_ms", "forward_ms", "dispatch_ms"], SYSTEMS[:2], [ON]))
    array = ON.draw(4).load.array  # [m, l, source, expert]
    largest = array.reshape(4, 3, 2, 4, 32).max((2, 3, 4))
    rho = largest * 4 * 8 * 8 / array.sum((2, 3))  # a rank has 8 experts, each with rows of 4 sources
    assert of["padded"]["rho_mean"] == pytest.approx(rho.mean(), rel=1e-12)
    assert of["padded"]["experts_ms"] > of["vanilla"]["experts_ms"]
    dense = {  # a forward consists of dense layers, two exchanges and experts
        name: f["forward_ms"] - 2 * f["dispatch_ms"] - f["experts_ms"] for name, f in of.items()
    }
    assert dense["padded"] == pytest.approx(dense["vanilla"], rel=1e-6)


def test_in_place_replicas_fetch_nothing_and_reduce_their_gradients() -> None:
    update = foremoe.evaluate(
        ON.draw(4).load, "finemoe-symmetric", guest_slots=4, cluster="h100", model=MODEL, dispatch="row"
    ).figures["phases"]
    forward = sum(update[0]["parts"][of] for of in ("dense", "planning", "dispatch", "experts", "combine"))
    seconds, parts = update[1]["seconds"], update[1]["parts"]
    moved = parts["arena_refresh"] + parts["exposed_copies"] + parts["exposed_gradients"]
    assert moved > 0
    # Each rank has eight replicas, two per expert, with float32 gradients. The last backward hides 5 of 6 rings.
    ring = 2 * (8 * WEIGHTS * 4 / 2 / PEERS["bytes_per_second"] + PEERS["latency_seconds"])
    reduced = max(ring, 6 * ring - 5 * (seconds - moved - parts["optimizer"] - forward) / (4 * 6))
    of = figures(run(["update_ms"], SYSTEMS[2:], [ON]))
    assert of["fetched"]["update_ms"] == pytest.approx(1e3 * seconds, rel=1e-9)
    assert of["in place"]["update_ms"] == pytest.approx(1e3 * (seconds - moved + reduced), rel=1e-9)


def test_a_migration_moves_what_the_busiest_rank_lacks_with_its_optimizer_state() -> None:
    columns = ["update_ms", finemoe_figure_12.MIGRATION, finemoe_figure_12.OF_50_STEPS, finemoe_figure_12.PAYS]
    fewer = Arranged("fewer", "static", guest_slots=1, in_place=True)
    vanilla, in_place, one = run(columns, [System("vanilla"), SYSTEMS[3], fewer], [ON]).cells[0]
    # A rank lacks four experts, each with 2 bytes of weights and 12 of optimizer state per parameter.
    seconds = 6 * 4 * (WEIGHTS * 14 / PEERS["bytes_per_second"] + PEERS["latency_seconds"])
    saved = 1e-3 * (vanilla.figures[0] - in_place.figures[0])
    of_50 = 100 * seconds / (50e-3 * in_place.figures[0])
    pays = seconds / saved if saved > 0 else np.inf
    assert in_place.figures[1:] == pytest.approx((1e3 * seconds, of_50, pays), rel=1e-9)
    assert vanilla.figures[1] == 0 < one.figures[1] <= in_place.figures[1] / 4


def test_arrangements_that_do_not_fit_are_rejected() -> None:
    with pytest.raises(foremoe.InputError, match="column 'copies' is not defined for vanilla"):
        experiment(["copies"], [SYSTEMS[0]], [ON])
    with pytest.raises(foremoe.InputError, match="3 groups do not divide 8 ranks"):
        run(["rho_mean"], [Arranged("vanilla", groups=3)], [ON])
    by_both = modelled(dispatch=("token", "row"))
    cell = run(["step_ms"], [Arranged("padded", "vanilla", padded=True)], [by_both]).cells[0][0]
    assert np.isnan(cell.figures[0]) and cell.figures[1] > 0  # padding rows are not tokens
