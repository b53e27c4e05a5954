"""Planning, checks, figures, comparing and simulating, held against the command where it says the same."""

from __future__ import annotations

import ast
import concurrent.futures
import json
import os
import pathlib
import pickle
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from conftest import draw_load

import foremoe

PROGRAM = pathlib.Path(foremoe.__file__).with_name("bin") / "foremoe"
TIMES = {"plan_seconds", "plan_us_per_layer_micro_step", "threads"}


def command(*arguments: object) -> object:
    done = subprocess.run([PROGRAM, *map(str, arguments), "--json"], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def without_times(figures: object) -> object:
    if isinstance(figures, list):
        return [without_times(one) for one in figures]
    assert isinstance(figures, dict)
    return {key: value for key, value in figures.items() if key not in TIMES}


@pytest.mark.parametrize("residency", ["static", "resident", "shared"])
def test_a_plan_serves_its_load_with_less_imbalance(load: foremoe.Load, residency: str) -> None:
    plan = foremoe.plan(load, guest_slots=1, residency=residency)
    assert foremoe.check(plan, load) == []
    by_rank = plan.slot_tokens.sum(-1)  # [events, layers, ranks]
    np.testing.assert_array_equal(by_rank.max(-1), plan.max_load)
    at_home = load.array.sum(2).reshape(*load.array.shape[:2], load.num_ranks, -1).sum(-1)
    assert by_rank.max(-1).mean() < at_home.max(-1).mean()
    # Over the replicas of an expert quotas are its load.
    events, layers, _, _ = plan.slot_expert.shape
    for event in range(events):
        for layer in range(layers):
            served = np.zeros(load.num_experts + 1, np.int64)
            np.add.at(served, plan.slot_expert[event, layer].ravel(), plan.slot_tokens[event, layer].ravel())
            expected = load.array[plan.event_micro_step[event], layer].sum(0)
            np.testing.assert_array_equal(served[:-1], expected)


def test_the_same_plan_as_the_command_writes(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    path = data / "load-q30-ep8-bursty.safetensors"
    out = tmp_path / "plan.safetensors"
    printed = command("plan", path, "--guest-slots", 2, "--residency", "static", "--out", out)
    load = foremoe.read_load(path)
    plan = foremoe.plan(load, guest_slots=2, residency="static")
    plan.save(tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == out.read_bytes()
    assert foremoe.figures(plan, load) == without_times(printed)
    read = foremoe.read_plan(out)
    np.testing.assert_array_equal(read.slot_tokens, plan.slot_tokens)
    assert read.options == plan.options


def test_compare_and_simulate_return_what_the_command_prints(data: pathlib.Path) -> None:
    path = data / "load-q30-ep8.safetensors"
    load = foremoe.read_load(path)
    names = ["vanilla", "eplb", "foremoe"]
    compared = foremoe.compare(load, policies=names, guest_slots=1)
    assert without_times(compared) == without_times(command("compare", path, "--policy", ",".join(names), "-G", 1))
    simulated = foremoe.simulate(load, policies=names, cluster="h100", model="qwen3-30b-a3b", prefetch_depth=3)
    printed = command(
        "simulate",
        path,
        "--policy",
        ",".join(names),
        "--cluster",
        "h100",
        "--model",
        "qwen3-30b-a3b",
        "--prefetch-depth",
        3,
    )
    assert without_times(simulated) == without_times(printed)


def test_rows_between_nodes_are_known_with_the_trace(data: pathlib.Path) -> None:
    trace = foremoe.read_trace(data / "rollout-math.safetensors")
    load = foremoe.collect(trace, ranks=8, ranks_per_node=4)
    plan = foremoe.plan(load)
    assert "node_link_rows" in foremoe.figures(plan, load, trace)
    assert "node_link_rows" not in foremoe.figures(plan, load)
    again = foremoe.read_trace(data / "rollout-math.safetensors")
    assert foremoe.check(plan, load, again) == []
    routes = np.array(trace.routed_experts)
    changed = foremoe.Trace.from_arrays(routes, np.array(trace.cu_seqlens), num_experts=trace.num_experts)
    assert foremoe.check(plan, load, changed) == []
    routes[5, 0] = routes[5, 0, ::-1] + 1
    with pytest.raises(foremoe.InputError, match="trace: is not the trace"):
        foremoe.figures(plan, load, changed)
    with pytest.raises(foremoe.InputError, match="not collected from a trace"):
        foremoe.figures(plan, foremoe.Load.from_array(load.array.copy()), trace)


@pytest.mark.parametrize("policy", ["foremoe", "static", "vanilla"])
@pytest.mark.parametrize("in_flight", [1, 2])
def test_parts_join_to_the_whole_byte_for_byte(tmp_path: pathlib.Path, policy: str, in_flight: int) -> None:
    load = draw_load(layers=5)
    options = {"policy": policy, "guest_slots": 1, "in_flight": in_flight}
    whole = foremoe.plan(load, **options)
    parts = [foremoe.plan(load, layers=layers, **options) for layers in (slice(3, None), range(0, 1), range(1, 3))]
    assert list(parts[0].layers) == [3, 4]
    whole.save(tmp_path / "whole")
    foremoe.Plan.join(parts).save(tmp_path / "joined")
    assert (tmp_path / "joined").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("layers", [None, range(1, 2)])
def test_plans_and_parts_travel_between_processes(layers: range | None) -> None:
    load = draw_load()
    plan = foremoe.plan(load, layers=layers)
    again = pickle.loads(pickle.dumps(plan))
    for name in ("slot_expert", "slot_tokens", "home", "event_micro_step", "event_pass", "max_load"):
        np.testing.assert_array_equal(getattr(again, name), getattr(plan, name))
    assert (again.options, again.layers, again.load_digest) == (plan.options, plan.layers, plan.load_digest)
    if layers is None:
        assert foremoe.check(again, load) == []


def test_numpy_numbers_are_numbers(load: foremoe.Load) -> None:
    expected = foremoe.plan(load, guest_slots=2, tolerance=0.25)
    plan = foremoe.plan(load, guest_slots=np.int64(2), tolerance=np.float32(0.25))  # type: ignore[arg-type]
    np.testing.assert_array_equal(plan.slot_tokens, expected.slot_tokens)


def test_one_policy_needs_no_list(load: foremoe.Load) -> None:
    assert [one["policy"] for one in foremoe.compare(load, "foremoe")] == ["foremoe"]
    assert [one["policy"] for one in foremoe.compare(load, "vanilla,static")] == ["vanilla", "static"]
    with pytest.raises(foremoe.InputError) as raised:
        foremoe.compare(load, ["nobody"])
    assert raised.value.field == "policies"


def test_parts_that_are_no_whole_are_refused() -> None:
    load = draw_load(layers=4)
    first, second = (foremoe.plan(load, layers=layers) for layers in (range(0, 2), range(2, 4)))
    for parts, words in [
        ([first], "layer 2 is in none"),
        ([second], "layer 0 is in none"),
        ([first, first, second], "layer 0 is in two"),
        ([first, foremoe.plan(load, layers=range(2, 4), guest_slots=2)], "different plans"),
        ([first, foremoe.plan(draw_load(1, layers=4), layers=range(2, 4))], "different plans"),
        ([], "lists no plan"),
    ]:
        with pytest.raises(foremoe.InputError, match=words):
            foremoe.Plan.join(parts)
    for call in (
        lambda: first.save("x"),
        lambda: foremoe.check(first, load),
        lambda: foremoe.plan(load, previous=first),
    ):
        with pytest.raises(foremoe.InputError, match="join the parts"):
            call()
    with pytest.raises(foremoe.InputError, match="policy eplb"):
        foremoe.plan(load, policy="eplb", layers=range(0, 2))


def test_homes_and_former_plans_are_taken(load: foremoe.Load) -> None:
    homes = np.ascontiguousarray(foremoe.plan(load).home[:, ::-1])
    plan = foremoe.plan(load, homes=homes)
    np.testing.assert_array_equal(plan.home, homes)
    again = foremoe.plan(load, homes=plan)
    np.testing.assert_array_equal(again.home, homes)
    assert foremoe.check(again, load, homes=plan) == []
    assert {violation.kind for violation in foremoe.check(again, load)} == {"home-moves"}
    assert (
        foremoe.check(foremoe.plan(load, previous=foremoe.plan(draw_load(1)), previous_load=draw_load(1)), load) == []
    )
    wrong = homes.copy()
    wrong[1, 0] = 9
    with pytest.raises(foremoe.InputError) as raised:
        foremoe.plan(load, homes=wrong)
    assert (raised.value.field, raised.value.index) == ("homes", "[1, 0]")
    assert str(raised.value).startswith("homes[1, 0]: rank 9")


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


def test_unknown_keywords_are_a_type_error(load: foremoe.Load) -> None:
    with pytest.raises(TypeError, match="guest_slotz"):
        foremoe.plan(load, guest_slotz=1)  # type: ignore[call-arg]


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


def test_a_spoilt_plan_is_reported_not_raised(load: foremoe.Load) -> None:
    plan = foremoe.plan(load)
    violations = foremoe.check(plan, draw_load(7))
    kinds = {violation.kind for violation in violations}
    assert {"digest", "quota"} <= kinds
    quota = next(v for v in violations if v.kind == "quota")
    assert quota.expert is not None and quota.layer is not None and quota.message
    with pytest.raises(foremoe.InputError, match="not right for this load"):
        foremoe.figures(plan, draw_load(7))


def test_micro_steps_are_announced_in_order(load: foremoe.Load) -> None:
    seen: list[int] = []
    foremoe.plan(load, on_micro_step=seen.append)
    assert seen == [0, 1, 2]
    foremoe.plan(load, policy="eplb", on_micro_step=seen.append)
    assert seen == [0, 1, 2, 0, 1, 2]


def test_what_the_callback_raises_ends_planning(load: foremoe.Load) -> None:
    seen: list[int] = []

    def stop(micro_step: int) -> None:
        seen.append(micro_step)
        if micro_step == 1:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        foremoe.plan(load, on_micro_step=stop)
    assert seen == [0, 1]


def test_other_threads_run_while_it_plans(data: pathlib.Path) -> None:
    load = foremoe.read_load(data / "load-q30-ep64-bursty.safetensors")
    begun, counted, done = threading.Event(), 0, False

    def count() -> None:
        nonlocal counted
        begun.set()
        while not done:
            counted += 1
            time.sleep(0)

    with concurrent.futures.ThreadPoolExecutor() as pool:
        counting = pool.submit(count)
        begun.wait()
        before = counted
        foremoe.plan(load, threads=1)
        during = counted - before
        done = True
        counting.result()
    assert during > 100, "the GIL was held"


def test_ctrl_c_ends_planning(data: pathlib.Path) -> None:
    script = f"""
import os, signal, sys, threading
import foremoe
signal.signal(signal.SIGINT, signal.default_int_handler)  # also where it was ignored before
load = foremoe.read_load({str(data / "load-v3-ep64-skewed.safetensors")!r})
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
try:
    while True:
        foremoe.plan(load, threads=1)
except KeyboardInterrupt:
    print("interrupted")
plan = foremoe.plan(foremoe.Load.from_array(load.array[:1, :1].copy()))
print("plans again", plan.num_layers)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout == "interrupted\nplans again 1\n", done.stderr


def test_a_running_plan_becomes_the_same_plan(data: pathlib.Path) -> None:
    load = foremoe.read_load(data / "load-q30-ep8-bursty.safetensors")
    expected = foremoe.plan(load, guest_slots=1)
    running = foremoe.start_plan(load, guest_slots=1)
    plan = running.begin()
    np.testing.assert_array_equal(plan.slot_expert, expected.slot_expert)
    for m in range(load.num_micro_steps):
        running.wait_for(m)
        of_micro_step = plan.event_micro_step == m
        np.testing.assert_array_equal(plan.slot_tokens[of_micro_step], expected.slot_tokens[of_micro_step])
    with pytest.raises(foremoe.InputError, match="micro_step"):
        running.wait_for(load.num_micro_steps)
    del running
    assert foremoe.check(plan, load) == []


def test_a_running_plan_can_be_waited_for_at_once(load: foremoe.Load) -> None:
    foremoe.start_plan(load).wait_for(1)
    assert foremoe.check(foremoe.start_plan(load).finish(), load) == []
    for call in ("begin", "finish"):
        with pytest.raises(foremoe.PolicySkipped):
            getattr(foremoe.start_plan(load, policy="flexmoe", in_flight=2), call)()


def test_a_running_plan_is_whole_where_all_of_it_is_needed(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    load = foremoe.read_load(data / "load-q30-ep8-bursty.safetensors")
    foremoe.plan(load).save(tmp_path / "expected")
    foremoe.start_plan(load).begin().save(tmp_path / "found")
    assert (tmp_path / "found").read_bytes() == (tmp_path / "expected").read_bytes()
    assert foremoe.check(foremoe.start_plan(load).begin(), load) == []
    again = pickle.loads(pickle.dumps(foremoe.start_plan(load).begin()))
    assert foremoe.check(again, load) == []


def test_turns_of_micro_steps_that_are_not_planned_yet_are_refused(load: foremoe.Load) -> None:
    running = foremoe.start_plan(load)
    turns = foremoe.RankTurns(running.begin(), load, rank=0)
    running.wait_for(0)
    assert turns["forward", 0, 0].rows_sent > 0
    for call in (lambda: turns["forward", 2, 0], lambda: turns.returning(len(turns) - 1), lambda: turns.draining(0)):
        with pytest.raises(foremoe.InputError, match="not planned yet"):
            call()
    running.finish()
    assert turns["forward", 2, 0].rows_sent > 0


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
    ]:
        with pytest.raises(foremoe.InputError, match=f"{field}: is a ") as raised:
            call()  # type: ignore[no-untyped-call]
        assert raised.value.field == field


def test_a_running_plan_that_is_dropped_stops(data: pathlib.Path) -> None:
    load = foremoe.read_load(data / "load-v3-ep64-skewed.safetensors")
    begin = time.monotonic()
    running = foremoe.start_plan(load, threads=1)
    del running
    stopped = time.monotonic() - begin
    foremoe.plan(load, threads=1)
    assert stopped < (time.monotonic() - begin - stopped), "dropping it waited for all of the plan"


def test_importing_it_imports_numpy_alone() -> None:
    script = "import sys, foremoe; print(sorted({name.split('.')[0] for name in sys.modules}))"
    modules = subprocess.check_output([sys.executable, "-c", script], text=True)
    assert not {"torch", "transformers", "trl", "plotly", "scipy", "pandas"} & set(ast.literal_eval(modules))


def test_the_package_carries_the_command() -> None:
    for program in ([sys.executable, "-m", "foremoe"], [str(PROGRAM)]):
        assert subprocess.check_output([*program, "--version"], text=True) == f"foremoe {foremoe.__version__}\n"
    wrong = subprocess.run([sys.executable, "-m", "foremoe", "bogus"], capture_output=True, text=True)
    assert wrong.returncode == 2


def test_policies_clusters_and_models_are_listed() -> None:
    assert {"vanilla", "static", "foremoe", "eplb"} <= set(foremoe.policies())
    assert "h100" in foremoe.clusters()
    assert "Qwen3-30B-A3B" in foremoe.models()
