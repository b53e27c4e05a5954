"""Planning in shares: each rank plans some layers, and all ranks get the plan that each would compute alone."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist
from processes import RANKS, gather
from refusals import refusal
from training import LAYERS, begin, draw_routes, run_phase

import foremoe
from foremoe._engine import shares as shares_module
from foremoe._engine.failures import Channel
from foremoe._engine.shares import Shares, layers_of

PLANNED: list[dict[str, Any]] = [
    {"policy": "foremoe", "residency": "resident"},
    {"policy": "foremoe", "residency": "resident", "prefer": "links", "seed": 7},
    {"policy": "foremoe", "residency": "static"},
    {"policy": "foremoe", "residency": "shared"},
    {"policy": "foremoe", "residency": "shared", "in_flight": 2, "guest_slots": 2},
    {"policy": "static", "residency": "static"},
    {"policy": "vanilla", "residency": "shared"},
    {"policy": "eplb", "residency": "static"},
]
FINISHED = {  # ways to wait for a plan
    "begin": lambda running, last: running.begin(),
    "wait": lambda running, last: (running.wait_for(last), running.begin())[1],
    "finish": lambda running, last: running.finish(),
}


def draw(layers: int, seed: int | None = None) -> foremoe.Load:
    return foremoe.synthesize_load(
        layers=layers, experts=16, top_k=2, ranks=RANKS, ranks_per_node=2, micro_steps=4, tokens_per_rank=256,
        sequences_per_rank=1, group_spread=1, seed=layers if seed is None else seed,
    )  # fmt: skip


def saved(plan: foremoe.Plan) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        plan.save(f"{folder}/plan")
        return pathlib.Path(f"{folder}/plan").read_bytes()


@contextlib.contextmanager
def watched(before: Callable[[range], None] = lambda layers: None) -> Any:
    """Record the layers that this rank plans as a share. before(layers) is called first."""
    planned: list[range] = []
    own = shares_module._core._plan

    def plan(*arguments: Any, layers: range | None = None, **keywords: Any) -> Any:
        if layers is not None:
            planned.append(layers)
            before(layers)
        return own(*arguments, layers=layers, **keywords)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shares_module, "SMALLEST", 0)
        patch.setattr(shares_module._core, "_plan", plan)
        yield planned


def failing_on(rank: int, nth: int = 1) -> Any:
    """Return watched(), with a failure when `rank` plans its nth share."""
    planned = []

    def fail(layers: range) -> None:
        planned.append(layers)
        if dist.get_rank() == rank and len(planned) == nth:
            raise MemoryError("no room")

    return watched(fail)


FAILED = "RuntimeError: rank 2 could not plan its layers: MemoryError('no room')"


@functools.cache
def channel() -> Channel:
    return Channel(dist.group.WORLD)


def make_shares(**options: Any) -> Shares:
    return Shares(channel(), {"policy": "foremoe", "threads": 1, **options})


@pytest.mark.parametrize("options", PLANNED, ids=str)
@pytest.mark.parametrize("layers", [6, 2])
@pytest.mark.parametrize("finish", FINISHED)
def test_joined_shares_equal_the_plan_of_one_rank_and_each_layer_is_planned_once(
    rank: int, options: dict[str, Any], layers: int, finish: str
) -> None:
    options = {"guest_slots": 1, **options}
    shares, load = make_shares(**options), draw(layers)
    with watched() as planned:
        running = shares.start_plan(load)
        joined = FINISHED[finish](running, load.num_micro_steps - 1)
        running.finish()
    shares.close()
    assert saved(joined) == saved(foremoe.plan(load, **options))
    by_rank = gather([list(of) for of in planned])
    streams = options["policy"] == "foremoe" and options["residency"] == "shared"
    planners = 1 if options["policy"] == "eplb" else RANKS  # which plans all layers at once
    for block in range(3 if streams else 1):  # blocks of one, one and two micro-steps
        every = [layer for of in by_rank for share in of[block : block + 1] for layer in share]
        assert every == list(range(layers)) * (RANKS // planners)
    assert max(len(share) for of in by_rank for share in [*of, []]) <= -(-layers // planners)


def test_a_planning_error_on_one_rank_is_raised_on_all_and_the_next_plan_succeeds(rank: int) -> None:
    load, few = draw(6), draw(2)
    shares = make_shares()
    with failing_on(2):
        failing = shares.start_plan(load)
        for finish in (failing.begin, lambda: failing.wait_for(0), failing.finish):
            assert refusal(finish) == FAILED
    cold, previous = foremoe.plan(load), foremoe.plan(draw(6, seed=60))
    with watched():
        warm = shares.start_plan(load, previous=previous).finish()
    assert saved(warm) == saved(foremoe.plan(load, previous=previous)) != saved(cold)
    with pytest.MonkeyPatch.context() as patch:  # a small load is planned by each rank, without a gather
        patch.delattr(shares_module, "gathered_bytes")
        assert saved(shares.start_plan(load).finish()) == saved(cold)
    with watched():
        assert saved(shares.start_plan(load).finish()) == saved(cold)
        said = refusal(lambda: shares.start_plan(load).wait_for(4))
        assert said == "InputError: micro_step: 4 is not in 0 … 3"
        said = refusal(shares.start_plan(load, previous=foremoe.plan(few)).begin)
        assert said == "InputError: previous: has 2 layers, but the load has 6"
        wrong = shares.start_plan(few, guest_slots=-1)  # two ranks have no share
        assert refusal(wrong.begin).startswith("InputError: guest_slots")
    shares.close()


def test_a_shared_residency_plan_is_usable_while_later_micro_steps_are_planned(rank: int) -> None:
    """A phase can begin once its first micro-step is planned."""
    load, shares = draw(6), make_shares(residency="shared")
    go, begun = threading.Event(), []

    def hold(layers: range) -> None:
        begun.append(layers)
        if len(begun) > 1:
            assert go.wait(60)

    with watched(hold):
        running = shares.start_plan(load)
        turns = foremoe.RankTurns(running.begin(), load, rank=rank, path="peer")
        first = [copy.arrives for copy in turns.starting(0)]
        assert not go.is_set()
        go.set()
        assert saved(running.finish()) == saved(foremoe.plan(load, residency="shared"))
    whole = foremoe.RankTurns(running.finish(), load, rank=rank, path="peer")
    assert first == [copy.arrives for copy in whole.starting(0)]
    with failing_on(2, nth=3):
        failing = shares.start_plan(load)
        failing.begin()
        failing.wait_for(1)
        assert refusal(lambda: failing.wait_for(2)) == refusal(failing.finish) == FAILED
    shares.close()


def test_ranks_of_an_expert_parallel_plan_in_shares(rank: int) -> None:
    """Runs two phases, the second one planned from the first plan, then a phase that one rank cannot plan."""
    ep, _, trained = begin()
    own = layers_of(rank, RANKS, LAYERS)
    previous = None
    for step in range(2):
        with watched() as planned:
            phase = run_phase(ep, trained, step, previous=previous)
        assert planned == ([own] if own else [])
        assert saved(phase.plan) == saved(foremoe.plan(phase._load, guest_slots=1, previous=previous))
        previous = phase.plan
    with failing_on(1):
        failing = ep.plan(draw_routes(rank, 2, 2))
        assert refusal(failing.__enter__).startswith(FAILED.replace("rank 2", "rank 1"))
    ep.detach()
