"""Expert-parallel groups: `ep` gives the figures of each group's ranks alone."""

from __future__ import annotations

import pathlib
from typing import Any

import commands
import numpy as np
import pytest
from reports import MODEL

import foremoe
from foremoe.report.gather import Request, gather_report
from foremoe.report.numbers import seconds_text
from foremoe.report.sections import groups_section
from foremoe.report.summary import conclusion

EP = 2
ON: dict[str, Any] = {"cluster": "h100", "model": MODEL}


@pytest.fixture(scope="module")
def job() -> foremoe.Load:
    shape = {"layers": 2, "micro_steps": 3, "ranks": 4, "ranks_per_node": 4}
    return foremoe.synthesize_load(shape=MODEL, tokens_per_rank=256, seed=5, group_spread=1.0, **shape)  # type: ignore[arg-type]


def test_groups_have_the_counts_of_their_ranks(job: foremoe.Load) -> None:
    groups = job.groups(EP)
    assert [(g.num_ranks, g.ranks_per_node, g.top_k) for g in groups] == [(EP, EP, job.top_k)] * 2
    np.testing.assert_array_equal(np.concatenate([g.array for g in groups], axis=2), job.array)


def test_the_group_of_a_trace_has_its_sequences() -> None:
    trace = foremoe.synthesize_trace(layers=2, experts=16, top_k=2, micro_steps=3, ranks=4, tokens_per_rank=64)
    load = foremoe.collect(trace)
    batching = load.batching
    assert batching is not None
    for i, group in enumerate(load.groups(EP)):
        mine = batching[1] // EP == i
        of_group = group.batching
        assert of_group is not None
        np.testing.assert_array_equal(of_group[0], batching[0][mine])
        np.testing.assert_array_equal(of_group[1], batching[1][mine] - EP * i)
        plan = foremoe.plan(group)
        assert foremoe.check(plan, group) == []
        assert foremoe.evaluate(group, "vanilla", **{**ON, "model": SMALL}, rows="token").figures["ok"]


SMALL = {
    "vocabulary": 100,
    "moe_layers": 2,
    "experts": 16,
    "top_k": 2,
    "hidden": 64,
    "intermediate": 32,
    "heads": 4,
    "head_width": 16,
}


def test_every_function_evaluates_the_groups(job: foremoe.Load) -> None:
    groups = job.groups(EP)
    plans = foremoe.plan(job, ep=EP)
    for group, plan in zip(groups, plans, strict=True):
        np.testing.assert_array_equal(plan.slot_tokens, foremoe.plan(group).slot_tokens)
        assert foremoe.check(plan, group) == []
    (vanilla,) = foremoe.compare(job, "vanilla", ep=EP)
    alone = [foremoe.compare(group, "vanilla")[0]["rho"] for group in groups]
    assert [group["rho"] for group in vanilla["groups"]] == alone
    assert vanilla["rho"]["max"] == max(rho["max"] for rho in alone)
    (simulated,) = foremoe.simulate(job, "foremoe", ep=EP, **ON)
    seconds = [foremoe.simulate(group, "foremoe", **ON)[0]["step_seconds"] for group in groups]
    assert simulated["step_seconds"] == max(seconds)
    assert simulated["memory_bytes_per_rank"] == max(
        foremoe.evaluate(group, **ON).figures["memory_bytes_per_rank"] for group in groups
    )
    found = foremoe.fit(job, ep=EP, **ON)
    assert found["ep"] == EP and len(found["now"]["ranks"]) == job.num_ranks
    assert foremoe.compare(job, "vanilla", ep=None)[0].keys() < vanilla.keys()


def test_plans_equal_those_of_the_command(job: foremoe.Load, tmp_path: pathlib.Path) -> None:
    job.save(tmp_path / "job")
    planned = ["plan", str(tmp_path / "job"), "--out", str(tmp_path / "plan")]
    assert commands.run(*planned, "--ep", str(EP)) == 0
    for i, plan in enumerate(foremoe.plan(job, ep=EP)):
        plan.save(tmp_path / "mine")
        assert (tmp_path / "mine").read_bytes() == (tmp_path / f"plan-group{i}").read_bytes()
    assert commands.run(*planned, "--ranks", "2", "--fold") == 0
    foremoe.plan(job.fold(2)).save(tmp_path / "mine")
    assert (tmp_path / "mine").read_bytes() == (tmp_path / "plan").read_bytes()


@pytest.mark.parametrize("ep", [0, 3, 8, -2])
def test_other_numbers_of_ranks_are_refused(job: foremoe.Load, ep: int) -> None:
    for call in (job.groups, lambda ep: foremoe.plan(job, ep=ep), lambda ep: foremoe.compare(job, ep=ep)):
        with pytest.raises(foremoe.InputError) as raised:
            call(ep)
        assert raised.value.field == "ep" and str(ep) in str(raised.value)


def test_inputs_of_one_group_are_refused(job: foremoe.Load) -> None:
    previous = foremoe.plan(job.groups(EP)[0])
    for call in (foremoe.plan, foremoe.compare):
        with pytest.raises(foremoe.InputError) as raised:
            call(job, ep=EP, previous=previous)  # type: ignore[operator]
        assert raised.value.field == "previous"


def test_the_report_shows_the_slowest_group_and_lists_all(job: foremoe.Load, tmp_path: pathlib.Path) -> None:
    request = Request(("vanilla", "static"), (1,), ON)
    report = gather_report(job.groups(EP), request)
    vanilla = [foremoe.evaluate(group, "vanilla", **ON).figures["step_seconds"] for group in job.groups(EP)]
    slowest = int(np.argmax(vanilla))
    assert [(g.first_rank, g.num_ranks) for g in report.groups] == [(0, EP), (EP, EP)]
    assert [g.before.step_seconds for g in report.groups] == vanilla
    assert report.before.step_seconds == max(vanilla) and report.groups[slowest].after is report.after
    assert f"group {slowest} of 2" in report.input
    _, static = foremoe.simulate(job, ("vanilla", "static"), ep=EP, **ON)
    gain = f"{static['speedup_over_vanilla']:.3f} times as fast as vanilla"
    assert f"static in {seconds_text(static['step_seconds'])}, {gain}" in conclusion(report)
    section = groups_section(report)
    assert section is not None and "0 to 1" in section.body and "2 to 3" in section.body
    assert groups_section(gather_report(job, request)) is None
