"""Tests the choice of homes, and that it equals that of the command."""

from __future__ import annotations

import json
import pathlib

import commands
import numpy as np
import pytest

import foremoe


def draw_trace(seed: int) -> foremoe.Trace:
    return foremoe.synthesize_trace(
        seed=seed, layers=2, experts=16, top_k=4, micro_steps=3, ranks=8, ranks_per_node=2, tokens_per_rank=64
    )


def test_python_chooses_the_homes_of_the_command(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = [str(tmp_path / f"{seed}.safetensors") for seed in (1, 2, 3)]
    traces = [draw_trace(seed) for seed in (1, 2, 3)]
    for trace, path in zip(traces, paths, strict=True):
        trace.save(path)
    homes, report = foremoe.choose_homes(traces[:2], holdout=traces[2], sweeps=5, seed=4)
    out = str(tmp_path / "homes.safetensors")
    arguments = [*paths[:2], "--holdout", paths[2], "--sweeps", "5", "--seed", "4", "--out", out, "--json"]
    assert commands.run("homes", *arguments) == 0
    assert {"out": out, **report} == json.loads(capsys.readouterr().out)
    np.testing.assert_array_equal(foremoe.read_homes(out).home, homes.home)
    assert report["fitted"]["chosen"]["pairs"] < report["fitted"]["contiguous"]["pairs"]


def test_plans_use_chosen_homes_and_record_their_digest(tmp_path: pathlib.Path) -> None:
    trace = draw_trace(1)
    homes, _ = foremoe.choose_homes(trace)
    homes.save(tmp_path / "homes.safetensors")
    load = foremoe.collect(trace)
    plan = foremoe.plan(load, homes=foremoe.read_homes(tmp_path / "homes.safetensors"))
    np.testing.assert_array_equal(plan.home, homes.home)
    assert foremoe.check(plan, load, trace, homes=homes) == []
    assert foremoe.check(plan, load, trace) == []


@pytest.mark.parametrize("holdout", [0.0, 1.0, -1, 1e-9])
def test_rejects_fractions_without_routes(holdout: float) -> None:
    with pytest.raises(foremoe.InputError) as raised:
        foremoe.choose_homes(draw_trace(1), holdout=holdout)
    assert raised.value.field == "holdout"


def test_rejects_homes_of_another_shape() -> None:
    homes, _ = foremoe.choose_homes(draw_trace(1))
    load = foremoe.synthesize_load(layers=1, experts=16, ranks=8, micro_steps=1)
    with pytest.raises(foremoe.InputError, match="homes"):
        foremoe.plan(load, homes=homes)
    with pytest.raises(foremoe.InputError, match="traces"):
        foremoe.choose_homes([])
