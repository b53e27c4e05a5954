"""Systems as an experiment arranges them: with padded rows, with replicas that train in place, moved between steps."""

from __future__ import annotations

import pathlib
import tomllib
from typing import Any

import numpy as np
import pytest
from experiments import PROSE, changed, run

import foremoe
from foremoe.reproduce.arranged import _with_all_reduce

SHAPES = """
[[shape]]
name = "wide"
moe_layers = 6
experts = 32
top_k = 2
hidden = 512
intermediate = 65536
vocabulary = 1000
heads = 4
head_width = 64

[[shape]]
name = "narrow"
moe_layers = 6
experts = 32
top_k = 2
hidden = 256
intermediate = 65536
vocabulary = 1000
heads = 4
head_width = 64
"""

COLUMNS = '["rho_mean", "dense_ms", "experts_ms", "update_ms", "update_speedup", "migration_ms", "migration_of_50"]'

ARRANGED = (
    PROSE
    + f"columns = {COLUMNS}\n"
    + SHAPES
    + """
[[input]]
label = "{model}"
model = ["wide", "narrow"]
cluster = "h100"
dispatch = "row"
routing = "zipf"
skew = 1.0
ranks = 8
layers = 3
micro_steps = 4
tokens_per_rank = 512
seed = 4
guest_slots = 4

[[system]]
label = "vanilla"
policy = "vanilla"
ep_groups = 2

[[system]]
label = "padded"
policy = "vanilla"
ep_groups = 2
padded = true

[[system]]
label = "fetched"
policy = "finemoe-symmetric"

[[system]]
label = "in place"
policy = "finemoe-symmetric"
in_place = true

[[system]]
label = "fewer"
policy = "static"
guest_slots = 1
in_place = true
"""
)

LOAD = {"routing": "zipf", "skew": 1.0, "ranks": 8, "experts": 32, "top_k": 2, "layers": 3, "micro_steps": 4}
DRAWN = {**LOAD, "tokens_per_rank": 512, "seed": 4}
H100 = tomllib.loads((pathlib.Path(__file__).parents[2] / "data/clusters/h100.toml").read_text(encoding="utf-8"))
PEERS = H100["peers"]
WEIGHTS = 3 * 512 * 65536  # of one expert of the wide model


@pytest.fixture(scope="module")
def cells() -> dict[str, dict[str, float]]:
    """By system and column, of the wide model."""
    result = run(ARRANGED)
    names = [column.name for column in result.experiment.columns]
    labels = [system.label for system in result.experiment.systems]
    wide, narrow = ([dict(zip(names, c.figures, strict=True)) for c in row] for row in result.cells)
    assert wide[0]["experts_ms"] > narrow[0]["experts_ms"], "each input has its own shape"
    return dict(zip(labels, wide, strict=True))


def test_padded_rows_are_those_of_the_largest_cell_and_tokens_pass_the_rest_once(
    cells: dict[str, dict[str, float]],
) -> None:
    array = foremoe.synthesize_load(**DRAWN).array  # [m, l, source, expert]
    largest = array.reshape(4, 3, 2, 4, 32).max((2, 3, 4))
    rho = largest * 4 * 8 * 8 / array.sum((2, 3))  # a rank has 8 experts, each with rows of 4 sources
    assert cells["padded"]["rho_mean"] == pytest.approx(rho.mean(), rel=1e-12)
    assert cells["padded"]["dense_ms"] == pytest.approx(cells["vanilla"]["dense_ms"], rel=1e-12)
    assert cells["padded"]["experts_ms"] > cells["vanilla"]["experts_ms"]


def in_turns(phase: dict[str, Any]) -> float:
    """Seconds of a phase but for its copies and its optimizer."""
    return float(sum(phase["parts"][of] for of in ("dense", "planning", "dispatch", "experts", "combine")))


def test_in_place_nothing_is_fetched_and_replicas_reduce_their_gradients() -> None:
    load = foremoe.synthesize_load(**DRAWN)
    model = dict(tomllib.loads(SHAPES)["shape"][0])
    evaluated = foremoe.evaluate(
        load, "finemoe-symmetric", guest_slots=4, cluster="h100", model=model, dispatch="row"
    ).figures
    update = evaluated["phases"][1]
    parts = update["parts"]
    moved = parts["arena_refresh"] + parts["exposed_copies"] + parts["exposed_gradients"]
    assert moved > 0
    # Eight replicas on each rank, two of each expert, float32 gradients. Of 6 layers the last backward hides 5 rings.
    ring = 2 * (8 * WEIGHTS * 4 / 2 / PEERS["bytes_per_second"] + PEERS["latency_seconds"])
    computing = update["seconds"] - moved - parts["optimizer"] - in_turns(evaluated["phases"][0])
    backward = computing / (4 * 6)
    reduced = max(ring, 6 * ring - 5 * backward)
    (vanilla, _, fetched, in_place, _), _ = run(ARRANGED).cells
    assert fetched.figures[3] == pytest.approx(1e3 * update["seconds"], rel=1e-9)
    assert in_place.figures[3] == pytest.approx(1e3 * (update["seconds"] - moved + reduced), rel=1e-9)
    assert in_place.figures[4] == pytest.approx(vanilla.figures[3] / in_place.figures[3], rel=1e-9)


def test_a_migration_moves_what_the_busiest_rank_lacks_with_its_optimizer_state(
    cells: dict[str, dict[str, float]],
) -> None:
    columns = '["update_ms", "migration_ms", "migration_of_50", "migration_pays"]'
    one_group = changed(changed(ARRANGED, "ep_groups = 2\n\n", "\n"), COLUMNS, columns)
    one_group = changed(
        one_group, 'policy = "finemoe-symmetric"\n\n', 'policy = "finemoe-symmetric"\nin_place = true\n\n'
    )
    (vanilla, _, symmetric, same, fewer), _ = run(one_group).cells
    # Four experts that a rank does not own, 2 bytes of weights and 12 of optimizer state for each parameter.
    seconds = 6 * 4 * (WEIGHTS * 14 / PEERS["bytes_per_second"] + PEERS["latency_seconds"])
    assert symmetric.figures[1] == same.figures[1] == pytest.approx(1e3 * seconds, rel=1e-9)
    assert symmetric.figures[2] == pytest.approx(100 * seconds / (50e-3 * symmetric.figures[0]), rel=1e-9)
    saved = vanilla.figures[0] - symmetric.figures[0]
    assert symmetric.figures[3] == pytest.approx(1e3 * seconds / saved if saved > 0 else np.inf, rel=1e-9)
    assert 0 < fewer.figures[1] <= symmetric.figures[1] / 4, "its own guest_slots"
    assert vanilla.figures[1] == 0


@pytest.mark.parametrize(
    ("old", "new", "field", "words"),
    [
        ('label = "in place"', 'label = "in place"\npadded = true', "system[3].padded", "beside in_place"),
        ('"dense_ms"', '"copies"', "system[0].ep_groups", "2, but column 'copies' is of one plan"),
        ("guest_slots = 4", 'guest_slots = "four"', "input[0].guest_slots", "not a whole number"),
        ('name = "narrow"', 'name = "wide"', "shape[1].name", "'wide' twice"),
        ('name = "narrow"\nmoe_layers = 6', 'name = "narrow"\nmoe_layers = 0', "shape[1].moe_layers", "not in 1"),
        ('dispatch = "row"', 'dispatch = "token"', "system[1].padded", "needs dispatch row"),
        ("in_place = true", "in_place = 1", "system[3].in_place", "expected true or false"),
    ],
)
def test_what_cannot_be_arranged_is_named(old: str, new: str, field: str, words: str) -> None:
    with pytest.raises(foremoe.InputError, match=words) as caught:
        run(changed(ARRANGED, old, new))
    assert caught.value.field == field


def test_an_all_reduce_hides_no_other_one() -> None:
    parts = {"experts": 1.0, "arena_refresh": 0.0, "optimizer": 0.0}
    phases = [{"seconds": seconds, "parts": {**parts, "experts": seconds}} for seconds in (1.0, 3.0)]
    figures = {"phases": phases, "step_seconds": 4.0, "micro_steps": 1}
    # Rings of 2 s in each of two layers, beside backward passes of 1 s: 3 s remain.
    cost = {
        "expert_gradient_bytes": 2.0,
        "moe_layers": 2,
        "peers": {"bytes_per_second": 1.0, "latency_seconds": 0.0},
    }
    once = _with_all_reduce(figures, cost, 2, 1, "peers")
    assert once["step_seconds"] == once["phases"][1]["seconds"] + 1 == 7
    assert _with_all_reduce(once, cost, 2, 1, "peers")["step_seconds"] == 10
