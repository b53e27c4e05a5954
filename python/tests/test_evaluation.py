"""Checks foremoe.evaluate and synthesized inputs against definitions, compare() and simulate()."""

import numpy as np
import pytest
from conftest import expect_refused

import foremoe
from foremoe import _core

ON = {"cluster": "h100", "model": "Mixtral-8x7B"}
MIXTRAL = {
    "name": "by keys", "moe_layers": 32, "experts": 8, "top_k": 2, "hidden": 4096, "intermediate": 14336,
    "vocabulary": 32000, "heads": 32, "kv_heads": 8, "head_width": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def load():
    return foremoe.synthesize_load(shape="Mixtral-8x7B", layers=2, micro_steps=4, ranks=4, tokens_per_rank=512, seed=3)


@pytest.fixture(scope="module")
def hot_rank():
    """Rank 0 has 2.5 times the mean load: 500 tokens instead of 200."""
    return foremoe.synthesize_load(
        routing="w2", ranks=4, experts=16, top_k=2, layers=1, micro_steps=2, tokens_per_rank=100
    )


def test_the_figures_of_evaluate_match_compare_and_simulate(load):
    of = foremoe.evaluate(load, "foremoe", guest_slots=2, **ON)
    (compared,) = foremoe.compare(load, "foremoe", guest_slots=2)
    (simulated,) = foremoe.simulate(load, "foremoe", guest_slots=2, **ON)
    speedups = ("speedup_over_vanilla", "rl_step_speedup", "framework")  # evaluate() has no vanilla
    measured = ("plan_seconds", "plan_us_per_layer_micro_step", "threads", "placement")
    for key in {*compared, *simulated} - {*speedups, *measured}:
        assert of.figures[key] == {**compared, **simulated}[key], key
    assert of.skipped is None and foremoe.check(of.plan, load) == []
    assert of.cost["cluster"] == "h100" and of.cost["moe_layers"] == 32


def test_an_evaluation_of_a_skipped_policy_has_the_reason(load):
    of = foremoe.evaluate(load, "eplb", in_flight=2)
    assert of.skipped and of.figures == {"policy": "eplb", "skipped": of.skipped}


def test_recompute_has_its_own_plan_if_micro_steps_are_in_flight(load):
    of = foremoe.evaluate(load, in_flight=2, **ON)
    assert of.plan.in_flight == 2 and of.recompute_plan.in_flight == 1
    alone = foremoe.evaluate(load, **ON)
    assert np.array_equal(alone.plan.slot_tokens, alone.recompute_plan.slot_tokens)


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("policy", ["foremoe", "feplb", "vanilla"])
def test_evaluating_an_existing_plan_gives_the_figures_of_evaluate(load, policy, in_flight):
    made = foremoe.evaluate(load, policy, guest_slots=2, residency="resident", in_flight=in_flight, path="peer", **ON)
    recompute = made.recompute_plan if in_flight > 1 else None
    found = foremoe.evaluate_plan(made.plan, load, recompute_plan=recompute, path="peer", **ON)
    placed = ("placement", "placed_step_seconds", "placed_speedup")  # depend on measured planning time
    assert found.figures.keys() == made.figures.keys()
    assert {k: v for k, v in found.figures.items() if k not in placed} == {
        k: v for k, v in made.figures.items() if k not in placed
    }
    assert found.policy == policy and found.cost == made.cost
    plain = foremoe.evaluate_plan(made.plan, load).figures  # without a cluster, recompute is not simulated
    assert plain["rho"] == made.figures["rho"] and "phases" not in plain


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("foremoe", {}),
        ("foremoe", {"residency": "shared", "path": "host"}),
        ("foremoe", {"residency": "static", "keep_activations": True}),
        ("feplb", {"policy_options": {"dyn": 2}}),
        ("eplb", {"rollout_seconds": 9}),  # residency free, which requires one micro-step in flight
    ],
)
def test_a_phase_evaluated_alone_takes_as_long_as_in_a_whole_step(load, policy, options, in_flight):
    made = foremoe.evaluate(load, policy, guest_slots=2, in_flight=in_flight, **options, **ON)
    if made.skipped:
        assert (policy, in_flight) == ("eplb", 2)
        return
    options.pop("residency", None)
    for plan, of_step in zip((made.recompute_plan, made.plan), made.figures["phases"], strict=True):
        alone = foremoe.evaluate_plan(plan, load, phase=of_step["phase"], **options, **ON)
        assert alone.figures["phases"] == [of_step]
        assert not {key for key in alone.figures if key.endswith("step_seconds")} and "placement" not in alone.figures
        with pytest.raises(foremoe.InputError, match="no simulated step"):
            alone.timeline(1, 1)


def test_a_plan_that_cannot_be_evaluated_is_rejected_by_name(load):
    plan, ahead = foremoe.plan(load), foremoe.plan(load, in_flight=2)
    part = foremoe.plan(load, layers=range(1))
    for plans, field, words in [
        ({"plan": ahead}, "recompute_plan", "is missing, and the plan has 2 micro-steps in flight"),
        ({"plan": plan, "recompute_plan": ahead}, "recompute_plan", "has 2 micro-steps in flight, expected 1"),
        ({"plan": part}, "plan", "is a part of a plan"),
        ({"plan": ahead, "recompute_plan": part}, "recompute_plan", "is a part of a plan"),
        (
            {"plan": ahead, "recompute_plan": plan, "phase": "policy_update"},
            "recompute_plan",
            "cannot be combined with phase",
        ),
        ({"plan": ahead, "phase": "recompute"}, "event_pass", "cannot serve recompute"),
        ({"plan": plan, "phase": "forward"}, "phase", "expected recompute or policy_update"),
    ]:
        expect_refused(lambda plans=plans: foremoe.evaluate_plan(**plans, load=load, **ON), field, words)
    other = foremoe.synthesize_load(shape="Mixtral-8x7B", layers=2, micro_steps=4, ranks=4, tokens_per_rank=512, seed=4)
    of = foremoe.evaluate_plan(plan, other, **ON).figures
    assert not of["ok"] and "phases" not in of
    of = foremoe.evaluate_plan(plan, other, phase="policy_update", **ON).figures
    assert not of["ok"] and "phases" not in of


def test_a_model_can_be_given_as_a_dict(load):
    named, told = (foremoe.evaluate(load, cluster="h100", model=model) for model in ("Mixtral-8x7B", MIXTRAL))
    assert told.cost["model"] == "by keys"
    assert told.figures["step_seconds"] == named.figures["step_seconds"]


def test_attention_uses_the_lengths_in_a_trace_unless_a_length_is_given():
    trace = foremoe.synthesize_trace(
        shape="Mixtral-8x7B", layers=2, micro_steps=2, ranks=4, tokens_per_rank=512, sequences_per_rank=4
    )
    load = foremoe.collect(trace)
    counts = foremoe.Load.from_array(load.array, top_k=load.top_k, ranks_per_node=load.ranks_per_node)

    def vanilla(of, **options):
        (figures,) = foremoe.simulate(of, "vanilla", dispatch="row", **ON, **options)
        assert (
            foremoe.evaluate(of, "vanilla", dispatch="row", **ON, **options).figures["attention"]
            == figures["attention"]
        )
        return figures["attention"], figures["step_seconds"]

    by_sequence, mean = vanilla(load), vanilla(counts)
    assert by_sequence[0] == "sequences" and mean[0] == "mean"
    assert by_sequence[1] < mean[1], "its sequences have fewer than 4096 tokens"
    assert vanilla(load, sequence_tokens=4096) == mean
    plan = foremoe.plan(load, "vanilla")
    alone = foremoe.evaluate_plan(plan, load, phase="recompute", dispatch="row", **ON).figures
    whole = foremoe.evaluate(load, "vanilla", dispatch="row", **ON).figures
    assert alone["attention"] == "sequences"
    assert alone["phases"][0]["seconds"] == whole["phases"][0]["seconds"]

    # All sequences have 128 tokens if each has the same number.
    ends = np.arange(0, trace.num_tokens + 1, 128, dtype=np.int64)
    batch = np.arange(len(ends) - 1, dtype=np.int32)
    even = foremoe.Trace.from_arrays(
        np.array(trace.routed_experts), ends, num_experts=8, ranks=4, ranks_per_node=4,
        micro_step=batch % 2, rank=batch // 2 % 4,
    )  # fmt: skip
    _, seconds = vanilla(foremoe.collect(even))
    assert seconds == pytest.approx(vanilla(foremoe.collect(even), sequence_tokens=128)[1], rel=1e-12)


def test_policy_options_are_applied(hot_rank):
    """FEPLB moves at most `dyn` experts of a rank, and no expert with fewer than `min_tokens` tokens."""

    def copies(**options):
        return foremoe.evaluate(hot_rank, "feplb", guest_slots=4, policy_options=options).figures["copies"]

    assert copies(dyn=4, min_tokens=1) > copies(dyn=1, min_tokens=1) > copies(dyn=4, min_tokens=1000) == 0


def test_a_stress_workload_has_its_defined_imbalance(hot_rank):
    of = foremoe.evaluate(hot_rank, "vanilla")
    assert of.figures["rho"]["mean"] == 2.5
    pairs = _core._pair_figures(of.plan, hot_rank, False)
    assert (pairs["straggler"], pairs["waste"], pairs["share_of_bucket"]) == (300, 0.6, [0, 0, 0, 0, 1])
    assert "between_nodes" not in pairs


def test_stability_compares_shares_rather_than_tokens(hot_rank):
    stability = _core._load_stability(hot_rank, 2)
    assert (stability["step_change"], stability["hottest"]) == (0, 2.5)
    assert np.isnan(_core._load_stability(hot_rank, 1)["step_change"])
    with pytest.raises(foremoe.InputError, match="3 does not divide 2 micro-steps"):
        _core._load_stability(hot_rank, 3)


def test_a_timeline_has_the_requested_turns(load):
    of = foremoe.evaluate(load, guest_slots=1, **ON)
    spans = [span for span in of.timeline(micro_steps=2, layers=1) if span["ph"] == "X"]
    assert {span["pid"] for span in spans} == set(range(load.num_ranks))
    assert any(span["name"].endswith("micro-step 1, layer 0") for span in spans)
    assert not any("layer 1" in span["name"] for span in spans)
    assert all(span["dur"] > 0 for span in spans)
    with pytest.raises(foremoe.InputError, match="layers: 3, expected 1 … 2"):
        of.timeline(1, 3)
    with pytest.raises(foremoe.InputError, match="no simulated step"):
        foremoe.evaluate(load).timeline(1, 1)


def test_memory_remarks_name_the_policies_above_the_budget(load):
    needed = [("small", 10**9), ("large", 3 * 10**9)]
    of = foremoe.evaluate(load, "vanilla", memory_budget=2, **ON)
    (remark,) = _core._memory_remarks(of, needed)
    assert remark == "more than the budget of 2 GB: large; the most is 3.0 GB"
    assert _core._memory_remarks(of, [("small", 10**9)]) == []
    (of_cluster, of_budget) = _core._memory_remarks(of, [("huge", 10**12)])
    assert "80 GB of a rank of h100" in of_cluster and "nothing fits the budget of 2 GB" in of_budget


def test_a_drawn_trace_fills_every_rank_of_every_micro_step():
    trace = foremoe.synthesize_trace(layers=1, experts=8, top_k=2, micro_steps=3, ranks=4, tokens_per_rank=64)
    load = foremoe.collect(trace)
    assert load.array.shape == (3, 1, 4, 8)
    assert (load.array.sum(-1) == 64 * 2).all()


def test_the_same_keywords_draw_the_same_load():
    keywords = {"layers": 1, "experts": 8, "top_k": 2, "micro_steps": 2, "ranks": 2, "tokens_per_rank": 32}
    one, again, other = (foremoe.synthesize_load(**keywords, seed=seed).digest for seed in (1, 1, 2))
    assert one == again != other


def test_former_plans_can_be_read_from_files(load, tmp_path):
    load.save(tmp_path / "load")
    plan = foremoe.plan(load, guest_slots=1)
    plan.save(tmp_path / "plan")
    assert _core._read_input(str(tmp_path / "load"), {"layers": 1}, 1)[0].num_layers == 1
    (whole,) = _core._read_input(str(tmp_path / "load"), {"previous": tmp_path / "plan"}, 1)
    warm = foremoe.plan(load, guest_slots=1, previous=plan)
    assert np.array_equal(foremoe.evaluate(whole, guest_slots=1).plan.slot_expert, warm.slot_expert)


def test_a_plan_for_a_cluster_is_the_one_that_evaluate_chooses(load):
    for options in ({}, {"residency": "auto"}, {"rollout_tail_seconds": 10}, {"prefer": "balance"}):
        plan, of = foremoe.plan(load, **options, **ON), foremoe.evaluate(load, **options, **ON)
        assert (plan.policy, plan.options) == (of.plan.policy, of.plan.options)
        assert np.array_equal(plan.slot_tokens, of.plan.slot_tokens)
    load = foremoe.synthesize_load(shape="Mixtral-8x7B", layers=2, micro_steps=4, ranks=4, tokens_per_rank=8192, seed=3)
    chosen = foremoe.evaluate(load, **ON)
    residency, prefer = chosen.figures["choice"]["plan"].split(", ")
    recorded = chosen.plan.options
    assert prefer == "time"
    again = foremoe.plan(
        load, residency=residency, prefer="time", copy_price=recorded["copy-price"], free_copies=recorded["free-copies"]
    )
    assert np.array_equal(again.slot_expert, chosen.plan.slot_expert)
    assert np.array_equal(again.slot_tokens, chosen.plan.slot_tokens)


def test_what_a_plan_for_a_cluster_needs(load):
    for option, value in (("layers", range(1)), ("on_micro_step", print)):
        with pytest.raises(foremoe.InputError, match=f"{option}: needs cluster None"):
            foremoe.plan(load, **{option: value}, **ON)
    with pytest.raises(foremoe.InputError, match="rollout_tail_seconds: needs a cluster"):
        foremoe.plan(load, rollout_tail_seconds=1)
    with pytest.raises(foremoe.InputError, match="residency: 'auto'"):
        foremoe.plan(load, residency="auto")
