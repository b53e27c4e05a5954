"""Options of single policies: each changes the plan, and an option that the policy lacks is rejected by name."""

import numpy as np
import pytest
from conftest import expect_refused

import foremoe
from foremoe import _core


@pytest.fixture(scope="module")
def drifting():
    """Load whose expert popularity is redrawn in about a fifth of the micro-steps."""
    return foremoe.synthesize_load(
        routing="zipf", skew=1.0, permute_probability=0.2, ranks=8, experts=32, top_k=2, layers=2, micro_steps=12,
        tokens_per_rank=512,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "beside", "option"),
    [
        ("finemoe", {"interval": 1}, {"threshold": 1e6}),
        ("finemoe", {}, {"interval": 1}),
        ("finemoe", {"interval": 4}, {"window": 1}),
        ("finemoe", {"interval": 2}, {"samples": 1}),
        ("eplb-ema", {}, {"alpha": 1}),
        ("eplb-ema", {}, {"period": 1}),
        ("foremoe-review", {}, {"base_epsilon": 0}),
        ("foremoe-review-bpo", {}, {"base_epsilon": 0}),
        ("foremoe-review-mda", {}, {"epsilon": 2}),
        ("foremoe-review-mda", {}, {"overshoot": 0.1}),
        ("foremoe-review-mda", {}, {"try_smaller": 1}),
        ("foremoe-review-mda", {}, {"rounds": 1}),
        ("fastermoe", {"intermediate": 1500, "bytes_per_second": 1e9}, {"rule": "expert"}),
        ("fastermoe", {"bytes_per_second": 1e9}, {"intermediate": 1e6}),
        ("fastermoe", {"intermediate": 1e6}, {"bytes_per_second": 1e9}),
        ("fastermoe", {"intermediate": 1e6}, {"flops_per_second": 1e16}),
        ("llep", {}, {"capacity_factor": 1.2}),
        ("llep", {}, {"min_chunk": 1}),
        ("llep", {"min_chunk": 1}, {"imbalance_threshold": 100}),
    ],
)
def test_each_option_of_one_policy_changes_its_plan(drifting, policy, beside, option):
    default, other = (
        foremoe.plan(drifting, policy, guest_slots=1, policy_options=options) for options in (beside, beside | option)
    )
    assert not np.array_equal(default.slot_tokens, other.slot_tokens)
    assert foremoe.check(other, drifting) == []


def test_finemoe_with_our_assignment_has_the_same_maximum_loads(drifting):
    by_lp, exact = (
        foremoe.plan(drifting, "finemoe-symmetric", guest_slots=4, policy_options={"solver": solver})
        for solver in ("lp", "exact")
    )
    assert np.array_equal(by_lp.max_load, exact.max_load)


def test_ultraep_copies_no_expert_to_another_node_unless_the_group_is_one_domain(drifting):
    nodes = foremoe.Load.from_array(drifting.array, ranks_per_node=4, top_k=2)
    inside, whole = (foremoe.plan(nodes, "ultraep", guest_slots=2, policy_options={"whole_group": of}) for of in (0, 1))
    home = np.repeat(np.arange(8), 4)  # [expert]

    def leaves_its_node(plan):
        guests = plan.slot_expert[..., 4:]  # [event, layer, rank, slot]
        rank = np.broadcast_to(np.arange(8)[:, None], guests.shape)
        return (home[guests] // 4 != rank // 4)[guests >= 0]

    assert leaves_its_node(whole).any()
    assert leaves_its_node(inside).size > 0 and not leaves_its_node(inside).any()


def test_llep_without_a_slot_limit_gets_the_slots_that_it_needs(drifting):
    one, none, plenty = (
        foremoe.evaluate(drifting, "llep", guest_slots=slots, policy_options={"min_chunk": 1, "slot_limit": limit})
        for slots, limit in ((1, 1), (1, 0), (28, 1))
    )
    assert 1 < none.figures["guest_slots"] < 28
    assert none.figures["rho"] == plenty.figures["rho"] != one.figures["rho"]


def test_each_of_several_policies_uses_the_options_that_it_has(drifting):
    by_name = {"policies": ["vanilla", "eplb-ema", "foremoe-review-mda"], "guest_slots": 4}
    plain = foremoe.compare(drifting, **by_name)
    chosen = foremoe.compare(drifting, **by_name, policy_options={"period": 1})
    same = [a["rho"] == b["rho"] and a["copies"] == b["copies"] for a, b in zip(plain, chosen, strict=True)]
    assert same == [True, False, True]
    simulated = foremoe.simulate(
        foremoe.synthesize_load(experts=8, top_k=2, layers=2, micro_steps=4, tokens_per_rank=64),
        policies=["eplb-ema"],
        cluster="h100",
        model="Mixtral-8x7B",
        policy_options={"period": 1},
    )
    assert simulated[0]["policy"] == "eplb-ema"


def test_the_cost_of_a_plan_uses_its_own_options():
    load = foremoe.synthesize_load(experts=8, top_k=2, layers=2, micro_steps=4, tokens_per_rank=64)
    on = {"cluster": "h100", "model": "Mixtral-8x7B"}
    seconds = []
    for options in ({}, {"solver": "exact"}):
        made = foremoe.evaluate(load, "finemoe", guest_slots=1, policy_options=options, **on)
        seconds.append(made.figures["step_seconds"])
        assert (
            foremoe.evaluate_plan(made.plan, load, policy_options=options, **on).figures["step_seconds"] == seconds[-1]
        )
        same = _core._evaluate_quotas(made.plan, made.plan.slot_tokens, load, on, options)
        assert same.figures["step_seconds"] == seconds[-1]
    assert seconds[1] < seconds[0], "an LP takes longer"
    wrong = {"dyn": 1}
    expect_refused(
        lambda: foremoe.evaluate_plan(made.plan, load, policy_options=wrong), "dyn", "policy finemoe has solver"
    )
