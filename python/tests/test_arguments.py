"""Arguments that are invalid, unused by the policy, or of the wrong class."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import draw_load, expect_refused

import foremoe

TINY = {
    "name": "tiny", "moe_layers": 2, "experts": 16, "top_k": 1, "hidden": 64, "intermediate": 32, "vocabulary": 9,
    "heads": 1, "head_width": 64,
}  # fmt: skip


MODEL = {"cluster": "h100", "model": TINY}
OPTIONS: list[tuple[Callable[..., Any], list[tuple[dict[str, Any], str, str]]]] = [
    (foremoe.plan, [
        ({"guest_slots": -1}, "guest_slots", ""),
        ({"guest_slots": 1.5}, "guest_slots", ""),
        ({"guest_slots": True}, "guest_slots", ""),
        ({"guest_slots": np.array(1.7)}, "guest_slots", ""),
        ({"residency": "everywhere"}, "residency", ""),
        ({"stages": "XYZ"}, "stages", ""),
        ({"policy": "nobody"}, "policy", ""),
        ({"threads": -1}, "threads", ""),
        ({"tolerance": 2.0}, "tolerance", ""),
        ({"homes": np.zeros((2, 16), np.int64)}, "homes", ""),
        ({"homes": "contiguous"}, "homes", ""),
        ({"homes": np.zeros((2, 15), np.int32)}, "homes", ""),
        ({"layers": range(0, 9)}, "layers", ""),
        ({"layers": range(0, 2, 2)}, "layers", ""),
        ({"layers": 3}, "layers", ""),
        ({"layers": slice("a", None)}, "layers", ""),
        ({"layers": slice(0, 2**40)}, "layers", ""),
        ({"seed": {}}, "seed", ""),
    ]),
    (foremoe.evaluate, [
        ({"cluster": "h100", "model": {"name": "x", "hidden": 64}}, "model", "moe_layers is missing"),
        ({"cluster": "h100", "model": {"nam": "x"}}, "model", "not an option"),
        ({"cluster": "h100", "model": {**TINY, "experts": 8}}, "model", "8"),
        ({**MODEL, "memory_budget": 0}, "memory_budget", "not above 0"),
        ({"policy_options": {"dyn": 2}}, "dyn", "foremoe has no options of its own"),
        ({"policy": "feplb", "policy_options": {"dny": 2}}, "dny", "dyn"),
        ({"policy": "nobody"}, "policy", "vanilla"),
    ]),
    (foremoe.compare, [
        ({"policies": ["nobody"]}, "policies", ""),
        *(({"policies": policies, "guest_slots": 4, "policy_options": options}, field, words)
          for policies, options, field, words in [
            (["vanilla", "eplb-ema"], {"dyn": 1}, "dyn", "policies vanilla, eplb-ema have alpha, period"),
            (["vanilla", "static"], {"dyn": 1}, "dyn", "policies vanilla, static have no options of their own"),
            (["finemoe-random"], {"threshold": 1.1}, "threshold", "policy finemoe-random has solver, alpha_ranks"),
            (["finemoe"], {"threshold": 0.5}, "threshold", "0.5"),
            (["finemoe"], {"samples": 0}, "samples", "0"),
            (["finemoe"], {"solver": "highs"}, "solver", "expected lp or exact"),
            (["finemoe"], {"solver": "exact", "alpha_ranks": 1}, "solver", "exact solves LP 1"),
            (["eplb-ema"], {"alpha": 0}, "alpha", "0"),
        ]),
    ]),
    (lambda load, **options: foremoe.RankTurns(foremoe.plan(load), load, **{"rank": 0, **options}), [
        ({"rank": 4}, "rank", ""),
        ({"rank": -1}, "rank", ""),
        ({"phase": "rollout"}, "phase", ""),
        ({"path": "air"}, "path", ""),
        ({"depth": 0}, "depth", ""),
        ({"depth": 2**31 - 1}, "depth", ""),
        ({"expert_bytes": 0}, "expert_bytes", ""),
    ]),
    (lambda _, **options: foremoe.synthesize_load(**options), [
        ({"ranks": 0}, "ranks", ""),
        ({"routing": "w9"}, "routing", ""),
        ({"shape": "GPT"}, "shape", ""),
        ({"skew": -1}, "skew", ""),
    ]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "options", "field", "words"), [(call, *case) for call, cases in OPTIONS for case in cases]
)
def test_invalid_options_are_rejected_by_name(
    load: foremoe.Load, call: Callable[..., Any], options: dict[str, Any], field: str, words: str
) -> None:
    expect_refused(lambda: call(load, **options), field, words)


def test_a_skipped_policy_has_a_reason(load: foremoe.Load) -> None:
    with pytest.raises(foremoe.PolicySkipped) as raised:
        foremoe.plan(load, policy="flexmoe", in_flight=2)
    assert raised.value.policy == "flexmoe"
    assert raised.value.reason
    again = pickle.loads(pickle.dumps(raised.value))
    assert (again.policy, again.reason) == (raised.value.policy, raised.value.reason)


def test_errors_survive_pickling(load: foremoe.Load) -> None:
    with pytest.raises(foremoe.InputError) as raised:
        foremoe.plan(load, guest_slots=-1)
    again = pickle.loads(pickle.dumps(raised.value))
    assert (str(again), again.field) == (str(raised.value), "guest_slots")
    assert isinstance(again, ValueError)


@pytest.mark.parametrize("policy", foremoe.policies())
def test_invalid_homes_are_rejected_by_every_policy(load: foremoe.Load, policy: str) -> None:
    homes = np.array(foremoe.plan(load).home)
    for wrong in (np.full_like(homes, -1), np.zeros_like(homes), np.full_like(homes, 2**31 - 1)):
        expect_refused(lambda wrong=wrong: foremoe.plan(load, policy, homes=wrong), "homes")
    other = foremoe.plan(draw_load(ranks=8))
    for call in (foremoe.plan, foremoe.start_plan, foremoe.compare):
        with pytest.raises(foremoe.InputError, match="8 ranks"):
            call(load, policy, homes=other)  # type: ignore[operator]


def test_mismatched_arguments_are_rejected_by_name(load: foremoe.Load) -> None:
    plan = foremoe.plan(load)
    for call, field in [
        (lambda: foremoe.Plan.join([None]), "parts"),  # type: ignore[list-item]
        (lambda: foremoe.RankTurns(plan, foremoe.Load.from_array(load.array.copy(), ranks_per_node=4), rank=0), "plan"),
        (lambda: foremoe.Load.from_array(-load.array - 1), "array"),
    ]:
        expect_refused(call, field)
    with pytest.raises(foremoe.InputError) as raised:
        foremoe.read_load(os.fsdecode(b"/nowhere/\xff"))
    assert raised.value.file == os.fsdecode(b"/nowhere/\xff")


def test_arguments_of_the_wrong_class_are_rejected_by_name(load: foremoe.Load) -> None:
    plan = foremoe.plan(load)
    for call, field in [
        (lambda: foremoe.plan(plan), "load"),
        (lambda: foremoe.check(load, plan), "plan"),
        (lambda: foremoe.collect(load), "trace"),
        (lambda: foremoe.figures(plan, plan), "load"),
        (lambda: foremoe.figures(plan, load, load), "trace"),
        (lambda: foremoe.check(plan, load, align="wide"), "align"),
        (lambda: foremoe.plan(load, previous=load), "previous"),
        (lambda: foremoe.plan(load, previous_load=plan), "previous_load"),
        (lambda: foremoe.plan(load, threads=2.5), "threads"),
        (lambda: foremoe.plan(load, on_micro_step=3), "on_micro_step"),
        (lambda: foremoe.start_plan(load, ["foremoe"]), "policy"),
        (lambda: foremoe.evaluate(load, ["foremoe"]), "policy"),
        (lambda: foremoe.evaluate(load, policy_options=3), "policy_options"),
        (lambda: foremoe.compare(load, 3), "policies"),
        (lambda: foremoe.simulate(load, ["vanilla", 3], cluster="h100"), "policies[1]"),
        (lambda: foremoe.read_load(3), "path"),
        (lambda: foremoe.read_trace(None), "path"),
        (lambda: foremoe.import_files(3), "paths"),
    ]:
        expect_refused(call, field, f"{field}: is a ")
