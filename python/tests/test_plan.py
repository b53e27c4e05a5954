"""Planning, checks, figures, comparison and simulation. Compares results with the command's output."""

from __future__ import annotations

import ast
import hashlib
import json
import pathlib
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conftest import draw_load, expect_refused

import foremoe
from foremoe._balance import imbalance, planned_rows, violations

PROGRAM = pathlib.Path(foremoe.__file__).with_name("bin") / "foremoe"
TIMES = {"plan_seconds", "plan_us_per_layer_micro_step", "threads", "placement"}


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
    # The quotas of an expert's replicas sum to its load.
    events, layers, _, _ = plan.slot_expert.shape
    for event in range(events):
        for layer in range(layers):
            served = np.zeros(load.num_experts + 1, np.int64)
            np.add.at(served, plan.slot_expert[event, layer].ravel(), plan.slot_tokens[event, layer].ravel())
            expected = load.array[plan.event_micro_step[event], layer].sum(0)
            np.testing.assert_array_equal(served[:-1], expected)


@pytest.mark.parametrize("residency", ["static", "shared"])
def test_the_rows_of_ranks_have_the_imbalance_that_the_library_reports(residency: str) -> None:
    counts = draw_load().array.copy()
    counts[1, 0] = 0  # no rows, so ρ is undefined
    load = foremoe.Load.from_array(counts, top_k=1, ranks_per_node=2)
    plan = foremoe.plan(load, guest_slots=1, residency=residency)
    rows = planned_rows(plan)
    np.testing.assert_array_equal(rows.sum(-1), load.array.sum((2, 3)))
    rho = imbalance(rows)
    assert rho[1, 0] == 0 and (np.delete(rho.ravel(), 2) >= 1).all()
    figures = foremoe.figures(plan, load)
    assert rho[rho > 0].mean() == pytest.approx(figures["rho"]["mean"], rel=1e-12)
    assert {name: figures[name] for name in ("max_vio", "avg_vio")} == pytest.approx(violations(counts), rel=1e-12)


def test_the_plan_equals_that_of_the_command(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
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
        "simulate", path, "--policy", ",".join(names), "--cluster", "h100", "--model", "qwen3-30b-a3b",
        "--prefetch-depth", 3,
    )  # fmt: skip
    assert without_times(simulated) == without_times(printed)


def test_rows_between_nodes_are_reported_with_a_trace(data: pathlib.Path) -> None:
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
@pytest.mark.parametrize("residency", ["static", "resident", "shared"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"in_flight": 2, "seed": 5},
        {"prefer": "links", "guest_slots": 2, "tolerance": 0.0},
        {"max_copies_per_rank": 1, "max_copies_per_source": 2, "min_tokens_per_guest": 3, "stages": "LPT", "seed": 9},
    ],
    ids=["default", "in flight", "links", "limits"],
)
def test_joined_parts_equal_the_whole_plan_byte_for_byte(
    tmp_path: pathlib.Path, policy: str, residency: str, options: dict[str, Any]
) -> None:
    for seed in range(3):
        load = draw_load(seed, layers=5, micro_steps=6, ranks=8, experts=32)
        of: dict[str, Any] = {"policy": policy, "residency": residency, **options}
        parts = [foremoe.plan(load, layers=layers, **of) for layers in (slice(3, None), range(0, 1), range(1, 3))]
        assert list(parts[0].layers) == [3, 4]
        foremoe.plan(load, **of).save(tmp_path / "whole")
        foremoe.Plan.join(parts).save(tmp_path / "joined")
        assert (tmp_path / "joined").read_bytes() == (tmp_path / "whole").read_bytes(), seed


@pytest.mark.parametrize("layers", [None, range(1, 2)])
def test_plans_and_parts_can_be_pickled(layers: range | None) -> None:
    load = draw_load()
    plan = foremoe.plan(load, layers=layers)
    again = pickle.loads(pickle.dumps(plan))
    for name in ("slot_expert", "slot_tokens", "home", "event_micro_step", "event_pass", "max_load"):
        np.testing.assert_array_equal(getattr(again, name), getattr(plan, name))
    assert (again.options, again.layers, again.load_digest) == (plan.options, plan.layers, plan.load_digest)
    if layers is None:
        assert foremoe.check(again, load) == []


def damaged_states(state: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """Yields damaged variants of a pickled plan's state."""
    for i in range(len(state)):
        yield state[:i]
        yield (*state[:i], None, *state[i + 1 :])
    yield (*state, None)
    for at in range(0, len(state[2]), 7):
        file = bytearray(state[2])
        file[at] ^= 4
        yield (*state[:2], bytes(file), *state[3:])
    yield (*state[:3], (0, 1, 2), state[4])
    yield (*state[:3], (-1, 1, 2), state[4])
    yield ("foremoe.Plan/2", *state[1:])


def test_a_damaged_pickled_state_is_rejected() -> None:
    plan = foremoe.plan(draw_load())
    for state in [*damaged_states(plan.__getstate__()), None, 7, []]:
        again = foremoe.Plan.__new__(foremoe.Plan)
        expect_refused(lambda again=again, state=state: again.__setstate__(state), "state")


def test_a_pickled_plan_with_a_flipped_bit_is_rejected() -> None:
    pickled = bytearray(pickle.dumps(foremoe.plan(draw_load())))
    flipped = range(pickled.index(b"slot_tokens"), len(pickled) - 100, 61)
    assert len(flipped) > 10
    for i in flipped:
        spoilt = bytearray(pickled)
        spoilt[i] ^= 1
        with pytest.raises(foremoe.InputError, match="state"):
            pickle.loads(bytes(spoilt))


def test_numpy_numbers_are_accepted_as_options(load: foremoe.Load) -> None:
    expected = foremoe.plan(load, guest_slots=2, tolerance=0.25)
    plan = foremoe.plan(load, guest_slots=np.int64(2), tolerance=np.float32(0.25))  # type: ignore[arg-type]
    np.testing.assert_array_equal(plan.slot_tokens, expected.slot_tokens)


def test_one_policy_needs_no_list(load: foremoe.Load) -> None:
    assert [one["policy"] for one in foremoe.compare(load, "foremoe")] == ["foremoe"]
    assert [one["policy"] for one in foremoe.compare(load, "vanilla,static")] == ["vanilla", "static"]


def with_file(plan: foremoe.Plan, change: Callable[[dict[str, Any], dict[str, bytes]], None]) -> foremoe.Plan:
    """Returns the plan with its file's header and tensors changed, as a hostile pickle may have them."""
    state = plan.__getstate__()
    size = int.from_bytes(state[2][:8], "little")
    header = json.loads(state[2][8 : 8 + size])
    metadata = header.pop("__metadata__")
    tensors = {name: state[2][8 + size :][slice(*of["data_offsets"])] for name, of in header.items()}
    change(header, tensors)
    data = b""
    for name, of in header.items():
        of["data_offsets"] = [len(data), len(data) + len(tensors[name])]
        data += tensors[name]
    text = json.dumps({"__metadata__": metadata} | header).encode()
    file = len(text).to_bytes(8, "little") + text + data
    changed = foremoe.Plan.__new__(foremoe.Plan)
    changed.__setstate__((state[0], hashlib.sha256(file).hexdigest(), file, *state[3:]))
    return changed


def without_bounds(plan: foremoe.Plan) -> foremoe.Plan:
    def remove(header: dict[str, Any], _: dict[str, bytes]) -> None:
        del header["max_load"], header["lower_bound"]

    return with_file(plan, remove)


def test_bounds_that_no_part_records_stay_unrecorded() -> None:
    load = draw_load(layers=4)
    parts = [without_bounds(foremoe.plan(load, layers=layers)) for layers in (range(0, 2), range(2, 4))]
    joined = foremoe.Plan.join(parts)
    assert joined.max_load.size == 0
    np.testing.assert_array_equal(joined.slot_tokens, foremoe.plan(load).slot_tokens)


def test_blocks_of_another_plan_are_not_appended() -> None:
    load = draw_load(layers=2, micro_steps=4)
    options: dict[str, Any] = {"residency": "shared", "guest_slots": 1}

    def block(first: int, last: int, of: foremoe.Load = load, **more: Any) -> foremoe.Plan:
        return foremoe.plan(foremoe.Load.from_array(of.array[first:last], ranks_per_node=2), **options | more)

    growing = foremoe._core._GrowingPlan(load)
    for begin in (0, 1):
        for wrong in (
            block(2, 3),
            block(begin, 4, draw_load(layers=3, micro_steps=4)),
            block(begin, 4, draw_load(layers=2, micro_steps=4, experts=32)),
            without_bounds(block(begin, begin + 1)),
            foremoe.plan(load, layers=range(0, 1), **options),
            *([block(1, 2, guest_slots=3), block(1, 2, in_flight=2), block(1, 4, residency="static")] if begin else []),
        ):
            expect_refused(lambda wrong=wrong: growing.append(wrong), "block")
        growing.append(block(0, 1) if begin == 0 else block(1, 4))
    np.testing.assert_array_equal(growing.begin().slot_tokens.sum(-1).max(-1), foremoe.plan(load, **options).max_load)


def test_incomplete_parts_are_rejected() -> None:
    load = draw_load(layers=4)
    first, second = (foremoe.plan(load, layers=layers) for layers in (range(0, 2), range(2, 4)))
    for parts, words in [
        ([first], "layer 2 is in none"),
        ([second], "layer 0 is in none"),
        ([first, first, second], "layer 0 is in two"),
        ([first, foremoe.plan(load, layers=range(2, 4), guest_slots=2)], "different plans"),
        ([first, foremoe.plan(draw_load(1, layers=4), layers=range(2, 4))], "different plans"),
        ([first, without_bounds(second)], "differ from layer 2 on"),
        ([without_bounds(first), second], "differ from layer 2 on"),
        ([], "must contain at least one plan"),
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


def test_homes_and_former_plans_are_used(load: foremoe.Load) -> None:
    homes = np.ascontiguousarray(foremoe.plan(load).home[:, ::-1])
    plan = foremoe.plan(load, homes=homes)
    np.testing.assert_array_equal(plan.home, homes)
    again = foremoe.plan(load, homes=plan)
    np.testing.assert_array_equal(again.home, homes)
    assert foremoe.check(again, load, homes=plan) == []
    assert foremoe.check(again, load) == []  # the plan records the digest of its homes
    contiguous = np.ascontiguousarray(foremoe.plan(load).home)
    kinds = {violation.kind for violation in foremoe.check(again, load, homes=contiguous)}
    assert kinds == {"digest"}
    assert (
        foremoe.check(foremoe.plan(load, previous=foremoe.plan(draw_load(1)), previous_load=draw_load(1)), load) == []
    )
    wrong = homes.copy()
    wrong[1, 0] = 9
    with pytest.raises(foremoe.InputError) as raised:
        foremoe.plan(load, homes=wrong)
    assert (raised.value.field, raised.value.index) == ("homes", "[1, 0]")
    assert str(raised.value).startswith("homes[1, 0]: rank 9")


def test_check_reports_a_damaged_plan_without_raising(load: foremoe.Load) -> None:
    plan = foremoe.plan(load)
    (digest,) = foremoe.check(plan, draw_load(7))  # and nothing that follows from it
    assert digest.kind == "digest" and digest.message
    with pytest.raises(foremoe.InputError, match="not right for this load"):
        foremoe.figures(plan, draw_load(7))


def test_importing_foremoe_imports_only_numpy() -> None:
    script = "import sys, foremoe; print(sorted({name.split('.')[0] for name in sys.modules}))"
    modules = subprocess.check_output([sys.executable, "-c", script], text=True)
    assert not {"torch", "transformers", "trl", "plotly", "scipy", "pandas"} & set(ast.literal_eval(modules))


def test_the_package_contains_the_command() -> None:
    for program in ([sys.executable, "-m", "foremoe"], [str(PROGRAM)]):
        assert subprocess.check_output([*program, "--version"], text=True) == f"foremoe {foremoe.__version__}\n"
    wrong = subprocess.run([sys.executable, "-m", "foremoe", "bogus"], capture_output=True, text=True)
    assert wrong.returncode == 2


def test_policies_clusters_and_models_are_listed() -> None:
    assert {"vanilla", "static", "foremoe", "eplb"} <= set(foremoe.policies())
    assert "h100" in foremoe.clusters()
    assert "Qwen3-30B-A3B" in foremoe.models()
