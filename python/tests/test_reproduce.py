"""Experiments carried out, judged and told."""

from __future__ import annotations

import math
import pathlib
import tomllib
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from experiments import HOT_RANK, MODELLED, PROSE, ROOT, TRACE, changed, run

import foremoe
from foremoe import reproduce
from foremoe.reproduce.columns import COLUMNS
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
        seconds = [phase["seconds"] for phase in vanilla["phases"]]
        alone.append([vanilla["step_seconds"], *seconds, vanilla["phases"][1]["parts"]["optimizer"]])
    assert alone[0] != alone[1]
    step, recompute, update, optimizer = max(alone)
    # 32 experts a rank in each of 48 layers: float32 gradients of 3 · 2048 · 768 weights. Half of them are sent to the
    # other group, and half of the sums are sent back, over NVLink as the h100 preset has it. All layers but the first
    # do so beside the last micro-step's backward.
    one_layer = 2 * (32 * 3 * 2048 * 768 * 4 / 2 / PEERS["bytes_per_second"] + PEERS["latency_seconds"])
    backward = (update - optimizer - recompute) / (48 * whole.num_micro_steps)
    exposed = max(one_layer, 48 * one_layer - 47 * backward)
    expected = (recompute, update + exposed, step + exposed)
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
