"""Running plans: progress per micro-step, interruption, and planning in the background."""

from __future__ import annotations

import concurrent.futures
import pathlib
import pickle
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import foremoe


def test_micro_steps_are_announced_in_order(load: foremoe.Load) -> None:
    seen: list[int] = []
    foremoe.plan(load, on_micro_step=seen.append)
    assert seen == [0, 1, 2]
    foremoe.plan(load, policy="eplb", on_micro_step=seen.append)
    assert seen == [0, 1, 2, 0, 1, 2]


def test_an_exception_in_the_callback_ends_planning(load: foremoe.Load) -> None:
    seen: list[int] = []

    def stop(micro_step: int) -> None:
        seen.append(micro_step)
        if micro_step == 1:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        foremoe.plan(load, on_micro_step=stop)
    assert seen == [0, 1]


def test_other_threads_run_during_planning(data: pathlib.Path) -> None:
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
        try:
            foremoe.plan(load, threads=1)
        finally:
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


def test_a_running_plan_equals_the_plan_of_foremoe_plan(data: pathlib.Path) -> None:
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


def test_a_running_plan_can_be_waited_for_without_begin(load: foremoe.Load) -> None:
    foremoe.start_plan(load).wait_for(1)
    assert foremoe.check(foremoe.start_plan(load).finish(), load) == []
    for call in ("begin", "finish"):
        with pytest.raises(foremoe.PolicySkipped):
            getattr(foremoe.start_plan(load, policy="flexmoe", in_flight=2), call)()


def test_uses_of_the_whole_plan_wait_until_it_is_finished(data: pathlib.Path, tmp_path: pathlib.Path) -> None:
    load = foremoe.read_load(data / "load-q30-ep8-bursty.safetensors")
    foremoe.plan(load).save(tmp_path / "expected")
    foremoe.start_plan(load).begin().save(tmp_path / "found")
    assert (tmp_path / "found").read_bytes() == (tmp_path / "expected").read_bytes()
    assert foremoe.check(foremoe.start_plan(load).begin(), load) == []
    again = pickle.loads(pickle.dumps(foremoe.start_plan(load).begin()))
    assert foremoe.check(again, load) == []


def test_a_forked_child_cannot_wait_for_its_parents_plan(data: pathlib.Path) -> None:
    script = f"""
import os, pickle, sys, warnings
import foremoe
warnings.simplefilter("ignore")
load = foremoe.read_load({str(data / "load-q30-ep8-bursty.safetensors")!r})
running = foremoe.start_plan(load)
plan = running.begin()
if os.fork() == 0:
    for call in (running.begin, running.finish, lambda: running.wait_for(0), lambda: pickle.dumps(plan)):
        try:
            call()
        except foremoe.InputError as error:
            assert "forked" in str(error), error
        else:
            os._exit(1)
    del running, plan, call  # waits for no thread
    print("told", flush=True)
    os._exit(0)
assert os.wait()[1] == 0
assert foremoe.check(running.finish(), load) == []
if os.fork() == 0:  # now there is nothing to wait for
    pickle.dumps(plan), running.finish()
    os._exit(0)
assert os.wait()[1] == 0
print("finished")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "told\nfinished\n", done.stderr


def test_turns_of_unplanned_micro_steps_are_rejected(load: foremoe.Load) -> None:
    running = foremoe.start_plan(load)
    turns = foremoe.RankTurns(running.begin(), load, rank=0)
    running.wait_for(0)
    assert turns["forward", 0, 0].rows_sent > 0
    for call in (lambda: turns["forward", 2, 0], lambda: turns.returning(len(turns) - 1), lambda: turns.draining(0)):
        with pytest.raises(foremoe.InputError, match="not planned yet"):
            call()
    running.finish()
    assert turns["forward", 2, 0].rows_sent > 0


def test_deleting_a_running_plan_stops_planning(data: pathlib.Path) -> None:
    load = foremoe.read_load(data / "load-v3-ep64-skewed.safetensors")
    begin = time.monotonic()
    running = foremoe.start_plan(load, threads=1)
    del running
    stopped = time.monotonic() - begin
    foremoe.plan(load, threads=1)
    assert stopped < (time.monotonic() - begin - stopped), "dropping it waited for all of the plan"


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize("path", ["peer", "auto"])
def test_turns_of_residency_shared_follow_a_running_plan(load: foremoe.Load, in_flight: int, path: str) -> None:
    options = {"residency": "shared", "guest_slots": 2, "in_flight": in_flight}
    whole = foremoe.plan(load, **options)
    running = foremoe.start_plan(load, **options)

    def starting_copies(turns: foremoe.RankTurns, index: int) -> list[tuple[object, ...]]:
        return [(repr(c), c.buffer, c.opens, c.closes, c.path, c.source) for c in turns.starting(index)]

    for rank in range(load.num_ranks):
        following = foremoe.RankTurns(running.begin(), load, rank=rank, path=path, depth=3)
        expected = foremoe.RankTurns(whole, load, rank=rank, path=path, depth=3)
        for index in range(len(expected)):
            assert starting_copies(following, index) == starting_copies(expected, index)
            running.wait_for(expected[index].micro_step)
            assert list(map(repr, following[index].copies)) == list(map(repr, expected[index].copies))
            assert following[index].blocks == expected[index].blocks
        late = foremoe.RankTurns(foremoe.start_plan(load, **options).begin(), load, rank=rank, path=path, depth=3)
        last = len(expected) - 2  # requested before earlier turns
        assert starting_copies(late, last) == starting_copies(expected, last)


def test_slots_of_residency_shared_are_not_read_before_they_are_final(load: foremoe.Load) -> None:
    whole = foremoe.plan(load, residency="shared", guest_slots=2)
    plan = foremoe.start_plan(load, residency="shared", guest_slots=2).begin()
    for event in range(plan.num_events):
        experts, tokens = plan._slots_of_event(event)
        assert (experts == whole.slot_expert[event]).all() and (tokens == whole.slot_tokens[event]).all()
    plan = foremoe.start_plan(load, residency="shared", guest_slots=2).begin()
    assert (plan.slot_expert == whole.slot_expert).all()  # waits for all events
    with pytest.raises(foremoe.InputError, match=f"event: {plan.num_events} is not in 0"):
        plan._slots_of_event(plan.num_events)
