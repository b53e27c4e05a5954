"""Arguments that cannot be, are of no use, or are of another class."""

from __future__ import annotations

import os
import pickle

import numpy as np
import pytest
from conftest import draw_load

import foremoe

TINY = {
    "name": "tiny", "moe_layers": 2, "experts": 16, "top_k": 1, "hidden": 64, "intermediate": 32, "vocabulary": 9,
    "heads": 1, "head_width": 64,
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"guest_slots": -1}, "guest_slots"),
        ({"guest_slots": 1.5}, "guest_slots"),
        ({"guest_slots": True}, "guest_slots"),
        ({"residency": "everywhere"}, "residency"),
        ({"stages": "XYZ"}, "stages"),
        ({"policy": "nobody"}, "policy"),
        ({"threads": -1}, "threads"),
        ({"tolerance": 2.0}, "tolerance"),
        ({"homes": np.zeros((2, 16), np.int64)}, "homes"),
        ({"homes": "contiguous"}, "homes"),
        ({"homes": np.zeros((2, 15), np.int32)}, "homes"),
        ({"layers": range(0, 9)}, "layers"),
        ({"layers": range(0, 2, 2)}, "layers"),
        ({"layers": 3}, "layers"),
        ({"seed": {}}, "seed"),
    ],
)
def test_bad_options_are_refused_by_name(load: foremoe.Load, options: dict[str, object], field: str) -> None:
    with pytest.raises(foremoe.InputError) as raised:
        foremoe.plan(load, **options)  # type: ignore[arg-type]
    assert raised.value.field == field, raised.value
    assert isinstance(raised.value, ValueError)


def test_a_policy_that_cannot_says_why(load: foremoe.Load) -> None:
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


@pytest.mark.parametrize("policy", foremoe.policies())
def test_homes_that_cannot_be_are_refused_by_every_policy(load: foremoe.Load, policy: str) -> None:
    homes = np.array(foremoe.plan(load).home)
    for wrong in (np.full_like(homes, -1), np.zeros_like(homes), np.full_like(homes, 2**31 - 1)):
        with pytest.raises(foremoe.InputError) as raised:
            foremoe.plan(load, policy, homes=wrong)
        assert raised.value.field == "homes"
    other = foremoe.plan(draw_load(ranks=8))
    for call in (foremoe.plan, foremoe.start_plan, foremoe.compare):
        with pytest.raises(foremoe.InputError, match="8 ranks"):
            call(load, policy, homes=other)  # type: ignore[operator]


def test_odd_arguments_are_refused_by_name(load: foremoe.Load) -> None:
    plan = foremoe.plan(load)
    for call, field in [
        (lambda: foremoe.Plan.join([None]), "parts"),  # type: ignore[list-item]
        (lambda: foremoe.plan(load, layers=slice("a", None)), "layers"),
        (lambda: foremoe.plan(load, layers=slice(0, 2**40)), "layers"),
        (lambda: foremoe.plan(load, guest_slots=np.array(1.7)), "guest_slots"),  # type: ignore[arg-type]
        (lambda: foremoe.RankTurns(plan, load, rank=0, depth=2**31 - 1), "depth"),
        (lambda: foremoe.RankTurns(plan, foremoe.Load.from_array(load.array.copy(), ranks_per_node=4), rank=0), "plan"),
        (lambda: foremoe.Load.from_array(-load.array - 1), "array"),
    ]:
        with pytest.raises(foremoe.InputError) as raised:
            call()  # type: ignore[no-untyped-call]
        assert raised.value.field == field
    with pytest.raises(foremoe.InputError) as raised:
        foremoe.read_load(os.fsdecode(b"/nowhere/\xff"))
    assert raised.value.file == os.fsdecode(b"/nowhere/\xff")


def test_wrong_classes_are_named(load: foremoe.Load) -> None:
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
        (lambda: foremoe.simulate(load, ["vanilla", 3], cluster="h100"), r"policies\[1\]"),
        (lambda: foremoe.read_load(3), "path"),
        (lambda: foremoe.read_trace(None), "path"),
        (lambda: foremoe.import_files(3), "paths"),
    ]:
        with pytest.raises(foremoe.InputError, match=f"^{field}: is a .*; expected ") as raised:
            call()  # type: ignore[no-untyped-call]
        assert raised.value.field == field.replace("\\", "")
